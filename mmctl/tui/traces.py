"""Traces: streams as rows of a timeline, and collectives with the rank that came late."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from textual.app import ComposeResult
from textual.containers import Horizontal, Vertical

from mmctl.engine.records import AnyRecord, Event, Span
from mmctl.engine.units import show_seconds
from mmctl.tui import text
from mmctl.tui.filter import passes
from mmctl.tui.keys import finer_coarser, left_right, up_down
from mmctl.tui.lines import ABSENT, EMPTY, Line, clean, fit, left, natural, quiet, right, window
from mmctl.tui.snapshot import Snapshot
from mmctl.tui.ui import Choices, Ui, clamp
from mmctl.tui.view import Styles, View
from mmctl.tui.widgets import Lines

_LEAST_NAME = 16  # columns of a row's name
_BUSY = 7  # columns of its busy share
Lane = tuple[str, str, str]  # node, device, stream
_STEPS = 4  # moves through the window that is shown


def _window(spans: tuple[Span, ...], ui: Ui) -> tuple[int, int]:
    """From when to when: all that is kept, halved by each zoom; the newest, or so far back."""
    end = max(span.ts_ns + span.duration_ns for span in spans)
    start = min(span.ts_ns for span in spans)
    size = max(1, (end - start) >> ui.trace_zoom)
    end = max(start + size, end - size * ui.trace_back // _STEPS)
    return end - size, end


def most_back(ui: Ui) -> int:
    """How many steps back from the newest the oldest is."""
    return int(((1 << ui.trace_zoom) - 1) * _STEPS)


def lanes(snapshot: Snapshot, ui: Ui) -> list[tuple[Lane, list[Span]]]:
    """The streams that pass the filter with their spans in the shown time, in order."""
    if not snapshot.spans:
        return []
    start, end = _window(snapshot.spans, ui)
    found: dict[Lane, list[Span]] = {}
    for span in snapshot.spans:
        shown = span.ts_ns < end and span.ts_ns + span.duration_ns > start
        if passes(ui.filter, {}, span.node, span.device, span.stream, span.name):
            lane = found.setdefault((span.node, span.device, span.stream), [])
            if shown:
                lane.append(span)
    return sorted(found.items(), key=lambda item: tuple(natural(part) for part in item[0]))


def timeline(snapshot: Snapshot, ui: Ui, columns: int, rows: int) -> list[Line]:
    """One row a stream: what ran when, by modality; collectives and copies have their own mark."""
    spans = snapshot.spans
    if not spans:
        return [
            *quiet("no span among the records: traces give them", columns),
            EMPTY,
            *quiet("mmctl probe kernels rank*.json.gz -o ndjson | mmctl top -", columns),
            *quiet("mmctl probe kernels TRACE --record spans.ndjson", columns),
        ]
    start, end = _window(spans, ui)
    streams = lanes(snapshot, ui)
    if not streams:
        return quiet(f"no stream matches '{ui.filter}': Esc clears the filter", columns)
    many = len(snapshot.nodes) > 1
    names = [
        " ".join(clean(part) for part in (node if many else "", device, stream) if part)
        for (node, device, stream), _ in streams
    ]
    name_width = min(max(map(len, names)) + 3, max(_LEAST_NAME, columns // 3))
    wide = max(8, columns - name_width - _BUSY)
    lines: list[Line] = []
    at = min(ui.lane, len(streams) - 1)
    room = max(1, rows - 1 if len(streams) < rows else rows - 2)
    first = max(0, min(at - room // 2, len(streams) - room))
    for i, (_, found) in enumerate(streams[first : first + room], first):
        busy = covered(found, start, end) / (end - start)
        lines.append((
            (f"{ui.glyphs.cursor} " if i == at else "  ", "accent"),
            (left(names[i], name_width - 3) + " ", "strong" if i == at else "dim"),
            *_cells(found, start, end, wide, ui), (right(f"{100 * busy:.0f}%", _BUSY), ""),
        ))  # fmt: skip
    if len(streams) > room:
        lines.append(((f"  {len(streams)} streams, {first + 1} to {first + room}", "dim"),))
    newest = max(span.ts_ns + span.duration_ns for span in spans)
    after = "newest" if end == newest else f"-{show_seconds((newest - end) / 1e9)}"
    back = f"-{show_seconds((newest - start) / 1e9)}"
    times = back + right(after, wide - len(back))
    busy_head = right("busy", _BUSY)
    lines.append(fit(((" " * name_width, ""), (times, "dim"), (busy_head, "dim")), columns))
    return lines


def legend(ui: Ui) -> Line:
    """What the marks mean."""
    g = ui.glyphs
    return (
        (f"{g.vision} ", "vision"), ("vision  ", "dim"), (f"{g.text} ", "text"), ("text  ", "dim"),
        (f"{g.other} ", "other"), ("other  ", "dim"), (f"{g.event} ", "accent"),
        ("collective  ", "dim"), (f"{g.play} ", "held"), ("copy", "dim"),
    )  # fmt: skip


def _cells(spans: list[Span], start: int, end: int, wide: int, ui: Ui) -> Line:
    """Each cell shows the kind of work that took most of its time; none leaves it blank."""
    g = ui.glyphs
    kinds = {
        "vision": (g.vision, "vision"), "text": (g.text, "text"), "other": (g.other, "other"),
        "collective": (g.event, "accent"), "copy": (g.play, "held"),
    }  # fmt: skip
    spent: list[dict[str, float]] = [{} for _ in range(wide)]
    size = (end - start) / wide
    for span in spans:
        kind = span.kind if span.kind in ("collective", "copy") else span.modality or "other"
        first = max(0.0, (span.ts_ns - start) / size)
        last = min(float(wide), (span.ts_ns + span.duration_ns - start) / size)
        x = int(first)
        while x < min(wide, last):
            part = min(last, x + 1) - max(first, x)
            spent[x][kind] = spent[x].get(kind, 0.0) + part
            x += 1
    pieces: list[tuple[str, str]] = []
    for cell in spent:
        mark, role = kinds[max(cell, key=cell.__getitem__)] if cell else (" ", "")
        if pieces and pieces[-1][1] == role:
            pieces[-1] = (pieces[-1][0] + mark, role)
        else:
            pieces.append((mark, role))
    return tuple(pieces)


def covered(spans: Iterable[Span], start: int, end: int) -> int:
    """Nanoseconds in which at least one span runs."""
    total, until = 0, start
    for begin, stop in sorted((span.ts_ns, span.ts_ns + span.duration_ns) for span in spans):
        begin, stop = max(begin, until), min(stop, end)
        if stop > begin:
            total += stop - begin
            until = stop
    return total


def together(snapshot: Snapshot, ui: Ui, columns: int) -> list[Line]:
    """Per device: busy, idle, and the share of busy time in which several streams ran; below
    it what sharing a cache is predicted to cost the pairs of tasks that were compared."""
    if not snapshot.spans:
        return _sharing(snapshot, ui, columns)
    start, end = _window(snapshot.spans, ui)
    devices: dict[tuple[str, str], dict[str, list[Span]]] = {}
    for span in snapshot.spans:
        if span.ts_ns < end and span.ts_ns + span.duration_ns > start:
            streams = devices.setdefault((span.node, span.device), {})
            streams.setdefault(span.stream, []).append(span)
    lines: list[Line] = []
    for (node, device), streams in sorted(devices.items()):
        busy = covered([span for spans in streams.values() for span in spans], start, end)
        alone = sum(covered(spans, start, end) for spans in streams.values())
        overlap = (alone - busy) / busy if busy else None
        lines.append(fit((
            (left(f"{clean(node)} {clean(device)}", 13), "strong"),
            ("busy ", "dim"), (f"{100 * busy / (end - start):.0f}%", ""),
            ("  idle ", "dim"), (f"{100 - 100 * busy / (end - start):.0f}%", ""),
            ("  overlap ", "dim"),
            (ABSENT if overlap is None else f"{100 * min(1.0, overlap):.0f}%", ""),
        ), columns))  # fmt: skip
    return [*lines, *_sharing(snapshot, ui, columns)]


def _sharing(snapshot: Snapshot, ui: Ui, columns: int) -> list[Line]:
    """Predicted extra misses of pairs of tasks, the worst first."""
    told = [event.evidence for event in snapshot.events if event.what == "sharing"]
    pairs = {(str(one.get("a")), str(one.get("b"))): one for one in told}
    known = [one for one in pairs.values() if isinstance(_extra(one), float)]
    if not known:
        how = "predicted extra misses: mmctl fingerprint matrix FILE... --record FILE gives them"
        return quiet(how, columns)
    lines: list[Line] = [EMPTY, (("extra misses when sharing a cache, modelled", "dim"),)]
    for one in sorted(known, key=_extra, reverse=True):
        collides = bool(one.get("collision"))
        mark = ui.glyphs.failed if collides else ui.glyphs.done
        lines.append(fit((
            (f"{mark} ", "bad" if collides else "good"),
            (f"{100 * _extra(one):5.1f}%", "bad_strong" if collides else ""),
            (f"  {clean(one.get('a'))} and {clean(one.get('b'))}", ""),
            (f"  {clean(one.get('cache') or '')}", "dim"),
        ), columns))  # fmt: skip
    return lines


def _extra(pair: dict[str, Any]) -> Any:
    return pair.get("predicted_extra_misses_ratio")


def collectives(snapshot: Snapshot, ui: Ui, columns: int) -> list[Line]:
    """The latest imbalances: every rank's wait as a bar, the rank that came late marked."""
    found = [event for event in reversed(snapshot.events) if event.what == "imbalance"]
    if not found:
        told = (
            "no late rank among the events: mmctl probe kernels finds them in traces of all ranks"
        )
        return quiet(told, columns)
    lines: list[Line] = []
    for event in found[:4]:
        lines += _imbalance(event, ui, columns)
    return lines


