"""A device's trace made ready to walk: units, arenas, and the state before its first event."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from mmctl.engine.memory import walk
from mmctl.engine.memory.allocator import DEFAULT_POOL
from mmctl.engine.memory.core import SMALL_LIMIT, SMALL_SEGMENT
from mmctl.engine.memory.settings import Settings, round_size
from mmctl.engine.memory.snapshot import Snapshot
from mmctl.engine.memory.start import (
    ALLOC,
    COMPLETED,
    MAP,
    OOM,
    REQUESTED,
    SEGMENT_ALLOC,
    SEGMENT_FREE,
    UNMAP,
    ArenaKey,
    Final,
    StartBlock,
    StartRange,
    arena_number,
    reservations_of,
    start_blocks,
    start_ranges,
)

if TYPE_CHECKING:
    from mmctl.engine.memory.snapshot import Ints
else:
    Ints: TypeAlias = Any


class Program(NamedTuple):
    """All that a replay of one device needs.

    ``rows`` is the program (``walk.OP`` ...); ``entry[i]`` the trace entry that event i is.
    Units 0 .. ``units - 1`` are allocations; ``unit_entry`` is the entry that allocated one, or
    -1 for those that were live at the start.
    """

    device: int
    settings: Settings
    rows: Ints
    entry: Ints
    units: int
    unit_entry: Ints
    unit_stack: Ints  # the stack that allocated a unit, or else one that freed it
    unit_metadata: Ints  # the user's words about a unit, a number of the snapshot's strings
    arenas: list[ArenaKey]
    start_blocks: list[StartBlock]
    start_ranges: list[StartRange]
    reservations: list[tuple[int, int, int]]  # start, size, arena
    allocs: int
    complete: bool  # the trace begins with an empty allocator


def reason_without(snapshot: Snapshot, device: int) -> str | None:
    """Why the device's history cannot be replayed; None if it can."""
    trace = snapshot.traces.get(device)
    if trace is None or len(trace.action) == 0:
        return "no history was recorded (torch.cuda.memory._record_memory_history)"
    if len(trace.action) <= 1:
        return "the history holds at most one entry: recording was off"
    if not (trace.action == ALLOC).any() and not (trace.action == COMPLETED).any():
        return "the history holds no allocations"
    return None


def prepare(snapshot: Snapshot, device: int) -> Program:
    """The program of a device whose history can be replayed (see ``reason_without``)."""
    import numpy as np

    trace = snapshot.traces[device]
    settings = snapshot.settings
    kept = np.flatnonzero(trace.action <= OOM)
    action = trace.action[kept].astype(np.int64)
    address, size = trace.address[kept], trace.size[kept]
    unit, unit_entry = _units(action, address)
    arena_names: dict[ArenaKey, int] = {}
    final = Final(snapshot, device, arena_names)
    rounded = _rounded(action, size, settings)
    arena = _arenas(
        snapshot, final, action, address, rounded, trace.stream[kept], trace.pool[kept],
        arena_names,
    )  # fmt: skip
    ranges = start_ranges(action, address, size, arena, final)
    blocks = start_blocks(action, address, size, unit, unit_entry, settings, ranges, final)
    reservations = reservations_of(action, address, size, arena, ranges)
    rows = np.zeros((walk.PROGRAM_ROWS, len(kept)), np.int64)
    rows[walk.OP] = _ops()[action]
    rows[walk.ADDRESS] = address
    rows[walk.SIZE] = rounded
    rows[walk.REQUESTED] = size
    rows[walk.UNIT] = unit
    rows[walk.ARENA] = arena
    late = [block for block in blocks if block.unit >= len(unit_entry)]
    extra = len(late)
    stack, metadata = np.zeros((2, len(unit_entry) + extra), np.int64)
    own = np.flatnonzero(unit >= 0)[::-1]  # backwards, so that the first event has the last word
    stack[unit[own]] = trace.stack[kept[own]]
    metadata[unit[own]] = trace.metadata[kept[own]]
    stack[len(unit_entry) :] = final.stacks([block.address for block in late])
    return Program(
        device=device,
        settings=settings,
        rows=rows,
        entry=kept,
        units=len(unit_entry) + extra,
        unit_entry=np.concatenate([unit_entry, np.full(extra, -1)]),
        unit_stack=stack,
        unit_metadata=metadata,
        arenas=list(arena_names),
        start_blocks=blocks,
        start_ranges=ranges,
        reservations=reservations,
        allocs=int((action == ALLOC).sum()),
        complete=not blocks and not ranges,
    )


