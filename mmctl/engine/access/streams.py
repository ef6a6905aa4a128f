"""Two streams on one device: last-level cache misses and row-buffer conflicts, by a model.

The mapping of addresses is this project's own, as no vendor publishes one: channels interleave
every 256 bytes through a fold of the upper bits, each channel owns a slice of the cache, a set
is a hash of the line, a row spans all channels and rows fold over the banks. A line is filled
sector by sector, replacement is least recently used, rows stay open. Reads and writes count
alike. Long sweeps are shrunk together with the cache (``scale``).
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from mmctl.engine import compiling
from mmctl.engine.access.accesses import Accesses, Int
from mmctl.engine.access.compiled import compiled
from mmctl.engine.access.memory_models import MemoryModel
from mmctl.engine.errors import MmctlError

INTERLEAVE_BYTES = 256
MOST_SECTORS = 2_000_000
MOST_SECTORS_PLAIN = 100_000  # without numba, so that an answer takes seconds there too
SCHEDULES = ("run_to_completion", "one_mixed_stream", "two_streams", "two_streams_disjoint")


class StreamShare(msgspec.Struct, frozen=True, kw_only=True):
    """One stream within a schedule, beside the same stream alone on the whole device."""

    stream: str
    sectors: int
    l2_miss_ratio: float
    row_conflict_ratio: float | None
    alone_l2_miss_ratio: float
    alone_row_conflict_ratio: float | None
    extra_misses_ratio: float
    conflicts_by_other_ratio: float | None


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """A schedule: misses over sectors asked for, conflicts over sectors that went to DRAM."""

    schedule: str
    l2_miss_ratio: float
    row_conflict_ratio: float | None
    streams: list[StreamShare]


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """All schedules under one model, and what stands behind the difference."""

    model: dict[str, object]
    cases: list[Case]
    causes: list[str]
    absent: dict[str, str]


def simulate(parts: Sequence[Accesses], model: MemoryModel) -> Report:
    """The four schedules for two streams.

    Run to completion is one stream after the other; mixed takes turns operator by operator in
    one stream; two streams take turns sector by sector at rates by which both end together;
    disjoint gives each half of the channels, and so half of the cache.
    Raises MmctlError when there are not two streams.
    """
    if len(parts) != 2:
        raise MmctlError(f"the model needs two streams, not {len(parts)}: give a file for each")
    scale = _scale(parts, model)
    sectors = [_sectors(part, model.sector_bytes, scale) for part in parts]
    if len(parts[0].streams) == 1:
        # Two traces from two runs: their addresses say nothing about each other.
        apart = (int(max(address.max() for address, _ in sectors)) >> 21) + 1 << 21
        sectors[1] = (sectors[1][0] + apart, sectors[1][1])
    device = _Device.of(model, scale)
    alone = [_run(device, address, np.zeros(len(address), np.int64), 1) for address, _ in sectors]
    cases = []
    for schedule in SCHEDULES:
        address, owner = _order(sectors, schedule)
        groups = 2 if schedule.endswith("disjoint") else 1
        counts = _run(device, address, owner, groups)
        cases.append(_case(schedule, counts, alone, [part.name for part in parts]))
    return Report(
        model={
            **{name: getattr(model, name) for name in model.__struct_fields__},
            "channel_interleave_bytes": INTERLEAVE_BYTES,
            "scale": scale,
            "simulated_l2_bytes": device.sets * device.channels * device.ways * model.line_bytes,
        },
        cases=cases,
        causes=_causes(parts, cases, model),
        absent={"nvlink_arbitration": "access traces hold no link traffic"},
    )


def _scale(parts: Sequence[Accesses], model: MemoryModel) -> int:
    total = sum(int((part.size_bytes // model.sector_bytes + 1).sum()) for part in parts)
    most = MOST_SECTORS if compiling.available() else MOST_SECTORS_PLAIN
    scale = 1
    while total > most * scale:
        scale *= 2
    return scale


def _sectors(part: Accesses, sector_bytes: int, scale: int) -> tuple[Int, Int]:
    """Sector addresses in order, and the operator (cycle) of each; a warp's repeats are one."""
    first = part.address // scale // sector_bytes
    last = (part.address // scale + np.maximum(part.size_bytes // scale, 1) - 1) // sector_bytes
    count = last - first + 1
    start = np.cumsum(count) - count
    sector = np.repeat(first - start, count) + np.arange(int(count.sum()))
    cycle = np.repeat(part.cycle, count)
    fresh = np.concatenate(([True], (sector[1:] != sector[:-1]) | (cycle[1:] != cycle[:-1])))
    return sector[fresh] * sector_bytes, cycle[fresh]


def _order(sectors: Sequence[tuple[Int, Int]], schedule: str) -> tuple[Int, Int]:
    (a, a_cycle), (b, b_cycle) = sectors
    if schedule == "run_to_completion":
        place = np.concatenate([np.zeros(len(a)), np.ones(len(b))])
    elif schedule == "one_mixed_stream":
        place = np.concatenate([_turns(a_cycle), _turns(b_cycle) + 1e-9])
    else:
        place = np.concatenate([(np.arange(len(s)) + 0.5) / len(s) for s in (a, b)])
    order = np.argsort(place, kind="stable")
    owner = np.repeat(np.array([0, 1]), [len(a), len(b)])
    return np.concatenate([a, b])[order], owner[order]


def _turns(cycle: Int) -> np.ndarray:
    """The operator's number as a share of all operators of the stream."""
    number = np.concatenate(([0], np.cumsum(cycle[1:] != cycle[:-1])))
    result: np.ndarray = number / (number[-1] + 1)
    return result


class _Device(msgspec.Struct, frozen=True):
    channels: int
    sets: int
    ways: int
    line_bytes: int
    sector_bytes: int
    banks: int
    row_bytes: int

    @classmethod
    def of(cls, model: MemoryModel, scale: int) -> _Device:
        lines = model.l2_bytes // scale // model.line_bytes
        ways = min(model.ways, max(1, lines // model.channels))
        sets = max(1, lines // (ways * model.channels))
        return cls(
            model.channels, sets, ways, model.line_bytes, model.sector_bytes, model.banks,
            model.row_bytes,
        )  # fmt: skip


def _run(device: _Device, address: Int, owner: Int, groups: int) -> Int:
    found: Int = _simulate(
        address, owner, groups, device.channels, device.sets, device.ways, device.line_bytes,
        device.sector_bytes, device.banks, device.row_bytes, INTERLEAVE_BYTES,
    )  # fmt: skip
    return found


@compiled
def _simulate(
    address: Int, owner: Int, groups: int, channels: int, sets: int, ways: int, line_bytes: int,
    sector_bytes: int, banks: int, row_bytes: int, interleave: int,
) -> Int:  # fmt: skip
    """Per owner: sectors, misses, row conflicts, conflicts with a row that the other opened."""
    tags = np.full(channels * sets * ways, -1, np.int64)
    filled = np.zeros(channels * sets * ways, np.int64)
    age = np.zeros(channels * sets * ways, np.int64)
    row_open = np.full(channels * banks, -1, np.int64)
    opener = np.zeros(channels * banks, np.int64)
    counts = np.zeros((2, 4), np.int64)
    share = channels // groups
    for at in range(len(address)):
        where = address[at]
        who = owner[at]
        counts[who, 0] += 1
        chunk = where // interleave
        folded = chunk ^ (chunk >> 5) ^ (chunk >> 11) ^ (chunk >> 17)
        channel = folded % share
        if groups > 1:
            channel += who * share
        line = where // line_bytes
        mixed = (((line ^ (line >> 13)) & 0x7FFFFFFF) * 0x2C1B3C6D) & 0x7FFFFFFF
        base = (channel * sets + (mixed ^ (mixed >> 15)) % sets) * ways
        bit = 1 << ((where % line_bytes) // sector_bytes)
        oldest = base
        hit = False
        found = False
        for way in range(base, base + ways):
            if tags[way] == line:
                found = True
                hit = (filled[way] & bit) != 0
                filled[way] |= bit
                age[way] = at + 1
                break
            if age[way] < age[oldest]:
                oldest = way
        if hit:
            continue
        if not found:
            tags[oldest] = line
            filled[oldest] = bit
            age[oldest] = at + 1
        counts[who, 1] += 1
        row_number = where // (row_bytes * share)
        bank = (row_number ^ (row_number >> 4) ^ (row_number >> 9)) % banks
        slot = channel * banks + bank
        if row_open[slot] != row_number:
            if row_open[slot] >= 0:
                counts[who, 2] += 1
                if opener[slot] != who:
                    counts[who, 3] += 1
            row_open[slot] = row_number
            opener[slot] = who
    return counts


def _ratio(part: int, whole: int) -> float | None:
    return part / whole if whole else None


def _case(schedule: str, counts: Int, alone: Sequence[Int], names: Sequence[str]) -> Case:
    total = counts.sum(0).tolist()
    streams = []
    for index, name in enumerate(names):
        sectors, missed, conflicts, by_other = counts[index].tolist()
        own_sectors, own_missed, own_conflicts, _ = alone[index][0].tolist()
        streams.append(
            StreamShare(
                stream=name,
                sectors=sectors,
                l2_miss_ratio=missed / sectors,
                row_conflict_ratio=_ratio(conflicts, missed),
                alone_l2_miss_ratio=own_missed / own_sectors,
                alone_row_conflict_ratio=_ratio(own_conflicts, own_missed),
                extra_misses_ratio=max(0.0, (missed - own_missed) / sectors),
                conflicts_by_other_ratio=_ratio(by_other, missed),
            )
        )
    return Case(
        schedule=schedule,
        l2_miss_ratio=total[1] / total[0],
        row_conflict_ratio=_ratio(total[2], total[1]),
        streams=streams,
    )


def _causes(parts: Sequence[Accesses], cases: Sequence[Case], model: MemoryModel) -> list[str]:
    """What the figures point at, in words."""
    found = []
    together = next(case for case in cases if case.schedule == "two_streams")
    for part, share in zip(parts, together.streams, strict=True):
        across = (part.address % model.sector_bytes + part.size_bytes) > model.sector_bytes
        small = part.size_bytes <= model.sector_bytes
        unaligned = float((across & small).mean())
        if unaligned > 0.05:
            found.append(f"{part.name}: {unaligned:.0%} of its accesses straddle two sectors")
        if share.extra_misses_ratio > 0.02:
            found.append(
                f"{share.stream}: {share.extra_misses_ratio:.1%} of its sectors miss because the "
                "other stream took their place"
            )
        by_other = share.conflicts_by_other_ratio or 0.0
        if by_other > 0.02:
            found.append(
                f"{share.stream}: bank conflicts, {by_other:.1%} of its DRAM accesses find a row "
                "that the other stream opened"
            )
    return found
