"""The heatmap's picture: columns of a pool as rows of codes, its axes, legend and cursor.

A code is a small integer into a table of characters; the widget knows characters and styles, this
module what they stand for.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable

from mmctl.engine.records import Heat
from mmctl.engine.units import show_bytes, show_seconds
from mmctl.tui.heat import (
    CONFLICT,
    FIELDS,
    FREE,
    FREE_PAGES,
    HELD_S,
    OTHER,
    PARTIAL_PAGES,
    TEXT,
    USABLE,
    VISION,
    Column,
    Columns,
    Rows,
    resample,
)  # fmt: skip
from mmctl.tui.lines import ABSENT, Glyphs, Line, clean, flow, justify, left, spark
from mmctl.tui.palette import HEAT_LEVELS
from mmctl.tui.snapshot import PoolView, Snapshot
from mmctl.tui.ui import Layer, Ui

PAGE_BYTES = 4096
ROUND_BYTES = 2 * 2**20
HOLD_NS = 2_500_000_000  # a column holds until the next one, if that comes by then
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
    value = cells[at + CONFLICT]
    if value <= 0.005:
        return 1
    return 2 + min(HEAT_LEVELS - 2, int(value * (HEAT_LEVELS - 1)))


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


def address(value: int) -> str:
    """``0x7f10_4a20_0000``."""
    digits = f"{value:012x}"
    return f"0x{digits[:4]}_{digits[4:8]}_{digits[8:]}"


def axis(view: Rows, short: bool) -> list[Line]:
    """An address every few rows."""
    lines: list[Line] = []
    every = 4 if view.row_count > 8 else 2 if view.row_count > 4 else 1
    for row in range(view.row_count):
        at = view.base_address + row * view.row_bytes
        if row % every:
            lines.append(((" " * (5 if short else 17) + "┃", "line"),))
        elif short:
            lines.append(
                (
                    (
                        left("+" + show_bytes(at - view.base_address).replace(" ", "")[:-2], 5),
                        "dim",
                    ),
                    ("┃", "line"),
                )
            )
        else:
            lines.append(((address(at) + " ", "dim"), ("┃", "line")))
    return lines


def caption(view: PoolView, ui: Ui, level: Columns, columns: int, cells: int) -> Line:
    """What is drawn: pool, size, time, layer; the colours' scale at the right."""
    pool = view.record
    span = level.step_ns * min(cells, level.span)
    start: Line = (
        (f"{pool.device}", "strong"), (f"  pool {clean(pool.pool)}", ""),
        ("  layer ", "dim"), (ui.layer, "strong"), *_unknown(pool.heat, ui.layer),
        ("  last ", "dim"), (_span(span), ""),
        (f" at {show_seconds(level.step_ns / 1e9)} a column", "dim"),
        (f"  {show_bytes(pool.reserved_bytes)}", ""), (" reserved", "dim"),
    )  # fmt: skip
    return justify(start, scale(ui), columns)


def _unknown(heat: Heat | None, layer: Layer) -> Line:
    """That the source leaves out what the layer would draw."""
    if heat is None or {"age": heat.age_s, "pages": heat.pages}.get(layer, ()) is not None:
        return ()
    return ((" not told by this source", "warn"),)


def _span(ns: int) -> str:
    seconds = ns / 1e9
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"


def scale(ui: Ui) -> Line:
    """The legend of the layer."""
    table = legend(ui.layer, ui.glyphs)
    if ui.layer == "conflict":
        marks = tuple((mark, role) for mark, role in table[1:])
        return (("0 ", "dim"), *marks, (" 1 ", "dim"))
    if ui.layer == "age":
        (nothing, role), *steps = table[1:]
        least, most = (_span(seconds * 10**9) for seconds in (AGES_S[0], AGES_S[-1]))
        return (
            (f"{nothing} ", role), ("nothing held  ", "dim"), (f"< {least} ", "dim"), *steps,
            (f" > {most} ", "dim"),
        )  # fmt: skip
    names = {
        "modality": ("vision", "text", "other", "free"), "free": ("held", "usable", "unusable"),
        "pages": ("used", f"partly used (from {PARTIAL_SHARE:.0%})", "free"),
    }[ui.layer]  # fmt: skip
    pieces: list[tuple[str, str]] = []
    for (mark, role), name in zip(table[1:], names, strict=True):
        pieces += [(f"{mark * 2} ", role), (f"{name}  ", "dim")]
    return tuple(pieces)


def strips(level: Columns, view: PoolView, columns: int, cells: int, g: Glyphs) -> list[Line]:
    """Bytes of each modality over the same columns as the heatmap: one line each."""
    top = float(view.record.capacity_bytes or 0)
    shown = placed(level, cells)
    series: dict[str, list[float | None]] = {
        "vision": [None if column is None else column.vision_bytes for column in shown],
        "text": [None if column is None else column.text_bytes for column in shown],
        "free": [None if column is None else column.free_bytes for column in shown],
    }
    margin = columns - cells
    now = {"vision": view.record.vision_bytes, "text": view.record.text_bytes,
           "free": view.record.free_bytes}  # fmt: skip
    lines: list[Line] = []
    for name, values in series.items():
        most = top or max((v for v in values if v is not None), default=0.0)
        label = (
            f"{left(name, 7)}{show_bytes(now[name]):>9} " if margin >= 17 else left(name, margin)
        )
        lines.append((
            (left(label, margin), name), (spark(values, most, g), name),
        ))  # fmt: skip
    return lines


