"""What frames every screen: the title above, notices and keys below."""

from __future__ import annotations

from mmctl.tui import text
from mmctl.tui.filter import problem
from mmctl.tui.lines import ABSENT, Line, clean, justify
from mmctl.tui.snapshot import Snapshot
from mmctl.tui.text import STATE_ROLES
from mmctl.tui.ui import SCREENS, Ui, now_ns


def title(snapshot: Snapshot, ui: Ui, columns: int) -> Line:
    """Node, profile, source and mode at the left; breaker state, as a word, at the right."""
    state = snapshot.state
    end: list[tuple[str, str]] = []
    if ui.ended is not None:
        end.append((f"{clean(ui.ended)}  ", "warn_strong"))
    elif not snapshot.records:
        end.append(("waiting for records  ", "warn"))
    elif ui.paused:
        end.append(("PAUSED  ", "warn_strong"))
    if ui.recording is not None:
        end.append((f"{ui.glyphs.dot} REC  ", "bad_strong"))
    if state is not None:
        name = STATE_ROLES.get(state, "dim") + "_strong"
        since = max(span.start_ns for span in snapshot.states if span.state == state)
        held = (snapshot.newest_ns or since) - since
        end.append((f"{ui.glyphs.dot} {state.replace('_', ' ').upper()}", name))
        end.append((f" {text.ago(held)}  ", "dim"))
    end.append((f"{text.clock(snapshot.newest_ns)} ", ""))
    nodes = snapshot.nodes
    named = clean(nodes[0]) if len(nodes) == 1 else f"{len(nodes)} nodes" if nodes else ABSENT
    wide = columns >= 100
    start: Line = (
        (" mmctl", "accent_strong"),
        ("  node " if wide else "  ", "dim"), (named, ""),
        ("  profile " if wide else "  ", "dim"), (clean(snapshot.profile or ui.profile), ""),
        ("  mode " if wide else "  ", "dim"), ((snapshot.mode or ui.mode).upper(), "strong"),
        ("  ", "dim"), (clean(" + ".join(ui.sources)), "dim"),
    )  # fmt: skip
    return justify(start, tuple(end), columns)


def notices(snapshot: Snapshot, ui: Ui) -> list[Line]:
    """What must be said above the keys: lost sources, the last key's outcome."""
    now = now_ns(snapshot, ui) or 0
    lines: list[Line] = [
        ((" lost ", "bad_strong"), (f"{clean(uri)} ", "strong"),
         (f"for {text.ago(max(0, now - since))}: {clean(reason)}", ""))
        for uri, reason, since in snapshot.down[:3]
    ]  # fmt: skip
    if snapshot.notice:
        lines.append(((f" {clean(snapshot.notice)}", "warn_strong"),))
    if wrong := problem(ui.filter):
        lines.append(((f" {clean(wrong)}", "warn"),))
    if ui.notice:
        lines.append(((f" {clean(ui.notice)}", "accent"),))
    return lines


def keys(snapshot: Snapshot, ui: Ui, columns: int) -> Line:
    """Screens and keys at the left, age of the newest record and own cost at the right."""
    end: list[tuple[str, str]] = []
    if ui.live and snapshot.newest_ns is not None:
        age = ui.now_ns - snapshot.newest_ns
        end.append((f"{text.ago(age)} old", "bad_strong" if age > 5e9 else "dim"))
    if ui.cost is not None:
        end.append((f"  {100 * ui.cost[0]:.0f}% {ui.cost[1] / 2**20:.0f}M", "dim"))
    short = columns < 132
    start: list[tuple[str, str]] = [(" ", "")]
    for number, name in enumerate(SCREENS, 1):
        here = name == ui.screen
        shown = name + " " if not short or here else ""
        start += [(f"{number} ", "key"), (shown, "strong" if here else "dim")]
    rest = [("/", "filter"), ("space", "go on" if ui.paused else "pause"), ("?", "help"),
            ("q", "quit")]  # fmt: skip
    start.append((" ", ""))
    for key, does in rest:
        start += [(f"{key} ", "key"), (f"{does} ", "dim")]
    return justify(tuple(start), (*end, (" ", "")), columns)
