"""Conflict over address and time, from a recorded trace or a single state."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from mmctl.engine.memory import walk
from mmctl.engine.memory.allocator import Segment, Tag
from mmctl.engine.memory.program import Program
from mmctl.engine.memory.replay import moments, segments_at
from mmctl.engine.memory.snapshot import Trace
from mmctl.engine.memory.state import Region, conflict, regions

if TYPE_CHECKING:
    from mmctl.engine.memory.snapshot import Ints

VISION, TEXT = 1, 2  # codes of modalities in arrays; 0 is other
CODES = {"other": 0, "vision": VISION, "text": TEXT}


class Heatmap(NamedTuple):
    """Cells[row][column] is a conflict in [0, 1], None where nothing was mapped.

    ``addresses`` are where rows begin: rows hold equal bytes of all that was ever mapped, in
    order of address, or one region each where there are no more regions than rows. ``seconds``
    are the ends of columns from the first entry on; without times they are shares of the trace.
    ``held`` are the bytes of each modality at these ends.
    """

    device: int
    addresses: list[int]
    row_bytes: int
    seconds: list[float]
    timed: bool
    cells: list[list[float | None]]
    held: dict[str, list[int]]


class Lives(NamedTuple):
    """When each unit lived, as events (or microseconds), where, and of what modality."""

    born: Ints
    died: Ints
    address: Ints
    size: Ints
    code: Ints


def lives(program: Program, trace: Trace, codes: Ints) -> tuple[Lives, Ints, bool]:
    """The life of every unit, the clock of every event, and whether that clock is in time."""
    import numpy as np

    rows = program.rows
    time = trace.time_us[program.entry]
    timed = bool(len(time) and time[-1] > time[0] > 0)
    clock = np.maximum.accumulate(time - time[0]) if timed else np.arange(rows.shape[1])
    units = program.units
    born = np.zeros(units, np.int64)
    end = int(clock[-1]) + 1 if len(clock) else 1
    died = np.full(units, end)
    address, size = np.zeros((2, units), np.int64)
    for block in program.start_blocks:
        address[block.unit], size[block.unit] = block.address, block.size
    ops, unit = rows[walk.OP], rows[walk.UNIT]
    allocs, frees = ops == walk.ALLOC, ops == walk.FREE
    born[unit[allocs]] = clock[allocs]
    address[unit[allocs]] = rows[walk.ADDRESS][allocs]
    size[unit[allocs]] = rows[walk.SIZE][allocs]
    died[unit[frees]] = clock[frees]
    return Lives(born, died, address, size, codes), clock, timed


def timeline(life: Lives, end: int, points: int) -> tuple[list[float], dict[str, list[int]]]:
    """Equally spaced moments up to ``end`` on the clock, and the bytes of each modality then."""
    import numpy as np

    at = np.linspace(0, end, points)
    held = {}
    for name, code in CODES.items():
        mine = life.code == code
        size = life.size[mine]
        came, went = np.argsort(life.born[mine]), np.argsort(life.died[mine])
        total = np.zeros(points, np.int64)
        for order, moments_of, sign in ((came, life.born[mine], 1), (went, life.died[mine], -1)):
            sums = np.concatenate([[0], np.cumsum(size[order])])
            total += sign * sums[np.searchsorted(moments_of[order], at, "right")]
        held[name] = total.tolist()
    return at.tolist(), held


def residency(found: Sequence[Region], life: Lives, start: float, end: float) -> tuple[Ints, Ints]:
    """Byte-time of vision and of text in each region (by address) from ``start`` to ``end``."""
    import numpy as np

    starts = np.array([one.address for one in found], np.int64)
    sizes = np.array([one.size for one in found], np.int64)
    totals = np.zeros((2, len(found)))
    if not len(found):
        return totals[0], totals[1]
    for row, code in enumerate((VISION, TEXT)):
        mine = np.flatnonzero((life.code == code) & (life.born < end) & (life.died > start))
        if not len(mine):
            continue
        low, high = life.address[mine], life.address[mine] + life.size[mine]
        during = np.minimum(life.died[mine], end) - np.maximum(life.born[mine], start)
        first = np.maximum(np.searchsorted(starts, low, "right") - 1, 0)
        last = np.maximum(np.searchsorted(starts, high, "left") - 1, first)
        spread = last - first + 1
        which = np.repeat(np.arange(len(mine)), spread)
        region = np.arange(len(which)) - np.repeat(np.cumsum(spread) - spread, spread)
        region += first[which]
        overlap = np.minimum(high[which], starts[region] + sizes[region]) - np.maximum(
            low[which], starts[region]
        )
        np.add.at(totals[row], region, np.maximum(overlap, 0) * during[which])
    return totals[0], totals[1]


def region_conflicts(
    segments: Sequence[Segment],
    life: Lives | None,
    start: float,
    end: float,
    region_bytes: int,
    reference_bytes: int,
) -> list[tuple[Region, float]]:
    """Every region of a state with its conflict over a window; without lives, of the moment."""
    found = regions(segments, region_bytes, reference_bytes)
    if life is None:
        return [
            (one, conflict(one.vision_bytes, one.text_bytes, one.free_bytes,
                           one.usable_free_bytes))
            for one in found
        ]  # fmt: skip
    vision, text = residency(found, life, start, end)
    return [
        (one, conflict(v, t, one.free_bytes, one.usable_free_bytes))
        for one, v, t in zip(found, vision.tolist(), text.tolist(), strict=True)
    ]


def from_trace(
    program: Program, trace: Trace, tag_of: Callable[[int], Tag], codes: Ints, region_bytes: int,
    reference_bytes: int, rows: int = 40, columns: int = 70,
) -> Heatmap:  # fmt: skip
    """The heatmap of a recorded trace, ``columns`` equal spans of time wide."""
    import numpy as np

    life, clock, timed = lives(program, trace, codes)
    total = int(clock[-1]) + 1
    ends = [total * (column + 1) / columns for column in range(columns)]
    stops = np.searchsorted(clock, ends, "left").tolist()
    found = []
    held: dict[str, list[int]] = {"vision": [], "text": [], "other": []}
    start = 0.0
    for moment, end in zip(moments(program, stops), ends, strict=True):
        segments = segments_at(program, moment, tag_of)
        column = region_conflicts(segments, life, start, end, region_bytes, reference_bytes)
        found.append(column)
        for name, field in (("vision", 2), ("text", 3), ("other", 4)):
            held[name].append(sum(one[field] for one, _ in column))
        start = end
    scale = 1e-6 if timed else 1 / total
    return _draw(program.device, found, [end * scale for end in ends], timed, held, rows)


def from_state(
    device: int, segments: Sequence[Segment], region_bytes: int, reference_bytes: int,
    rows: int = 40,
) -> Heatmap:  # fmt: skip
    """A single column: the conflict of one moment."""
    column = region_conflicts(segments, None, 0, 0, region_bytes, reference_bytes)
    held = {
        "vision": [sum(one.vision_bytes for one, _ in column)],
        "text": [sum(one.text_bytes for one, _ in column)],
        "other": [sum(one.other_bytes for one, _ in column)],
    }
    return _draw(device, [column], [0.0], False, held, rows)


def _draw(
    device: int, columns: Sequence[Sequence[tuple[Region, float]]], seconds: list[float],
    timed: bool, held: dict[str, list[int]], rows: int,
) -> Heatmap:  # fmt: skip
    """Regions gathered into rows of equal bytes, or a row each where they are few; a cell is the
    byte-weighted mean."""
    sizes: dict[int, int] = {}
    for column in columns:
        for one, _ in column:
            sizes[one.address] = max(sizes.get(one.address, 0), one.size)
    total = sum(sizes.values())
    row_bytes = max(-(-total // max(min(rows, len(sizes)), 1)), 1)
    count = min(rows, len(sizes))
    addresses = [0] * count
    # Rows that a region covers, with the bytes of it in each: (row, bytes).
    covers: dict[int, list[tuple[int, int]]] = {}
    few = len(sizes) <= rows
    at = 0
    for number, address in enumerate(sorted(sizes)):
        end = at + sizes[address]
        if few:
            covers[address] = [(number, sizes[address])]
            addresses[number:] = [address] * (count - number)
        else:
            covers[address] = []
            for row in range(at // row_bytes, min(-(-end // row_bytes), count)):
                low, high = max(at, row * row_bytes), min(end, (row + 1) * row_bytes)
                covers[address].append((row, high - low))
                if low == row * row_bytes:
                    addresses[row] = address + low - at
        at = end
    cells: list[list[float | None]] = [[None] * len(columns) for _ in addresses]
    for number, column in enumerate(columns):
        weight, value = [0.0] * count, [0.0] * count
        for one, heat in column:
            for row, size in covers[one.address]:
                share = size * one.size / sizes[one.address]
                weight[row] += share
                value[row] += share * heat
        for row, bytes_there in enumerate(weight):
            if bytes_there:
                cells[row][number] = value[row] / bytes_there
    return Heatmap(device, addresses, row_bytes, seconds, timed, cells, held)