def _imbalance(event: Event, ui: Ui, columns: int) -> list[Line]:
    waits = event.evidence.get("waits_s")
    late = str(event.evidence.get("late_rank"))
    lines: list[Line] = [(
        (text.clock(event.ts_ns, fraction=True) + "  ", "dim"),
        (clean(event.evidence.get("collective", event.rule or "collective")), "strong"),
        ("  rank ", "dim"), (clean(late), "bad_strong"), (" came late", "bad"),
    )]  # fmt: skip
    if not isinstance(waits, dict):
        return lines
    shown = {clean(rank): float(wait) for rank, wait in waits.items() if wait is not None}
    most = max(shown.values(), default=0.0) or 1.0
    wide = max(4, columns - 34)
    for rank, wait in shown.items():
        is_late = rank == late
        lines.append((
            (f"  rank {left(rank, 4)}", "bad_strong" if is_late else "dim"),
            (ui.glyphs.event * max(1, round(wait / most * wide)), "bad" if is_late else "accent"),
            (f" waited {show_seconds(wait)}", ""),
            (f" {ui.glyphs.failed} late" if is_late else "", "bad_strong"),
        ))  # fmt: skip
    return lines


class TracesView(View):
    """Streams over time, what runs together, who came late."""

    keys = (
        *up_down("stream"),
        *left_right("back in time", "on in time"),
        *finer_coarser("time"),
    )
    layout_css = """
    #legend { height: 1; padding: 0 2; }
    #under { height: 14; }
    #together { width: 1fr; max-width: 60; }
    #late { width: 1fr; }
    .narrow #under { height: 9; layout: vertical; }
    .narrow #together { max-width: 100%; height: 1fr; }
    .narrow #late { height: 1fr; }
    """

    def compose(self) -> ComposeResult:
        with Vertical():
            yield Lines(id="timeline", title="Streams", classes="panel")
            yield Lines(id="legend")
            with Horizontal(id="under"):
                yield Lines(id="together", title="Together", classes="panel")
                yield Lines(id="late", title="Collectives", classes="panel")

    def paint(self, snapshot: Snapshot, ui: Ui, styles: Styles) -> None:
        names = ("timeline", "legend", "together", "late")
        streams, marks, shared, late = (self.panel(name) for name in names)
        told = together(snapshot, ui, shared.size.width)
        waits = collectives(snapshot, ui, late.size.width)
        self._share(len(told) + 2, len(waits) + 2)
        size = streams.size
        streams.show(timeline(snapshot, ui, size.width, size.height), styles)
        marks.show([legend(ui)], styles)
        shared.show(window(told, shared.size.height, 0), styles)
        late.show(window(waits, late.size.height, 0), styles)

    def _share(self, told: int, waits: int) -> None:
        """Half of the rows at most for what stands below the streams."""
        most = max(4, self.size.height // 2)
        if self.app.has_class("narrow"):
            told = min(told, max(most - waits, most // 2, 3))
            waits = max(3, min(waits, most - told))
            self.panel("together").styles.height, self.panel("late").styles.height = told, waits
            self.query_one("#under").styles.height = told + waits
        else:
            self.query_one("#under").styles.height = min(max(told, waits), most)
            self.panel("together").styles.height = self.panel("late").styles.height = "1fr"

    def move(self, snapshot: Snapshot, ui: Ui, dx: int, dy: int) -> Choices:
        count = len(lanes(snapshot, ui))
        back = max(0, min(most_back(ui), ui.trace_back - dx))
        return {"lane": clamp(min(ui.lane, count - 1) + dy, count), "trace_back": back}

    def press(self, snapshot: Snapshot, ui: Ui, name: str) -> Choices:
        return {"trace_zoom": max(0, min(20, ui.trace_zoom + (1 if name == "finer" else -1)))}

    def under_cursor(self, snapshot: Snapshot, ui: Ui) -> list[AnyRecord]:
        streams = lanes(snapshot, ui)
        return list(streams[min(ui.lane, len(streams) - 1)][1]) if streams else []
