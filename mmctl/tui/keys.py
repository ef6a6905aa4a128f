"""The keys: what each does, in words, and under which name a profile moves it.

``GENERAL`` works on every screen; a screen adds its own as ``View.keys``. Bindings, help, footer,
command palette and man page are made from these and from nothing else.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from mmctl.engine.errors import UsageError, suggestion
from mmctl.tui import SCREENS


class Key(NamedTuple):
    """A name for profiles, the keys, the action and what it does; ``acts`` on a server.

    ``hint`` is its word in the footer; neighbours with the same word stand there as one.
    """

    name: str
    keys: str
    action: str
    about: str
    hint: str = ""
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

GENERAL = (
    *(Key(name, str(i), f"go('{name}')", f"screen {name}") for i, name in enumerate(SCREENS, 1)),
    Key("next_screen", "tab", "turn(1)", "next screen", priority=True),
    Key("previous_screen", "shift+tab", "turn(-1)", "previous screen", priority=True),
    Key("help", "question_mark", "help", "these keys", "help"),
    Key("quit", "q,ctrl+q", "leave(0)", "quit", "quit"),
    Key("filter", "slash", "filter", "filter devices and events", "filter"),
    Key("pause", "space,f", "pause", "pause the picture, or the recording", "pause"),
    Key("clear", "escape", "clear", "clear filter, cursor and zoom"),
    Key("palette", "colon,ctrl+p", "palette", "find a command by its name"),
    Key("slower", "less_than_sign", "speed(-1)", "recording: slower"),
    Key("faster", "greater_than_sign", "speed(1)", "recording: faster"),
    Key("step", "full_stop", "step(0.1)", "recording: a tenth of a second on"),
    Key("back", "comma", "step(-1.0)", "recording: a second back"),
    Key("next_event", "n", "jump(True)", "recording: next event"),
    Key("previous_event", "N,p", "jump(False)", "recording: event before"),
    Key("record", "r", "record", "record what comes in, or end it"),
    Key("picture", "s", "picture", "write this screen as SVG"),
    Key("export", "e", "export", "write what is under the cursor as NDJSON"),
    Key("theme", "t", "theme", "next theme"),
    Key("interrupt", "ctrl+c", "leave(130)", "interrupt", priority=True),
    Key("trip", "T", "order('trip')", "trip the device under the cursor", acts=True),
    Key("hold", "H", "order('hold')", "hold it: no traffic until reset", acts=True),
    Key("reset", "R", "order('reset')", "reset it: verify, then half open", acts=True),
    Key("verify", "V", "order('verify')", "ask it the canaries now", acts=True),
    Key("profile", "P", "profile", "another profile for the breaker", acts=True),
    Key("mode", "M", "mode", "next mode: off, observe, enforce", acts=True),
)


def up_down(what: str) -> tuple[Key, ...]:
    """The keys that move a cursor among ``what``, one below the other."""
    return (
        Key("up", "up,k", "move(0,-1)", f"{what} above"),
        Key("down", "down,j", "move(0,1)", f"{what} below"),
        Key("page_up", "pageup", "move(0,-10)", f"ten {what}s up"),
        Key("page_down", "pagedown", "move(0,10)", f"ten {what}s down"),
        Key("first", "home", "move(0,-100000)", f"first {what}"),
        Key("last", "end", "move(0,100000)", f"last {what}"),
    )


def left_right(left: str, right: str) -> tuple[Key, ...]:
    """The keys to the sides, and what each does."""
    return Key("left", "left,h", "move(-1,0)", left), Key("right", "right,l", "move(1,0)", right)


def finer_coarser(what: str) -> tuple[Key, ...]:
    """The keys that show less of ``what``, in more detail, and more of it."""
    return (
        Key("finer", "plus,equals_sign", "press('finer')", f"finer {what}", what),
        Key("coarser", "minus", "press('coarser')", f"coarser {what}", what),
    )


POOLS = (
    Key("previous_pool", "left_square_bracket", "press('previous_pool')", "pool before", "pool"),
    Key("next_pool", "right_square_bracket", "press('next_pool')", "next pool", "pool"),
)


def every(own: Iterable[tuple[Key, ...]]) -> list[Key]:
    """All keys once: the general ones, then those of each screen."""
    found = {key.name: key for keys in own for key in keys}
    return [*GENERAL, *found.values()]


def moved(given: tuple[str, ...], known: Iterable[Key]) -> dict[str, str]:
    """``name=key,key`` entries of a profile; UsageError for a name that does nothing."""
    names = [key.name for key in known]
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
