"""Schedule: queues per modality, time per stage, links as a matrix, and what placements say."""

from __future__ import annotations

import msgspec

from mmctl.engine.records import Event, Link
from mmctl.engine.units import show_seconds
from mmctl.tui import text
from mmctl.tui.lines import ABSENT, Line, clean, fit, left, right
from mmctl.tui.snapshot import Queue, Snapshot
from mmctl.tui.ui import Ui

# Events that tell of a placement, and why.
RECEIPTS = {"route", "placement", "rebalance", "migrate", "split"}


def queues(snapshot: Snapshot, ui: Ui, columns: int) -> list[Line]:
    """One line a queue: depth, oldest wait, usual waits, deadline misses."""
    if not snapshot.queues:
        return [
            (("no request among the records yet", "dim"),),
            (("demo, agent:PATH and simulated days give them: mmctl top demo", "dim"),),
        ]
    deadlines = {"vision": ui.vision_deadline_s, "text": ui.stream_deadline_s}
    lines: list[Line] = [(
        (left("queue", 8), "dim"), (right("depth", 6), "dim"), (right("in work", 9), "dim"),
        (right("oldest", 10), "dim"), (right("wait p50", 10), "dim"), (right("p99", 10), "dim"),
        (right("late", 6), "dim"), ("  deadline", "dim"),
    )]  # fmt: skip
    for queue in snapshot.queues:
        deadline = deadlines[queue.modality]
        late = _late(queue, deadline)
        oldest = None
        if queue.oldest_ns is not None and snapshot.newest_ns is not None:
            oldest = (snapshot.newest_ns - queue.oldest_ns) / 1e9
        over = oldest is not None and oldest > deadline
        lines.append((
            (left(queue.modality, 8), queue.modality), (right(queue.depth, 6), "strong"),
            (right(queue.in_work, 9), ""),
            (right(show_seconds(oldest), 10), "warn" if over else ""),
            (right(show_seconds(quantile(queue.waits_s, 0.5)), 10), ""),
            (right(show_seconds(quantile(queue.waits_s, 0.99)), 10), ""),
            (right(ABSENT if late is None else f"{100 * late:.0f}%", 6), "warn" if late else ""),
            (f"  {show_seconds(deadline)}", "dim"),
        ))  # fmt: skip
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
        return [(("no request has given its stages yet", "dim"),)]
    most = max((quantile(times, 0.99) or 0.0) for _, times in snapshot.stages) or 1.0
    bar = max(4, columns - 50)
    lines: list[Line] = [(
        (left("stage", 20), "dim"), (right("n", 5), "dim"), (right("p50", 10), "dim"),
        (right("p99", 10), "dim"),
    )]  # fmt: skip
    for stage, times in snapshot.stages:
        p99 = quantile(times, 0.99) or 0.0
        lines.append((
            (left(stage, 20), ""), (right(len(times), 5), "dim"),
            (right(show_seconds(quantile(times, 0.5)), 10), ""), (right(show_seconds(p99), 10), ""),
            ("  ", ""), (ui.glyphs.other * max(1, round(p99 / most * bar)), "accent"),
        ))  # fmt: skip
    return lines


def links(snapshot: Snapshot, ui: Ui, columns: int) -> list[Line]:
    """Class and measured latency between every two devices."""
    if not snapshot.links:
        return [(("no link among the records: mmctl probe links -o ndjson gives them", "dim"),)]
    names = list(dict.fromkeys(name for link in snapshot.links for name in (link.a, link.b)))
    between: dict[tuple[str, str], Link] = {}
    for link in snapshot.links:
        between[link.a, link.b] = link
        between.setdefault((link.b, link.a), link)
    cell = 12
    shown = names[: max(1, (columns - 8) // cell)]
    lines: list[Line] = [((" " * 8, ""), *((right(name, cell), "dim") for name in shown))]
    for a in names:
        row: list[tuple[str, str]] = [(left(a, 8), "strong")]
        for b in shown:
            found = between.get((a, b))
            row.append(_link(found, cell) if a != b else (right("·", cell), "dim"))
        lines.append(tuple(row))
    if len(shown) < len(names):
        lines.append(((f"{len(names) - len(shown)} more to the right", "dim"),))
    return lines


def _link(link: Link | None, cell: int) -> tuple[str, str]:
    if link is None:
        return right(ABSENT, cell), "dim"
    told = clean(link.link_class)
    if link.latency_us is not None:
        told += f" {link.latency_us:.1f}µs"
    far = link.crosses_numa or link.link_class in ("SYS", "NODE", "PHB")
    return right(told, cell), "warn" if far else "good"


def receipts(snapshot: Snapshot, ui: Ui, columns: int, rows: int) -> list[Line]:
    """The latest placements: what went where, and what the others scored."""
    found = [event for event in reversed(snapshot.events) if event.what in RECEIPTS][:rows]
    if not found:
        told = "no placement among the events: a scheduler writes them (route, split, migrate)"
        return [((told, "dim"),)]
    return [_receipt(event, columns) for event in found]


def _receipt(event: Event, columns: int) -> Line:
    why = text.summary(msgspec.structs.replace(event, message=None))
    told = ", ".join(part for part in (clean(event.message or ""), why) if part)
    return fit((
        (text.clock(event.ts_ns) + "  ", "dim"), (left(text.word(event), 11), "accent"),
        (left(event.device or "", 7), "strong"), (told, ""),
    ), columns)  # fmt: skip
