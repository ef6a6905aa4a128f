"""The state before a trace's first event, derived from its end and from what it frees.

A trace is a ring: its beginning may be lost.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from mmctl.engine.memory import walk
from mmctl.engine.memory.allocator import PoolId
from mmctl.engine.memory.columns import ACTIONS
from mmctl.engine.memory.core import SMALL_LIMIT
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


class Final:
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
            [arena_number(names, snapshot.pools[pool], s, bool(small)) for pool, s, small in keys],
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


def arena_number(names: dict[ArenaKey, int], pool: PoolId, stream: int, small: bool) -> int:
    """The number of an arena (pool, stream, small or large), a new one when it is met first."""
    return names.setdefault((pool, stream, small), len(names))


def start_ranges(
    action: Ints, address: Ints, size: Ints, arena: Ints, final: Final
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


def start_blocks(
    action: Ints, address: Ints, size: Ints, unit: Ints, unit_entry: Ints, settings: Settings,
    ranges: list[StartRange], final: Final,
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


def reservations_of(
    action: Ints, address: Ints, size: Ints, arena: Ints, ranges: list[StartRange]
) -> list[tuple[int, int, int]]:
    """Address ranges of the expandable segments that exist at the start (start, size, arena).

    One per run of mapped ranges of an arena that nothing else interrupts. It may begin lower,
    where the arena maps or unmaps later with nothing else in between; where it ends is not
    recorded, and lies before whatever comes next.
    """
    import numpy as np

    runs: list[tuple[int, int, int]] = []
    before: StartRange | None = None
    for one in ranges:
        if one.expandable:
            if (
                before is not None
                and before.expandable
                and before.arena == one.arena
                and one.address - runs[-1][1] < _WIDEST_HOLE
            ):
                runs[-1] = (runs[-1][0], one.address + one.size, one.arena)
            else:
                runs.append((one.address, one.address + one.size, one.arena))
        before = one
    if not runs:
        return []
    maps = np.flatnonzero((action == MAP) | (action == UNMAP))
    ends = [one.address + one.size for one in ranges]
    begins = []
    for start, _, number in runs:
        floor = max([start - _WIDEST_HOLE, *(end for end in ends if end <= start)])
        mine = address[maps[arena[maps] == number]]
        lower = mine[(mine >= floor) & (mine < start)]
        begins.append(min(start, int(lower.min())) if len(lower) else start)
    starts = begins + [one.address for one in ranges]
    found = []
    for begin, (_, end, number) in zip(begins, runs, strict=True):
        limit = min([begin + _RESERVED, *(start for start in starts if start >= end)])
        found.append((begin, max(limit, end) - begin, number))
    return found


_RESERVED = walk.FARTHEST
_WIDEST_HOLE = 320 << 30