def _ops() -> Ints:
    import numpy as np

    table = np.zeros(OOM + 1, np.int64)
    for action, op in (
        (ALLOC, walk.ALLOC), (REQUESTED, walk.REQUEST_FREE), (COMPLETED, walk.FREE),
        (SEGMENT_ALLOC, walk.SEGMENT_ALLOC), (SEGMENT_FREE, walk.SEGMENT_FREE), (MAP, walk.MAP),
        (UNMAP, walk.UNMAP), (OOM, walk.OOM),
    ):  # fmt: skip
        table[action] = op
    return table


def _units(action: Ints, address: Ints) -> tuple[Ints, Ints]:
    """The unit (allocation) of every event, -1 for device events, and each unit's event.

    Events of one address alternate alloc, free_requested, free_completed in time; a group that
    does not begin with an alloc belongs to a block that was live at the start (event -1).
    """
    import numpy as np

    own = np.flatnonzero(action <= COMPLETED)
    order = own[np.argsort(address[own], kind="stable")]
    kinds, places = action[order], address[order]
    begins = kinds == ALLOC
    first = np.ones(len(order), bool)
    first[1:] = places[1:] != places[:-1]
    # After a free is complete, a free of the same address without an alloc would be a new life.
    number = np.cumsum(begins | first) - 1
    unit = np.full(len(action), -1)
    unit[order] = number
    heads = order[begins | first]
    return unit, np.where(action[heads] == ALLOC, heads, -1)


def _rounded(action: Ints, size: Ints, settings: Settings) -> Ints:
    """Allocations as the allocator rounds them; an oom's size is rounded already."""
    import numpy as np

    result = size.copy()
    where = np.flatnonzero(action == ALLOC)
    result[where] = round_sizes(size[where], settings)
    return result


