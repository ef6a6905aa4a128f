"""A trace, walked event by event against the allocator's rules.

``exact`` checks each recorded address against the rules and follows the record; ``under`` runs
the same requests under other settings. Like ``core``, this file runs on lists as imported and
through numba when ``compiled.load()`` runs it again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from mmctl.engine.memory import core as plain_core

# Rows of a program: one column per event.
OP, ADDRESS, SIZE, REQUESTED, UNIT, ARENA = range(6)
PROGRAM_ROWS = 6

# Operations.
ALLOC, REQUEST_FREE, FREE, SEGMENT_ALLOC, SEGMENT_FREE, MAP, UNMAP, OOM, RELEASE = range(9)

# Tallies.
(
    FRESH, GROWN, GROWN_EXACT, SEGMENTS, EXACT_SEGMENTS, LOST, STOPPED, LARGEST_AT_PEAK, SEEN_PEAK,
    PENDING_BYTES,
) = range(10)  # fmt: skip
TALLIES = 10

# The widest reservation: 1 1/8 of a device larger than any sold.
FARTHEST = 512 << 30

F = TypeVar("F", bound=Callable[..., Any])
core: Any = globals().get("compiled_core") or plain_core
jit: Callable[[F], F] = core.jit
NONE = -1


@jit
def free_block_holding(c: Any, arena: int, address: int, size: int) -> int:
    """The free block of an arena that holds ``size`` bytes from ``address``; NONE if none."""
    for i in range(c.arenas[core.FREE_COUNT][arena]):
        row = c.free[core.KEY_BLOCK][arena][i]
        start = c.blocks[core.ADDRESS][row]
        if start <= address and address + size <= start + c.blocks[core.SIZE][row]:
            return row
    return NONE


@jit
def forced(c: Any, arena: int, address: int, size: int) -> int:
    """Where the rules and the record differ: the block at the recorded address, in no index."""
    row = free_block_holding(c, arena, address, size)
    if row == NONE:
        return NONE
    core.drop_free(c, row)
    skipped = address - c.blocks[core.ADDRESS][row]
    if skipped > 0:
        rest = core.new_row(
            c, address, c.blocks[core.SIZE][row] - skipped, arena, c.blocks[core.EXPANDABLE][row]
        )
        c.blocks[core.SIZE][row] = skipped
        core.link_after(c, rest, row)
        core.index_free(c, row)
        row = rest
    return row


@jit
def exact_alloc(c: Any, p: Any, i: int, t: Any) -> int:
    """Serve one recorded allocation; 1 where the rules give its recorded address.

    The block's row is left in ``t[STOPPED]`` (NONE where the record cannot be followed).
    """
    arena, size, address = p[ARENA][i], p[SIZE][i], p[ADDRESS][i]
    hit = 0
    fresh, grown = t[FRESH], t[GROWN]
    row = NONE
    if fresh != NONE and c.blocks[core.ADDRESS][fresh] == address:
        found = core.find_free(c, arena, size)
        if found != NONE:
            core.index_free(c, found)
        hit = 1 if found == NONE else 0
        row = fresh
        t[FRESH] = NONE
    elif grown != NONE:
        t[GROWN] = NONE
        if (
            c.blocks[core.STATE][grown] == core.FREE
            and c.blocks[core.ADDRESS][grown] == address
            and c.blocks[core.SIZE][grown] >= size
        ):
            core.drop_free(c, grown)
            row = grown
            hit = t[GROWN_EXACT]
    else:
        row = core.find_free(c, arena, size)
        if row == NONE and c.scalars[core.EXPANDABLE_SEGMENTS]:
            # A block that the split limit keeps from best fit is still found at the edge of
            # the unmapped range, where it needs no mapping.
            edge = core.find_expandable(c, arena, size)
            if (
                edge != NONE
                and c.blocks[core.STATE][edge] == core.FREE
                and c.blocks[core.SIZE][edge] >= size
            ):
                core.drop_free(c, edge)
                row = edge
        if row != NONE and c.blocks[core.ADDRESS][row] != address:
            core.index_free(c, row)
            row = NONE
        hit = 1 if row != NONE else 0
    if row == NONE:
        row = forced(c, arena, address, size)
        if row == NONE:
            t[LOST] += 1
            t[STOPPED] = NONE
            return 0
    split = core.should_split(c, row, size)
    t[STOPPED] = core.take(c, row, size, p[REQUESTED][i], split)
    return hit


@jit
def exact_segment(c: Any, p: Any, i: int, t: Any) -> None:
    """A recorded new segment: exact where its size is what the next request takes."""
    if t[FRESH] != NONE:
        core.index_free(c, t[FRESH])
    arena, size = p[ARENA][i], p[SIZE][i]
    make_way(c, p[ADDRESS][i])
    c.scalars[core.GIVEN] = p[ADDRESS][i]
    t[FRESH] = core.new_segment(c, arena, size)
    c.scalars[core.GIVEN] = NONE
    t[SEGMENTS] += 1
    follower = next_request(p, i)
    if follower != NONE and core.segment_size(c, p[SIZE][follower]) == size:
        t[EXACT_SEGMENTS] += 1


@jit
def next_request(p: Any, i: int) -> int:
    """The allocation that the device event ``i`` served; NONE if none follows."""
    last = min(len(p[OP]), i + 4096)
    for j in range(i + 1, last):
        if p[OP][j] in (ALLOC, OOM):
            return j if p[OP][j] == ALLOC else NONE
    return NONE


@jit
def exact_map(c: Any, p: Any, i: int, t: Any) -> None:
    """A recorded mapping: exact where the rules map the same range for the next request."""
    blocks = c.blocks
    arena, address, size = p[ARENA][i], p[ADDRESS][i], p[SIZE][i]
    t[SEGMENTS] += 1
    follower = next_request(p, i)
    first = t[GROWN] == NONE
    right = 1
    if first and follower != NONE:
        want = p[SIZE][follower]
        found = core.find_free(c, arena, want)
        if found != NONE:
            core.index_free(c, found)
            right = 0
        start = core.find_expandable(c, arena, want)
        have = 0
        if start != NONE and blocks[core.STATE][start] == core.FREE:
            have = blocks[core.SIZE][start]
            start = blocks[core.NEXT][start]
        if start != NONE:
            handle = core.handle_size(c, arena)
            lacks = min(want - have, blocks[core.SIZE][start])
            expected = (lacks + handle - 1) // handle * handle
            if blocks[core.ADDRESS][start] != address or expected != size:
                right = 0
        t[GROWN_EXACT] = right
    t[EXACT_SEGMENTS] += right
    row = unmapped_holding(c, arena, address, size)
    if row == NONE:
        if not make_way(c, address):
            t[LOST] += 1
            return
        # How far a reservation reaches is not recorded: at most to what lies above it.
        above = core.bisect_right(c.spans[core.START], address, 0, c.scalars[core.SPANS])
        extent = FARTHEST
        if above < c.scalars[core.SPANS]:
            extent = min(extent, c.spans[core.START][above] - address)
        c.scalars[core.GIVEN] = address
        row = core.new_reservation(c, arena, max(extent, size))
        c.scalars[core.GIVEN] = NONE
    skipped = address - blocks[core.ADDRESS][row]
    if skipped > 0:
        rest = core.new_row(c, address, blocks[core.SIZE][row] - skipped, arena, 1)
        blocks[core.STATE][rest] = core.UNMAPPED
        blocks[core.SIZE][row] = skipped
        core.link_after(c, rest, row)
        core.index_unmapped(c, rest)
        row = rest
    core.map_block(c, row, size)
    t[GROWN] = row


@jit
def make_way(c: Any, address: int) -> bool:
    """Cut off the end of a reservation that was taken to reach beyond ``address``.

    False where the address is mapped already.
    """
    at = core.bisect_right(c.spans[core.START], address, 0, c.scalars[core.SPANS]) - 1
    if at < 0 or c.spans[core.END][at] <= address:
        return True
    for arena in range(c.scalars[core.ARENAS]):
        row = unmapped_holding(c, arena, address, 1)
        if row == NONE or c.blocks[core.NEXT][row] != NONE:
            continue
        core.drop_unmapped(c, row)
        if c.blocks[core.ADDRESS][row] < address:
            c.blocks[core.SIZE][row] = address - c.blocks[core.ADDRESS][row]
            core.index_unmapped(c, row)
            c.spans[core.END][at] = address
            return True
        before = c.blocks[core.PREVIOUS][row]
        if before == NONE:
            core.drop_span(c, c.spans[core.START][at])
        else:
            c.blocks[core.NEXT][before] = NONE
            c.spans[core.END][at] = address
        core.drop_row(c, row)
        return True
    return False


@jit
def unmapped_holding(c: Any, arena: int, address: int, size: int) -> int:
    """The unmapped range that holds the bytes from ``address``, NONE if none does."""
    count = c.arenas[core.UNMAPPED_COUNT][arena]
    at = core.bisect_right(c.unmapped[0][arena], address, 0, count) - 1
    if at < 0:
        return NONE
    row = c.unmapped[1][arena][at]
    end = c.blocks[core.ADDRESS][row] + c.blocks[core.SIZE][row]
    return row if address + size <= end else NONE


@jit
def exact_release(c: Any, p: Any, i: int, t: Any) -> None:
    """A recorded segment_free or segment_unmap."""
    arena, address, size = p[ARENA][i], p[ADDRESS][i], p[SIZE][i]
    row = free_block_holding(c, arena, address, size)
    other = 0
    while row == NONE and other < c.scalars[core.ARENAS]:
        # The record does not always tell the pool; the address does.
        row = free_block_holding(c, other, address, size)
        other += 1
    if row == NONE:
        t[LOST] += 1
        return
    if p[OP][i] == UNMAP:
        core.unmap_range(c, row, address, address + size)
        if core.whole_segment(c, row):
            core.drop_unmapped(c, row)
            core.drop_span(c, c.blocks[core.ADDRESS][row])
            core.drop_row(c, row)
    elif core.whole_segment(c, row) and c.blocks[core.SIZE][row] == size:
        core.release_segment(c, row)
    else:
        t[LOST] += 1


@jit
def exact(c: Any, p: Any, start: int, stop: int, row_of: Any, hits: Any, t: Any) -> int:
    """Follow events ``start`` to ``stop``; ``hits[unit]`` becomes 1 for each exact address.

    ``row_of[unit]`` is the block of an allocation, NONE before and after its life. Returns the
    event it stopped before: ``stop``, or an earlier one when block rows ran out.
    """
    for i in range(start, stop):
        if core.crowded(c):
            return i
        op = p[OP][i]
        unit = p[UNIT][i]
        if op == ALLOC:
            hits[unit] = exact_alloc(c, p, i, t)
            row_of[unit] = t[STOPPED]
        elif op == REQUEST_FREE:
            if row_of[unit] != NONE:
                c.blocks[core.STATE][row_of[unit]] = core.PENDING
        elif op == FREE:
            if row_of[unit] != NONE:
                core.free(c, row_of[unit])
                row_of[unit] = NONE
        elif op == SEGMENT_ALLOC:
            exact_segment(c, p, i, t)
        elif op == MAP:
            exact_map(c, p, i, t)
        elif op in (SEGMENT_FREE, UNMAP):
            exact_release(c, p, i, t)
    return stop


@jit
def largest_free(c: Any) -> int:
    """The largest free block of any arena."""
    largest = 0
    for arena in range(c.scalars[core.ARENAS]):
        count = c.arenas[core.FREE_COUNT][arena]
        if count > 0 and c.free[core.KEY_SIZE][arena][count - 1] > largest:
            largest = c.free[core.KEY_SIZE][arena][count - 1]
    return largest


@jit
def under(c: Any, p: Any, start: int, stop: int, row_of: Any, t: Any) -> int:
    """Serve the requests of events ``start`` to ``stop`` by the rules alone.

    Returns the event it stopped before: ``stop``, the first that found no memory
    (``t[STOPPED]`` is then 1), or an earlier one when block rows ran out.
    """
    for i in range(start, stop):
        if core.crowded(c):
            return i
        op = p[OP][i]
        unit = p[UNIT][i]
        if op in (ALLOC, OOM):
            row = core.malloc(c, p[ARENA][i], p[SIZE][i], p[REQUESTED][i])
            if row == NONE:
                t[STOPPED] = 1
                return i
            if c.scalars[core.PEAK_RESERVED] > t[SEEN_PEAK]:
                t[SEEN_PEAK] = c.scalars[core.PEAK_RESERVED]
                t[LARGEST_AT_PEAK] = largest_free(c)
            if op == OOM:
                core.free(c, row)
            else:
                row_of[unit] = row
        elif op == FREE:
            if row_of[unit] != NONE:
                core.free(c, row_of[unit])
                row_of[unit] = NONE
        elif op == RELEASE:
            core.release_cached(c)
    return stop
