"""Overview: devices, serving engines, headroom of a pool."""

from __future__ import annotations

from textual.app import ComposeResult
from textual.containers import Horizontal

from mmctl.engine.records import AnyRecord, Device, Latencies, Pool, Serving
from mmctl.engine.units import show_bytes, show_seconds
from mmctl.tui import events, text
from mmctl.tui.filter import passes, shown_devices
from mmctl.tui.keys import POOLS, up_down
from mmctl.tui.lines import (
    ABSENT,
    EMPTY,
    Glyphs,
    Line,
    clean,
    fit,
    flow,
    left,
    percent,
    quiet,
    right,
    shares,
    spark,
)  # fmt: skip
from mmctl.tui.snapshot import ServingView, Snapshot, full_in_s, unread
from mmctl.tui.ui import Choices, Ui, clamp, nothing_came, pool_of, starting, unheard_ns
from mmctl.tui.view import Styles, View
from mmctl.tui.widgets import Lines

TRIED_NS = 1_000_000_000  # from when on the age of a dry run is told


def devices(snapshot: Snapshot, ui: Ui, columns: int) -> list[Line]:
    """One line a device, and a last one on what the cursor's device does not give."""
    views = shown_devices(snapshot, ui)
    if told := starting(snapshot, ui):
        return quiet(told, columns)
    if not snapshot.records:
        waits = "no record in" if nothing_came(snapshot, ui) else "waiting for the first record of"
        return quiet(f"{waits} {clean(' + '.join(ui.sources))}", columns)
    if not snapshot.devices:
        return quiet("no device among the records: nvml:, ascend: and host: give them", columns)
    if not views:
        return quiet(f"no device matches '{ui.filter}': Esc clears the filter", columns)
    many = len(snapshot.nodes) > 1
    names = [
        f"{view.record.node}/{view.record.device}" if many else view.record.device for view in views
    ]
    name_width = min(24, max(6, *(len(name) for name in names)))
    model_width = 0 if columns < 92 else min(16, max(len(v.record.model or "") for v in views))
    trend = 8 if columns >= 132 else 4 if columns >= 76 else 0
    why_width = 14 if columns >= 116 else 8 if columns >= 100 else 0
    fixed = name_width + 2 + (model_width + 2 if model_width else 0)
    fixed += 2 * (trend + 6) + 18 + 5 + 5 + 6 + (why_width + 1 if why_width else 0)
    bar = max(4, columns - fixed - 2)
    head: list[tuple[str, str]] = [("  ", ""), (left("dev", name_width), "dim")]
    if model_width:
        head.append((left("  model", model_width + 2), "dim"))
    g = ui.glyphs
    head += [
        (" " + left("SM", trend + 5), "dim"), (" " + left("DRAM", trend + 5), "dim"),
        *fit((
            (f" {g.vision}", "vision"), ("vision ", "dim"), (g.text, "text"), ("text ", "dim"),
            (g.other, "other"), ("other ", "dim"), (g.free, "free"), ("free", "dim"),
        ) if bar >= 28 else ((" memory", "dim"),), bar + 1),
        (right("used/total", 17), "dim"), (" frag", "dim"), (" temp", "dim"), (" power", "dim"),
    ]  # fmt: skip
    if why_width:
        head.append((" why", "dim"))
    lines: list[Line] = [tuple(head)]
    selected = min(ui.device, len(views) - 1)
    for i, view in enumerate(views):
        record = view.record
        pools = [p.record for p in snapshot.pools
                 if (p.record.node, p.record.device) == (record.node, record.device)]  # fmt: skip
        pieces: list[tuple[str, str]] = [
            (g.cursor + " " if i == selected else "  ", "accent"),
            (left(names[i], name_width), "strong"),
        ]
        if model_width:
            pieces.append(("  " + left(record.model or ABSENT, model_width), ""))
        pieces += _ratio(view.sm_ratio, record.sm_ratio, trend, g)
        pieces += _ratio(view.bandwidth_ratio, record.bandwidth_ratio, trend, g)
        pieces.append((" ", ""))
        pieces += _memory(record, pools, bar, g)
        frag = max((p.fragmentation_ratio for p in pools), default=None)
        pieces += [
            (right(_used(record, pools), 17), ""),
            (right(ABSENT if frag is None else f"{frag:.2f}".lstrip("0") or "0", 5),
             "warn" if frag is not None and frag > 0.65 else ""),
            (right(ABSENT if record.temperature_c is None else f"{record.temperature_c:.0f}°", 5),
             "bad" if (record.temperature_c or 0) >= 85 else ""),
            (right(ABSENT if record.power_w is None else f"{record.power_w:.0f}W", 6), ""),
        ]  # fmt: skip
        silent = unheard_ns(view, snapshot, ui)
        if silent is not None or _lost(record):  # what is old or lost must not look like now
            told = f"{g.absent} no reading for {text.ago(silent or 0)}"
            if silent is None:
                told = f"{g.absent} {clean(next(iter(record.absent.values())))}"
            pieces = [*pieces[:2], *fit((("  " + told, "bad_strong"),), columns - name_width - 2)]
        elif why_width:
            pieces.append((" " + left(_why(record), why_width), "warn"))
        lines.append(tuple(pieces))
    lines.append(_detail(views[selected].record, columns))
    return lines


