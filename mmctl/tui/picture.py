"""The heatmap's picture: columns of a pool as rows of codes, and what each code stands for.

A code is a small integer into a table of characters; the widget knows characters and styles, this
module what they stand for.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable

from mmctl.tui.heat import (
    CONFLICT,
    FIELDS,
    FREE,
    FREE_PAGES,
    HELD_S,
    OTHER,
    PAGE_BYTES,
    PARTIAL_PAGES,
    TEXT,
    USABLE,
    VISION,
    Column,
    Columns,
    Rows,
    resample,
)  # fmt: skip
from mmctl.tui.lines import Glyphs
from mmctl.tui.palette import HEAT_LEVELS
from mmctl.tui.ui import Layer, Ui

ROUND_BYTES = 2 * 2**20
HOLD_NS = 2_500_000_000  # a column holds until the next one, if that comes by then
# Where each step of the conflict layer begins: finer at the low end, where most pools live, so
# that little conflict looks like little and never like none. Every second one has a new character.
CONFLICTS = (0.005, 0.04, 0.1, 0.2, 0.3, 0.45, 0.6, 0.8)
AGES_S = (1, 3, 10, 30, 100, 300, 1000)  # where one step of the age layer ends
PARTIAL_SHARE = 0.01  # pages of a row that are partly used, for the row to be drawn as such


def legend(layer: Layer, g: Glyphs) -> list[tuple[str, str]]:
    """Character and role of every code of a layer; code 0 is always blank."""
    if layer in ("conflict", "age"):
        ramp = g.ramp
        return [(" ", "")] + [
            (
                ramp[0] if i == 0 else ramp[1 + (i - 1) * (len(ramp) - 1) // (HEAT_LEVELS - 1)],
                f"heat{i}",
            )
            for i in range(HEAT_LEVELS)
        ]
    if layer == "modality":
        return [(" ", ""), (g.vision, "vision"), (g.text, "text"), (g.other, "other"),
                (g.free, "free")]  # fmt: skip
    if layer == "pages":
        return [(" ", ""), (g.vision, "other"), (g.unusable, "warn"), (g.free, "free")]
    return [(" ", ""), (g.other, "line"), (g.free, "good"), (g.unusable, "unusable")]


def _conflict(cells: list[float], at: int) -> int:
    return 1 + bisect_right(CONFLICTS, cells[at + CONFLICT])


def _modality(cells: list[float], at: int) -> int:
    amounts = cells[at + VISION], cells[at + TEXT], cells[at + OTHER], cells[at + FREE]
    return 1 + amounts.index(max(amounts))


def _free(cells: list[float], at: int) -> int:
    free, usable = cells[at + FREE], cells[at + USABLE]
    held = cells[at + VISION] + cells[at + TEXT] + cells[at + OTHER]
    if free <= held:
        return 1
    return 2 if usable >= free / 2 else 3


def _age(cells: list[float], at: int) -> int:
    held_s, held = cells[at + HELD_S], cells[at + VISION] + cells[at + TEXT] + cells[at + OTHER]
    if held_s != held_s:  # not told
        return 0
    return 2 + bisect_right(AGES_S, held_s / held) if held > 0 else 1


def _pages(cells: list[float], at: int) -> int:
    partial, free = cells[at + PARTIAL_PAGES], cells[at + FREE_PAGES]
    if free != free:  # not told
        return 0
    pages = sum(cells[at + VISION : at + FREE + 1]) / PAGE_BYTES
    if partial > PARTIAL_SHARE * pages:
        return 2
    return 3 if 2 * free > pages else 1


_CODES: dict[Layer, Callable[[list[float], int], int]] = {
    "conflict": _conflict, "modality": _modality, "free": _free, "age": _age, "pages": _pages,
}  # fmt: skip


def placed(level: Columns, count: int) -> list[Column | None]:
    """The column that each of the last ``count`` places shows, newest at the right.

    A column holds until the next one, if that comes soon enough; else its place stands alone.
    """
    found: list[Column | None] = [None] * max(0, count)
    if not level.columns:
        return found
    hold = max(1, HOLD_NS // level.step_ns)
    newest = level.columns[-1].start_ns // level.step_ns
    end = count
    for column in reversed(level.columns):
        x = count - 1 - (newest - column.start_ns // level.step_ns)
        until = end if end - x <= hold else x + 1
        found[max(0, x) : until] = [column] * (until - max(0, x))
        end = x
        if x <= 0:
            break
    return found


class Picture:
    """Rows of codes for one size, layer and range of addresses; columns are kept as they come.

    Used by one thread. A finished column is resampled once, however often it is drawn.
    """

    def __init__(self) -> None:
        self._key: object = None
        self._kept: dict[int, tuple[Column, bytes]] = {}

    def rows(self, level: Columns, view: Rows, layer: Layer, columns: int) -> list[bytes]:
        """The last ``columns`` columns, newest at the right: a row of codes for each row."""
        if columns <= 0:
            return [b""] * view.row_count
        if (view, layer) != self._key:
            self._key, self._kept = (view, layer), {}
        blank = bytes(view.row_count)
        kept: dict[int, tuple[Column, bytes]] = {}
        found = []
        for column in placed(level, columns):
            if column is None:
                found.append(blank)
                continue
            key = id(column)  # kept with the column itself, so that no other can have it
            if key not in kept:
                kept[key] = self._kept.get(key) or (column, _codes(column, view, layer))
            found.append(kept[key][1])
        self._kept = kept
        return [bytes(row) for row in zip(*found, strict=True)]


def _codes(column: Column, view: Rows, layer: Layer) -> bytes:
    cells = resample(column.values(), column.rows, view)
    code = _CODES[layer]
    found = bytearray(view.row_count)
    for row in range(view.row_count):
        at = FIELDS * row
        if cells[at + VISION] + cells[at + TEXT] + cells[at + OTHER] + cells[at + FREE] > 0:
            found[row] = code(cells, at)
    return bytes(found)


def view_rows(level: Columns, ui: Ui, height: int) -> Rows | None:
    """The rows to draw: all addresses of the shown columns, or what was zoomed to."""
    if height <= 0:
        return None
    spans = [column.rows for column in level.columns if column.rows.row_count]
    if not spans:
        return None
    low, high = min(s.base_address for s in spans), max(s.end_address for s in spans)
    if ui.rows is not None:
        low, high = max(low, ui.rows[0]), min(high, ui.rows[1])
        if high <= low:
            low, high = min(s.base_address for s in spans), max(s.end_address for s in spans)
    finest = min(s.row_bytes for s in spans)
    # Never finer than the records are: a row of its own for every row that was sent.
    count = max(1, min(height, -(-(high - low) // finest)))
    size = -(-(high - low) // count)
    if size != finest:
        size = -(-size // ROUND_BYTES) * ROUND_BYTES  # round addresses beside the rows
    return Rows(low, size, -(-(high - low) // size))


def zoomed(level: Columns, view: Rows, row: int, factor: float) -> tuple[int, int] | None:
    """Addresses around a row, ``factor`` times as many as now; absent for all there are."""
    whole = [column.rows for column in level.columns if column.rows.row_count]
    low, high = min(r.base_address for r in whole), max(r.end_address for r in whole)
    span = int((view.end_address - view.base_address) * factor)
    if span >= high - low:
        return None
    span = max(span, 2 * min(r.row_bytes for r in whole))
    start = max(low, view.base_address + row * view.row_bytes - span // 2)
    return start, start + span
