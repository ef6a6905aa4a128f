"""The board: snapshots that a feed posts, onto the widgets of the screen that is shown."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import ClassVar

import msgspec
from textual import on
from textual.app import App, ComposeResult
from textual.css.query import NoMatches
from textual.events import Event, Key, Resize
from textual.message import Message
from textual.reactive import reactive
from textual.widgets import ContentSwitcher, Input, Static

from mmctl.tui import frame, scrub, text
from mmctl.tui.cost import Cost
from mmctl.tui.dialogs import Dialog
from mmctl.tui.feed import Feed
from mmctl.tui.lines import ASCII, fit
from mmctl.tui.palette import THEMES, styles, theme
from mmctl.tui.playback import Playback
from mmctl.tui.snapshot import Snapshot
from mmctl.tui.ui import Ui
from mmctl.tui.view import View, views
from mmctl.tui.widgets import Lines, Resized

SMALLEST = (60, 15)
NARROW = 100
# What stands by then, modules, style sheet and widgets, is there to stay: a full collection would
# look through all of it each time, and a key that comes meanwhile waits for 60 to 100 ms.
SETTLED_S = 1.5
ENDS = ("oom", "fault")  # events of a source's own end
TYPED_S = 1.0  # the longest wait for a line to take in a key


class Board(App[int]):
    """Shows ``snapshot`` as ``ui`` has it; both are frozen, and replaced whole."""

    CSS_PATH = "top.tcss"
    CSS: ClassVar[str] = "\n".join(view.layout_css for view in views().values())
    AUTO_FOCUS = ""
    COMMAND_PALETTE_BINDING = "ctrl+p"

    snapshot: reactive[Snapshot] = reactive(Snapshot(), init=False)
    ui: reactive[Ui] = reactive(Ui(), init=False)

    class Fresh(Message):
        """A new snapshot; an older one that still waits is skipped."""

        def __init__(self, snapshot: Snapshot) -> None:
            super().__init__()
            self.snapshot = snapshot

        def can_replace(self, message: Message) -> bool:
            return isinstance(message, Board.Fresh)

    class Ended(Message):
        """No record comes any more, and why."""

        def __init__(self, error: BaseException | None) -> None:
            super().__init__()
            self.error = error

    def __init__(
        self,
        ui: Ui,
        *,
        playback: Playback | None = None,
        clock: Callable[[], int] = time.time_ns,
        theme_name: str = "calm",
        keys: Mapping[str, str] | None = None,
        signals: bool = False,
    ) -> None:
        super().__init__()
        self._clock, self._signals = clock, signals
        self._playback = playback
        self._keys = dict(keys or {})
        self._feed: Feed | None = None
        self._cost = Cost()
        self._latest = Snapshot()  # newer than what is shown while the picture is held
        self.error: BaseException | None = None
        self.broken: BaseException | None = None  # an error of the screen, not of its source
        for name in THEMES:
            self.register_theme(theme(name))
        if signals and self.console.color_system == "standard":  # a terminal of sixteen colours
            theme_name = "sixteen"
        self.theme = theme_name
        self._ink, self._bar_ink = styles(theme_name), styles(theme_name, raised=True)
        self.set_reactive(Board.ui, ui)
        self.title = "mmctl top"

    def compose(self) -> ComposeResult:
        yield Lines(id="title")
        with ContentSwitcher(initial=self.ui.screen, id="views"):
            for name, view in views().items():
                yield view(id=name, classes="view")
        yield Lines(id="notice")
        yield Lines(id="scrub")
        hint = "words, or a condition such as sm_ratio < 5% and power_w > 300"
        yield Input(placeholder=hint, id="filter", compact=True)
        yield Lines(id="keys")
        yield Static(id="small")

    def on_mount(self) -> None:
        if self.ui.glyphs is ASCII:
            self.add_class("ascii")
        if self._signals:
            loop = asyncio.get_running_loop()
            loop.add_signal_handler(signal.SIGINT, self.exit, 130)
            loop.add_signal_handler(signal.SIGTERM, self.exit, 143)
            signal.signal(signal.SIGHUP, self._hang_up)
            self.set_interval(1.0, self._tick)
            gc.freeze()
            self.set_timer(SETTLED_S, gc.freeze)

    async def on_event(self, event: Event) -> None:
        """A key goes before the records that come, and has its effect before the next key.

        Textual lets a key wander to a screen and back by queues; of several that come at once the
        later ones would still reach a dialog that the first has closed, or miss the one that it
        has opened. Here many keys in one burst do what the same keys do one by one.
        """
        if isinstance(event, Key) and self._feed is not None:
            self._feed.rest()
            self.call_after_refresh(self._feed.go_on)
        if not isinstance(event, Key) or event.is_forwarded or not await self._did(event.key):
            await super().on_event(event)
            if isinstance(event, Key) and isinstance(self.focused, Input):
                await self._typed(self.focused)

    async def _did(self, key: str) -> bool:
        """Do what a key does; False where it is the focused widget's."""
        shown = self.screen
        if isinstance(shown, Dialog):
            return shown.takes(key)
        if len(self.screen_stack) > 1:
            return False
        bound = shown.active_bindings.get(key)
        if self.focused is None:
            return bound is not None and await self.run_action(bound.binding.action, bound.node)
        if key == "enter":
            return await self.run_action("filtered")
        clears = bound is not None and bound.binding.action == "clear"
        return clears and await self.run_action("clear")

    async def _typed(self, box: Input) -> None:
        """Until ``box`` has what was typed into it."""
        done = asyncio.Event()
        if box.call_later(done.set):
            with suppress(TimeoutError):
                await asyncio.wait_for(done.wait(), TYPED_S)
        self._filtering()

    @on(Input.Changed, "#filter")
    def _filtering(self) -> None:
        typed = self.query_one("#filter", Input).value
        if typed != self.ui.filter:
            self._choose(filter=typed, event=0, device=0, lane=0)

    def _hang_up(self, *_: object) -> None:
        """The terminal is gone: close what is recorded and end, without a word to anybody.

        Textual would write to the terminal once more, and wait for ever for its writer thread,
        which has died of it; the loop may wait for that already, so this is no handler of its.
        """
        if self._feed is not None:
            self._feed.close(timeout_s=2.0)
        os._exit(143)

    def _fatal_error(self) -> None:
        """An error of the screen itself: its caller says it in one line, or shows where."""
        self.broken = self._exception
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
            )  # fmt: skip
            for view in self.query(View):
                moved = view.followed(self.snapshot, message.snapshot, choices)
                choices = msgspec.structs.replace(choices, **moved) if moved else choices
            self.set_reactive(Board.ui, choices)
            self.snapshot = message.snapshot

    @on(Ended)
    def _on_ended(self, message: Ended) -> None:
        if message.error is not None:
            self.error = message.error
            self.exit(1)
            return
        piped = "-" in self.ui.sources
        if self.ui.live and not piped:
            self.ui = msgspec.structs.replace(self.ui, ended=self._end())
        else:
            self.ui = msgspec.structs.replace(self.ui, ended="END OF RECORDS", live=False)

    def _end(self) -> str:
        """What has ended, and of what where it said so."""
        last = next((one for one in reversed(self._latest.events) if one.what in ENDS), None)
        why = f": {text.word(last)}" if last is not None else ""
        return f"{' + '.join(self.ui.sources)} ended{why}"

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
            view = self.view
        except NoMatches:  # the first resize comes before the widgets
            return
        title.show([frame.title(self.snapshot, self.ui, title.size.width)], self._bar_ink)
        notices = frame.notices(self.snapshot, self.ui, title.size.width)
        notice.display = bool(notices)
        notice.styles.height = len(notices) or 1
        notice.show([fit(line, title.size.width) for line in notices], self._bar_ink)
        bar.display = self.ui.playback is not None
        bar.show([scrub.bar(self.snapshot, self.ui, title.size.width)], self._bar_ink)
        line = frame.keys(self.snapshot, self.ui, keys.size.width, view.keys, self._keys)
        keys.show([line], self._bar_ink)
        if view.size.width:
            view.paint(self.snapshot, self.ui, self._ink)
        if self._feed is not None:
            self._feed.ask(view.asked(self.snapshot, self.ui))

    @property
    def view(self) -> View:
        """The screen that is shown."""
        return self.query_one(f"#{self.ui.screen}", View)

    def _choose(self, **choices: object) -> None:
        """Other choices; what the last key said is no longer said."""
        choices.setdefault("notice", None)
        self.ui = msgspec.structs.replace(self.ui, **choices)

    def _say(self, told: str) -> None:
        self._choose(notice=told)

    def _dress(self, name: str) -> None:
        self.theme = name
        self._ink, self._bar_ink = styles(self.theme), styles(self.theme, raised=True)
        self.paint()
