"""The allocator's rules through numba's compiler (the extra ``fast``), for long traces.

Compiled code is kept in the user's cache folder, so that it is made once per version.
"""

from __future__ import annotations

import os
import sys
from functools import cache
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

# Below so many events, loading what was compiled costs more than it saves; compiling it, a
# quarter of a minute once, pays from the second figure on.
WORTH_LOADING = 150_000
WORTH_COMPILING = 8_000_000


def worth(events: int) -> bool:
    """Whether to walk so many events, over all runs to come, through the compiler."""
    if events < WORTH_LOADING or find_spec("numba") is None:
        return False
    return events >= WORTH_COMPILING or next(_folder().rglob("walk.exact-*.nbi"), None) is not None


def _folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(os.environ.get("NUMBA_CACHE_DIR") or Path(base) / "mmctl" / "numba")


@cache
def load() -> tuple[Any, Any]:
    """``core`` and ``walk`` again, compiled on first use."""
    os.environ["NUMBA_CACHE_DIR"] = str(_folder())
    import numba

    jit = numba.njit(cache=True, nogil=True, error_model="numpy")
    core = _again("core", primitives=_primitives(jit))
    return core, _again("walk", compiled_core=core)


def _again(name: str, **given: Any) -> ModuleType:
    """A second instance of a module of this package, with names bound before it runs."""
    path = Path(__file__).with_name(f"{name}.py")
    spec = spec_from_file_location(f"mmctl.engine.memory.compiled_{name}", path)
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    module.__dict__.update(given)
    sys.modules[module.__name__] = module
    spec.loader.exec_module(module)
    return module


def _primitives(jit: Any) -> SimpleNamespace:
    """The sorted row on arrays. Unsigned indices cannot be negative, which spares the compiler a
    check per element and makes a shift one move of memory."""
    import numpy as np

    one = np.uint64(1)

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
        last = np.uint64(count)
        for i in range(np.uint64(count - position)):
            row[last - i] = row[last - i - one]
        row[position] = value

    @jit
    def remove(row, count, position):  # type: ignore[no-untyped-def]
        first = np.uint64(position)
        for i in range(np.uint64(count - position - 1)):
            row[first + i] = row[first + i + one]

    return SimpleNamespace(
        jit=jit, bisect_left=bisect_left, bisect_right=bisect_right, insert=insert, remove=remove
    )