def round_sizes(sizes: Ints, settings: Settings) -> Ints:
    """``round_size`` of many."""
    import numpy as np

    if not any(parts > 1 for parts in settings.roundup_power2_divisions):
        return np.maximum(-(-sizes // 512) * 512, 512)
    values, back = np.unique(sizes, return_inverse=True)
    rounded = [round_size(int(value), settings.roundup_power2_divisions) for value in values]
    return np.array(rounded, np.int64)[back]


def _arenas(
    snapshot: Snapshot, final: Final, action: Ints, address: Ints, rounded: Ints, stream: Ints,
    pool: Ints, names: dict[ArenaKey, int],
) -> Ints:  # fmt: skip
    """The arena of every event that has one, else 0.

    A pool that the file does not record is that of the final segment at the address, else of
    the last segment allocated there, else the default pool.
    """
    import numpy as np

    unknown = pool < 0
    if unknown.any():
        at = final.segment_at(address)
        pool = np.where(unknown, np.where(at >= 0, final.pool[at], 0) if len(final.pool) else 0,
                        pool)  # fmt: skip
    small = np.zeros(len(action), np.int64)
    requests = (action == ALLOC) | (action == OOM)
    small[requests] = rounded[requests] <= SMALL_LIMIT
    plain = (action == SEGMENT_ALLOC) | (action == SEGMENT_FREE)
    small[plain] = rounded[plain] == SMALL_SEGMENT
    keyed = requests | plain | (action == MAP)
    # A mapping is made for the request that follows it, in that request's arena.
    follower = np.where(action == ALLOC, np.arange(len(action)), len(action))
    follower = np.minimum.accumulate(follower[::-1])[::-1]
    maps = np.flatnonzero(action == MAP)
    served = follower[maps]
    known = served < len(action)
    small[maps[known]] = small[served[known]]
    at = final.segment_at(address[maps[~known]]) if len(maps) else maps
    # Pools and streams are few: number the streams, then count every combination.
    streams, stream_number = np.unique(stream[keyed], return_inverse=True)
    combined = (pool[keyed] * len(streams) + stream_number.reshape(-1)) * 2 + small[keyed]
    kinds = np.flatnonzero(np.bincount(combined))
    numbers = np.zeros(int(kinds[-1]) + 1 if len(kinds) else 0, np.int64)
    for kind in kinds.tolist():
        key = snapshot.pools[kind // 2 // len(streams)], int(streams[kind // 2 % len(streams)])
        numbers[kind] = arena_number(names, *key, bool(kind % 2))
    arena = np.zeros(len(action), np.int64)
    arena[keyed] = numbers[combined]
    for event, place in zip(maps[~known].tolist(), at.tolist(), strict=True):
        if place >= 0:
            arena[event] = final.arena[place]
    unmaps = np.flatnonzero(action == UNMAP)
    _unmap_arenas(unmaps, unmaps[:0], action, address, arena, stream, final, names)
    used = _unmap_arenas_by_use(unmaps, action, address, rounded, arena, stream, names)
    rest = np.setdiff1d(unmaps, used)
    _unmap_arenas(rest, used, action, address, arena, stream, final, names)
    return arena


def _unmap_arenas(
    unmaps: Ints, known_unmaps: Ints, action: Ints, address: Ints, arena: Ints, stream: Ints,
    final: Final, names: dict[ArenaKey, int],
) -> None:  # fmt: skip
    """An unmapping has the arena of the nearest mapping of its stream, or unmapping whose arena
    is known: reservations lie further apart than what one of them has mapped."""
    import numpy as np

    maps = np.concatenate([np.flatnonzero(action == MAP), known_unmaps])
    expandable = final.expandable == 1
    places = np.concatenate([address[maps], final.address[expandable]])
    arenas = np.concatenate([arena[maps], final.arena[expandable]])
    if not len(unmaps) or not len(places):
        return
    order = np.argsort(places, kind="stable")
    places, arenas = places[order], arenas[order]
    stream_of = np.array([key[1] for key in names], np.int64)[arenas]
    for one in np.unique(stream[unmaps]):
        mine = unmaps[stream[unmaps] == one]
        known = np.flatnonzero(stream_of == one)
        if len(known) == 0:
            known = np.arange(len(places))
        above = np.searchsorted(places[known], address[mine], "right")
        low = np.maximum(above - 1, 0)
        high = np.minimum(above, len(known) - 1)
        nearer = np.abs(address[mine] - places[known][low]) <= np.abs(
            places[known][high] - address[mine]
        )
        arena[mine] = arenas[known][np.where(nearer, low, high)]


def _unmap_arenas_by_use(
    unmaps: Ints, action: Ints, address: Ints, size: Ints, arena: Ints, stream: Ints,
    names: dict[ArenaKey, int],
) -> Ints:  # fmt: skip
    """Better evidence, where there is some: the allocations and frees inside what is unmapped.
    Returns the unmappings that have it."""
    import numpy as np

    found = []
    used = np.flatnonzero((action == ALLOC) | (action == COMPLETED))
    order = used[np.argsort(address[used], kind="stable")]
    places = address[order]
    for event in unmaps.tolist():
        low = np.searchsorted(places, address[event], "left")
        high = np.searchsorted(places, address[event] + size[event], "left")
        inside = order[low:high]
        inside = inside[(inside < event) & (stream[inside] == stream[event])]
        if not len(inside):
            continue
        found.append(event)
        last = int(inside.max())
        if action[last] == ALLOC:
            arena[event] = arena[last]
        else:
            pool = next(
                (key[0] for key, number in names.items() if number == arena[event]), DEFAULT_POOL
            )
            small = max(int(size[last]), 1) <= SMALL_LIMIT
            arena[event] = arena_number(names, pool, int(stream[event]), small)
    return np.array(found, np.int64)
