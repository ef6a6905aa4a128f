"""Events: the breaker's states as a band over time, the list, and the evidence of one."""

from __future__ import annotations

from textual.app import ComposeResult
from textual.containers import Horizontal

from mmctl.engine.records import AnyRecord, Event
from mmctl.engine.units import show_seconds
from mmctl.tui import text
from mmctl.tui.filter import passes
from mmctl.tui.keys import left_right, up_down
from mmctl.tui.lines import ABSENT, EMPTY, Line, fit, justify, left, quiet, window, wrap
from mmctl.tui.snapshot import READINGS, Snapshot, StateSpan
from mmctl.tui.text import STATE_ROLES
from mmctl.tui.ui import Choices, Ui, clamp
from mmctl.tui.view import Styles, View
from mmctl.tui.widgets import Lines

# A state's mark in the band: the more it keeps traffic away, the heavier.
MARKS = {
    "closed": "─", "unknown": "·", "half_open": "░", "verifying": "▒", "open": "█", "isolated": "╳",
}  # fmt: skip
ASCII_MARKS = {
    "closed": "-", "unknown": ".", "half_open": ":", "verifying": "+", "open": "#", "isolated": "x",
}  # fmt: skip


def shown_events(snapshot: Snapshot, ui: Ui) -> list[Event]:
    """Events that pass the filter, newest first; readings only where a filter asks for them."""
    return [event for event in reversed(snapshot.events) if _passes(ui, event)]


def latest(snapshot: Snapshot, ui: Ui, columns: int, rows: int) -> list[Line]:
    """The newest events, newest first; readings that come as events only where asked for."""
    found = shown_events(snapshot, ui)[:rows]
    if not found:
        return quiet(_none(ui), columns)
    return [event_line(event, columns, ui) for event in found]


def _passes(ui: Ui, event: Event) -> bool:
    if not ui.filter:
        return event.what not in READINGS
    return passes(ui.filter, {"event": event}, event.node, event.device, event.what,
                  text.word(event), event.rule, event.mode, event.state, event.message)  # fmt: skip


def event_line(event: Event, columns: int, ui: Ui) -> Line:
    """When, what, which rule, which device, why."""
    wide = columns >= 96
    pieces: Line = (
        (text.clock(event.ts_ns, fraction=wide) + "  ", "dim"),
        (left(text.word(event), 14) + " ", text.role(event)),
        (left(event.rule or "", 18 if wide else 0) + (" " if wide else ""), ""),
        (left(event.device or "", 10 if wide else 6) + " ", "dim"),
        (f"{event.rule}: " if event.rule and not wide else "", "strong"),
        (text.summary(event), ""),
    )
    end: Line = EMPTY
    if wide and event.mode and event.what == "trip":
        end = ((f" [{event.mode}]", "dim"),)
    return justify(pieces, end, columns)


