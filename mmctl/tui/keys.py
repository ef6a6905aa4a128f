"""Every key of the dashboard: what it does, in words, and under which name a profile moves it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from textual.binding import Binding

from mmctl.engine.errors import UsageError, suggestion
from mmctl.tui.ui import SCREENS


class Key(NamedTuple):
    """A name for profiles, the keys, the action and what it does; ``acts`` on a server."""

    name: str
    keys: str
    action: str
    about: str
    acts: bool = False
    priority: bool = False

    def shown(self, moved: Mapping[str, str]) -> str:
        """The keys as a person knows them."""
        keys = moved.get(self.name, self.keys)
        return " ".join(_NAMES.get(key, key) for key in keys.split(","))


_NAMES = {
    "slash": "/", "question_mark": "?", "left_square_bracket": "[", "right_square_bracket": "]",
    "plus": "+", "minus": "-", "equals_sign": "=", "greater_than_sign": ">",
    "less_than_sign": "<", "full_stop": ".", "comma": ",", "colon": ":", "escape": "Esc",
    "space": "Space", "tab": "Tab", "shift+tab": "Shift+Tab", "up": "↑", "down": "↓",
    "left": "←", "right": "→", "pageup": "PgUp", "pagedown": "PgDn", "home": "Home", "end": "End",
    "ctrl+q": "Ctrl+Q", "ctrl+c": "Ctrl+C", "ctrl+p": "Ctrl+P",
}  # fmt: skip

KEYS = (
    *(Key(name, str(i), f"go('{name}')", f"screen {name}") for i, name in enumerate(SCREENS, 1)),
    Key("next_screen", "tab", "turn(1)", "next screen", priority=True),
    Key("previous_screen", "shift+tab", "turn(-1)", "previous screen", priority=True),
    Key("pause", "space,f", "pause", "hold the picture, or the recording"),
    Key("filter", "slash", "filter", "filter devices and events"),
    Key("clear", "escape", "clear", "clear filter, cursor and zoom"),
    Key("help", "question_mark", "help", "these keys"),
    Key("palette", "colon,ctrl+p", "palette", "find a command by its name"),
    Key("up", "up,k", "move(0,-1)", "cursor up; recovery: checks"),
    Key("down", "down,j", "move(0,1)", "cursor down; recovery: checks"),
    Key("left", "left,h", "move(-1,0)", "cursor left; traces: back in time"),
    Key("right", "right,l", "move(1,0)", "cursor right; traces: on in time"),
    Key("page_up", "pageup", "move(0,-10)", "cursor ten up"),
    Key("page_down", "pagedown", "move(0,10)", "cursor ten down"),
    Key("first", "home", "move(0,-100000)", "cursor to the first"),
    Key("last", "end", "move(0,100000)", "cursor to the last"),
    Key("previous_pool", "left_square_bracket", "pool(-1)", "pool before"),
    Key("next_pool", "right_square_bracket", "pool(1)", "next pool"),
    Key("layer", "m", "layer", "heatmap: conflict, modality, free, age, pages"),
    Key("finer", "plus,equals_sign", "level(-1)", "finer time"),
    Key("coarser", "minus", "level(1)", "coarser time"),
    Key("zoom_in", "z", "zoom(0.5)", "closer to the cursor's addresses"),
    Key("zoom_out", "x", "zoom(2)", "back out"),
    Key("slower", "less_than_sign", "speed(-1)", "recording: slower"),
    Key("faster", "greater_than_sign", "speed(1)", "recording: faster"),
    Key("step", "full_stop", "step(0.1)", "recording: a tenth of a second on"),
    Key("back", "comma", "step(-1.0)", "recording: a second back"),
    Key("next_event", "n", "jump(True)", "recording: next event"),
    Key("previous_event", "N,p", "jump(False)", "recording: event before"),
    Key("record", "r", "record", "record what comes in, or end it"),
    Key("picture", "s", "picture", "write this screen as SVG"),
    Key("export", "e", "export", "write the data under the cursor as NDJSON"),
    Key("theme", "t", "theme", "next theme"),
    Key("trip", "T", "order('trip')", "trip the device under the cursor", acts=True),
    Key("hold", "H", "order('hold')", "hold it: no traffic until reset", acts=True),
    Key("reset", "R", "order('reset')", "reset it: verify, then half open", acts=True),
    Key("verify", "V", "order('verify')", "ask it the canaries now", acts=True),
    Key("profile", "P", "profile", "another profile for the breaker", acts=True),
    Key("mode", "M", "mode", "next mode: off, observe, enforce", acts=True),
    Key("quit", "q,ctrl+q", "leave(0)", "quit"),
    Key("interrupt", "ctrl+c", "leave(130)", "interrupt", priority=True),
)


def bindings() -> list[Binding | tuple[str, str] | tuple[str, str, str]]:
    """The keys as Textual takes them; the name is what a profile moves them by."""
    return [
        Binding(key.keys, key.action, key.about, id=key.name, priority=key.priority) for key in KEYS
    ]


def moved(given: tuple[str, ...]) -> dict[str, str]:
    """``name=key,key`` entries of a profile; UsageError for a name that does nothing."""
    names = [key.name for key in KEYS]
    found: dict[str, str] = {}
    for entry in given:
        name, _, keys = entry.partition("=")
        if name not in names:
            hint = suggestion(name, names) or f": one of {', '.join(names)}"
            raise UsageError(f"screen.keys: nothing is named '{name}'{hint}")
        if not keys:
            raise UsageError(f"screen.keys: '{entry}' names no key, as in '{name}=f8'")
        found[name] = keys
    return found