def _ratio(trend: tuple[float | None, ...], now: float | None, wide: int, g: Glyphs) -> Line:
    marks = right(spark(trend[-wide:], 1.0, g), wide) if wide else ""
    return ((" " + marks, "accent"), (right(percent(now), 5), "dim" if now is None else ""))


def _memory(record: Device, pools: list[Pool], columns: int, g: Glyphs) -> Line:
    total = record.total_bytes or sum(p.capacity_bytes or 0 for p in pools)
    if not total:
        return ((left(ABSENT, columns), "dim"),)
    vision = sum(p.vision_bytes for p in pools)
    words = sum(p.text_bytes for p in pools)
    reserved = sum(p.reserved_bytes for p in pools)
    other = sum(p.other_bytes for p in pools) + max(0, (record.used_bytes or reserved) - reserved)
    free = max(0, total - vision - words - other)
    return shares(
        [(vision, g.vision, "vision"), (words, g.text, "text"), (other, g.other, "other"),
         (free, g.free, "free")], columns,
    )  # fmt: skip


def _used(record: Device, pools: list[Pool]) -> str:
    total = record.total_bytes or sum(p.capacity_bytes or 0 for p in pools) or None
    used = record.used_bytes
    if used is None and pools:
        used = sum(p.reserved_bytes for p in pools)
    if total is None:
        return ABSENT
    amount, unit = show_bytes(total).split(" ")
    scale = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}[unit]
    shown = ABSENT if used is None else f"{used / scale:.1f}"
    return f"{shown}/{amount} {unit}"


_THROTTLES = {
    "hw_slowdown": "HW SLOWDOWN", "hw_thermal_slowdown": "HW THERMAL",
    "hw_power_brake": "POWER BRAKE", "sw_thermal_slowdown": "SW THERMAL",
    "sw_power_cap": "power cap", "sync_boost": "sync boost",
}  # fmt: skip


def _why(record: Device) -> str:
    found = [] if record.xid is None else [f"XID {record.xid}"]
    found += [_THROTTLES.get(reason, clean(reason)) for reason in record.throttle or ()]
    return " ".join(found)


def _lost(record: Device) -> bool:
    """Whether nothing at all could be read."""
    readings = (record.sm_ratio, record.used_bytes, record.temperature_c, record.power_w)
    return bool(record.absent) and all(reading is None for reading in readings)


def _detail(record: Device, columns: int) -> Line:
    """What the device does not give, and why; else who holds its memory."""
    if record.absent:
        reasons: dict[str, list[str]] = {}
        for name, reason in record.absent.items():
            reasons.setdefault(clean(reason), []).append(clean(name))
        told = "; ".join(f"{reason} ({', '.join(names)})" for reason, names in reasons.items())
        return fit(((f"  {ABSENT} {record.device} ", "dim"), (told, "dim")), columns)
    if record.processes:
        held = ", ".join(
            f"{clean(p.name or '?')} ({p.pid}) {show_bytes(p.used_bytes)}"
            for p in sorted(record.processes, key=lambda p: -(p.used_bytes or 0))
        )
        return fit(((f"  {record.device} held by ", "dim"), (held, "dim")), columns)
    return EMPTY


def serving(snapshot: Snapshot, ui: Ui, columns: int) -> list[Line]:
    """Three lines an engine: load, first token per modality, per token and queue."""
    lines: list[Line] = []
    for view in snapshot.serving:
        record = view.record
        if passes(ui.filter, {"serving": record}, record.engine, record.instance, record.node):
            silent = unheard_ns(view, snapshot, ui)
            if silent is not None or unread(record):
                told = f"no reading for {text.ago(silent or 0)}"
                if unread(record):
                    told = clean(next(iter(record.absent.values())))
                name = clean(f"{record.engine} {record.instance}")
                line: Line = ((name, "strong"), (f"  {ABSENT} {told}", "bad_strong"))
                lines.append(fit(line, columns))
            else:
                lines += _engine(view, ui, columns)
    if snapshot.requests is not None:
        r = snapshot.requests
        counts: list[Line] = [
            (
                ("requests open " if r.admitted is None else "requests queued ", "dim"),
                (f"{r.queued}", "strong"),
            ),
            *([] if r.admitted is None else [(("in work ", "dim"), (f"{r.admitted}", "strong"))]),
            (("done ", "dim"), (f"{r.completed}", "good")),
            (("failed ", "dim"), (f"{r.failed}", "bad" if r.failed else "")),
        ]
        lines += flow(counts, columns, 2)
    if not lines:
        told = "no serving engine among the records: http://HOST:PORT/metrics gives one"
        if ui.filter and snapshot.serving:
            told = f"no engine matches '{ui.filter}'"
        lines = quiet(told, columns)
    return lines


