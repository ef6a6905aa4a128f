"""Recovery: what was done since the trip, step by step, and the checks with their tolerance."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from textual.app import ComposeResult
from textual.containers import Horizontal, Vertical

from mmctl.engine.records import AnyRecord, Event
from mmctl.engine.units import show_seconds
from mmctl.tui import canary, text
from mmctl.tui.keys import left_right, up_down
from mmctl.tui.lines import ABSENT, Line, clean, fit, flow, left, quiet, window, wrap
from mmctl.tui.snapshot import Recovery, Snapshot
from mmctl.tui.text import STATE_ROLES
from mmctl.tui.ui import Choices, Ui, clamp
from mmctl.tui.view import Styles, View
from mmctl.tui.widgets import Lines

STEPS = ("trip", "respond", "rebuild", "verify", "half_open", "close")
NAMES = {
    "trip": "tripped", "respond": "responded", "rebuild": "rebuilt", "verify": "verified",
    "half_open": "half open", "close": "closed",
}  # fmt: skip


def chosen(snapshot: Snapshot, ui: Ui) -> Recovery | None:
    """The recovery that was picked, the latest one first."""
    if not snapshot.recoveries:
        return None
    latest = sorted(snapshot.recoveries, key=lambda r: -r.events[0].ts_ns)
    return latest[min(ui.recovery, len(latest) - 1)]


def steps(snapshot: Snapshot, ui: Ui, columns: int) -> list[Line]:
    """The chain from trip to closed: what is done, how long it took, what comes next."""
    recovery = chosen(snapshot, ui)
    if recovery is None:
        return _none(snapshot, columns)
    events, g = recovery.events, ui.glyphs
    first, last = events[0], events[-1]
    done = _done(events)
    reached = max((STEPS.index(step) for step in done), default=0)
    state = next((e.state for e in reversed(events) if e.state), None)
    lines: list[Line] = [(
        ("recovery of ", "dim"),
        (f"{recovery.node + '/' if len(snapshot.nodes) > 1 else ''}{recovery.device}", "strong"),
        ("  tripped ", "dim"), (text.clock(first.ts_ns), ""),
        (f" {clean(first.rule or '')}", "strong"),
        ("  now ", "dim"),
        ((state or "unknown").replace("_", " "), STATE_ROLES.get(state or "unknown", "dim")),
        ("  for ", "dim"),
        (text.ago((snapshot.newest_ns or last.ts_ns) - last.ts_ns), ""),
    )]  # fmt: skip
    chain: list[Line] = []
    for i, step in enumerate(STEPS):
        event = done.get(step)
        if event is not None:
            failed = _failed(event)
            mark, role = (g.failed, "bad") if failed else (g.done, "good")
            took = event.took_ns
            shown = f" ({show_seconds(took / 1e9)})" if took is not None else ""
            piece: Line = ((f"{mark} ", role), (NAMES[step], ""), (shown, "dim"))
        elif i < reached:
            continue  # this recovery did not need it
        else:
            piece = ((f"{g.waiting} ", "dim"), (NAMES[step], "dim"))
        chain.append(piece)
    lines += [*flow(chain, columns), *_next(recovery, snapshot, columns)]
    for event in events:
        if event.what in ("respond", "rebuild"):
            lines += _answers(event, columns)
    return lines


def _done(events: Sequence[Event]) -> dict[str, Event]:
    """The latest event of each step; a step is to be done again once an earlier one was."""
    done: dict[str, Event] = {}
    for event in events:
        if event.what in STEPS:
            at = STEPS.index(event.what)
            done = {step: known for step, known in done.items() if STEPS.index(step) < at}
            done[event.what] = event
    return done


def _answers(event: Event, columns: int) -> list[Line]:
    """What a worker did when it was asked."""
    lines: list[Line] = []
    for step in event.evidence.get("steps") or ():
        if not isinstance(step, dict):
            continue
        name = clean(step.get("response") or step.get("name") or "step")
        rest = {k: v for k, v in step.items() if k not in ("response", "name") and v is not None}
        told = ", ".join(f"{k.removesuffix('_ns').removesuffix('_bytes').replace('_', ' ')} "
                         f"{text.value(k, v)}" for k, v in rest.items())  # fmt: skip
        lines.append(fit((("    ", ""), (left(name, 18), "warn"), (told, "dim")), columns))
    return lines


def _failed(event: Event) -> bool:
    given = event.evidence
    return text.passed(event) is False or given.get("ok") is False or bool(given.get("error"))


def _next(recovery: Recovery, snapshot: Snapshot, columns: int) -> list[Line]:
    """What is waited for, and how long still."""
    last = next((e for e in reversed(recovery.events) if "deadline_s" in e.evidence), None)
    state = next((e.state for e in reversed(recovery.events) if e.state), None)
    if state == "half_open" and last is not None and last.what == "half_open":
        share, needed = last.evidence.get("share"), last.evidence.get("requests_needed")
        told = f"half open with {text.value('share', share)} of traffic"
        told = f"half open with {100 * share:.0f}% of traffic" if share is not None else told
        told += f" until {needed} requests have completed" if needed is not None else ""
    elif state == "half_open" and last is not None and "verifications_needed" in last.evidence:
        done, needed = (last.evidence.get(f"verifications_{what}") for what in ("passed", "needed"))
        told = f"half open: {clean(last.evidence.get('reason') or '')}, {done} of {needed} in a row"
    elif state in ("open", "isolated"):
        event = next((e for e in reversed(recovery.events) if e.evidence.get("reason")), None)
        told = clean(event.evidence["reason"]) if event else ""
        if event is not None and event.evidence.get("next"):
            told += f": {clean(event.evidence['next'])}"
    else:
        told = ""
    if last is not None and state not in (None, "closed", "isolated") and snapshot.newest_ns:
        left_s = (last.ts_ns - snapshot.newest_ns) / 1e9 + float(last.evidence["deadline_s"])
        told += f"{', ' if told else ''}deadline in {show_seconds(max(0.0, left_s))}"
    if not told:
        return []
    first, *rest = wrap(told, columns - 5)
    return [(("then ", "dim"), (first, "")), *(((" " * 5 + part, ""),) for part in rest)]


def verified(snapshot: Snapshot, ui: Ui) -> tuple[Event | None, list[dict[str, Any]]]:
    """The latest verification and its checks: what failed or is unknown stands first."""
    recovery = chosen(snapshot, ui)
    events = reversed(recovery.events) if recovery else ()
    event = next((e for e in events if e.what == "verify"), None)
    rows = (event.evidence.get("checks") or ()) if event else ()
    return event, sorted(
        (r for r in rows if isinstance(r, dict)), key=lambda r: bool(r.get("passed"))
    )


def selected(snapshot: Snapshot, ui: Ui) -> dict[str, Any] | None:
    """The check under the cursor."""
    _, rows = verified(snapshot, ui)
    return rows[min(ui.scroll, len(rows) - 1)] if rows else None


def checks(snapshot: Snapshot, ui: Ui, columns: int, height: int = 1000) -> list[Line]:
    """Each check beside its golden: value, tolerance, verdict as a mark and a word.

    Of more than ``height`` lines those around the cursor.
    """
    event, rows = verified(snapshot, ui)
    if event is None or not rows:
        recovery = chosen(snapshot, ui)
        told = "no check has been answered yet" if recovery else "nothing has been verified"
        return quiet(f"{told}: canaries are asked after a trip, or by V", columns)
    columns -= 2
    name_width = max(12, min(34, columns - 47, max(len(str(r.get("name", ""))) for r in rows)))
    cell = max(6, min(18, (columns - name_width - 29) // 2))
    lines: list[Line] = [(
        (f"{sum(bool(row.get('passed')) for row in rows)} of {len(rows)} passed", "strong"),
        ("  verdict ", "dim"),
        (clean(event.evidence.get("verdict") or ABSENT), "bad" if _failed(event) else "good"),
    ), (
        (left("  check", name_width + 2), "dim"), ("  ", ""), (left("golden", cell), "dim"),
        ("  ", ""), (left("now", cell), "dim"), ("  ", ""), (left("tolerance", 12), "dim"),
        ("  verdict", "dim"),
    )]  # fmt: skip
    at = min(ui.scroll, len(rows) - 1)
    body: list[Line] = []
    for i, row in enumerate(rows):
        passed = row.get("passed")
        if passed is None:
            mark: Line = ((f"{ui.glyphs.absent} unknown", "dim"),)
        elif passed:
            mark = ((f"{ui.glyphs.done} passed", "good"),)
        else:
            mark = ((f"{ui.glyphs.failed} failed", "bad"),)
        body.append((
            (f"{ui.glyphs.cursor} " if i == at else "  ", "accent"),
            (left(row.get("name", ABSENT), name_width), "strong" if i == at else ""), ("  ", ""),
            (left(_cell(row.get("golden")), cell), ""), ("  ", ""),
            (left(_cell(row.get("value")), cell), "" if passed else "strong"), ("  ", ""),
            (left(_tolerance(row), 12), "dim"), ("  ", ""), *mark,
        ))  # fmt: skip
    room = max(1, height - len(lines))
    return [*lines, *window(body, room, max(0, at - room // 2))]


def _tolerance(row: dict[str, Any]) -> str:
    """How far from its golden a value may be; an answer in words must be the same."""
    if row.get("tolerance") is None and isinstance(row.get("golden"), str):
        return "exact"
    return _cell(row.get("tolerance"))


def _cell(given: Any) -> str:
    if given is None:
        return ABSENT
    if isinstance(given, float):
        return f"{given:.4g}"
    if isinstance(given, str):
        return clean(given)
    return text.value("", given)


def _none(snapshot: Snapshot, columns: int) -> list[Line]:
    would = [e for e in snapshot.events if e.what == "trip" and e.mode == "observe"]
    told = "No device has been tripped."
    if would:
        told += (
            f" {len(would)} would-be trip{'s' * (len(would) != 1)},"
            f" the last at {text.clock(would[-1].ts_ns)} by"
            f" {would[-1].rule or 'a rule'}: the mode is observe, so nothing was done."
            " --mode enforce acts."
        )
    return quiet(told, columns)


class RecoveryView(View):
    """The steps since the trip, the checks, the picture that the check under the cursor asks."""

    keys = (*up_down("check"), *left_right("recovery after this one", "recovery before this one"))
    layout_css = """
    #steps { height: 40%; min-height: 5; }
    #verified { height: 1fr; }
    #checks { width: 1fr; }
    #canary { width: 38; display: none; }
    """

    def compose(self) -> ComposeResult:
        with Vertical():
            yield Lines(id="steps", title="Recovery", classes="panel")
            with Horizontal(id="verified"):
                yield Lines(id="checks", title="Checks", classes="panel")
                yield Lines(id="canary", title="Canary", classes="panel")

    def paint(self, snapshot: Snapshot, ui: Ui, styles: Styles) -> None:
        done, answered = self.panel("steps"), self.panel("checks")
        lines = steps(snapshot, ui, done.size.width)
        rows = min(len(lines), max(3, self.size.height // 2 - 2))
        done.styles.height = rows + 2
        done.show(window(lines, rows, 0), styles)
        size = answered.size
        answered.show(checks(snapshot, ui, size.width, size.height), styles)
        self._draw(selected(snapshot, ui), ui, styles)

    def _draw(self, check: dict[str, Any] | None, ui: Ui, styles: Styles) -> None:
        """The canary of a check, where there is one and room for it."""
        shown = self.panel("canary")
        name = canary.named(check) if check and not self.app.has_class("narrow") else None
        shown.display = name is not None
        if name is not None:
            shown.border_title = f"Canary {name}"
            size = shown.size
            shown.show(canary.panel(name, size.width, size.height, ui.glyphs), styles)

    def move(self, snapshot: Snapshot, ui: Ui, dx: int, dy: int) -> Choices:
        at = clamp(ui.recovery + dx, len(snapshot.recoveries))
        count = len(verified(snapshot, ui)[1])
        check = clamp(min(ui.scroll, count - 1) + dy, count)
        return {"recovery": at, "scroll": 0 if dx else check}

    def under_cursor(self, snapshot: Snapshot, ui: Ui) -> list[AnyRecord]:
        recovery = chosen(snapshot, ui)
        return list(recovery.events) if recovery else []

    def target(self, snapshot: Snapshot, ui: Ui) -> tuple[str, str] | None:
        recovery = chosen(snapshot, ui)
        return (recovery.node, recovery.device) if recovery else super().target(snapshot, ui)
