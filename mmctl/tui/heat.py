"""Columns of the heatmap over time: recent ones fine, older ones coarse, each packed and frozen.

A column is one moment of one pool: for every row of addresses the conflict, the bytes of each
kind, how long they have been held, and the pages by state. The finest level takes pool records as
they come; every coarser one takes the columns that the level before it finished, so a day costs
as much memory as an hour. A level keeps its columns as numbers of half precision: three digits,
as many as a screen shows, for half of the memory.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Sequence
from itertools import repeat
from struct import pack, unpack
from typing import NamedTuple

import msgspec

from mmctl.engine.records import Heat, Pool

CONFLICT, VISION, TEXT, OTHER, FREE, USABLE, HELD_S, PARTIAL_PAGES, FREE_PAGES = range(9)
FIELDS = 9
NOT_TOLD = float("nan")  # what a source leaves out stays unknown in every sum
MOST_A_COLUMN = 4
KEEP = 240  # columns of each level: more than a wide terminal shows
PAGE_BYTES = 4096
MOST_HALF = 65_504.0  # the largest number of half precision; of seconds: 18 hours


class Rows(NamedTuple):
    """Rows of addresses: ``row_count`` rows of ``row_bytes`` from ``base_address``."""

    base_address: int
    row_bytes: int
    row_count: int

    @property
    def end_address(self) -> int:
        return self.base_address + self.row_bytes * self.row_count


class Column(msgspec.Struct, frozen=True):
    """One column; bytes are means over its time.

    ``packed`` is ``FIELDS`` numbers of half precision a row: conflict, bytes as shares of the
    row, the mean age of what is held in seconds, pages as shares of the row's. Deflated in a
    column that is ``finished``: most rows of most pools are alike.
    """

    start_ns: int
    rows: Rows
    packed: bytes
    vision_bytes: float
    text_bytes: float
    other_bytes: float
    free_bytes: float
    finished: bool = False

    def values(self) -> Cells:
        """The cells as one flat list of floats, ``FIELDS`` a row."""
        packed = zlib.decompress(self.packed) if self.finished else self.packed
        cells = list(unpack(f"{len(packed) // 2}e", packed))
        row_bytes = self.rows.row_bytes
        pages = row_bytes / PAGE_BYTES
        for at in range(0, len(cells), FIELDS):
            for field in range(VISION, HELD_S):
                cells[at + field] *= row_bytes
            cells[at + HELD_S] *= cells[at + VISION] + cells[at + TEXT] + cells[at + OTHER]
            cells[at + PARTIAL_PAGES] *= pages
            cells[at + FREE_PAGES] *= pages
        return cells


# FIELDS a row: conflict, bytes, bytes times the seconds they have been held, pages. All but the
# first add up over addresses.
Cells = list[float]


def _packed(cells: Cells, row_bytes: int) -> bytes:
    """Cells as ``Column.packed``."""
    small = [0.0] * len(cells)
    pages = row_bytes / PAGE_BYTES
    for at in range(0, len(cells), FIELDS):
        conflict, vision, text, other, free, usable, held_s, partial, free_pages = cells[
            at : at + FIELDS
        ]
        held = vision + text + other
        if held + free <= 0:
            continue
        small[at : at + FIELDS] = (
            conflict, vision / row_bytes, text / row_bytes, other / row_bytes, free / row_bytes,
            usable / row_bytes, min(held_s / held, MOST_HALF) if held else held_s * 0.0,
            partial / pages, free_pages / pages,
        )  # fmt: skip
    try:
        return pack(f"{len(small)}e", *small)
    except OverflowError:  # a source that says a row holds thousands of times what it spans
        bound = (x if x != x else max(-MOST_HALF, min(x, MOST_HALF)) for x in small)
        return pack(f"{len(small)}e", *bound)


def dense(heat: Heat) -> Cells:
    """A sparse column with every row; a row without memory is all zeros."""
    cells = [0.0] * (FIELDS * heat.row_count)
    ages = heat.age_s if heat.age_s is not None else repeat(NOT_TOLD)
    pages = heat.pages if heat.pages is not None else repeat((0, NOT_TOLD, NOT_TOLD))
    for row, cell, age_s, states in zip(heat.rows, heat.cells, ages, pages, strict=False):
        if 0 <= row < heat.row_count:
            held_s = (cell[VISION] + cell[TEXT] + cell[OTHER]) * (age_s or 0.0)
            cells[FIELDS * row : FIELDS * row + FIELDS] = (*cell, held_s, *states[1:])
    return cells


def resample(cells: Sequence[float], have: Rows, want: Rows) -> Cells:
    """Cells of ``have`` rows spread over ``want`` rows by overlap of addresses.

    Bytes are shared out in proportion, conflict is the mean weighted by bytes.
    """
    if have == want:
        return list(cells)
    found = [0.0] * (FIELDS * want.row_count)
    for i in range(have.row_count):
        cell = cells[FIELDS * i : FIELDS * i + FIELDS]
        held = cell[VISION] + cell[TEXT] + cell[OTHER] + cell[FREE]
        if held <= 0:
            continue
        start = have.base_address + i * have.row_bytes
        end = start + have.row_bytes
        first = max(0, (start - want.base_address) // want.row_bytes)
        last = min(want.row_count - 1, (end - 1 - want.base_address) // want.row_bytes)
        for j in range(first, last + 1):
            low = want.base_address + j * want.row_bytes
            share = (min(end, low + want.row_bytes) - max(start, low)) / have.row_bytes
            at = FIELDS * j
            found[at] += cell[CONFLICT] * held * share
            for field in range(VISION, FIELDS):
                found[at + field] += cell[field] * share
    for at in range(0, len(found), FIELDS):
        held = found[at + VISION] + found[at + TEXT] + found[at + OTHER] + found[at + FREE]
        found[at] = found[at] / held if held > 0 else 0.0
    return found


class Level:
    """Columns of one width in time; the last one is still open."""

    def __init__(self, step_ns: int, coarser: Level | None = None) -> None:
        self.step_ns = step_ns
        self.coarser = coarser
        self._done: deque[Column] = deque(maxlen=KEEP)
        self._frozen: tuple[Column, ...] = ()
        self._whole: tuple[Column, ...] | None = None  # with the open one, until it changes
        self._start_ns = -1
        self._open(-1, Rows(0, 1, 0))

    def _open(self, start_ns: int, rows: Rows) -> None:
        self._start_ns = start_ns
        self._totals, self._moments = [0.0] * 4, 0
        self._begin(rows)

    def _begin(self, rows: Rows) -> None:
        self._rows = rows
        self._sums = [0.0] * (FIELDS * rows.row_count)
        self._weights = [0.0] * rows.row_count
        self._count = 0

    def add(self, ts_ns: int, rows: Rows, cells: Sequence[float], totals: Sequence[float]) -> None:
        """Fold one moment in; a moment older than the open column is dropped.

        ``totals`` are the bytes of vision, text, other and free; without rows only they count.
        """
        start = ts_ns - ts_ns % self.step_ns
        if start < self._start_ns:
            return
        if rows == self._rows:
            rows = self._rows  # one object for all columns
        if start > self._start_ns:
            self._finish()
            self._open(start, rows)
        self._moments += 1
        self._whole = None
        for i, value in enumerate(totals):
            self._totals[i] += value
        if not rows.row_count:
            return
        if rows != self._rows:  # the pool grew or moved inside this column
            kept, count = resample(self._mean(), self._rows, rows), self._count
            self._begin(rows)
            self._fold(kept, count)
        self._fold(cells, 1)

    def _fold(self, cells: Sequence[float], times: int) -> None:
        sums, weights = self._sums, self._weights
        for row in range(self._rows.row_count):
            at = FIELDS * row
            held = cells[at + 1] + cells[at + 2] + cells[at + 3] + cells[at + 4]
            if held <= 0:
                continue
            weights[row] += held * times
            sums[at] += cells[at] * held * times
            for i in range(at + 1, at + FIELDS):
                sums[i] += cells[i] * times
        self._count += times

    def _mean(self) -> Cells:
        count = self._count or 1
        cells = [value / count for value in self._sums]
        for row, weight in enumerate(self._weights):
            cells[FIELDS * row] = self._sums[FIELDS * row] / weight if weight else 0.0
        return cells

    def _column(self, cells: Cells) -> Column:
        vision, text, other, free = (total / (self._moments or 1) for total in self._totals)
        packed = _packed(cells, self._rows.row_bytes)
        return Column(self._start_ns, self._rows, packed, vision, text, other, free)

    def _finish(self) -> None:
        if self._start_ns < 0:
            return
        cells = self._mean()
        done = self._column(cells)
        done = msgspec.structs.replace(done, packed=zlib.compress(done.packed, 1), finished=True)
        self._done.append(done)
        self._frozen = tuple(self._done)
        if self.coarser is not None:
            totals = (done.vision_bytes, done.text_bytes, done.other_bytes, done.free_bytes)
            self.coarser.add(done.start_ns, self._rows, cells, totals)

    def columns(self) -> tuple[Column, ...]:
        """The columns, oldest first; the open one as it is now."""
        if self._start_ns < 0:
            return ()
        if self._whole is None:
            self._whole = (*self._frozen, self._column(self._mean()))
        return self._whole


class Columns(NamedTuple):
    """The frozen columns of one level."""

    step_ns: int
    columns: tuple[Column, ...]

    @property
    def span(self) -> int:
        """Columns from the oldest to the newest, those without a record too."""
        if not self.columns:
            return 0
        return (self.columns[-1].start_ns - self.columns[0].start_ns) // self.step_ns + 1


class HeatHistory:
    """Every level of one pool. ``window_ns`` across 120 columns is the second level."""

    def __init__(self, window_ns: int) -> None:
        usual = max(1, window_ns // 120)
        coarser: Level | None = None
        levels = []
        for factor in (25.0, 5.0, 1.0, 0.2):
            coarser = Level(max(1, int(usual * factor)), coarser)
            levels.append(coarser)
        self.levels = levels[::-1]
        self._apart_ns = self.levels[0].step_ns // MOST_A_COLUMN
        self._next_ns = 0

    def add(self, pool: Pool) -> None:
        """Fold one pool record in; without heat its totals still count.

        Of a pool that tells faster than is drawn only ``MOST_A_COLUMN`` moments have their rows
        folded in, evenly apart.
        """
        heat = pool.heat
        totals = (pool.vision_bytes, pool.text_bytes, pool.other_bytes, pool.free_bytes)
        often = self._next_ns - self._apart_ns <= pool.ts_ns < self._next_ns
        if heat is None or heat.row_bytes <= 0 or often:
            self.levels[0].add(pool.ts_ns, Rows(0, 1, 0), (), totals)
        else:
            self._next_ns = pool.ts_ns + self._apart_ns
            rows = Rows(heat.base_address, heat.row_bytes, heat.row_count)
            self.levels[0].add(pool.ts_ns, rows, dense(heat), totals)

    def frozen(self) -> tuple[Columns, ...]:
        """All levels, finest first."""
        return tuple(Columns(level.step_ns, level.columns()) for level in self.levels)
