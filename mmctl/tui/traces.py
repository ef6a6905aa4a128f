"""Traces: streams as rows of a timeline, and collectives with the rank that came late."""

from __future__ import annotations

from collections.abc import Iterable

from mmctl.engine.records import Event, Span
from mmctl.engine.units import show_seconds
from mmctl.tui import text
from mmctl.tui.filter import passes
from mmctl.tui.lines import ABSENT, EMPTY, Line, clean, fit, left, right
from mmctl.tui.snapshot import Snapshot
from mmctl.tui.ui import Ui

_LANE = 26  # columns of a row's name
_BUSY = 7  # columns of its busy share
Lane = tuple[str, str, str]  # node, device, stream


def _window(spans: tuple[Span, ...], ui: Ui) -> tuple[int, int]:
    """From when to when: all that is kept, or the newest part of it, halved by each zoom."""
    end = max(span.ts_ns + span.duration_ns for span in spans)
    start = min(span.ts_ns for span in spans)
    return end - max(1, (end - start) >> ui.trace_zoom), end


def timeline(snapshot: Snapshot, ui: Ui, columns: int, rows: int) -> list[Line]:
    """One row a stream: what ran when, by modality; collectives and copies have their own mark."""
    spans = snapshot.spans
    if not spans:
        return [
            (("no span among the records yet", "dim"),),
            EMPTY,
            (("traces give them:", "dim"),),
            (("mmctl probe kernels rank*.json.gz -o ndjson | mmctl top -", "dim"),),
            (("mmctl probe kernels TRACE --record spans.ndjson", "dim"),),
        ]  # fmt: skip
    start, end = _window(spans, ui)
    lanes: dict[Lane, list[Span]] = {}
    for span in spans:
        shown = span.ts_ns + span.duration_ns > start
        if shown and passes(ui.filter, {}, span.node, span.device, span.stream, span.name):
            lanes.setdefault((span.node, span.device, span.stream), []).append(span)
    wide = max(8, columns - _LANE - _BUSY)
    lines: list[Line] = []
    for (node, device, stream), found in sorted(lanes.items())[: max(1, rows - 2)]:
        name = " ".join(clean(part) for part in (node, device, stream) if part)
        busy = _covered(found, start, end) / (end - start)
        lines.append((
            (left(name, _LANE - 1) + " ", "dim"), *_cells(found, start, end, wide, ui),
            (right(f"{100 * busy:.0f}%", _BUSY), ""),
        ))  # fmt: skip
    if len(lanes) > rows - 2:
        lines.append(((f"{len(lanes) - rows + 2} more streams: filter with /", "dim"),))
    back = f"-{show_seconds((end - start) / 1e9)}"
    times = back + right("newest", wide - len(back))
    busy_head = right("busy", _BUSY)
    lines.append(fit(((" " * _LANE, ""), (times, "dim"), (busy_head, "dim")), columns))
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


def _covered(spans: Iterable[Span], start: int, end: int) -> int:
    """Nanoseconds in which at least one span runs."""
    total, until = 0, start
    for begin, stop in sorted((span.ts_ns, span.ts_ns + span.duration_ns) for span in spans):
        begin, stop = max(begin, until), min(stop, end)
        if stop > begin:
            total += stop - begin
            until = stop
    return total


def together(snapshot: Snapshot, ui: Ui, columns: int) -> list[Line]:
    """Per device: busy, idle, and the share of busy time in which several streams ran."""
    if not snapshot.spans:
        return []
    start, end = _window(snapshot.spans, ui)
    devices: dict[tuple[str, str], dict[str, list[Span]]] = {}
    for span in snapshot.spans:
        if span.ts_ns + span.duration_ns > start:
            lanes = devices.setdefault((span.node, span.device), {})
            lanes.setdefault(span.stream, []).append(span)
    lines: list[Line] = []
    for (node, device), lanes in sorted(devices.items()):
        busy = _covered([span for spans in lanes.values() for span in spans], start, end)
        alone = sum(_covered(spans, start, end) for spans in lanes.values())
        overlap = (alone - busy) / busy if busy else None
        lines.append(fit((
            (left(f"{clean(node)} {clean(device)}", 18), "strong"),
            ("busy ", "dim"), (f"{100 * busy / (end - start):.0f}%", ""),
            ("  idle ", "dim"), (f"{100 - 100 * busy / (end - start):.0f}%", ""),
            ("  overlap ", "dim"),
            (ABSENT if overlap is None else f"{100 * min(1.0, overlap):.0f}% of busy", ""),
        ), columns))  # fmt: skip
    return lines


def collectives(snapshot: Snapshot, ui: Ui, columns: int) -> list[Line]:
    """The latest imbalances: every rank's wait as a bar, the rank that came late marked."""
    found = [event for event in reversed(snapshot.events) if event.what == "imbalance"]
    if not found:
        return [(("no late rank among the events", "dim"),)]
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
