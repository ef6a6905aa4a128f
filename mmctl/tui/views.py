"""The screens: which panels, where, and which lines go into each. One class a screen."""

from __future__ import annotations

from typing import Any

from rich.style import Style
from textual.app import ComposeResult
from textual.containers import Container, Horizontal, Vertical

from mmctl.tui import canary, events, heatmap, overview, recovery, schedule, traces
from mmctl.tui.cursor import Drawn
from mmctl.tui.lines import window
from mmctl.tui.snapshot import Snapshot
from mmctl.tui.ui import Ui
from mmctl.tui.widgets import Heatmap, Lines

Styles = dict[str, Style]
LEAST_FOR_FOUR = 36  # rows for four panels above the placements, one below the other


class View(Container):
    """A screen: ``paint`` puts a snapshot on it."""

    def paint(self, snapshot: Snapshot, ui: Ui, styles: Styles) -> None:
        raise NotImplementedError

    def panel(self, name: str) -> Lines:
        return self.query_one(f"#{name}", Lines)


class Overview(View):
    """Devices, serving, headroom, last events."""

    def compose(self) -> ComposeResult:
        yield Lines(id="devices", title="Devices", classes="panel")
        with Horizontal(id="middle"):
            yield Lines(id="serving", title="Serving", classes="panel")
            yield Lines(id="headroom", title="Headroom", classes="panel")
        yield Lines(id="last", title="Last events", classes="panel")

    def paint(self, snapshot: Snapshot, ui: Ui, styles: Styles) -> None:
        devices, last = self.panel("devices"), self.panel("last")
        serving, room = self.panel("serving"), self.panel("headroom")
        lines = overview.devices(snapshot, ui, devices.size.width)
        most = max(3, self.size.height // 2 - 2)
        if len(lines) > most:  # keep the cursor's device in sight, and the detail line
            shown = most - 2
            first = max(0, min(ui.device - shown // 2, len(lines) - 2 - shown))
            lines = [lines[0], *lines[1 + first : 1 + first + shown], lines[-1]]
        left = overview.serving(snapshot, ui, serving.size.width)
        right = overview.headroom(snapshot, ui, room.size.width)
        pool = overview.pool_of(snapshot, ui)
        room.border_title = f"Headroom {pool.record.device}" if pool else "Headroom"
        self._share(len(lines), len(left), len(right))
        devices.show(lines, styles)
        serving.show(left, styles)
        room.show(right, styles)
        last.show(events.latest(snapshot, ui, last.size.width, last.size.height), styles)

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


class HeatmapView(View):
    """Addresses downwards, time to the right, and what the cursor's region is."""

    def __init__(self, id: str) -> None:
        super().__init__(id=id, classes="view")
        self._picture = heatmap.Picture()
        self._cells: dict[tuple[object, ...], list[tuple[str, Style]]] = {}
        self.drawn: Drawn | None = None

    def compose(self) -> ComposeResult:
        yield Lines(id="caption")
        yield Lines(id="strips")
        with Horizontal(id="grid"):
            yield Lines(id="axis")
            yield Heatmap(id="heat")
        yield Lines(id="times")
        yield Lines(id="region", title="Under the cursor", classes="panel")

    def paint(self, snapshot: Snapshot, ui: Ui, styles: Styles) -> None:
        view = overview.pool_of(snapshot, ui)
        heat = self.query_one("#heat", Heatmap)
        names = ("caption", "strips", "axis", "times", "region")
        caption, strips, axis, times, region = (self.panel(name) for name in names)
        if view is None:
            why = "no pool among the sources: demo, hook:PID and agent:PATH give one"
            caption.show([((why, "dim"),)], styles)
            for panel in (strips, axis, times, region):
                panel.show([], styles)
            heat.show([], heat._cells, None, styles["cursor"])
            self.drawn = None
            return
        level = view.heat[min(ui.level, len(view.heat) - 1)]
        width, height = heat.size
        rows = heatmap.view_rows(level, ui, height)
        self.drawn = Drawn(level, rows, width) if rows else None
        caption.show([heatmap.caption(view, ui, level, caption.size.width, width)], styles)
        strips.show(heatmap.strips(level, view, strips.size.width, width, ui.glyphs), styles)
        times.show([heatmap.time_axis(level, width, times.size.width - width)], styles)
        region.styles.height = 6 if self.size.height >= 28 else 5  # a line for the holders
        region.show(heatmap.region(snapshot, level, rows, ui, region.size.width), styles)
        if rows is None:
            axis.show([], styles)
            heat.show([], heat._cells, None, styles["cursor"])
            return
        axis.show(heatmap.axis(rows, axis.size.width < 17), styles)
        codes = self._picture.rows(level, rows, ui.layer, width)
        key = (ui.layer, ui.glyphs, id(styles))
        if key not in self._cells:
            self._cells[key] = [
                (mark, styles[role]) for mark, role in heatmap.legend(ui.layer, ui.glyphs)
            ]
        cursor = None
        if ui.cell is not None and width - 1 - ui.cell[0] >= 0:
            cursor = (width - 1 - ui.cell[0], min(ui.cell[1], rows.row_count - 1))
        heat.show(codes, self._cells[key], cursor, styles["cursor"])


class EventsView(View):
    """States over time, the list, the evidence."""

    def compose(self) -> ComposeResult:
        yield Lines(id="band", title="Breaker", classes="panel")
        with Horizontal(id="lower"):
            yield Lines(id="list", title="Events", classes="panel")
            yield Lines(id="evidence", title="Evidence", classes="panel")

    def paint(self, snapshot: Snapshot, ui: Ui, styles: Styles) -> None:
        band, listing, evidence = (self.panel(n) for n in ("band", "list", "evidence"))
        lines = events.band(snapshot, ui, band.size.width)
        band.styles.height = min(len(lines), max(1, self.size.height // 3)) + 2
        band.show(lines, styles)
        shown = events.shown_events(snapshot, ui)
        listing.border_title = f"Events {len(shown)}" + (
            f" · filter {ui.filter}" if ui.filter else ""
        )
        listing.show(events.listing(snapshot, ui, listing.size.width, listing.size.height), styles)
        told = events.evidence(snapshot, ui, evidence.size.width)
        evidence.show(window(told, evidence.size.height, ui.scroll), styles)


class RecoveryView(View):
    """The steps since the trip, the checks, the picture that the check under the cursor asks."""

    def compose(self) -> ComposeResult:
        with Vertical():
            yield Lines(id="steps", title="Recovery", classes="panel")
            with Horizontal(id="verified"):
                yield Lines(id="checks", title="Checks", classes="panel")
                yield Lines(id="canary", title="Canary", classes="panel")

    def paint(self, snapshot: Snapshot, ui: Ui, styles: Styles) -> None:
        steps, checks = self.panel("steps"), self.panel("checks")
        lines = recovery.steps(snapshot, ui, steps.size.width)
        steps.styles.height = min(len(lines) + 2, max(5, self.size.height // 2))
        steps.show(lines, styles)
        size = checks.size
        checks.show(recovery.checks(snapshot, ui, size.width, size.height), styles)
        self._draw(recovery.selected(snapshot, ui), ui, styles)

    def _draw(self, check: dict[str, Any] | None, ui: Ui, styles: Styles) -> None:
        """The canary of a check, where there is one and room for it."""
        shown = self.panel("canary")
        name = canary.named(check) if check and not self.app.has_class("narrow") else None
        shown.display = name is not None
        if name is not None:
            shown.border_title = f"Canary {name}"
            size = shown.size
            shown.show(canary.panel(name, size.width, size.height, ui.glyphs), styles)


class ScheduleView(View):
    """Queues, stages, what is in flight, links, placements and why."""

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
        queues, stages, flight, links, receipts, why = (
            self.panel(name)
            for name in ("queues", "stages", "flight", "links", "receipts", "receipt")
        )
        waiting = schedule.queues(snapshot, ui, queues.size.width)
        times = schedule.stages(snapshot, ui, stages.size.width)
        work = schedule.in_flight(snapshot, ui, flight.size.width)
        joined = schedule.links(snapshot, ui, links.size.width)
        self._share(len(waiting), len(times), len(work), len(joined))
        queues.show(waiting, styles)
        stages.show(window(times, stages.size.height, 0), styles)
        flight.show(window(work, flight.size.height, 0), styles)
        links.show(window(joined, links.size.height, 0), styles)
        size = receipts.size
        receipts.show(schedule.receipts(snapshot, ui, size.width, size.height), styles)
        told = schedule.receipt(snapshot, ui, why.size.width)
        why.show(window(told, why.size.height, ui.scroll), styles)

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


class TracesView(View):
    """Streams over time, what runs together, who came late."""

    def compose(self) -> ComposeResult:
        with Vertical():
            yield Lines(id="timeline", title="Streams", classes="panel")
            yield Lines(id="legend")
            with Horizontal(id="under"):
                yield Lines(id="together", title="Together", classes="panel")
                yield Lines(id="late", title="Collectives", classes="panel")

    def paint(self, snapshot: Snapshot, ui: Ui, styles: Styles) -> None:
        timeline, legend, together, late = (
            self.panel(name) for name in ("timeline", "legend", "together", "late")
        )
        told = traces.together(snapshot, ui, together.size.width)
        waits = traces.collectives(snapshot, ui, late.size.width)
        self._share(len(told) + 2, len(waits) + 2)
        size = timeline.size
        timeline.show(traces.timeline(snapshot, ui, size.width, size.height), styles)
        legend.show([traces.legend(ui)], styles)
        together.show(window(told, together.size.height, 0), styles)
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


VIEWS: dict[str, type[View]] = {
    "overview": Overview,
    "heatmap": HeatmapView,
    "events": EventsView,
    "recovery": RecoveryView,
    "schedule": ScheduleView,
    "traces": TracesView,
}