def _engine(view: ServingView, ui: Ui, columns: int) -> list[Line]:
    record = view.record
    kv = spark(view.kv_ratio[-8:], 1.0, ui.glyphs)
    full = (record.kv_ratio or 0) > 0.9
    load: list[Line] = [
        ((clean(f"{record.engine} {record.instance}"), "strong"),),
        (("running ", "dim"), (_count(record.running), "")),
        (("waiting ", "dim"), (_count(record.waiting), "warn" if record.waiting else "")),
        (("KV ", "dim"), (kv, "accent"), (f" {percent(record.kv_ratio)}", "bad" if full else "")),
    ]
    if record.modalities:
        first: Line = (("first token p99", "dim"),)
        for modality in ("text", "vision"):
            given = record.modalities.get(modality, Latencies())
            first = (*first, (f" {modality}", modality), (f" {show_seconds(given.ttft_p99_s)}", ""))
    else:
        first = (("first token p99 ", "dim"), (show_seconds(record.ttft_p99_s), ""))
    times: list[Line] = [
        first,
        (("per token p99 ", "dim"), (show_seconds(record.itl_p99_s), "")),
        (("queue wait ", "dim"), (show_seconds(record.queue_wait_s), "")),
        (("out ", "dim"), (_rate(record), "")),
    ]
    lines = [*flow(load, columns, 2), *flow(times, columns, 2)]
    if record.absent:
        name, reason = next(iter(record.absent.items()))
        lines.append(fit(((f"{ABSENT} {clean(name)}: {clean(reason)}", "dim"),), columns))
    return lines


def _count(number: int | None) -> str:
    return ABSENT if number is None else str(number)


def _rate(record: Serving) -> str:
    rate = record.generation_tokens_per_s
    return ABSENT if rate is None else f"{rate:,.0f} tok/s"


def headroom(snapshot: Snapshot, ui: Ui, columns: int) -> list[Line]:
    """Whether the next batch fits, and how long the pool lasts."""
    view = pool_of(snapshot, ui)
    if view is None:
        return quiet("no pool among the records: demo, hook:PID and agent:PATH give one", columns)
    pool, tried, left_s = view.record, view.tried or view.record, full_in_s(view)
    fits = tried.fits
    room = tried.headroom_bytes if pool.headroom_bytes is None else pool.headroom_bytes
    if fits is None:
        verdict: Line = ((ABSENT, ""), (" no dry run yet", "dim"))
    elif fits.fits:
        verdict = (("fits", "good_strong"), (f" peak {show_bytes(fits.peak_bytes)}", "dim"))
    else:
        verdict = (("does not fit", "bad_strong"), (f" needs {show_bytes(fits.need_bytes)}", ""),
                   (f" {clean(fits.cause or '').replace('_', ' ')}", "bad"))  # fmt: skip
    if fits is not None and pool.ts_ns - tried.ts_ns >= TRIED_NS:
        age = (f" {text.ago(pool.ts_ns - tried.ts_ns)} ago", "dim")
        verdict = (*verdict[:2], age, *verdict[2:])
    silent = unheard_ns(view, snapshot, ui)
    if silent is not None:
        told_last: list[Line] = [(("last dry run    ", "dim"), *verdict)] if fits else []
        return [((f"{ABSENT} no record of this pool for {text.ago(silent)}", "bad_strong"),),
                *told_last]  # fmt: skip
    sign = "+" if room is not None and room > 0 else ""
    filling: Line = ((ABSENT, ""), (" not filling", "dim"))
    if left_s is not None:
        filling = ((show_seconds(left_s), ""), (" at this rate", "dim"))
    told: list[tuple[str, Line]] = [
        ("next batch", verdict),
        ("headroom", ((sign + show_bytes(room), "bad" if (room or 0) < 0 else ""),)),
        ("largest usable", ((show_bytes(pool.largest_free_bytes), ""),)),
        ("device free", ((show_bytes(pool.device_free_bytes), ""),)),
        ("full in", filling),
        ("releasable", ((show_bytes(pool.releasable_bytes), ""),)),
        ("fragmentation", ((_two(pool.fragmentation_ratio), ""),
                           (f" of {show_bytes(pool.free_bytes)} free", "dim"))),
        ("conflict", ((_two(pool.conflict_ratio), ""),)),
        ("vision tokens", ((_count(pool.vision_tokens), "vision"),)),
        ("text tokens", ((_count(pool.text_tokens), "text"),)),
    ]  # fmt: skip
    lines: list[Line] = [((left(name, 16), "dim"), *value) for name, value in told]
    if columns < 60:
        return lines
    wide = columns * 3 // 5
    return [(*fit(a, wide), *b) for a, b in zip(lines[::2], lines[1::2], strict=True)]