def time_axis(level: Columns, cells: int, margin: int) -> Line:
    """Seconds before now under the columns, every twenty or so."""
    marks = [" "] * cells
    for back in range(0, cells, 20):
        label = "now" if back == 0 else f"-{_span(back * level.step_ns).replace(' ', '')}"
        at = cells - 1 - back
        start = at - len(label) + 1
        if start >= 0:
            marks[start : at + 1] = label
    return ((" " * margin, ""), ("".join(marks), "dim"))


def under_cursor(level: Columns, view: Rows, cursor: tuple[int, int]) -> list[float] | None:
    """The cell ``(columns back from the newest, row)``; absent where nothing was recorded."""
    back, row = cursor
    if not level.columns:
        return None
    wanted = level.columns[-1].start_ns // level.step_ns - back
    for column in reversed(level.columns):
        if column.start_ns // level.step_ns == wanted:
            cells = resample(column.values(), column.rows, view)
            return cells[FIELDS * row : FIELDS * row + FIELDS]
    return None


def region(
    snapshot: Snapshot, level: Columns, view: Rows | None, ui: Ui, columns: int
) -> list[Line]:
    """The cell under the cursor: where, when, how much of each kind, and who holds it now."""
    if view is None or ui.cell is None:
        return [
            (("arrows or a click put the cursor on a region; m layer, +/- time, z/x zoom", "dim"),)
        ]
    back, row = ui.cell[0], min(ui.cell[1], view.row_count - 1)
    at = view.base_address + row * view.row_bytes
    ago = back * level.step_ns / 1e9
    head: Line = (
        ("region ", "dim"), (address(at), "strong"), (f" ({show_bytes(view.row_bytes)})", "dim"),
        ("  t ", "dim"), (f"-{ago:.1f} s" if back else "now", ""),
    )  # fmt: skip
    cell = under_cursor(level, view, (back, row))
    if cell is None:
        return [head, ((f"{ABSENT} no record of this moment", "dim"),)]
    held = sum(cell[VISION : FREE + 1])
    if held <= 0:
        return [head, (("no memory of the pool at these addresses", "dim"),)]
    usable = cell[USABLE] / cell[FREE] if cell[FREE] > 0 else None
    told: Line = (
        ("vision ", "vision"), (_share(cell[VISION], held), ""), ("  text ", "text"),
        (_share(cell[TEXT], held), ""), ("  other ", "other"), (_share(cell[OTHER], held), ""),
        ("  free ", "dim"), (_share(cell[FREE], held), ""),
        (" (usable ", "dim"), (ABSENT if usable is None else f"{100 * usable:.0f}%", ""),
        (")", "dim"),
        ("  conflict ", "dim"), (f"{cell[CONFLICT]:.2f}", "strong"),
    )  # fmt: skip
    pieces = (told[:6], told[6:-2], told[-2:], *_age_and_pages(cell))
    return [head, *flow(pieces, columns, 0), *_held(snapshot, columns)]


def _age_and_pages(cell: list[float]) -> list[Line]:
    """How old what is held is, and its 4 KiB pages, where the source tells them."""
    found: list[Line] = []
    held = cell[VISION] + cell[TEXT] + cell[OTHER]
    if held > 0 and cell[HELD_S] == cell[HELD_S]:
        found.append((("  age ", "dim"), (show_seconds(cell[HELD_S] / held), "")))
    partial, free = cell[PARTIAL_PAGES], cell[FREE_PAGES]
    if free == free:
        used = max(0.0, sum(cell[VISION : FREE + 1]) / PAGE_BYTES - partial - free)
        found.append((
            ("  pages ", "dim"), (f"{used:,.0f} used, {partial:,.0f} partly, {free:,.0f} free", ""),
        ))  # fmt: skip
    return found


def _held(snapshot: Snapshot, columns: int) -> list[Line]:
    if snapshot.holders is None or snapshot.newest_ns is None:
        return []
    pieces: list[Line] = [(("known holders", "dim"),)]
    for holder in snapshot.holders:
        count = f"{holder.blocks} block{'s' if holder.blocks > 1 else ''}"
        age_s = (snapshot.newest_ns - holder.oldest_ns) / 1e9
        pieces.append((
            (f"{holder.modality} ", holder.modality), (f"{count} {show_bytes(holder.bytes)}", ""),
            (f" for up to {show_seconds(max(0.0, age_s))}", "dim"),
        ))  # fmt: skip
    if not snapshot.holders:
        pieces.append(((f"{ABSENT} none", ""),))
    return flow(pieces, columns, 2)


def _share(part: float, whole: float) -> str:
    return f"{show_bytes(part)} {100 * part / whole:.0f}%"
