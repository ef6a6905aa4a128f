"""Heatmap: addresses of a pool over time, and what the cursor's region is."""

from __future__ import annotations

from typing import NamedTuple

from rich.style import Style
from textual.app import ComposeResult
from textual.containers import Horizontal

from mmctl.engine.records import AnyRecord, Heat
from mmctl.engine.units import show_bytes, show_seconds
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
    Columns,
    Rows,
    resample,
)  # fmt: skip
from mmctl.tui.keys import POOLS, Key, finer_coarser, left_right, up_down
from mmctl.tui.lines import ABSENT, Glyphs, Line, clean, flow, justify, left, quiet, spark
from mmctl.tui.picture import (
    AGES_S,
    CONFLICTS,
    PARTIAL_SHARE,
    Picture,
    legend,
    placed,
    view_rows,
    zoomed,
)
from mmctl.tui.snapshot import PoolView, Region, Snapshot
from mmctl.tui.ui import LAYERS, Choices, Layer, Ui, clamp, pool_of
from mmctl.tui.view import Styles, View
from mmctl.tui.widgets import Grid, Lines


def level_of(view: PoolView, ui: Ui) -> Columns:
    """The columns of the chosen width; finer ones as long as none of that width is whole."""
    levels = view.heat[min(ui.level, len(view.heat) - 1) :: -1]
    return next((level for level in levels if level.columns), levels[0])


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
    now = ABSENT if pool.conflict_ratio is None else f"{pool.conflict_ratio:.2f}"
    start: Line = (
        (f"{pool.device}", "strong"), (f"  pool {clean(pool.pool)}", ""),
        ("  layer ", "dim"), (ui.layer, "strong"), *_unknown(pool.heat, ui.layer),
        (f" {now} now" if ui.layer == "conflict" else "", ""),
        ("  last ", "dim"), (_span(span), ""),
        (f" at {show_seconds(level.step_ns / 1e9)} a column", "dim"),
        (f"  {show_bytes(pool.reserved_bytes)}", ""), (" reserved", "dim"),
    )  # fmt: skip
    return justify(start, scale(ui, columns < 124), columns)


def _unknown(heat: Heat | None, layer: Layer) -> Line:
    """That the source leaves out what the layer would draw."""
    if heat is None or {"age": heat.age_s, "pages": heat.pages}.get(layer, ()) is not None:
        return ()
    return ((" not told by this source", "warn"),)


def _span(ns: int) -> str:
    seconds = ns / 1e9
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"


def scale(ui: Ui, short: bool) -> Line:
    """The legend of the layer: every mark, and in a wide one where its values begin."""
    table = legend(ui.layer, ui.glyphs)
    pieces: list[tuple[str, str]] = []
    if ui.layer == "conflict":
        (nothing, role), *steps = table[1:]
        if short:
            return ((nothing, role), (" 0 ", "dim"), *steps, (" 1 ", "dim"))
        pieces = [(nothing, role), (" none  ", "dim")]
        for at in range(0, len(steps), 2):
            begins = f"{CONFLICTS[at]:g}".lstrip("0")
            pieces += [
                *steps[at : at + 2],
                (f" from {begins}  " if not at else f" {begins}  ", "dim"),
            ]
        return tuple(pieces)
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


