"""The dashboard: what every key, click and command does to the board."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from textual import on
from textual.app import SystemCommand
from textual.binding import Binding
from textual.screen import Screen
from textual.widgets import ContentSwitcher, Input

from mmctl.engine import atomic, profiles, recording
from mmctl.engine.breaker import reload
from mmctl.engine.errors import MmctlError
from mmctl.engine.profiles import MODES, Mode
from mmctl.engine.records import encode
from mmctl.tui import SCREENS, export, scrub
from mmctl.tui.board import Board
from mmctl.tui.dialogs import QUESTIONS, Commands, Confirm, Help, Pick
from mmctl.tui.feed import Feed
from mmctl.tui.keys import GENERAL, every
from mmctl.tui.orders import Order, Orders
from mmctl.tui.palette import THEMES
from mmctl.tui.playback import Playback
from mmctl.tui.svg import portable
from mmctl.tui.ui import Ui
from mmctl.tui.view import views
from mmctl.tui.widgets import Clicked

KEYS = tuple(every(view.keys for view in views().values()))


class Top(Board):
    """The board with its keys. Without ``orders`` nothing on it acts on a server."""

    BINDINGS: ClassVar = [
        Binding(key.keys, key.action, key.about, id=key.name, priority=key.priority) for key in KEYS
    ]

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
        refuses: str = "nothing on this screen acts on a server",
        signals: bool = False,
    ) -> None:
        super().__init__(
            ui, playback=playback, clock=clock, theme_name=theme_name, keys=keys, signals=signals
        )
        self._started, self._record = started, record
        self._orders, self._refuses = orders, refuses

    def on_mount(self) -> None:
        super().on_mount()
        self.set_keymap(self._keys)
        self.call_after_refresh(self._start)

    def _start(self) -> None:
        self._feed = self._started(self)
        if self._record is not None:
            self._record_to(self._record)

    def action_go(self, name: str) -> None:
        self.query_one("#views", ContentSwitcher).current = name
        self._choose(screen=name, scroll=0)

    def action_turn(self, by: int) -> None:
        names = list(SCREENS)
        self.action_go(names[(names.index(self.ui.screen) + by) % len(names)])

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

    def action_record(self) -> None:
        """Begin or end a recording of what comes in."""
        if self.ui.recording is not None and self._feed is not None:
            self._feed.record_to(None)
            self._choose(recording=None, notice=f"recorded to {self.ui.recording}")
        else:
            self._record_to(export.name("", ".ndjson.zst", self.snapshot, self._clock()))

    def _record_to(self, path: Path) -> None:
        node = self.snapshot.nodes[0] if self.snapshot.nodes else ""
        profile = self.snapshot.profile or self.ui.profile
        try:
            writer = recording.Writer(path, recording.header(node, profile))
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
        records = self.view.under_cursor(self.snapshot, self.ui)
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
        self.set_focus(box)  # now: Widget.focus would miss the first keys of a burst

    def action_filtered(self) -> None:
        """The filter has been typed: keys are commands again."""
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
            self._choose(cell=None, rows=None, trace_zoom=0, trace_back=0)

    def action_help(self) -> None:
        general = [key for key in GENERAL if not key.acts or self._orders is not None]
        self.push_screen(Help(self.ui.screen, self.view.keys, general, self._keys))

    def get_system_commands(self, screen: Screen[Any]) -> Iterable[SystemCommand]:
        """The command palette: everything that a key does, by name."""
        for key in (*self.view.keys, *GENERAL):
            if key.acts and self._orders is None:
                continue
            run = partial(self.run_action, key.action)
            yield SystemCommand(key.about, f"key {key.shown(self._keys)}", run)
        for name in THEMES:
            yield SystemCommand(f"theme {name}", "colours", partial(self._dress, name))
        if self._orders is not None:
            for mode in MODES:
                yield SystemCommand(f"mode {mode}", QUESTIONS[mode], partial(self._switch, mode))
            for name, about in self._profiles():
                yield SystemCommand(f"profile {name}", about, partial(self._use, name))

    async def action_palette(self) -> None:
        await self.action_command_palette()

    async def action_command_palette(self) -> None:  # type: ignore[override]
        """In the place of Textual's own, which ctrl+p opens."""
        palette = Commands()
        await self.push_screen(palette)
        palette.listen()

    def _may_act(self) -> Orders | None:
        if self.ui.live and self.ui.ended is not None:
            self._say(f"{self.ui.ended}: nobody is left to take an order")
            return None
        if self._orders is None:
            self._say(self._refuses)
        return self._orders

    def action_order(self, action: str) -> None:
        """Trip, hold, reset or verify the device under the cursor, after a question."""
        if (orders := self._may_act()) is None:
            return
        mode = self.snapshot.mode or self.ui.mode
        if mode != "enforce":
            self._say(f"mode {mode} acts on nothing: M changes it to enforce")
            return
        target = self.view.target(self.snapshot, self.ui)
        if target is None:
            self._say("no device is under the cursor")
            return
        node, device = target
        question = QUESTIONS[action].format(device=f"{node} {device}".strip())
        put = partial(orders.put, Order(action, node, device))
        self._ask(question, put, f"{action} of {device} was ordered")

    def action_mode(self) -> None:
        """The breaker's next mode, after a question."""
        mode = self.snapshot.mode or self.ui.mode
        self._switch(MODES[(MODES.index(mode) + 1) % len(MODES)])

    def _switch(self, mode: Mode) -> None:
        if (orders := self._may_act()) is not None:
            switch = partial(orders.changes.switch, mode)
            self._ask(QUESTIONS[mode], switch, f"mode {mode} was ordered")

    def action_profile(self) -> None:
        """Pick another profile for the breaker that runs."""
        if self._may_act() is not None:
            now = self.snapshot.profile or self.ui.profile
            self.push_screen(Pick("Profile", self._profiles(), now), self._use)

    def _profiles(self) -> list[tuple[str, str]]:
        return [(name, profiles.about(path)) for name, path in profiles.available().items()]

    def _use(self, name: str | None) -> None:
        """Go on with a profile, after a question that says what it changes."""
        if name is None or (orders := self._may_act()) is None:
            return
        try:
            wanted = profiles.load(name)
        except MmctlError as error:
            self._say(str(error))
            return
        changes = orders.changes
        told = reload.said(reload.compare(changes.loaded.profile, wanted.profile))
        mode = changes.mode or wanted.profile.breaker.mode
        question = f"Profile {name}, mode {mode}? {told}. States, holds and deadlines stay."
        self._ask(question, partial(changes.use, name), f"profile {name} was ordered")

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

    def action_press(self, name: str) -> None:
        """A key of the screen that is shown; it does nothing on one that does not name it."""
        if name in {key.name for key in self.view.keys}:
            self._choose(**self.view.press(self.snapshot, self.ui, name))

    def action_move(self, dx: int, dy: int) -> None:
        """Move the cursor of the screen that is shown."""
        self._choose(**self.view.move(self.snapshot, self.ui, dx, dy))

    @on(Clicked)
    def _clicked(self, message: Clicked) -> None:
        widget, column, row = message.widget, message.column, message.row
        if widget.id == "scrub" and self._playback and self.ui.playback:
            found = scrub.moment(self.ui.playback, column, widget.size.width)
            if found is not None:
                self._playback.seek(found)
        elif widget.id and self.view in widget.ancestors:
            self._choose(**self.view.clicked(self.snapshot, self.ui, widget.id, column, row))