def band(snapshot: Snapshot, ui: Ui, columns: int) -> list[Line]:
    """One line a device: the state it was in, over all the time that was seen."""
    marks = MARKS if ui.glyphs.dot == "●" else ASCII_MARKS
    if not snapshot.bands or snapshot.newest_ns is None or snapshot.oldest_ns is None:
        told = "no breaker has a state yet: it has one once its rules have fresh values"
        return quiet(told, columns)
    start, end = snapshot.oldest_ns, max(snapshot.newest_ns, snapshot.oldest_ns + 1)
    changes: dict[tuple[str, str], list[StateSpan]] = {}
    for span in snapshot.bands:
        changes.setdefault((span.node, span.device), []).append(span)
    name_width = min(max(9, *(len(device) + 1 for _, device in changes)), columns // 3)
    wide = max(10, columns - name_width)
    lines: list[Line] = []
    bands: list[list[str]] = []
    for (_, device), spans in sorted(changes.items()):
        cells = ["unknown"] * wide
        for i, span in enumerate(spans):
            until = spans[i + 1].start_ns if i + 1 < len(spans) else end
            first = max(0, int((span.start_ns - start) / (end - start) * wide))
            last = max(first + 1, int((until - start) / (end - start) * wide))
            for x in range(first, min(wide, last)):
                cells[x] = span.state
        bands.append(cells)
        lines.append(((left(device, name_width), "strong"), *_runs(cells, marks)))
    seen = {state for cells in bands for state in cells}
    legend: list[tuple[str, str]] = [(left(text.clock(start), name_width), "dim")]
    for state, mark in marks.items():
        if state in seen:
            role = STATE_ROLES.get(state, "dim")
            legend += [(f"  {mark} ", role), (state.replace("_", " "), "dim")]
    lines.append(fit(tuple(legend), columns))
    return lines


def _runs(cells: list[str], marks: dict[str, str]) -> Line:
    pieces: list[tuple[str, str]] = []
    for state in cells:
        mark, role = marks.get(state, "?"), STATE_ROLES.get(state, "dim")
        if pieces and pieces[-1][1] == role:
            pieces[-1] = (pieces[-1][0] + mark, role)
        else:
            pieces.append((mark, role))
    return tuple(pieces)


def listing(snapshot: Snapshot, ui: Ui, columns: int, rows: int) -> list[Line]:
    """The events around the cursor, newest first; the cursor's line is marked."""
    found = shown_events(snapshot, ui)
    if not found:
        return quiet(_none(ui), columns)
    cursor = min(ui.event, len(found) - 1)
    first = _first_row(cursor, rows, len(found))
    mark = ui.glyphs.cursor + " "
    return [
        ((mark if i == cursor else "  ", "accent"), *event_line(found[i], columns - 2, ui))
        for i in range(first, min(len(found), first + rows))
    ]


def _none(ui: Ui) -> str:
    if ui.filter:
        return f"no event matches '{ui.filter}': Esc clears the filter"
    return "no event yet: trips, answers, faults and orders stand here as they come"


def _first_row(cursor: int, rows: int, count: int) -> int:
    return max(0, min(cursor - rows // 2, count - rows))


def at_row(snapshot: Snapshot, ui: Ui, rows: int, row: int) -> int:
    """Which event stands on a row of the list."""
    count = len(shown_events(snapshot, ui))
    first = _first_row(min(ui.event, count - 1), rows, count)
    return max(0, min(first + row, count - 1))


def evidence(snapshot: Snapshot, ui: Ui, columns: int) -> list[Line]:
    """Everything the selected event carries."""
    found = shown_events(snapshot, ui)
    if not found:
        return [EMPTY]
    return told(found[min(ui.event, len(found) - 1)], columns)


def told(event: Event, columns: int) -> list[Line]:
    """Everything that an event carries."""
    lines: list[Line] = [
        ((text.word(event), text.role(event)), ("  ", ""), (event.rule or "", "strong")),
        ((text.clock(event.ts_ns, fraction=True), ""), ("  ", ""),
         (" ".join(part for part in (event.node, event.device) if part), "dim"),
         (f"  [{event.mode}]" if event.mode else "", "dim"),
         (f"  now {event.state.replace('_', ' ')}" if event.state else "", "")),
    ]  # fmt: skip
    if event.took_ns is not None:
        lines.append((("took ", "dim"), (show_seconds(event.took_ns / 1e9), "")))
    if event.message:
        lines.append(EMPTY)
        lines += [((part, ""),) for part in wrap(event.message, columns)]
    rows = list(text.flat(event.evidence))
    if rows:
        lines.append(EMPTY)
        for row in rows:
            lines += _told(row, columns)
    elif not event.message:
        lines.append(((f"{ABSENT} no evidence was given", "dim"),))
    return lines


_LABEL = 20
_INDENT = 4  # of what stands below its label, where there is no room beside it


def _told(told: text.Told, columns: int) -> list[Line]:
    """Label and value side by side; one of them that is long has the value below, then the note."""
    beside = len(told.label) < _LABEL and len(told.value) <= 2 * (columns - _LABEL)
    indent = " " * (_LABEL if columns >= 2 * _LABEL else _INDENT)
    lines: list[Line] = []
    if beside:
        first, *rest = wrap(told.value, columns - _LABEL)
        lines.append(((left(told.label, _LABEL), "dim"), (first, "strong")))
        lines += [((" " * _LABEL, ""), (part, "strong")) for part in rest]
    else:
        indent = " " * _INDENT
        lines += [((part, "dim"),) for part in wrap(told.label, columns)]
        parts = wrap(told.value, columns - _INDENT)
        lines += [((indent, ""), (part, "strong")) for part in parts if part]
    if told.note:
        parts = wrap(told.note, columns - len(indent))
        lines += [((indent, ""), (part, "dim")) for part in parts]
    return lines


def _title(snapshot: Snapshot, ui: Ui) -> str:
    """How many there are, and what is left out."""
    count = len(shown_events(snapshot, ui))
    if ui.filter:
        return f"Events {count} · filter {ui.filter}"
    hidden = sorted({event.what for event in snapshot.events if event.what in READINGS})
    return f"Events {count}" + "".join(f" · /{what} for its readings" for what in hidden)


class EventsView(View):
    """States over time, the list, the evidence."""

    keys = (*up_down("event"), *left_right("evidence up", "evidence down"))
    layout_css = """
    #band { height: auto; }
    #lower { height: 1fr; }
    #list { width: 1fr; }
    #evidence { width: 40%; max-width: 56; }
    .narrow #evidence { width: 100%; max-width: 100%; }
    .narrow #lower { layout: vertical; }
    .narrow #list { width: 100%; }
    """

    def compose(self) -> ComposeResult:
        yield Lines(id="band", title="Breaker", classes="panel")
        with Horizontal(id="lower"):
            yield Lines(id="list", title="Events", classes="panel")
            yield Lines(id="evidence", title="Evidence", classes="panel")

    def paint(self, snapshot: Snapshot, ui: Ui, styles: Styles) -> None:
        states, listed, carried = (self.panel(name) for name in ("band", "list", "evidence"))
        lines = band(snapshot, ui, states.size.width)
        states.styles.height = min(len(lines), max(1, self.size.height // 3)) + 2
        states.show(lines, styles)
        listed.border_title = _title(snapshot, ui)
        listed.show(listing(snapshot, ui, listed.size.width, listed.size.height), styles)
        if self.app.has_class("narrow"):  # half each, below the band
            carried.styles.height = max(5, (self.size.height - len(lines) - 2) // 2)
        lines = evidence(snapshot, ui, carried.size.width)
        carried.show(window(lines, carried.size.height, ui.scroll), styles)

    def move(self, snapshot: Snapshot, ui: Ui, dx: int, dy: int) -> Choices:
        count = len(shown_events(snapshot, ui))
        at = clamp(min(ui.event, count - 1) + dy, count)
        return {"event": at, "scroll": 0 if dy else max(0, ui.scroll + 3 * dx)}

    def clicked(self, snapshot: Snapshot, ui: Ui, panel: str, column: int, row: int) -> Choices:
        if panel != "list" or row < 0:
            return {}
        return {"event": at_row(snapshot, ui, self.panel("list").size.height, row)}

    def followed(self, before: Snapshot, after: Snapshot, ui: Ui) -> Choices:
        """The event under the cursor; at the newest the cursor stays on the newest."""
        if ui.event == 0 or before.events is after.events:
            return {}
        was = shown_events(before, ui)
        wanted = was[min(ui.event, len(was) - 1)] if was else None
        found = (i for i, event in enumerate(shown_events(after, ui)) if event is wanted)
        return {"event": next(found, ui.event)}

    def under_cursor(self, snapshot: Snapshot, ui: Ui) -> list[AnyRecord]:
        found = shown_events(snapshot, ui)
        return [found[min(ui.event, len(found) - 1)]] if found else []