def region_told(
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


class Drawn(NamedTuple):
    """The heatmap as it is on the screen: its columns, its rows, and how many columns fit."""

    level: Columns
    rows: Rows
    width: int


class HeatmapView(View):
    """Addresses downwards, time to the right, and what the cursor's region is."""

    keys = (
        *up_down("row"),
        *left_right("back in time", "on in time"),
        Key("layer", "m", "press('layer')", f"next layer: {', '.join(LAYERS)}", "layer"),
        *finer_coarser("time"),
        Key("zoom_in", "z", "press('zoom_in')", "closer to the cursor's addresses", "zoom"),
        Key("zoom_out", "x", "press('zoom_out')", "back out", "zoom"),
        *POOLS,
    )
    layout_css = """
    #caption { height: 1; padding: 0 1; }
    #strips { height: 3; padding: 0 1; }
    #grid { height: 1fr; padding: 0 1; }
    #axis { width: 19; }
    #heat { width: 1fr; height: 1fr; }
    #times { height: 1; padding: 0 1; }
    #region { height: 5; }
    .narrow #axis { width: 7; }
    """

    def __init__(self, id: str, classes: str) -> None:
        super().__init__(id=id, classes=classes)
        self._picture = Picture()
        self._cells: dict[tuple[object, ...], list[tuple[str, Style]]] = {}
        self.drawn: Drawn | None = None

    def compose(self) -> ComposeResult:
        yield Lines(id="caption")
        yield Lines(id="strips")
        with Horizontal(id="grid"):
            yield Lines(id="axis")
            yield Grid(id="heat")
        yield Lines(id="times")
        yield Lines(id="region", title="Under the cursor", classes="panel")

    def paint(self, snapshot: Snapshot, ui: Ui, styles: Styles) -> None:
        view = pool_of(snapshot, ui)
        heat = self.query_one("#heat", Grid)
        names = ("caption", "strips", "axis", "times", "region")
        title, bytes_, addresses, times, under = (self.panel(name) for name in names)
        if view is None:
            why = "no pool among the records: demo, hook:PID and agent:PATH give one"
            title.show([], styles)
            bytes_.show(quiet(why, bytes_.size.width), styles)
            for panel in (addresses, times, under):
                panel.show([], styles)
            self._draw_none(heat, styles)
            return
        level = level_of(view, ui)
        width, height = heat.size
        rows = view_rows(level, ui, height)
        self.drawn = Drawn(level, rows, width) if rows else None
        title.show([caption(view, ui, level, title.size.width, width)], styles)
        bytes_.show(strips(level, view, bytes_.size.width, width, ui.glyphs), styles)
        times.show([time_axis(level, width, times.size.width - width)], styles)
        under.styles.height = 6 if self.size.height >= 28 else 5  # a line for the holders
        under.show(region_told(snapshot, level, rows, ui, under.size.width), styles)
        if rows is None:
            addresses.show([], styles)
            self._draw_none(heat, styles)
            return
        addresses.show(axis(rows, addresses.size.width < 17), styles)
        codes = self._picture.rows(level, rows, ui.layer, width)
        key = (ui.layer, ui.glyphs, id(styles))
        if key not in self._cells:
            self._cells[key] = [(mark, styles[role]) for mark, role in legend(ui.layer, ui.glyphs)]
        cursor = None
        if ui.cell is not None and width - 1 - ui.cell[0] >= 0:
            cursor = (width - 1 - ui.cell[0], min(ui.cell[1], rows.row_count - 1))
        heat.show(codes, self._cells[key], cursor, styles["cursor"])

    def _draw_none(self, heat: Grid, styles: Styles) -> None:
        self.drawn = None
        heat.show([], [(" ", styles[""])], None, styles["cursor"])

    def move(self, snapshot: Snapshot, ui: Ui, dx: int, dy: int) -> Choices:
        drawn = self.drawn
        if drawn is None:
            return {}
        if ui.cell is None:
            return {"cell": (0, drawn.rows.row_count // 2)}
        back, row = ui.cell
        return {"cell": (clamp(back - dx, drawn.width), clamp(row + dy, drawn.rows.row_count))}

    def press(self, snapshot: Snapshot, ui: Ui, name: str) -> Choices:
        if name == "layer":
            return {"layer": LAYERS[(LAYERS.index(ui.layer) + 1) % len(LAYERS)]}
        if name in ("finer", "coarser"):
            by = -1 if name == "finer" else 1
            return {"level": max(0, min(3, ui.level + by)), "cell": None}
        if name in ("zoom_in", "zoom_out"):
            return self._zoomed(ui, 0.5 if name == "zoom_in" else 2.0)
        count = len(snapshot.pools)
        by = 1 if name == "next_pool" else -1
        return {"pool": (ui.pool + by) % count, "cell": None, "rows": None} if count else {}

    def _zoomed(self, ui: Ui, factor: float) -> Choices:
        """``factor`` times as many addresses around the cursor."""
        if self.drawn is None:
            return {}
        rows = self.drawn.rows
        row = ui.cell[1] if ui.cell else rows.row_count // 2
        return {"rows": zoomed(self.drawn.level, rows, row, factor)}

    def clicked(self, snapshot: Snapshot, ui: Ui, panel: str, column: int, row: int) -> Choices:
        drawn = self.drawn
        if panel != "heat" or drawn is None or not 0 <= row < drawn.rows.row_count:
            return {}
        return {"cell": (clamp(drawn.width - 1 - column, drawn.width), row)}

    def under_cursor(self, snapshot: Snapshot, ui: Ui) -> list[AnyRecord]:
        pool = pool_of(snapshot, ui)
        return [pool.record] if pool else []

    def target(self, snapshot: Snapshot, ui: Ui) -> tuple[str, str] | None:
        pool = pool_of(snapshot, ui)
        return (pool.record.node, pool.record.device) if pool else None

    def asked(self, snapshot: Snapshot, ui: Ui) -> Region | None:
        """The addresses under the cursor."""
        pool = pool_of(snapshot, ui)
        if self.drawn is None or pool is None or ui.cell is None:
            return None
        rows = self.drawn.rows
        start = rows.base_address + min(ui.cell[1], rows.row_count - 1) * rows.row_bytes
        return Region(pool.record.node, pool.record.device, start, start + rows.row_bytes)
