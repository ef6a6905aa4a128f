"""A tape of allocations and releases, played on an allocator's columns.

Like ``core``, this file runs on lists as imported and through numba when ``compiled.tape()``
runs it again: a dry run of thousands of plans is made of nothing else.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from mmctl.engine.memory import core as plain_core

F = TypeVar("F", bound=Callable[..., Any])
core: Any = globals().get("compiled_core") or plain_core
jit: Callable[[F], F] = core.jit
NONE = -1

# What ``figures`` finds.
FREE_BYTES, LARGEST, RELEASABLE = range(3)


@jit
def play(
    c: Any, slots: Any, sizes: Any, existing: Any, made: Any, arenas: Any, held: Any
) -> int:  # fmt: skip
    """Run a tape; the place of the allocation that was refused, or NONE.

    Entry i takes ``sizes[i]`` bytes for ``slots[i]``, or with 0 releases it. ``made[slot]`` are
    the rows that the tape made and left, NONE elsewhere; a negative slot is the row
    ``existing[-1 - slot]``, where there is one. ``arenas`` are those of large and of small
    requests; ``held[0]`` counts the bytes of the blocks.
    """
    blocks = c.blocks
    for i in range(len(slots)):
        slot = slots[i]
        if sizes[i] > 0:
            rounded = (sizes[i] + core.MIN_BLOCK - 1) // core.MIN_BLOCK * core.MIN_BLOCK
            arena = arenas[1] if rounded <= core.SMALL_LIMIT else arenas[0]
            row = core.malloc(c, arena, rounded, sizes[i])
            if row == NONE:
                return i
            made[slot] = row
            held[0] += blocks[core.SIZE][row]
            continue
        row = NONE
        if slot >= 0:
            row = made[slot]
            made[slot] = NONE
        elif -1 - slot < len(existing):
            row = existing[-1 - slot]
        if row != NONE:
            held[0] -= blocks[core.SIZE][row]
            core.free(c, row)
    return NONE


@jit
def figures(c: Any, found: Any) -> None:
    """Free bytes, the largest free block, and what would go back, of plain segments."""
    found[FREE_BYTES] = found[LARGEST] = found[RELEASABLE] = 0
    for arena in range(c.scalars[core.ARENAS]):
        count = c.arenas[core.FREE_COUNT][arena]
        if count > 0:
            found[LARGEST] = max(found[LARGEST], c.free[core.KEY_SIZE][arena][count - 1])
        for i in range(count):
            size = c.free[core.KEY_SIZE][arena][i]
            found[FREE_BYTES] += size
            if core.whole_segment(c, c.free[core.KEY_BLOCK][arena][i]):
                found[RELEASABLE] += size
