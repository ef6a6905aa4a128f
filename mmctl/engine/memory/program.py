"""A device's trace made ready to walk: units, arenas, and the state before its first event.

A trace is a ring: its beginning may be lost. What was there before is derived from what is
freed without having been allocated and from the final state.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from mmctl.engine.memory import walk
from mmctl.engine.memory.allocator import PoolId
from mmctl.engine.memory.columns import ACTIONS
from mmctl.engine.memory.core import SMALL_LIMIT, SMALL_SEGMENT
from mmctl.engine.memory.settings import MIB, Settings, round_size
from mmctl.engine.memory.snapshot import Snapshot

if TYPE_CHECKING:
    from mmctl.engine.memory.snapshot import Ints
else:
    Ints: TypeAlias = Any

ALLOC, REQUESTED, COMPLETED, SEGMENT_ALLOC, SEGMENT_FREE, MAP, UNMAP, OOM = (
    ACTIONS.index(name)
    for name in (
        "alloc", "free_requested", "free_completed", "segment_alloc", "segment_free",
        "segment_map", "segment_unmap", "oom",
    )
)  # fmt: skip
ArenaKey: TypeAlias = tuple[PoolId, int, bool]


class StartBlock(NamedTuple):
    """A block that was live before the first event."""

    address: int
    size: int
    requested: int
    unit: int
    pending: bool


class StartRange(NamedTuple):
    """A segment, or a mapped range of an expandable one, before the first event."""

    address: int
    size: int
    arena: int
    expandable: bool


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
    final = _Final(snapshot, device, arena_names)
    rounded = _rounded(action, size, settings)
    arena = _arenas(
        snapshot, final, action, address, rounded, trace.stream[kept], trace.pool[kept],
        arena_names,
    )  # fmt: skip
    ranges = _start_ranges(action, address, size, arena, final)
    blocks = _start_blocks(action, address, size, unit, unit_entry, settings, ranges, final)
    reservations = _reservations(action, address, size, arena, ranges)
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


class _Final:
    """The device's final segments and blocks as sorted columns."""

    def __init__(self, snapshot: Snapshot, device: int, names: dict[ArenaKey, int]) -> None:
        import numpy as np

        table = snapshot.segments
        mine = np.flatnonzero(table["device"] == device)
        ends = np.cumsum(table["blocks"])
        starts = ends - table["blocks"]
        self.address, self.size = table["address"][mine], table["size"][mine]
        self.expandable = table["expandable"][mine]
        self.pool = table["pool"][mine]
        keys = zip(
            table["pool"][mine].tolist(), table["stream"][mine].tolist(),
            table["small"][mine].tolist(), strict=True,
        )  # fmt: skip
        self.arena = np.array(
            [_arena(names, snapshot.pools[pool], s, bool(small)) for pool, s, small in keys],
            np.int64,
        )
        rows = [np.arange(starts[i], ends[i]) for i in mine]
        chosen = np.concatenate(rows) if rows else np.zeros(0, np.int64)
        live = chosen[snapshot.blocks["state"][chosen] > 0]
        self.block_address = snapshot.blocks["address"][live]
        self.block_size = snapshot.blocks["size"][live]
        self.block_requested = snapshot.blocks["requested"][live]
        self.block_pending = snapshot.blocks["state"][live] == 2
        self.block_stack = snapshot.blocks["stack"][live]

    def segment_at(self, address: Ints) -> Ints:
        """The final segment that holds each address; -1 for none."""
        import numpy as np

        if not len(self.address):
            return np.full(len(address), -1)
        at = np.searchsorted(self.address, address, "right") - 1
        inside = (at >= 0) & (address < self.address[at] + self.size[at])
        return np.where(inside, at, -1)

    def stacks(self, addresses: list[int]) -> Ints:
        """The stacks of final blocks by address."""
        import numpy as np

        order = np.argsort(self.block_address, kind="stable")
        at = np.searchsorted(self.block_address[order], np.array(addresses, np.int64))
        return self.block_stack[order][at]


def _arena(names: dict[ArenaKey, int], pool: PoolId, stream: int, small: bool) -> int:
    return names.setdefault((pool, stream, small), len(names))


