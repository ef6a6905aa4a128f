"""An allocator in a state that was found: what a live device's own snapshot shows, to try on."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from mmctl.engine.memory import core
from mmctl.engine.memory.allocator import STATES, UNTAGGED, Allocator, Block, Segment, Tag, grow
from mmctl.engine.memory.settings import Settings

_STATE = {
    "inactive": core.FREE, "active_allocated": core.ALLOCATED,
    "active_pending_free": core.PENDING, "active_awaiting_free": core.PENDING,
}  # fmt: skip


def adopt(
    segments: Sequence[Segment], settings: Settings, capacity_bytes: int | None = None,
    other_process_bytes: int = 0,
) -> Allocator:  # fmt: skip
    """An allocator that holds ``segments`` as they are.

    Mapped ranges of expandable segments of one pool and stream are taken for one reservation:
    a snapshot does not say where a reservation begins.
    """
    allocator = Allocator(settings, capacity_bytes, other_process_bytes)
    columns = allocator.columns
    reservations: dict[int, list[Segment]] = {}
    for segment in sorted(segments):
        size = core.SMALL_LIMIT if segment.small else core.SMALL_LIMIT + 1
        arena = allocator.arena(size, segment.stream, segment.pool)
        if segment.expandable:
            reservations.setdefault(arena, []).append(segment)
        else:
            _span(columns, segment.address, segment.size)
            _lay(allocator, segment, arena, core.NONE)
        columns.scalars[core.RESERVED] += segment.size
    for arena, parts in reservations.items():
        start, end = parts[0].address, parts[-1].address + parts[-1].size
        _span(columns, start, end - start)
        last = core.NONE
        for number, part in enumerate(parts):
            if number:
                before = parts[number - 1].address + parts[number - 1].size
                last = _row(allocator, before, part.address - before, arena, True, last)
                columns.blocks[core.STATE][last] = core.UNMAPPED
                core.index_unmapped(columns, last)
            last = _lay(allocator, part, arena, last)
    columns.scalars[core.PEAK_RESERVED] = columns.scalars[core.RESERVED]
    return allocator


def _lay(allocator: Allocator, segment: Segment, arena: int, last: int) -> int:
    """The blocks of a segment behind row ``last``; the row of the last one."""
    for block in segment.blocks:
        last = _row(allocator, block.address, block.size, arena, segment.expandable, last)
        state = _STATE[block.state]
        allocator.columns.blocks[core.STATE][last] = state
        if state == core.FREE:
            core.index_free(allocator.columns, last)
        else:
            allocator.hold(last, block)
    return last


def _row(
    allocator: Allocator, address: int, size: int, arena: int, expandable: bool, last: int
) -> int:
    columns = allocator.columns
    if columns.scalars[core.SPARE] < 8:
        grow(columns, len(columns.spare))
    row: int = core.new_row(columns, address, size, arena, int(expandable))
    if last != core.NONE:
        core.link_after(columns, row, last)
    return row


def _span(columns: core.Columns, address: int, size: int) -> None:
    columns.scalars[core.GIVEN] = address
    core.place(columns, size)
    columns.scalars[core.GIVEN] = core.NONE


def from_torch(segments: Iterable[Any], tag_of: Callable[[int], Tag]) -> list[Segment]:
    """The segments that ``torch.cuda.memory_snapshot()`` lists; blocks get the tag of their
    address."""
    found = []
    for segment in segments:
        pool, stream = tuple(segment["segment_pool_id"]), int(segment["stream"])
        blocks, at = [], int(segment["address"])
        for block in segment["blocks"]:
            at = int(block.get("address", at))
            state = str(block["state"])
            free = state == STATES[0]
            blocks.append(
                Block(
                    at, int(block["size"]), 0 if free else int(block["requested_size"]),
                    STATES[2] if state == "active_awaiting_free" else state, stream, pool,
                    UNTAGGED if free else tag_of(at),
                )
            )  # fmt: skip
            at += int(block["size"])
        found.append(
            Segment(
                int(segment["address"]), int(segment["total_size"]), stream, pool,
                segment["segment_type"] == "small", bool(segment.get("is_expandable")),
                tuple(blocks),
            )
        )  # fmt: skip
    return sorted(found)
