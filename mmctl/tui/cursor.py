"""Where the cursor of each screen goes, and what it stands on. Nothing here knows of widgets."""

from __future__ import annotations

from typing import NamedTuple

from mmctl.tui import events, heatmap, overview, recovery, traces
from mmctl.tui.heat import Columns, Rows
from mmctl.tui.snapshot import Region, Snapshot
from mmctl.tui.ui import Ui

Choices = dict[str, object]  # fields of Ui


class Drawn(NamedTuple):
    """The heatmap as it is on the screen: its columns, its rows, and how many columns fit."""

    level: Columns
    rows: Rows
    width: int


def move(snapshot: Snapshot, ui: Ui, drawn: Drawn | None, dx: int, dy: int) -> Choices:
    """The cursor of the screen that is shown, so many columns right and rows down."""
    if ui.screen == "overview":
        count = len(overview.shown_devices(snapshot, ui))
        return {"device": clamp(min(ui.device, count - 1) + dy, count)}
    if ui.screen == "events":
        count = len(events.shown_events(snapshot, ui))
        at = clamp(min(ui.event, count - 1) + dy, count)
        return {"event": at, "scroll": 0 if dy else max(0, ui.scroll + 3 * dx)}
    if ui.screen == "recovery":
        at = clamp(ui.recovery + dx, len(snapshot.recoveries))
        count = len(recovery.verified(snapshot, ui)[1])
        check = clamp(min(ui.scroll, count - 1) + dy, count)
        return {"recovery": at, "scroll": 0 if dx else check}
    if ui.screen == "schedule":
        count = len(snapshot.placements)
        at = clamp(min(ui.placement, count - 1) + dy, count)
        return {"placement": at, "scroll": 0 if dy else max(0, ui.scroll + 3 * dx)}
    if ui.screen == "traces":
        count = len(traces.lanes(snapshot, ui))
        back = max(0, min(traces.most_back(ui), ui.trace_back - dx))
        return {"lane": clamp(min(ui.lane, count - 1) + dy, count), "trace_back": back}
    if drawn is None:
        return {}
    if ui.cell is None:
        return {"cell": (0, drawn.rows.row_count // 2)}
    back, row = ui.cell
    return {"cell": (clamp(back - dx, drawn.width), clamp(row + dy, drawn.rows.row_count))}


def pick(drawn: Drawn | None, x: int, y: int) -> Choices:
    """The heatmap's cell under the mouse."""
    if drawn is None or not 0 <= y < drawn.rows.row_count:
        return {}
    return {"cell": (clamp(drawn.width - 1 - x, drawn.width), y)}


def zoom(ui: Ui, drawn: Drawn | None, factor: float) -> Choices:
    """``factor`` times as many addresses around the heatmap's cursor."""
    if drawn is None:
        return {}
    row = ui.cell[1] if ui.cell else drawn.rows.row_count // 2
    return {"rows": heatmap.zoomed(drawn.level, drawn.rows, row, factor)}


def region(snapshot: Snapshot, ui: Ui, drawn: Drawn | None) -> Region | None:
    """The addresses under the heatmap's cursor, while the heatmap is shown."""
    pool = overview.pool_of(snapshot, ui)
    if ui.screen != "heatmap" or drawn is None or pool is None or ui.cell is None:
        return None
    rows = drawn.rows
    start = rows.base_address + min(ui.cell[1], rows.row_count - 1) * rows.row_bytes
    return Region(pool.record.node, pool.record.device, start, start + rows.row_bytes)


def clamp(value: int, count: int) -> int:
    """``value`` among ``count`` places; 0 where there are none."""
    return max(0, min(value, count - 1))
