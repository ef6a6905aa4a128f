"""The allocator's rules through numba's compiler (the extra ``fast``), for long traces.

Compiled code is kept in the user's cache folder, so that it is made once per version.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import cache
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from mmctl.engine import compiling

# Below so many events, loading what was compiled costs more than it saves; compiling it, a
# quarter of a minute once, pays from the second figure on.
WORTH_LOADING = 150_000
WORTH_COMPILING = 8_000_000


def worth(events: int) -> bool:
    """Whether to walk so many events, over all runs to come, through the compiler."""
    if events < WORTH_LOADING or not compiling.available():
        return False
    return events >= WORTH_COMPILING or ready("walk.exact")


def ready(function: str) -> bool:
    """Whether ``function`` (``module.name``) was compiled here before."""
    return compiling.available() and compiling.kept(_folder(), function)


@cache
def _folder() -> Path:
    return compiling.folder(Path(__file__).parent.glob("*.py"))


@cache
def load() -> tuple[Any, Any]:
    """``core`` and ``walk`` again, compiled on first use."""
    return _core(), _again("walk", compiled_core=_core())


@cache
def tape() -> Any:
    """``tape`` again, compiled on first use."""
    return _again("tape", compiled_core=_core())


@cache
def _core() -> Any:
    with compiling.into(_folder()) as numba:
        jit = numba.njit(cache=True, nogil=True, error_model="numpy")
        primitives = _primitives(jit)
    return _again("core", primitives=primitives)


def arrays(c: Any) -> Any:
    """List columns as arrays, with as much room in every row as there are block rows."""
    import numpy as np

    slots = len(c.spare)

    def square(rows: Sequence[Sequence[int]]) -> Any:
        table = np.zeros((len(rows), slots), np.int64)
        for number, row in enumerate(rows):
            table[number, : len(row)] = row
        return table

    return _core().Columns(
        blocks=np.array(c.blocks, np.int64),
        arenas=np.array(c.arenas, np.int64),
        free=np.stack([square(rows) for rows in c.free]),
        unmapped=np.stack([square(rows) for rows in c.unmapped]),
        spans=square(c.spans),
        spare=np.array(c.spare, np.int64),
        log=np.array(c.log, np.int64),
        scalars=np.array(c.scalars, np.int64),
    )


def lists(c: Any) -> Any:
    """Array columns as lists, each row as long as its count."""
    from mmctl.engine.memory import core

    free, unmapped = c.arenas[core.FREE_COUNT], c.arenas[core.UNMAPPED_COUNT]
    spans = c.scalars[core.SPANS]
    return core.Columns(
        blocks=c.blocks.tolist(),
        arenas=c.arenas.tolist(),
        free=[
            [row[:count].tolist() for row, count in zip(rows, free, strict=True)] for rows in c.free
        ],
        unmapped=[
            [row[:count].tolist() for row, count in zip(rows, unmapped, strict=True)]
            for rows in c.unmapped
        ],
        spans=[row[:spans].tolist() for row in c.spans],
        spare=c.spare.tolist(),
        log=c.log.tolist(),
        scalars=c.scalars.tolist(),
    )


def _again(name: str, **given: Any) -> ModuleType:
    """A second instance of a module of this package, with names bound before it runs."""
    path = Path(__file__).with_name(f"{name}.py")
    spec = spec_from_file_location(f"mmctl.engine.memory.compiled_{name}", path)
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    module.__dict__.update(given)
    sys.modules[module.__name__] = module
    with compiling.into(_folder()):
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
