"""The dashboard: keys and messages in, choices and snapshots onto the screens."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import msgspec
from textual import on
from textual.app import App, ComposeResult, SystemCommand
from textual.css.query import NoMatches
from textual.events import Resize
from textual.message import Message
from textual.reactive import reactive
from textual.screen import Screen
from textual.widgets import ContentSwitcher, Input, Static

from mmctl.engine import atomic, recording
from mmctl.engine.errors import MmctlError
from mmctl.engine.records import encode
from mmctl.tui import events, export, frame, heatmap, overview, recovery, scrub
from mmctl.tui.cost import Cost
from mmctl.tui.dialogs import MODES, QUESTIONS, Confirm, Help
from mmctl.tui.feed import Feed
from mmctl.tui.heat import Columns, Rows
from mmctl.tui.keys import KEYS, bindings
from mmctl.tui.lines import ASCII, fit
from mmctl.tui.orders import Order, Orders
from mmctl.tui.palette import THEMES, styles, theme
from mmctl.tui.playback import Playback
from mmctl.tui.snapshot import Region, Snapshot
from mmctl.tui.svg import portable
from mmctl.tui.ui import LAYERS, SCREENS, Ui
from mmctl.tui.views import VIEWS, HeatmapView, View
from mmctl.tui.widgets import Heatmap, Lines, Resized

SMALLEST = (60, 15)
NARROW = 100


class Top(App[int]):
    """The dashboard over snapshots that a feed posts."""

    CSS_PATH = "top.tcss"
    AUTO_FOCUS = ""
    COMMAND_PALETTE_BINDING = "ctrl+p"
    BINDINGS: ClassVar = bindings()

    snapshot: reactive[Snapshot] = reactive(Snapshot(), init=False)
    ui: reactive[Ui] = reactive(Ui(), init=False)

    class Fresh(Message):
        """A new snapshot; an older one that still waits is skipped."""

        def __init__(self, snapshot: Snapshot) -> None:
            super().__init__()
            self.snapshot = snapshot

        def can_replace(self, message: Message) -> bool:
            return isinstance(message, Top.Fresh)

    class Ended(Message):
        """No record comes any more, and why."""

        def __init__(self, error: BaseException | None) -> None:
            super().__init__()
            self.error = error

    def __init__(
        self,
        ui: Ui,
        *,
        started: Callable[[Top], Feed | None] = lambda _: None,
        playback: Playback | None = None,
        record: Path | None = None,
        clock: Callable[[], int] = time.time_ns,
        theme_name: str = "calm",
        keys: Mapping[str, str] | None = None,
        orders: Orders | None = None,
        signals: bool = False,
    ) -> None:
        super().__init__()
        self._started, self._clock, self._signals = started, clock, signals
        self._playback, self._record = playback, record
        self._orders = orders
        self._keys = dict(keys or {})
        self._feed: Feed | None = None
        self._cost = Cost()
        self._latest = Snapshot()  # newer than what is shown while the picture is held
        self.error: BaseException | None = None
        for name in THEMES:
            self.register_theme(theme(name))
        if signals and self.console.color_system == "standard":  # a terminal of sixteen colours
            theme_name = "sixteen"
        self.theme = theme_name
        self._ink, self._bar_ink = styles(theme_name), styles(theme_name, raised=True)
        self.set_reactive(Top.ui, ui)
        self.title = "mmctl top"

    def compose(self) -> ComposeResult:
        yield Lines(id="title")
        with ContentSwitcher(initial=self.ui.screen, id="views"):
            for name, view in VIEWS.items():
                yield view(id=name, classes="view") if view is not HeatmapView else view(id=name)
        yield Lines(id="notice")
        yield Lines(id="scrub")
        hint = "words, or a condition such as sm_ratio < 5% and power_w > 300"
        yield Input(placeholder=hint, id="filter", compact=True)
        yield Lines(id="keys")
        yield Static(id="small")

    def on_mount(self) -> None:
        self.set_keymap(self._keys)
        if self.ui.glyphs is ASCII:
            self.add_class("ascii")
        if self._signals:
            loop = asyncio.get_running_loop()
            for number, code in ((signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 143)):
                loop.add_signal_handler(number, self.exit, code)
            self.set_interval(1.0, self._tick)
        self.call_after_refresh(self._start)

    def _start(self) -> None:
        self._feed = self._started(self)
        if self._record is not None:
            self._record_to(self._record)

    def _fatal_error(self) -> None:
        """An error of the screen itself: its caller says it in one line, or shows where."""
        self.error = self.error or self._exception
        self._close_messages_no_wait()

    def _tick(self) -> None:
        self.ui = msgspec.structs.replace(self.ui, now_ns=self._clock(), cost=self._cost.read())

    @on(Fresh)
    def _fresh(self, message: Fresh) -> None:
        self._latest = message.snapshot
        if not self.ui.paused:
            feed = self._feed
            choices = msgspec.structs.replace(
                self.ui, now_ns=self._clock(),
                playback=self._playback.progress() if self._playback else None,
                recording=self.ui.recording if feed is None or feed.records_to_file else None,
                event=events.followed(self.snapshot, message.snapshot, self.ui),
            )  # fmt: skip
            self.set_reactive(Top.ui, choices)
            self.snapshot = message.snapshot

    @on(Ended)
    def _on_ended(self, message: Ended) -> None:
        if message.error is not None:
            self.error = message.error
            self.exit(1)
            return
        self.ui = msgspec.structs.replace(self.ui, ended="END OF RECORDS", live=False)

    def watch_snapshot(self) -> None:
        self.paint()

    def watch_ui(self) -> None:
        self.paint()

    def on_resize(self, event: Resize) -> None:
        width, height = event.size
        small = width < SMALLEST[0] or height < SMALLEST[1]
        self.set_class(small, "small")
        self.set_class(width < NARROW, "narrow")
        if small:
            told = f"mmctl top needs {SMALLEST[0]}×{SMALLEST[1]},\nthis is {width}×{height}"
            self.query_one("#small", Static).update(told)

    @on(Resized)
    def paint(self) -> None:
        """Put the snapshot on the visible screen."""
        if not self.is_running or self.has_class("small"):
            return
        try:
            title, notice, bar, keys = (
                self.query_one(f"#{name}", Lines) for name in ("title", "notice", "scrub", "keys")
            )
            view = self.query_one(f"#{self.ui.screen}", View)
        except NoMatches:  # the first resize comes before the widgets
            return
        title.show([frame.title(self.snapshot, self.ui, title.size.width)], self._bar_ink)
        notices = frame.notices(self.snapshot, self.ui)
        notice.display = bool(notices)
        notice.styles.height = len(notices) or 1
        notice.show([fit(line, title.size.width) for line in notices], self._bar_ink)
        bar.display = self.ui.playback is not None
        bar.show([scrub.bar(self.snapshot, self.ui, title.size.width)], self._bar_ink)
        keys.show([frame.keys(self.snapshot, self.ui, keys.size.width)], self._bar_ink)
        if view.size.width:
            view.paint(self.snapshot, self.ui, self._ink)
        if self._feed is not None:
            self._feed.ask(self._region() if self.ui.screen == "heatmap" else None)

    def _region(self) -> Region | None:
        """The addresses under the heatmap's cursor."""
        drawn = self._drawn()
        pool = overview.pool_of(self.snapshot, self.ui)
        if drawn is None or pool is None or self.ui.cell is None:
            return None
        rows = drawn[1]
        start = rows.base_address + min(self.ui.cell[1], rows.row_count - 1) * rows.row_bytes
        return Region(pool.record.node, pool.record.device, start, start + rows.row_bytes)

    def _choose(self, **choices: object) -> None:
        """Other choices; what the last key said is no longer said."""
        choices.setdefault("notice", None)
        self.ui = msgspec.structs.replace(self.ui, **choices)

    def action_go(self, name: str) -> None:
        self.query_one("#views", ContentSwitcher).current = name
        self._choose(screen=name, scroll=0)

    def action_turn(self, by: int) -> None:
        at = SCREENS.index(self.ui.screen)
        self.action_go(SCREENS[(at + by) % len(SCREENS)])

    def action_pause(self) -> None:
        if self._playback is not None:
            self._playback.toggle()
            self._follow()
            return
        paused = not self.ui.paused
        self._choose(paused=paused)
        if not paused:
            self.snapshot = self._latest

    def _follow(self) -> None:
        if self._playback is not None:
            self._choose(playback=self._playback.progress())

    def _position_ns(self) -> int:
        assert self.ui.playback is not None
        return scrub.position_ns(self.snapshot, self.ui.playback)

    def _need_playback(self) -> bool:
        if self._playback is None:
            self._say("only a recording can be moved through: mmctl top FILE")
        return self.ui.playback is not None

    def action_speed(self, steps: int) -> None:
        if self._need_playback() and self._playback:
            self._playback.faster(steps)
            self._follow()

    def action_step(self, by_s: float) -> None:
        if self._need_playback() and self._playback:
            self._playback.step(self._position_ns(), int(by_s * 1e9))
            self._follow()

    def action_jump(self, forwards: bool) -> None:
        if self._need_playback() and self._playback:
            if not self._playback.jump(self._position_ns(), forwards):
                self._say("no later event" if forwards else "no earlier event")
            else:
                self._follow()

    def _say(self, told: str) -> None:
        self._choose(notice=told)

    def action_record(self) -> None:
        """Begin or end a recording of what comes in."""
        if self.ui.recording is not None and self._feed is not None:
            self._feed.record_to(None)
            self._choose(recording=None, notice=f"recorded to {self.ui.recording}")
        else:
            self._record_to(export.name("", ".ndjson.zst", self.snapshot, self._clock()))

    def _record_to(self, path: Path) -> None:
        node = self.snapshot.nodes[0] if self.snapshot.nodes else ""
        try:
            writer = recording.Writer(path, recording.header(node, self.ui.profile))
        except (MmctlError, OSError) as error:
            self._say(str(error))
            return
        if self._feed is not None:
            self._feed.record_to(writer)
        self._choose(recording=str(path))

    def action_picture(self) -> None:
        """This screen as an SVG file."""
        path = export.name(self.ui.screen, ".svg", self.snapshot, self._clock())
        self._wrote(path, lambda: portable(self.export_screenshot()).encode())

    def action_export(self) -> None:
        """The data under the cursor as NDJSON."""
        records = export.under_cursor(self.snapshot, self.ui)
        if not records:
            self._say("nothing is under the cursor")
            return
        path = export.name(self.ui.screen, ".ndjson", self.snapshot, self._clock())
        self._wrote(path, lambda: b"".join(encode(record) + b"\n" for record in records))

    def _wrote(self, path: Path, content: Callable[[], bytes]) -> None:
        try:
            atomic.write(path, content())
        except MmctlError as error:
            self._say(str(error))
        else:
            self._say(f"wrote {path}")

    def action_filter(self) -> None:
        box = self.query_one("#filter", Input)
        box.add_class("shown")
        box.value = self.ui.filter
        box.focus()

    @on(Input.Changed, "#filter")
    def _filtering(self, message: Input.Changed) -> None:
        self._choose(filter=message.value, event=0, device=0)

    @on(Input.Submitted, "#filter")
    def _filtered(self) -> None:
        self.query_one("#filter", Input).remove_class("shown")
        self.set_focus(None)

    def action_clear(self) -> None:
        box = self.query_one("#filter", Input)
        if box.has_class("shown") or self.ui.filter:
            box.value = ""
            box.remove_class("shown")
            self.set_focus(None)
            self._choose(filter="")
        else:
            self._choose(cell=None, rows=None)

    def action_help(self) -> None:
        self.push_screen(Help(self._keys, acts=self._orders is not None))

    def get_system_commands(self, screen: Screen[Any]) -> Iterable[SystemCommand]:
        """The command palette: everything that a key does, by name."""
        for key in KEYS:
            if key.acts and self._orders is None:
                continue
            run = partial(self.run_action, key.action)
            yield SystemCommand(key.about, f"key {key.shown(self._keys)}", run)
        for name in THEMES:
            yield SystemCommand(f"theme {name}", "colours", partial(self._dress, name))

    def action_palette(self) -> None:
        self.action_command_palette()

    def action_order(self, action: str) -> None:
        """Trip, hold or reset the device under the cursor, after a question."""
        if self._orders is None:
            self._say("read only: a recording is shown, or --readonly was given")
            return
        mode = self.snapshot.mode or self.ui.mode
        if mode != "enforce":
            self._say(f"mode {mode} acts on nothing: M changes it to enforce")
            return
        target = export.target(self.snapshot, self.ui)
        if target is None:
            self._say("no device is under the cursor")
            return
        node, device = target
        order = Order(action, node, device)
        question = QUESTIONS[action].format(device=f"{node} {device}".strip())
        self._ask(question, partial(self._orders.put, order), f"{action} of {device} was ordered")

    def action_mode(self) -> None:
        """The breaker's next mode, after a question."""
        if self._orders is None:
            self._say("read only: a recording is shown, or --readonly was given")
            return
        mode = self.snapshot.mode or self.ui.mode
        after = MODES[(MODES.index(mode) + 1) % len(MODES)]
        self._ask(QUESTIONS[after], partial(self._orders.put, after), f"mode {after} was ordered")

    def _ask(self, question: str, do: Callable[[], None], done: str) -> None:
        def answered(yes: bool | None) -> None:
            if yes:
                do()
            self._say(done if yes else "nothing was done")

        self.push_screen(Confirm(question), answered)

    def action_leave(self, code: int) -> None:
        self.exit(code)

    def action_theme(self) -> None:
        self._dress(THEMES[(THEMES.index(self.theme) + 1) % len(THEMES)])

    def _dress(self, name: str) -> None:
        self.theme = name
        self._ink, self._bar_ink = styles(self.theme), styles(self.theme, raised=True)
        self.paint()

    def action_layer(self) -> None:
        self._choose(layer=LAYERS[(LAYERS.index(self.ui.layer) + 1) % len(LAYERS)])

    def action_level(self, by: int) -> None:
        if self.ui.screen == "traces":
            self._choose(trace_zoom=max(0, min(20, self.ui.trace_zoom - by)))
            return
        self._choose(level=max(0, min(3, self.ui.level + by)), cell=None)

    def action_pool(self, by: int) -> None:
        count = len(self.snapshot.pools)
        if count:
            self._choose(pool=(self.ui.pool + by) % count, cell=None, rows=None)

    def action_move(self, dx: int, dy: int) -> None:
        """Move the cursor of the screen that is shown."""
        ui, snapshot = self.ui, self.snapshot
        if ui.screen == "overview":
            count = len(overview.shown_devices(snapshot, ui))
            self._choose(device=_clamp(min(ui.device, count - 1) + dy, count))
        elif ui.screen == "events":
            count = len(events.shown_events(snapshot, ui))
            at = _clamp(min(ui.event, count - 1) + dy, count)
            self._choose(event=at, scroll=0 if dy else max(0, ui.scroll + 3 * dx))
        elif ui.screen == "recovery":
            at = _clamp(ui.recovery + dx, len(snapshot.recoveries))
            self._choose(recovery=at, scroll=0 if dx else self._check(dy))
        elif ui.screen == "heatmap":
            self._move_cell(dx, dy)

    def _check(self, by: int) -> int:
        """The check that the cursor comes to."""
        count = len(recovery.verified(self.snapshot, self.ui)[1])
        return _clamp(min(self.ui.scroll, count - 1) + by, count)

    def _move_cell(self, dx: int, dy: int) -> None:
        drawn = self._drawn()
        if drawn is None:
            return
        width = self.query_one("#heat", Heatmap).size.width
        if self.ui.cell is None:
            self._choose(cell=(0, drawn[1].row_count // 2))
            return
        back, row = self.ui.cell
        self._choose(cell=(_clamp(back - dx, width), _clamp(row + dy, drawn[1].row_count)))

    def _drawn(self) -> tuple[Columns, Rows] | None:
        return self.query_one("#heatmap", HeatmapView).drawn

    def action_zoom(self, factor: float) -> None:
        """Show half or twice as many addresses around the cursor."""
        drawn = self._drawn()
        if drawn is not None:
            row = self.ui.cell[1] if self.ui.cell else drawn[1].row_count // 2
            self._choose(rows=heatmap.zoomed(*drawn, row, factor))

    @on(Heatmap.Picked)
    def _picked(self, message: Heatmap.Picked) -> None:
        drawn = self._drawn()
        if drawn is not None and 0 <= message.y < drawn[1].row_count:
            width = self.query_one("#heat", Heatmap).size.width
            self._choose(cell=(_clamp(width - 1 - message.x, width), message.y))

    @on(Lines.Clicked)
    def _clicked(self, message: Lines.Clicked) -> None:
        if message.widget.id == "scrub" and self._playback and self.ui.playback:
            found = scrub.moment(self.ui.playback, message.column, message.widget.size.width)
            if found is not None:
                self._playback.seek(found)
        elif message.widget.id == "devices" and message.row >= 1:
            count = len(overview.shown_devices(self.snapshot, self.ui))
            self._choose(device=_clamp(message.row - 1, count))
        elif message.widget.id == "list" and message.row >= 0:
            height = message.widget.size.height
            self._choose(event=events.at_row(self.snapshot, self.ui, height, message.row))


def _clamp(value: int, count: int) -> int:
    return max(0, min(value, count - 1))
