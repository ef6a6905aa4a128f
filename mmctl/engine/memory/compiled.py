"""The allocator's rules through numba's compiler (the extra ``fast``), for long traces.

Compiled code is kept in the user's cache folder, so that it is made once per version.
"""

from __future__ import annotations

import os
import sys
from functools import cache
from importlib.util import find_spec, module_from_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

# Below this many events the compiler's start costs more than it saves.
WORTH_EVENTS = 150_000


def available() -> bool:
    """Whether numba is installed."""
    return find_spec("numba") is not None


@cache
def load() -> tuple[Any, Any]:
    """``core`` and ``walk`` again, compiled on first use."""
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    os.environ.setdefault("NUMBA_CACHE_DIR", str(Path(base) / "mmctl" / "numba"))
    import numba

    jit = numba.njit(cache=True, nogil=True)
    core = _again("core", primitives=_primitives(jit))
    return core, _again("walk", compiled_core=core)


def _again(name: str, **given: Any) -> ModuleType:
    """A second instance of a module of this package, with names bound before it runs."""
    spec = find_spec(f"mmctl.engine.memory.{name}")
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    module.__name__ = f"mmctl.engine.memory.compiled_{name}"
    module.__dict__.update(given)
    sys.modules[module.__name__] = module
    spec.loader.exec_module(module)
    return module


def _primitives(jit: Any) -> SimpleNamespace:
    @jit
    def bisect_left(row, value, low, high):  # type: ignore[no-untyped-def]
        while low < high:
            middle = (low + high) >> 1
            if row[middle] < value:
                low = middle + 1
            else:
                high = middle
        return low

    @jit
    def bisect_right(row, value, low, high):  # type: ignore[no-untyped-def]
        while low < high:
            middle = (low + high) >> 1
            if value < row[middle]:
                high = middle
            else:
                low = middle + 1
        return low

    @jit
    def insert(row, count, position, value):  # type: ignore[no-untyped-def]
        for i in range(count, position, -1):
            row[i] = row[i - 1]
        row[position] = value

    @jit
    def remove(row, count, position):  # type: ignore[no-untyped-def]
        for i in range(position, count - 1):
            row[i] = row[i + 1]

    return SimpleNamespace(
        jit=jit, bisect_left=bisect_left, bisect_right=bisect_right, insert=insert, remove=remove
    )