def _two(ratio: float | None) -> str:
    return ABSENT if ratio is None else f"{ratio:.2f}"


class Overview(View):
    """Devices, serving, headroom, last events."""

    keys = (
        *up_down("device"),
        *POOLS,
    )
    layout_css = """
    #devices { height: auto; }
    #middle { height: 9; }
    #serving { width: 1fr; }
    #headroom { width: 1fr; }
    .narrow #middle { height: 14; layout: vertical; }
    .narrow #serving, .narrow #headroom { width: 100%; }
    """

    def compose(self) -> ComposeResult:
        yield Lines(id="devices", title="Devices", classes="panel")
        with Horizontal(id="middle"):
            yield Lines(id="serving", title="Serving", classes="panel")
            yield Lines(id="headroom", title="Headroom", classes="panel")
        yield Lines(id="last", title="Last events", classes="panel")

    def paint(self, snapshot: Snapshot, ui: Ui, styles: Styles) -> None:
        names = ("devices", "serving", "headroom", "last")
        listed, engines, room, last = (self.panel(name) for name in names)
        lines = devices(snapshot, ui, listed.size.width)
        first, shown = self._shown(len(lines), ui)
        if len(lines) > shown + 2:
            lines = [lines[0], *lines[1 + first : 1 + first + shown], lines[-1]]
        left = serving(snapshot, ui, engines.size.width)
        right = headroom(snapshot, ui, room.size.width)
        pool = pool_of(snapshot, ui)
        room.border_title = f"Headroom {pool.record.device}" if pool else "Headroom"
        self._share(len(lines), len(left), len(right))
        listed.show(lines, styles)
        engines.show(left, styles)
        room.show(right, styles)
        last.show(events.latest(snapshot, ui, last.size.width, last.size.height), styles)

    def _shown(self, lines: int, ui: Ui) -> tuple[int, int]:
        """The first device's row and how many have room: the cursor's one stays in sight."""
        most = max(3, self.size.height // 2 - 2)
        shown = min(lines, most) - 2
        return max(0, min(ui.device - shown // 2, lines - 2 - shown)), shown

    def _share(self, devices: int, left: int, right: int) -> None:
        """Heights from the number of lines; the events take what is left, three lines at least."""
        middle = self.query_one("#middle")
        self.panel("devices").styles.height = devices + 2
        spare = max(5, self.size.height - devices - 2 - 5)
        serving, headroom = self.panel("serving"), self.panel("headroom")
        serving.display = headroom.display = middle.display = True
        if self.app.has_class("narrow"):  # whole panels, and none of which only the frame has room
            room = self.size.height - devices - 2 - 3
            left, right = min(left, 4) + 2, min(right, 4) + 2
            headroom.display = left + right <= room
            middle.display = left <= room
            serving.styles.height, headroom.styles.height = left, right
            middle.styles.height = left + right if headroom.display else left
        else:
            self.panel("serving").styles.height = self.panel("headroom").styles.height = "1fr"
            middle.styles.height = min(max(left, min(right, 8), 3) + 2, spare)

    def move(self, snapshot: Snapshot, ui: Ui, dx: int, dy: int) -> Choices:
        count = len(shown_devices(snapshot, ui))
        return {"device": clamp(min(ui.device, count - 1) + dy, count)}

    def press(self, snapshot: Snapshot, ui: Ui, name: str) -> Choices:
        count = len(snapshot.pools)
        by = 1 if name == "next_pool" else -1
        return {"pool": (ui.pool + by) % count, "cell": None, "rows": None} if count else {}

    def clicked(self, snapshot: Snapshot, ui: Ui, panel: str, column: int, row: int) -> Choices:
        count = len(shown_devices(snapshot, ui))
        if panel != "devices" or not 1 <= row <= count:
            return {}
        first, _ = self._shown(len(devices(snapshot, ui, self.size.width)), ui)
        return {"device": clamp(first + row - 1, count)}

    def under_cursor(self, snapshot: Snapshot, ui: Ui) -> list[AnyRecord]:
        found = shown_devices(snapshot, ui)
        if not found:
            return []
        device = found[min(ui.device, len(found) - 1)].record
        key = (device.node, device.device)
        pools = [p.record for p in snapshot.pools if (p.record.node, p.record.device) == key]
        return [device, *pools]
