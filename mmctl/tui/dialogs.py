"""What lies over the screens for a moment: the keys, and a question before an action."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

from rich.text import Text
from textual.app import ComposeResult
from textual.await_complete import AwaitComplete
from textual.command import CommandInput, CommandPalette
from textual.containers import VerticalScroll
from textual.screen import ModalScreen, ScreenResultType
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
PAGE = 10  # rows


class Dialog(ModalScreen[ScreenResultType]):
    """What is answered once: keys and clicks that still come to it afterwards do nothing."""

    def takes(self, key: str) -> bool:
        """Do what a key does here; False leaves it to the widgets."""
        raise NotImplementedError

    def dismiss(self, result: ScreenResultType | None = None) -> AwaitComplete:
        return super().dismiss(result) if self.is_current else AwaitComplete()


class Help(Dialog[None]):
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

    def takes(self, key: str) -> bool:
        if key in ("up", "down", "pageup", "pagedown"):
            return False
        self.dismiss()
        return True

    def on_click(self) -> None:
        self.dismiss()


class Pick(Dialog[str | None]):
    """One of several, each with what it is; Enter takes it, Escape none."""

    _MOVES: ClassVar = {"j": 1, "down": 1, "k": -1, "up": -1, "pagedown": PAGE, "pageup": -PAGE}

    def __init__(self, title: str, choices: list[tuple[str, str]], now: str) -> None:
        super().__init__()
        names = [name for name, _ in choices]
        wide = max(map(len, names), default=0)
        self._shown = OptionList(
            *(
                Option(Text(f"{name:<{wide}}  {about}", overflow="ellipsis", no_wrap=True), id=name)
                for name, about in choices
            )
        )
        self._shown.border_title = f"{title}: now {now}"
        if now in names:
            self._shown.highlighted = names.index(now)

    def compose(self) -> ComposeResult:
        yield self._shown

    def on_mount(self) -> None:
        self._shown.focus()

    def on_option_list_option_selected(self, event: OptionList.OptionSelected) -> None:
        self.dismiss(event.option_id)

    def takes(self, key: str) -> bool:
        last, at = self._shown.option_count - 1, self._shown.highlighted
        if key == "enter":
            self.dismiss(None if at is None else self._shown.get_option_at_index(at).id)
        elif key in ("escape", "q"):
            self.dismiss(None)
        elif key in self._MOVES:
            at = -1 if at is None else at
            self._shown.highlighted = max(0, min(at + self._MOVES[key], last))
        elif key in ("home", "end"):
            self._shown.highlighted = 0 if key == "home" else last
        return True


class Confirm(Dialog[bool]):
    """A question; only ``y`` means yes."""

    def __init__(self, question: str) -> None:
        super().__init__()
        self._question = question

    def compose(self) -> ComposeResult:
        yield Static(f"{self._question}\n\ny  yes      any other key  no", markup=False)

    def takes(self, key: str) -> bool:
        self.dismiss(key in ("y", "Y"))
        return True

    def on_click(self) -> None:
        self.dismiss(False)


class Commands(CommandPalette):
    """Textual's palette: answered once, too, and typed into from the first key on."""

    def dismiss(self, result: None = None) -> AwaitComplete:
        return super().dismiss(result) if self.is_current else AwaitComplete()

    def listen(self) -> None:
        """Put the cursor into its line now, not when the screen is drawn next."""
        self.set_focus(self.query_one(CommandInput))
