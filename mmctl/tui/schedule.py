"""Schedule: queues per modality, time per stage, micro-batches in flight, links, placements."""

from __future__ import annotations

import msgspec
from textual.app import ComposeResult
from textual.containers import Horizontal, Vertical

from mmctl.engine.records import AnyRecord, Event, Link, Span
from mmctl.engine.units import show_bytes, show_seconds
from mmctl.tui import events, text
from mmctl.tui.keys import left_right, up_down
from mmctl.tui.lines import ABSENT, Line, clean, fit, left, natural, percent, quiet, right, window
from mmctl.tui.snapshot import Queue, Snapshot
from mmctl.tui.traces import covered
from mmctl.tui.ui import Choices, Ui, clamp
from mmctl.tui.view import Styles, View
from mmctl.tui.widgets import Lines

BUSY_NS = 10_000_000_000  # how far back "busy" looks
IN_USE_NS = 10_000_000_000  # a route is in use so long after it was said to be
LEAST_FOR_FOUR = 36  # rows for four panels above the placements, one below the other


def queues(snapshot: Snapshot, ui: Ui, columns: int) -> list[Line]:
    """One line a queue: depth, oldest wait, usual waits, deadline misses."""
    if not snapshot.queues:
        told = "no request among the records: demo, agent:PATH and simulated days give them"
        return quiet(told, columns)
    deadlines = {"vision": ui.vision_deadline_s, "text": ui.stream_deadline_s}
    wide = columns >= 70
    lines: list[Line] = [(
        (left("queue", 7), "dim"), (right("depth", 6), "dim"),
        (right("in work", 9) if wide else "", "dim"), (right("oldest", 8), "dim"),
        (right("wait p50", 10), "dim"), (right("p99", 9), "dim"), (right("late", 6), "dim"),
        ("  deadline" if wide else "", "dim"),
    )]  # fmt: skip
    for queue in snapshot.queues:
        deadline = deadlines[queue.modality]
        late = _late(queue, deadline)
        oldest = None
        if queue.oldest_ns is not None and snapshot.newest_ns is not None:
            oldest = (snapshot.newest_ns - queue.oldest_ns) / 1e9
        over = oldest is not None and oldest > deadline
        lines.append((
            (left(queue.modality, 7), queue.modality), (right(queue.depth, 6), "strong"),
            (right(ABSENT if queue.in_work is None else queue.in_work, 9) if wide else "", ""),
            (right(show_seconds(oldest), 8), "warn" if over else ""),
            (right(show_seconds(quantile(queue.waits_s, 0.5)), 10), ""),
            (right(show_seconds(quantile(queue.waits_s, 0.99)), 9), ""),
            (right(ABSENT if late is None else f"{100 * late:.0f}%", 6), "warn" if late else ""),
            (f"  {show_seconds(deadline)}" if wide else "", "dim"),
        ))  # fmt: skip
    if any(queue.in_work is None for queue in snapshot.queues):
        told = f"{ABSENT} depth counts those in work, too: their admission is not told"
        lines += quiet(told, columns)
    return lines


def _late(queue: Queue, deadline_s: float) -> float | None:
    if not queue.waits_s:
        return None
    return sum(wait > deadline_s for wait in queue.waits_s) / len(queue.waits_s)


def quantile(values: tuple[float, ...], q: float) -> float | None:
    """The value at rank ``q`` (nearest); absent of nothing."""
    if not values:
        return None
    return sorted(values)[min(len(values) - 1, int(q * len(values)))]


def stages(snapshot: Snapshot, ui: Ui, columns: int) -> list[Line]:
    """Time per stage of the latest requests."""
    if not snapshot.stages:
        return quiet("no request has told how long its stages took", columns)
    most = max((quantile(times, 0.99) or 0.0) for _, times in snapshot.stages) or 1.0
    bar = columns - 50
    lines: list[Line] = [(
        (left("stage", 20), "dim"), (right("n", 5), "dim"), (right("p50", 10), "dim"),
        (right("p99", 10), "dim"),
    )]  # fmt: skip
    for stage, times in snapshot.stages:
        p99 = quantile(times, 0.99) or 0.0
        lines.append((
            (left(stage.removesuffix("_s"), 20), ""), (right(len(times), 5), "dim"),
            (right(show_seconds(quantile(times, 0.5)), 10), ""), (right(show_seconds(p99), 10), ""),
            ("  ", ""),
            (ui.glyphs.other * max(1, round(p99 / most * bar)) if bar >= 4 else "", "accent"),
        ))  # fmt: skip
    return lines


