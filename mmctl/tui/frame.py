"""What frames every screen: the title above, notices and keys below."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import chain, groupby

from mmctl.tui import SCREENS, text
from mmctl.tui.filter import problem
from mmctl.tui.keys import GENERAL, Key
from mmctl.tui.lines import ABSENT, Line, clean, justify, left, width, wrap
from mmctl.tui.snapshot import Snapshot
from mmctl.tui.text import STATE_ROLES
from mmctl.tui.ui import Ui, all_lost, nothing_came, now_ns, starting
from mmctl.tui.ui import state as known_state


def title(snapshot: Snapshot, ui: Ui, columns: int) -> Line:
    """Node, profile, source and mode at the left; breaker state, as a word, at the right."""
    state = known_state(snapshot, ui)
    end: list[tuple[str, str]] = []
    if nothing_came(snapshot, ui):
        end.append(("NO RECORD  ", "warn_strong"))
    elif ui.ended is not None:
        end.append((f"{'ENDED' if ui.live else clean(ui.ended)}  ", "warn_strong"))
    elif all_lost(snapshot, ui):
        end.append(("SOURCE LOST  ", "bad_strong"))
    elif starting(snapshot, ui):
        end.append(("starting  ", "warn"))
    elif not snapshot.records:
        end.append(("waiting for records  ", "warn"))
    elif ui.paused:
        end.append(("PAUSED  ", "warn_strong"))
    if ui.recording is not None:
        end.append((f"{ui.glyphs.dot} REC  ", "bad_strong"))
    if state is not None:
        name = STATE_ROLES.get(state, "dim") + "_strong"
        end.append((f"{ui.glyphs.dot} {state.replace('_', ' ').upper()}", name))
        spans = [span.start_ns for span in snapshot.states if span.state == state]
        if spans:
            held = (snapshot.newest_ns or max(spans)) - max(spans)
            end.append((f" {text.ago(held)}  ", "dim"))
        else:  # its source has gone
            end.append((f" was {(snapshot.state or state).replace('_', ' ')}  ", "dim"))
    begun = snapshot.newest_ns is not None or not ui.live
    end.append((f"{text.clock(snapshot.newest_ns if begun else ui.now_ns)} ", ""))
    nodes = snapshot.nodes
    named = clean(nodes[0]) if len(nodes) == 1 else f"{len(nodes)} nodes" if nodes else ABSENT
    wide = columns >= 100
    start: Line = (
        (" mmctl", "accent_strong"),
        ("  node " if wide else "  ", "dim"), (named, ""),
        ("  profile " if wide else "  ", "dim"), (clean(snapshot.profile or ui.profile), ""),
        ("  mode " if wide else "  ", "dim"), ((snapshot.mode or ui.mode).upper(), "strong"),
        ("  ", "dim"), (clean(" + ".join(map(_source, ui.sources))), "dim"),
    )  # fmt: skip
    return justify(start, tuple(end), columns)


def _source(uri: str) -> str:
    """A URI as it is; of a file its name."""
    return uri if ":" in uri else uri.rpartition("/")[2]


def notices(snapshot: Snapshot, ui: Ui, columns: int) -> list[Line]:
    """What must be said above the keys: lost sources, the last key's outcome."""
    now = now_ns(snapshot, ui) or 0
    lines: list[Line] = [
        ((" lost ", "bad_strong"), (f"{clean(uri)} ", "strong"),
         (f"for {text.ago(max(0, now - since))}: {clean(reason)}", ""))
        for uri, reason, since in snapshot.down[:3]
    ]  # fmt: skip
    ended = ui.ended if ui.live else None
    for told, role in ((ended, "bad_strong"), (snapshot.notice, "warn_strong"),
                       (problem(ui.filter), "warn"), (ui.notice, "accent")):  # fmt: skip
        if told:
            parts = wrap(told, columns - 2)
            shown = parts if len(parts) <= 2 else [parts[0], left(" ".join(parts[1:]), columns - 2)]
            lines += [((f" {part}", role),) for part in shown]
    return lines


def keys(
    snapshot: Snapshot, ui: Ui, columns: int, own: tuple[Key, ...], moved: Mapping[str, str]
) -> Line:
    """Screens and keys at the left, age of the newest record and own cost at the right.

    What has no room is left out whole, the least important first: the screen's ``own`` keys, the
    names of the other screens, own cost, age, and all keys but help, quit and the screens'.
    """
    named = {key.name: key for key in GENERAL}
    here = [_screens(ui, lambda name: name == ui.screen)]
    full = [_screens(ui, lambda _: True)]
    always = _hints([named["help"], named["quit"]], ui, moved)
    often = _hints([named["filter"], named["pause"]], ui, moved)
    rare = _hints([key for key in own if key.hint], ui, moved)
    age, cost = _age(snapshot, ui), _cost(ui)
    best: tuple[tuple[Line, ...], Line] = (*here, *always), ()
    for start, end in (
        ((*here, *always), age),
        ((*here, *often[:1], *always), age),
        ((*here, *often, *always), age),
        ((*here, *often, *always), age + cost),
        ((*full, *often, *always), age + cost),
        *(((*full, *often, *rare[:n], *always), age + cost) for n in range(1, len(rare) + 1)),
    ):
        if sum(map(width, start)) + width(end) + 3 > columns:
            break
        best = start, end
    return justify(((" ", ""), *chain(*best[0])), (*best[1], (" ", "")), columns)


def _screens(ui: Ui, named: Callable[[str], bool]) -> Line:
    pieces: list[tuple[str, str]] = []
    for number, name in enumerate(SCREENS, 1):
        pieces.append((f"{number} ", "key"))
        if named(name):
            pieces.append((f"{name} ", "strong" if name == ui.screen else "dim"))
    return (*pieces, (" ", ""))


def _hints(keys: list[Key], ui: Ui, moved: Mapping[str, str]) -> list[Line]:
    """``+ - time``: the first of each key's keys, those with one word together."""
    found: list[Line] = []
    for word, several in groupby(keys, lambda key: key.hint):
        shown = " ".join(key.shown(moved).partition(" ")[0] for key in several)
        told = "go on" if word == "pause" and ui.paused else word
        found.append(((f"{shown} ", "key"), (f"{told} ", "dim")))
    return found


def _age(snapshot: Snapshot, ui: Ui) -> Line:
    if not ui.live or snapshot.newest_ns is None:
        return ()
    age = ui.now_ns - snapshot.newest_ns
    return ((f"{text.ago(age)} old", "bad_strong" if age > 5e9 else "dim"),)


def _cost(ui: Ui) -> Line:
    if ui.cost is None:
        return ()
    return ((f"  {100 * ui.cost[0]:.0f}% {ui.cost[1] / 2**20:.0f}M", "dim"),)