def _arenas(
    snapshot: Snapshot, final: _Final, action: Ints, address: Ints, rounded: Ints, stream: Ints,
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
        numbers[kind] = _arena(names, *key, bool(kind % 2))
    arena = np.zeros(len(action), np.int64)
    arena[keyed] = numbers[combined]
    for event, place in zip(maps[~known].tolist(), at.tolist(), strict=True):
        if place >= 0:
            arena[event] = final.arena[place]
    _unmap_arenas(action, address, arena, stream, final, names)
    return arena


def _unmap_arenas(
    action: Ints, address: Ints, arena: Ints, stream: Ints, final: _Final,
    names: dict[ArenaKey, int],
) -> None:  # fmt: skip
    """An unmapping has the arena of the nearest mapping of its stream: reservations lie further
    apart than what one of them has mapped."""
    import numpy as np

    unmaps = np.flatnonzero(action == UNMAP)
    maps = np.flatnonzero(action == MAP)
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


def _start_ranges(
    action: Ints, address: Ints, size: Ints, arena: Ints, final: _Final
) -> list[StartRange]:
    """Segments and mapped ranges before the first event: the device events undone."""
    import numpy as np

    plain: dict[int, StartRange] = {}
    mapped: dict[int, tuple[int, int]] = {}  # start -> end, arena
    for place, length, number, expandable in zip(
        final.address.tolist(), final.size.tolist(), final.arena.tolist(),
        final.expandable.tolist(), strict=True,
    ):  # fmt: skip
        if expandable:
            mapped[place] = (place + length, number)
        else:
            plain[place] = StartRange(place, length, number, False)
    device = np.flatnonzero((action >= SEGMENT_ALLOC) & (action <= UNMAP))
    for event in device[::-1].tolist():
        kind, place, length = int(action[event]), int(address[event]), int(size[event])
        if kind == SEGMENT_ALLOC:
            plain.pop(place, None)
        elif kind == SEGMENT_FREE:
            plain[place] = StartRange(place, length, int(arena[event]), False)
        elif kind == MAP:
            _cut(mapped, place, place + length)
        else:
            _join(mapped, place, place + length, int(arena[event]))
    found = list(plain.values())
    found += [StartRange(a, end - a, number, True) for a, (end, number) in mapped.items()]
    return sorted(found)


def _cut(mapped: dict[int, tuple[int, int]], start: int, end: int) -> None:
    for low, (high, number) in list(mapped.items()):
        if low < end and start < high:
            del mapped[low]
            if low < start:
                mapped[low] = (start, number)
            if end < high:
                mapped[end] = (high, number)


def _join(mapped: dict[int, tuple[int, int]], start: int, end: int, number: int) -> None:
    for low, (high, other) in list(mapped.items()):
        if other == number and low <= end and start <= high:
            del mapped[low]
            start, end = min(start, low), max(end, high)
    mapped[start] = (end, number)


def _start_blocks(
    action: Ints, address: Ints, size: Ints, unit: Ints, unit_entry: Ints, settings: Settings,
    ranges: list[StartRange], final: _Final,
) -> list[StartBlock]:  # fmt: skip
    """Blocks live before the first event, by address, with their true sizes where these can be
    told: from the final state, from the neighbours, from what was allocated behind them."""
    import numpy as np

    freed: dict[int, StartBlock] = {}
    still: dict[int, int] = {}  # address -> unit, for lives that never end
    last_kind: dict[int, int] = {}
    heads = np.flatnonzero(unit_entry < 0)
    is_start = np.zeros(len(unit_entry), bool)
    is_start[heads] = True
    events = np.flatnonzero((unit >= 0) & is_start[np.maximum(unit, 0)])
    for event in events.tolist():
        place, number = int(address[event]), int(unit[event])
        kind = int(action[event])
        last_kind[place] = kind
        if place not in freed:
            requested = int(size[event])
            rounded = round_size(requested, settings.roundup_power2_divisions)
            freed[place] = StartBlock(place, rounded, requested, number, kind == COMPLETED)
            still[place] = number
        if kind == COMPLETED:
            still.pop(place, None)
    touched = set(address[action == ALLOC].tolist())
    exact_size: dict[int, int] = {}
    extra = len(unit_entry)
    for place, length, requested, pending in zip(
        final.block_address.tolist(), final.block_size.tolist(), final.block_requested.tolist(),
        final.block_pending.tolist(), strict=True,
    ):  # fmt: skip
        if place in still and place not in touched:
            exact_size[place] = length
        elif place not in touched and place not in freed:
            freed[place] = StartBlock(place, length, requested, extra, pending)
            exact_size[place] = length
            extra += 1
    blocks = sorted(freed.values())
    return _with_slack(blocks, exact_size, ranges, action, address, unit, settings)


def _with_slack(
    blocks: list[StartBlock], exact_size: dict[int, int], ranges: list[StartRange], action: Ints,
    address: Ints, unit: Ints, settings: Settings,
) -> list[StartBlock]:  # fmt: skip
    """A large block may keep a remainder of at most 1 MiB that was not worth a split. Free blocks
    of large pools are longer than that, so a gap of at most 1 MiB is such a remainder; behind a
    longer gap, the first allocation placed close by shows where the block ends."""
    import numpy as np

    if not blocks:
        return blocks
    allocs = np.flatnonzero(action == ALLOC)
    order = np.argsort(address[allocs], kind="stable")
    alloc_event = allocs[order]
    alloc_address = address[alloc_event]
    ends = {int(unit[event]): int(event) for event in np.flatnonzero(action == COMPLETED)[::-1]}
    starts = [one.address for one in ranges]
    found = []
    at = -1
    for number, block in enumerate(blocks):
        while at + 1 < len(starts) and starts[at + 1] <= block.address:
            at += 1
        if block.address in exact_size:
            found.append(block._replace(size=exact_size[block.address]))
            continue
        if at < 0 or block.address >= ranges[at].address + ranges[at].size:
            continue  # its segment is unknown: nothing can be said of it
        place = ranges[at]
        border = place.address + place.size
        if number + 1 < len(blocks):
            border = min(border, blocks[number + 1].address)
        end = block.address + block.size
        gap = border - end
        slack = _most_slack(block, place, settings)
        if 0 < gap <= slack:
            block = block._replace(size=block.size + gap)
        elif gap > slack > 0:
            freed_at = ends.get(block.unit, len(action))
            low = np.searchsorted(alloc_address, end, "left")
            high = np.searchsorted(alloc_address, end + slack, "right")
            near = alloc_event[low:high]
            near = near[near < freed_at]
            if len(near):
                block = block._replace(size=int(address[near.min()]) - block.address)
        found.append(block)
    return found


def _most_slack(block: StartBlock, place: StartRange, settings: Settings) -> int:
    if place.expandable or settings.expandable_segments or block.size <= SMALL_LIMIT:
        return 0
    split = settings.max_split_bytes
    if split is not None and block.size >= split:
        return settings.max_non_split_rounding_bytes
    return MIB


def _reservations(
    action: Ints, address: Ints, size: Ints, arena: Ints, ranges: list[StartRange]
) -> list[tuple[int, int, int]]:
    """Address ranges of the expandable segments that exist at the start (start, size, arena):
    one per run of mappings of an arena that no other arena's interrupts. Where they end is not
    recorded; what can be said is that it lies before the next one's start."""
    import numpy as np

    mapped = [r for r in ranges if r.expandable]
    if not mapped:
        return []
    maps = np.flatnonzero((action == MAP) | (action == UNMAP))
    points = [(r.address, r.arena, r.address + r.size, True) for r in mapped]
    points += [
        (int(address[e]), int(arena[e]), int(address[e] + size[e]), False) for e in maps.tolist()
    ]  # fmt: skip
    points.sort()
    runs: list[tuple[int, int, int, bool]] = []
    for place, number, end, there in points:
        if runs and runs[-1][2] == number and place - runs[-1][1] < _WIDEST_HOLE:
            start, reached, _, before = runs[-1]
            runs[-1] = (start, max(reached, end), number, before or there)
        else:
            runs.append((place, end, number, there))
    runs = [run for run in runs if run[3]]
    taken = sorted([r.address for r in ranges if not r.expandable] + [run[0] for run in runs])
    found = []
    for start, end, number, _ in runs:
        limit = min((a for a in taken if a > start), default=start + _RESERVED)
        found.append((start, max(min(limit, start + _RESERVED), end) - start, number))
    return found


_RESERVED = walk.FARTHEST
_WIDEST_HOLE = 320 << 30
