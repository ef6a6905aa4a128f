"""What if other settings had been in force: the same requests, replayed under them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from mmctl.engine.memory import core, walk
from mmctl.engine.memory.allocator import DEFAULT_POOL, PoolId, add_arena, new_columns
from mmctl.engine.memory.program import Program, round_sizes
from mmctl.engine.memory.replay import Machine, start_machine
from mmctl.engine.memory.settings import Settings, show

if TYPE_CHECKING:
    from mmctl.engine.memory.snapshot import Ints

PLACEMENTS = (core.LOWEST, core.HIGHEST, core.SCATTERED)
LONG_EVENTS = 300_000  # from here on two orders of addresses have to do

# Classes of lifetime: how many allocations a place's blocks outlive, by their median.
LIFETIMES = (64, 4096)


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """What a setting would have led to.

    The spread is the lowest and highest peak over orders of new addresses, which are unknown
    and break ties. ``oom`` is None where no capacity is known. ``start`` tells what the trace
    starts from: ``empty``, the ``recorded`` layout (settings in force), or the same blocks
    ``rebuilt`` under other settings. ``basis`` is always modelled.
    """

    device: int
    setting: str
    capacity_bytes: int | None
    peak_reserved_bytes: int
    peak_reserved_spread: tuple[int, int]
    largest_free_at_peak_bytes: int
    device_allocs: int
    oom: bool | None
    oom_entry: int | None = None
    in_force: bool = False
    start: str = "empty"
    basis: str = "modelled"


class Requests:
    """The requests of a trace, free of what the device did: start blocks first, then the events."""

    def __init__(self, program: Program, modality: Ints) -> None:
        import numpy as np

        self.program = program
        self.modality = modality
        ops = program.rows[walk.OP]
        releases = _explicit_releases(ops)
        wanted = (ops == walk.ALLOC) | (ops == walk.FREE) | (ops == walk.OOM)
        wanted[releases] = True
        kept = np.flatnonzero(wanted)
        start = np.zeros((walk.PROGRAM_ROWS, len(program.start_blocks)), np.int64)
        for column, block in enumerate(program.start_blocks):
            start[:, column] = (
                walk.ALLOC, block.address, block.requested, block.requested, block.unit, 0,
            )  # fmt: skip
        keys = _arena_of_start(program)
        body = program.rows[:, kept].copy()
        body[walk.OP][np.isin(kept, releases)] = walk.RELEASE
        self.body, self.body_entry = body, program.entry[kept]
        self.rows = np.concatenate([start, body], axis=1)
        self.entry = np.concatenate([np.full(start.shape[1], -1), program.entry[kept]])
        # A request's pool and stream, whatever the settings: (pool, stream) by number.
        self.places: list[tuple[PoolId, int]] = list(
            dict.fromkeys((pool, stream) for pool, stream, _ in program.arenas)
        ) or [(DEFAULT_POOL, 0)]
        number = {place: n for n, place in enumerate(self.places)}
        by_arena = np.array(
            [number[pool, stream] for pool, stream, _ in program.arenas] or [0], np.int64
        )
        self.place = np.concatenate([by_arena[keys], by_arena[body[walk.ARENA]]])
        self._lifetime: Ints | None = None

    def under(self, settings: Settings) -> tuple[Ints, list[tuple[PoolId, bool]]]:
        """The rows with sizes and arenas of ``settings``, and the arenas: (pool, small)."""
        import numpy as np

        rows = self.rows.copy()
        requests = (rows[walk.OP] == walk.ALLOC) | (rows[walk.OP] == walk.OOM)
        sizes = rows[walk.REQUESTED].copy()
        sizes[requests] = round_sizes(sizes[requests], settings)
        rows[walk.SIZE] = sizes
        kind = np.zeros(rows.shape[1], np.int64)
        unit = rows[walk.UNIT]
        known = unit >= 0
        if settings.pool_per_modality:
            kind[known] = self.modality[unit[known]]
        if settings.lifetime_pool:
            kind[known] = kind[known] * 4 + self.lifetime[unit[known]]
        combined = ((self.place * 16 + kind) * 2 + (sizes <= core.SMALL_LIMIT))[requests]
        keys = np.flatnonzero(np.bincount(combined))
        numbers = np.zeros(int(keys[-1]) + 1 if len(keys) else 0, np.int64)
        numbers[keys] = np.arange(len(keys))
        rows[walk.ARENA][requests] = numbers[combined]
        return rows, [(self.places[key // 32][0], bool(key % 2)) for key in keys.tolist()]

    @property
    def lifetime(self) -> Ints:
        """The class of lifetime of every unit: that of the place in the code that asks for it,
        by the median number of allocations its blocks outlive. Never freed counts as long."""
        if self._lifetime is None:
            self._lifetime = lifetime_classes(self.program, self.rows)
        return self._lifetime


def lifetime_classes(program: Program, rows: Ints) -> Ints:
    """0 short, 1 medium, 2 long for every unit (see ``Requests.lifetime``)."""
    import numpy as np

    ops, unit = rows[walk.OP], rows[walk.UNIT]
    clock = np.cumsum(ops == walk.ALLOC)
    born = np.zeros(program.units, np.int64)
    died = np.full(program.units, clock[-1] + LIFETIMES[-1] + 1 if len(clock) else 0)
    size = np.zeros(program.units, np.int64)
    allocs, frees = ops == walk.ALLOC, ops == walk.FREE
    born[unit[allocs]] = clock[allocs]
    size[unit[allocs]] = rows[walk.REQUESTED][allocs]
    died[unit[frees]] = clock[frees]
    # Without stacks, requests of one size are taken for one place.
    exponent = np.frexp(size.astype(float))[1].astype(np.int64)
    place = program.unit_stack * 64 + exponent
    order = np.lexsort((died - born, place))
    keys, first, count = np.unique(place[order], return_index=True, return_counts=True)
    median = (died - born)[order][first + count // 2]
    classes = np.searchsorted(np.array(LIFETIMES), median, "right")
    return classes[np.searchsorted(keys, place)]


def _arena_of_start(program: Program) -> Ints:
    import numpy as np

    starts = np.array([place.address for place in program.start_ranges], np.int64)
    arenas = np.array([place.arena for place in program.start_ranges], np.int64)
    blocks = np.array([block.address for block in program.start_blocks], np.int64)
    if not len(blocks):
        return np.zeros(0, np.int64)
    return arenas[np.maximum(np.searchsorted(starts, blocks, "right") - 1, 0)]


def _explicit_releases(ops: Ints) -> Ints:
    """Runs of device frees that no request follows at once: the program emptied its cache.

    Those that a new segment, a mapping or an error follows were the allocator's own attempts.
    """
    import numpy as np

    release = (ops == walk.SEGMENT_FREE) | (ops == walk.UNMAP)
    last = release.copy()
    last[:-1] &= ~release[1:]
    ends = np.flatnonzero(last)
    following = ops[np.minimum(ends + 1, len(ops) - 1)]
    attempt = np.isin(following, (walk.SEGMENT_ALLOC, walk.MAP, walk.OOM)) & (ends + 1 < len(ops))
    return ends[~attempt]


def what_if(
    requests: Requests,
    settings: Settings,
    capacity_bytes: int | None = None,
    placements: Sequence[int] = PLACEMENTS,
    settings_in_all: int = 1,
) -> Outcome:
    """The outcome of ``settings`` for a device that can give ``capacity_bytes``.

    ``settings_in_all`` tells how many are going to be tried, which decides about compiling.
    """
    program = requests.program
    if requests.rows.shape[1] >= LONG_EVENTS:
        placements = placements[:2]
    times = settings_in_all * len(placements)
    in_force = settings == program.settings
    if in_force:
        rows, entry = requests.body, requests.body_entry
        runs = [_continue(requests, capacity_bytes, one, times) for one in placements]
    else:
        rows, arenas = requests.under(settings)
        entry = requests.entry
        runs = [
            _run(requests, rows, arenas, settings, capacity_bytes, one, times) for one in placements
        ]
    first, _, failed = runs[0]
    peaks = [int(columns.scalars[core.PEAK_RESERVED]) for columns, _, _ in runs]
    return Outcome(
        device=program.device,
        setting=show(settings),
        capacity_bytes=capacity_bytes,
        peak_reserved_bytes=peaks[0],
        peak_reserved_spread=(min(peaks), max(peaks)),
        largest_free_at_peak_bytes=int(runs[0][1][walk.LARGEST_AT_PEAK]),
        device_allocs=int(first.scalars[core.DEVICE_ALLOCS]),
        oom=None if capacity_bytes is None else failed is not None,
        oom_entry=None if failed is None else int(entry[failed]),
        in_force=in_force,
        start="empty" if program.complete else "recorded" if in_force else "rebuilt",
    )


def _run(
    requests: Requests, rows: Ints, arenas: Sequence[tuple[PoolId, bool]], settings: Settings,
    capacity_bytes: int | None, placement: int, times: int,
) -> tuple[Any, Any, int | None]:  # fmt: skip
    c = new_columns(settings, capacity_bytes, placement, slots=4096)
    pools = list(dict.fromkeys([DEFAULT_POOL, *(pool for pool, _ in arenas)]))
    for pool, small in arenas:
        add_arena(c, pools.index(pool), small)
    machine = Machine(rows, c, [core.NONE] * requests.program.units, times)
    end = machine.under(0, rows.shape[1])
    failed = end if machine.tallies[walk.STOPPED] else None
    return machine.columns, machine.tallies, failed


def _continue(
    requests: Requests, capacity_bytes: int | None, placement: int, times: int
) -> tuple[Any, Any, int | None]:
    """The settings in force, from the layout that the trace starts with."""
    program = requests.program
    machine = start_machine(program, requests.body, times)
    limits = new_columns(program.settings, capacity_bytes, placement, slots=0).scalars
    for name in (core.CAPACITY, core.LIMIT, core.COLLECT_ABOVE, core.RESERVATION, core.PLACEMENT):
        machine.columns.scalars[name] = limits[name]
    end = machine.under(0, requests.body.shape[1])
    return machine.columns, machine.tallies, end if machine.tallies[walk.STOPPED] else None
