"""What lies over the screens for a moment: the keys, and a question before an action."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.text import Text
from textual import events
from textual.app import ComposeResult
from textual.containers import VerticalScroll
from textual.screen import ModalScreen
from textual.widgets import OptionList, Static
from textual.widgets.option_list import Option

from mmctl.tui.keys import Key

QUESTIONS = {
    "trip": "Trip {device}? Admission is held and its worker is asked to give memory back.",
    "hold": "Hold {device}? It gets no traffic until it is reset.",
    "reset": "Reset {device}? It is verified first, then gets its traffic back in steps.",
    "verify": "Verify {device}? Canaries are asked between its requests, no state changes.",
    "off": "Mode off: rules are no longer evaluated, nothing trips.",
    "observe": "Mode observe: trips are said, nothing is done about them.",
    "enforce": "Mode enforce: a trip holds admission and acts on the worker.",
}
_COLORS = """\
Colours only repeat what characters say:
█ vision   ▓ text   ▒ other   · free         ░▒▓█ conflict 0 … 1
– is a value that the source does not give: the reason stands below
the devices when the cursor is on that device."""


AROUND = 8  # columns of the frame, its padding and a scroll bar


class Help(ModalScreen[None]):
    """What the keys do on a screen, its own ones first; any key closes it."""

    def __init__(
        self, screen: str, own: Sequence[Key], general: Sequence[Key], moved: Mapping[str, str]
    ) -> None:
        super().__init__()
        self._tables = [(f"On {screen}", own), ("Everywhere", general)]
        self._moved = moved

    def compose(self) -> ComposeResult:
        with VerticalScroll() as box:
            yield Static(f"{self._told()}\n\n{_COLORS}", markup=False)
        box.border_title = "Keys"
        box.border_subtitle = "↑ ↓ scroll · any other key closes"

    def _told(self) -> str:
        """Two columns where they have room."""
        tables = [
            [f"{key.shown(self._moved):<12} {key.about}" for key in keys]
            for _, keys in self._tables
        ]
        wide = max(len(row) for rows in tables for row in rows)
        columns = 2 if 2 * wide + 3 + AROUND <= 0.96 * self.app.size.width else 1
        lines = []
        for (title, _), rows in zip(self._tables, tables, strict=True):
            height = -(-len(rows) // columns)
            lines += ["", title]
            lines += ["   ".join(f"{row:<{wide}}" for row in rows[i::height]).rstrip()
                      for i in range(height)]  # fmt: skip
        return "\n".join(lines[1:])

    def on_key(self, event: events.Key) -> None:
        if event.key not in ("up", "down", "pageup", "pagedown"):
            event.stop()
            self.dismiss()

    def on_click(self) -> None:
        self.dismiss()


class Pick(ModalScreen[str | None]):
    """One of several, each with what it is; Enter takes it, Escape none."""

    def __init__(self, title: str, choices: list[tuple[str, str]], now: str) -> None:
        super().__init__()
        self._title, self._choices, self._now = title, choices, now

    def compose(self) -> ComposeResult:
        names = [name for name, _ in self._choices]
        wide = max(map(len, names), default=0)
        shown = OptionList(
            *(
                Option(Text(f"{name:<{wide}}  {about}", overflow="ellipsis", no_wrap=True), id=name)
                for name, about in self._choices
            )
        )
        shown.border_title = f"{self._title}: now {self._now}"
        if self._now in names:
            shown.highlighted = names.index(self._now)
        yield shown

    def on_mount(self) -> None:
        self.query_one(OptionList).focus()

    def on_option_list_option_selected(self, event: OptionList.OptionSelected) -> None:
        self.dismiss(event.option_id)

    def on_key(self, event: events.Key) -> None:
        if event.key in ("j", "k"):
            shown = self.query_one(OptionList)
            (shown.action_cursor_down if event.key == "j" else shown.action_cursor_up)()
        elif event.key not in ("escape", "q"):
            return
        else:
            self.dismiss(None)
        event.stop()


class Confirm(ModalScreen[bool]):
    """A question; only ``y`` means yes."""

    def __init__(self, question: str) -> None:
        super().__init__()
        self._question = question

    def compose(self) -> ComposeResult:
        yield Static(f"{self._question}\n\ny  yes      any other key  no", markup=False)

    def on_key(self, event: events.Key) -> None:
        event.stop()
        self.dismiss(event.key in ("y", "Y"))

    def on_click(self) -> None:
        self.dismiss(False)
