"""Numba (the extra ``fast``): whether it may be used, and where its machine code is kept."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from mmctl.engine import folders


def available() -> bool:
    """Whether numba is installed, and not switched off by ``MMCTL_PLAIN=1``."""
    return not os.environ.get("MMCTL_PLAIN") and find_spec("numba") is not None


def folder(sources: Iterable[Path]) -> Path:
    """Where machine code made from ``sources`` is kept: a folder per state of all of them, since
    numba looks only at the file of a function, not at those of the functions that it calls."""
    state = sha256(b"".join(path.read_bytes() for path in sorted(sources))).hexdigest()[:16]
    return Path(os.environ.get("NUMBA_CACHE_DIR") or folders.cache() / "numba") / state


def kept(place: Path, function: str) -> bool:
    """Whether ``function`` (``module.name``) was compiled into ``place`` before."""
    return next(place.rglob(f"{function}-*.nbi"), None) is not None


@contextmanager
def into(place: Path) -> Iterator[Any]:
    """``numba``, for functions decorated within to be kept in ``place``; others keep their own."""
    import numba

    config: Any = numba.config
    before, config.CACHE_DIR = config.CACHE_DIR, str(place)
    try:
        yield numba
    finally:
        config.CACHE_DIR = before
