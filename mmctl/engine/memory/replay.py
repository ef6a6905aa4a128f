"""Replay of a recorded trace: exactly as it was, or the same requests under other settings."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from mmctl.engine.memory import compiled, core, walk
from mmctl.engine.memory.allocator import (
    DEFAULT_POOL,
    STATES,
    Block,
    PoolId,
    Segment,
    Tag,
    add_arena,
    grow,
    mapped_ranges,
    new_columns,
)
from mmctl.engine.memory.program import Program, prepare
from mmctl.engine.memory.snapshot import Snapshot
from mmctl.engine.memory.start import StartBlock, StartRange

if TYPE_CHECKING:
    from mmctl.engine.memory.snapshot import Ints

ArenaName = tuple[PoolId, int, bool, str]


class Replay(msgspec.Struct, frozen=True, kw_only=True):
    """How faithful the replay of one device was.

    ``exact`` of ``allocs`` recorded addresses are what the rules give; ``exact_segments`` of
    ``segments`` new segments and mappings are; ``final_equal`` tells whether every block of the
    final state came out.
    """

    device: int
    allocs: int
    exact: int
    segments: int
    exact_segments: int
    lost: int
    complete: bool
    final_equal: bool


class Moment(NamedTuple):
    """The state before event ``event`` of a program."""

    event: int
    columns: core.Columns
    row_of: Any
    hits: Any
    tallies: Any


class Machine:
    """One allocator on the way through a program: plain lists, or arrays through the compiler."""

    def __init__(
        self, program_rows: Ints, columns: core.Columns, row_of: list[int], runs: int = 1
    ) -> None:
        """``runs``: how often a program like this one is going to be walked in all."""
        self.fast = compiled.worth(program_rows.shape[1] * runs)
        self.walk: Any = walk
        self.columns = columns
        self.tallies: Any = [0] * walk.TALLIES
        self.row_of: Any = row_of
        self.hits: Any = [0] * len(row_of)
        self.rows: Any
        if self.fast:
            import numpy as np

            _, self.walk = compiled.load()
            self.rows = program_rows
            self.columns = compiled.arrays(columns)
            self.row_of = np.array(row_of, np.int64)
            self.hits = np.zeros(len(row_of), np.int64)
            self.tallies = np.zeros(walk.TALLIES, np.int64)
        else:
            self.rows = program_rows.tolist()
        self.tallies[walk.FRESH] = self.tallies[walk.GROWN] = core.NONE

    def exact(self, start: int, stop: int) -> None:
        """Follow the record from event ``start`` to ``stop``."""
        while start < stop:
            start = self.walk.exact(
                self.columns, self.rows, start, stop, self.row_of, self.hits, self.tallies
            )
            self._room()

    def under(self, start: int, stop: int) -> int:
        """Serve the requests; returns the event that found no memory, or ``stop``."""
        while start < stop:
            start = self.walk.under(self.columns, self.rows, start, stop, self.row_of, self.tallies)
            if self.tallies[walk.STOPPED]:
                return start
            self._room()
        return stop

    def _room(self) -> None:
        if not core.crowded(self.columns):
            return
        slots = len(self.columns.spare)
        if not self.fast:
            grow(self.columns, slots)
            return
        lists = compiled.lists(self.columns)
        grow(lists, slots)
        self.columns = compiled.arrays(lists)


def start_machine(program: Program, rows: Ints | None = None, runs: int = 1) -> Machine:
    """The state before the first event, ready to follow the record (or other ``rows``)."""
    slots = 4 * (len(program.start_blocks) + len(program.start_ranges)) + 4096
    # What limits and collections did is in the record.
    settings = msgspec.structs.replace(
        program.settings, garbage_collection_threshold=0.0, memory_fraction=None
    )
    c = new_columns(settings, None, slots=slots)
    for pool, _, small in program.arenas:
        add_arena(c, 0 if pool == DEFAULT_POOL else 1, small)
    row_of = [core.NONE] * program.units
    inside = _blocks_inside(program.start_ranges, program.start_blocks)
    reserved: dict[int, list[tuple[StartRange, list[StartBlock]]]] = {}
    for place, blocks in zip(program.start_ranges, inside, strict=True):
        if place.expandable:
            number = next(
                n for n, (start, size, _) in enumerate(program.reservations)
                if start <= place.address < start + size
            )  # fmt: skip
            reserved.setdefault(number, []).append((place, blocks))
        else:
            _span(c, place.address, place.size)
            _chain(c, [(place, blocks)], place.address, place.size, row_of)
    for number, parts in reserved.items():
        start, size, _ = program.reservations[number]
        _span(c, start, size)
        _chain(c, parts, start, size, row_of)
    c.scalars[core.RESERVED] = sum(place.size for place in program.start_ranges)
    c.scalars[core.PEAK_RESERVED] = c.scalars[core.RESERVED]
    return Machine(program.rows if rows is None else rows, c, row_of, runs)


def _blocks_inside(
    ranges: Sequence[StartRange], blocks: Sequence[StartBlock]
) -> list[list[StartBlock]]:
    """The blocks of each range; both are sorted by address."""
    found: list[list[StartBlock]] = []
    at = 0
    for place in ranges:
        mine = []
        while at < len(blocks) and blocks[at].address < place.address + place.size:
            if blocks[at].address >= place.address:
                mine.append(blocks[at])
            at += 1
        found.append(mine)
    return found


def _span(c: core.Columns, address: int, size: int) -> None:
    c.scalars[core.GIVEN] = address
    core.place(c, size)
    c.scalars[core.GIVEN] = core.NONE


def _chain(
    c: core.Columns, parts: Sequence[tuple[StartRange, list[StartBlock]]], start: int, size: int,
    row_of: list[int],
) -> None:  # fmt: skip
    """Lay out one segment or reservation: blocks, the free gaps between, and what is unmapped."""
    last = core.NONE
    arena = parts[0][0].arena
    expandable = int(parts[0][0].expandable)

    def lay(address: int, length: int, state: int) -> int:
        nonlocal last
        if core.crowded(c):
            grow(c, len(c.spare))
        row = core.new_row(c, address, length, arena, expandable)
        c.blocks[core.STATE][row] = state
        if last != core.NONE:
            core.link_after(c, row, last)
        last = row
        if state == core.FREE:
            core.index_free(c, row)
        elif state == core.UNMAPPED:
            core.index_unmapped(c, row)
        return row

    at = start
    for place, blocks in parts:
        if place.address > at:
            lay(at, place.address - at, core.UNMAPPED)
        at = place.address
        for block in blocks:
            if block.address < at:
                continue  # an overlap can only come from a broken record
            if block.address > at:
                lay(at, block.address - at, core.FREE)
            length = min(block.size, place.address + place.size - block.address)
            row = lay(block.address, length, core.PENDING if block.pending else core.ALLOCATED)
            c.blocks[core.REQUESTED][row] = block.requested
            row_of[block.unit] = row
            at = block.address + length
        if at < place.address + place.size:
            lay(at, place.address + place.size - at, core.FREE)
        at = place.address + place.size
    if at < start + size:
        lay(at, start + size - at, core.UNMAPPED)


def moments(program: Program, stops: Sequence[int]) -> Iterator[Moment]:
    """The exact state before each of the events in ``stops`` (ascending), without copying: a
    moment is valid until the next is asked for."""
    machine = start_machine(program)
    at = 0
    for stop in stops:
        machine.exact(at, stop)
        at = stop
        yield Moment(stop, machine.columns, machine.row_of, machine.hits, machine.tallies)


def prepared(snapshot: Snapshot, device: int) -> Program:
    """The device's program. Files before torch 2.4 record no settings: where the defaults do not
    reproduce every address, usual ones are tried, and those that reproduce most are taken."""
    program = prepare(snapshot, device)
    if snapshot.settings_recorded or program.rows.shape[1] > _GUESSED_EVENTS:
        return program
    best = (_exact(snapshot, program), program)
    for change in _GUESSES:
        if best[0] == program.allocs:
            break
        settings = msgspec.structs.replace(best[1].settings, **change)
        guess = prepare(snapshot._replace(settings=settings), device)
        best = max(best, (_exact(snapshot, guess), guess), key=lambda pair: pair[0])
    return best[1]


_GUESSED_EVENTS = 300_000
_GUESSES: list[dict[str, Any]] = [
    *({"roundup_power2_divisions": (parts,) * 16} for parts in (2, 4, 8, 16)),
    *({"max_split_bytes": size << 20} for size in (24, 32, 64, 100, 128, 200, 256, 512, 1024)),
]


def _exact(snapshot: Snapshot, program: Program) -> int:
    (last,) = moments(program, [program.rows.shape[1]])
    return fidelity(snapshot, program, last).exact


def fidelity(snapshot: Snapshot, program: Program, last: Moment) -> Replay:
    """How well the replay, come to its end, agrees with the record."""
    import numpy as np

    t = last.tallies
    allocated = program.unit_entry >= 0
    hits = int(np.asarray(last.hits)[allocated].sum())
    return Replay(
        device=program.device,
        allocs=program.allocs,
        exact=hits,
        segments=int(t[walk.SEGMENTS]),
        exact_segments=int(t[walk.EXACT_SEGMENTS]),
        lost=int(t[walk.LOST]),
        complete=program.complete,
        final_equal=_final_blocks(snapshot, program.device) == _blocks(last.columns),
    )


def _final_blocks(snapshot: Snapshot, device: int) -> set[tuple[int, int, int]]:
    import numpy as np

    owner = np.repeat(snapshot.segments["device"], snapshot.segments["blocks"])
    mine = owner == device
    columns = (snapshot.blocks[name][mine].tolist() for name in ("address", "size", "state"))
    return set(zip(*columns, strict=True))


def _blocks(c: core.Columns) -> set[tuple[int, int, int]]:
    rows = zip(
        *(
            column if isinstance(column, list) else column.tolist()
            for column in (c.blocks[core.ADDRESS], c.blocks[core.SIZE], c.blocks[core.STATE])
        ),
        strict=True,
    )
    return {row for row in rows if row[2] < core.UNMAPPED}


def segments_at(program: Program, moment: Moment, tag_of: Callable[[int], Tag]) -> list[Segment]:
    """The segments of a moment as views; ``tag_of`` tells the tag of a unit."""
    import numpy as np

    c = moment.columns if isinstance(moment.columns.spare, list) else compiled.lists(moment.columns)
    row_of = np.asarray(moment.row_of)
    alive = np.flatnonzero(row_of != core.NONE)
    owner = dict(zip(row_of[alive].tolist(), alive.tolist(), strict=True))
    blocks = c.blocks
    keys: list[ArenaName] = [(*key, "") for key in program.arenas]

    def view(row: int) -> Block:
        pool, stream, _, _ = keys[blocks[core.ARENA][row]]
        state = blocks[core.STATE][row]
        unit = owner.get(row)
        return Block(
            blocks[core.ADDRESS][row], blocks[core.SIZE][row], blocks[core.REQUESTED][row],
            STATES[state], stream, pool, Tag() if unit is None else tag_of(unit),
        )  # fmt: skip

    return mapped_ranges(c, keys, view)
