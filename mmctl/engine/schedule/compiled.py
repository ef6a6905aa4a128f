"""The simulation's loop through numba's compiler (the extra ``fast``), for long traces."""

from __future__ import annotations

import os
import sys
from functools import cache
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any


def available() -> bool:
    """Whether numba is installed, and not switched off by ``MMCTL_PLAIN=1``."""
    return not os.environ.get("MMCTL_PLAIN") and find_spec("numba") is not None


# Compiling takes half a minute of CPU once per version; loading what was compiled one second.
WORTH_REQUESTS, WORTH_COMPILING = 10_000, 100_000


def worth(requests: int) -> bool:
    """Whether a run of so many requests is done sooner by the compiled loop."""
    if not available():
        return False
    kept = any(_folder().rglob("kernel.run-*.nbi")) if _folder().is_dir() else False
    return requests >= (WORTH_REQUESTS if kept else WORTH_COMPILING)


def _folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(os.environ.get("NUMBA_CACHE_DIR") or Path(base) / "mmctl" / "numba")


@cache
def load(name: str) -> Any:
    """The module ``name`` of this room again, compiled on first use.

    Compiled code is kept in the user's cache folder, so that it is made once per version.
    """
    os.environ.setdefault("NUMBA_CACHE_DIR", str(_folder()))
    import numba

    path = Path(__file__).with_name(f"{name}.py")
    spec = spec_from_file_location(f"mmctl.engine.schedule.compiled_{name}", path)
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    module.__dict__["jit"] = numba.njit(cache=True, nogil=True)
    sys.modules[module.__name__] = module
    spec.loader.exec_module(module)
    return module