def in_flight(snapshot: Snapshot, ui: Ui, columns: int) -> list[Line]:
    """Stages × devices: the micro-batches that run now, and how busy each device has been."""
    batches = [span for span in snapshot.spans if span.kind == "batch"]
    now_ns = snapshot.newest_ns
    if not batches or now_ns is None:
        told = "no micro-batch among the records: simulated days give them"
        return [
            *quiet(told, columns),
            *quiet("mmctl schedule simulate … -o ndjson | mmctl top -", columns),
        ]
    recent = [span for span in batches if span.ts_ns + span.duration_ns > now_ns - BUSY_NS]
    stages = list(dict.fromkeys(span.stage or span.stream for span in batches))
    devices = sorted({span.device for span in batches}, key=natural)
    name = max(8, *map(len, stages)) + 1
    cell = max(8, min(18, (columns - name) // len(devices)))
    shown = devices[: max(1, (columns - name) // cell)]
    hidden = len(devices) - len(shown)
    lines: list[Line] = [
        ((left("stage", name), "dim"), *((right(device, cell), "dim") for device in shown))
    ]
    for stage in stages:
        row: list[tuple[str, str]] = [(left(stage, name), "")]
        for device in shown:
            now = [
                span for span in recent
                if span.device == device and (span.stage or span.stream) == stage
                and span.ts_ns <= now_ns < span.ts_ns + span.duration_ns
            ]  # fmt: skip
            row.append(_batch(now, cell, ui))
        lines.append(tuple(row))
    busy: list[tuple[str, str]] = [(left("busy", name), "dim")]
    start = max(now_ns - BUSY_NS, snapshot.oldest_ns or 0)
    for device in shown:
        ran = covered((span for span in recent if span.device == device), start, now_ns)
        share = ran / (now_ns - start) if now_ns > start else None
        busy.append((right(percent(share), cell), "strong"))
    lines.append(tuple(busy))
    if hidden:
        lines.append(((f"{hidden} more devices to the right", "dim"),))
    return lines


def _batch(spans: list[Span], cell: int, ui: Ui) -> tuple[str, str]:
    """``█ 8 img``: what is in work of one stage on one device, in its modality's mark."""
    if not spans:
        return right("·", cell), "dim"
    modality = spans[0].modality or "other"
    marks = {"vision": ui.glyphs.vision, "text": ui.glyphs.text}
    images, requests = (
        sum(count) if (count := [n for span in spans if (n := getattr(span, name)) is not None])
        else None for name in ("images", "requests")
    )  # fmt: skip
    told = f"{images} img" if images else f"{requests} req" if requests is not None else ""
    several = f"{len(spans)}×" if len(spans) > 1 else ""
    return right(f"{several}{marks.get(modality, ui.glyphs.other)} {told}", cell), modality


def links(snapshot: Snapshot, ui: Ui, columns: int) -> list[Line]:
    """Class and latency between every two devices; the routes in use stand out, and below the
    matrix stands how much goes over them, the busiest first."""
    if not snapshot.links:
        told = "no link among the records: mmctl probe links -o ndjson gives them"
        return quiet(told, columns)
    names = sorted({name for link in snapshot.links for name in (link.a, link.b)}, key=natural)
    between: dict[tuple[str, str], Link] = {}
    for link in snapshot.links:
        between[link.a, link.b] = link
        between.setdefault((link.b, link.a), link)
    used = [link for link in snapshot.links if _in_use(link, snapshot)]
    routes = {(link.a, link.b) for link in used}
    cell = 2 + max(len(_class(link)) for link in snapshot.links)
    name = 1 + max(map(len, names))
    shown = names[: max(1, (columns - name) // cell)]
    lines: list[Line] = [((" " * name, ""), *((right(b, cell), "dim") for b in shown))]
    for a in names:
        row: list[tuple[str, str]] = [(left(a, name), "strong")]
        for b in shown:
            found = between.get((a, b))
            if found is None or a == b:
                row.append((right(ABSENT if a != b else "·", cell), "dim"))
            elif (a, b) in routes:
                row.append((right(ui.glyphs.play + _class(found), cell), "accent_strong"))
            else:
                row.append((right(_class(found), cell), "warn" if _far(found) else "good"))
        lines.append(tuple(row))
    if len(shown) < len(names):
        lines.append(((f"{len(names) - len(shown)} more to the right", "dim"),))
    busiest = sorted(used, key=lambda link: -(link.used_bytes_per_s or 0))
    return [*lines, *(_route(link, ui) for link in busiest)]


def _route(link: Link, ui: Ui) -> Line:
    return (
        (f"{ui.glyphs.play} ", "accent_strong"), (f"{clean(link.a)} to {clean(link.b)}", "strong"),
        (f"  {show_bytes(link.used_bytes_per_s)}/s", ""), (f"  {link.basis}", "dim"),
    )  # fmt: skip


def _class(link: Link) -> str:
    """``NV18 2.1 µs``; a link that is only modelled has no class worth a column."""
    known = "" if link.link_class == link.basis else clean(link.link_class)
    latency = "" if link.latency_us is None else f"{link.latency_us:.1f} µs"
    return " ".join(part for part in (known, latency) if part) or clean(link.link_class)


def _far(link: Link) -> bool:
    return bool(link.crosses_numa) or link.link_class in ("SYS", "NODE", "PHB")


def _in_use(link: Link, snapshot: Snapshot) -> bool:
    recent = (snapshot.newest_ns or 0) - link.ts_ns <= IN_USE_NS
    return recent and bool(link.used_bytes_per_s)


def receipts(snapshot: Snapshot, ui: Ui, columns: int, rows: int) -> list[Line]:
    """The placements around the cursor: what went where, and what the others scored."""
    found = snapshot.placements[::-1]
    if not found:
        told = "no placement among the events: breaker guard and simulated days give them"
        return quiet(told, columns)
    at = min(ui.placement, len(found) - 1)
    first = max(0, min(at - rows // 2, len(found) - rows))
    return [
        _receipt(event, columns, ui if first + i == at else None)
        for i, event in enumerate(found[first : first + rows])
    ]


def _receipt(event: Event, columns: int, ui: Ui | None) -> Line:
    why = text.summary(msgspec.structs.replace(event, message=None))
    told = ", ".join(part for part in (clean(event.message or ""), why) if part)
    return fit((
        (f"{ui.glyphs.cursor} " if ui else "  ", "accent"),
        (text.clock(event.ts_ns) + "  ", "dim"), (left(text.word(event), 11), "accent"),
        (left(event.device or "", 7), "strong"), (told, ""),
    ), columns)  # fmt: skip


def receipt(snapshot: Snapshot, ui: Ui, columns: int) -> list[Line]:
    """Why the placement under the cursor is as it is, and what each other device scored."""
    found = snapshot.placements[::-1]
    if not found:
        return []
    return events.told(found[min(ui.placement, len(found) - 1)], columns)


class ScheduleView(View):
    """Queues, stages, what is in flight, links, placements and why."""

    keys = (*up_down("placement"), *left_right("its reasons up", "its reasons down"))
    layout_css = """
    #flow, #work { height: 9; }
    #queues, #stages, #links, #receipts { width: 1fr; }
    #flight { width: 1.2fr; }
    #placed { height: 1fr; }
    #receipt { width: 40%; max-width: 56; }
    .narrow #flow, .narrow #work { height: auto; layout: vertical; }
    .narrow #queues, .narrow #stages, .narrow #flight, .narrow #links { width: 100%; }
    .narrow #receipt { display: none; }
    """

    def compose(self) -> ComposeResult:
        with Vertical():
            with Horizontal(id="flow"):
                yield Lines(id="queues", title="Queues", classes="panel")
                yield Lines(id="stages", title="Stages", classes="panel")
            with Horizontal(id="work"):
                yield Lines(id="flight", title="In flight", classes="panel")
                yield Lines(id="links", title="Links", classes="panel")
            with Horizontal(id="placed"):
                yield Lines(id="receipts", title="Placements", classes="panel")
                yield Lines(id="receipt", title="Why", classes="panel")

    def paint(self, snapshot: Snapshot, ui: Ui, styles: Styles) -> None:
        names = ("queues", "stages", "flight", "links", "receipts", "receipt")
        waiting, times, work, joined, placed, why = (self.panel(name) for name in names)
        told = {
            waiting: queues(snapshot, ui, waiting.size.width),
            times: stages(snapshot, ui, times.size.width),
            work: in_flight(snapshot, ui, work.size.width),
            joined: links(snapshot, ui, joined.size.width),
        }
        self._share(*map(len, told.values()))
        for panel, lines in told.items():
            panel.show(window(lines, panel.size.height, 0), styles)
        size = placed.size
        placed.show(receipts(snapshot, ui, size.width, size.height), styles)
        lines = receipt(snapshot, ui, why.size.width)
        why.show(window(lines, why.size.height, ui.scroll), styles)

    def _share(self, waiting: int, times: int, work: int, joined: int) -> None:
        """Heights from the number of lines, a third each at most; placements take what is left."""
        most = max(4, self.size.height // 3)
        narrow = self.app.has_class("narrow")
        whole = not narrow or self.size.height >= LEAST_FOR_FOUR
        self.panel("stages").display = self.panel("links").display = whole
        told = "" if whole else "stages and links: 100 columns or more rows"
        self.panel("receipts").border_subtitle = told
        if narrow:
            for name, lines in (("queues", waiting), ("stages", times), ("flight", work),
                                ("links", joined)):  # fmt: skip
                self.panel(name).styles.height = min(lines + 2, max(5, self.size.height // 3))
        else:
            self.query_one("#flow").styles.height = min(max(waiting, times) + 2, most)
            self.query_one("#work").styles.height = min(max(work, joined) + 2, most)
            for name in ("queues", "stages", "flight", "links"):
                self.panel(name).styles.height = "1fr"

    def move(self, snapshot: Snapshot, ui: Ui, dx: int, dy: int) -> Choices:
        count = len(snapshot.placements)
        at = clamp(min(ui.placement, count - 1) + dy, count)
        return {"placement": at, "scroll": 0 if dy else max(0, ui.scroll + 3 * dx)}

    def under_cursor(self, snapshot: Snapshot, ui: Ui) -> list[AnyRecord]:
        placed = snapshot.placements[::-1]
        return [placed[min(ui.placement, len(placed) - 1)]] if placed else []
