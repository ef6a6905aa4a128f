"""Events as they come: one line for a person, one object for a program."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

from mmctl.cli.render import to_csv
from mmctl.engine.errors import UsageError
from mmctl.engine.records import AnyRecord, Event, encode
from mmctl.engine.units import show_bytes

BACKGROUND = ("breaker", "ask", "entropy")
"""Events that a table leaves out: they report no decision. Every other format has them."""


class LineWriter:
    """Writes a stream of records in the format asked for, each line flushed, or by ``write``."""

    def __init__(
        self, output: str, every: bool = False, write: Callable[[str], None] | None = None
    ) -> None:
        if output == "json":
            raise UsageError("a stream has no json form; use -o ndjson")
        self.output, self.every, self._put = output, every, write or _flushed
        self.events = 0

    def write(self, record: AnyRecord) -> None:
        """Print ``record`` if it is an event (or if every record was asked for)."""
        if not isinstance(record, Event):
            if self.every and self.output == "ndjson":
                self._line(encode(record).decode())
            return
        self.events += 1
        if self.output == "ndjson":
            self._line(encode(record).decode())
        elif self.output == "csv":
            text = to_csv([row(record)])
            self._line((text if self.events == 1 else text.split("\r\n", 1)[1]).rstrip("\r\n"))
        elif record.what not in BACKGROUND:
            self._line(line(record))

    def end(self) -> None:
        """Say so when a table stayed empty."""
        if self.output == "table" and not self.events:
            self._line("(no events)")

    def _line(self, text: str) -> None:
        self._put(text + "\n")


def _flushed(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def row(event: Event) -> dict[str, Any]:
    """An event as one flat row."""
    return {
        "ts_ns": event.ts_ns, "node": event.node, "what": event.what, "device": event.device,
        "rule": event.rule, "mode": event.mode, "state": event.state, "reason": reason(event),
        "took_ns": event.took_ns, "evidence": event.evidence,
    }  # fmt: skip


def line(event: Event) -> str:
    """``14:02:11.120  would trip  gpu0  headroom  observe  closed  headroom_bytes < 0 …``."""
    seconds, rest = divmod(event.ts_ns, 10**9)
    clock = time.strftime("%H:%M:%S", time.localtime(seconds)) + f".{rest // 10**6:03}"
    took = f" ({event.took_ns * 1e-6:.1f} ms)" if event.took_ns is not None else ""
    words = [
        clock, f"{word(event):10}", f"{target(event) or '–':8}", f"{event.rule or '–':14}",
        f"{event.mode or '–':8}", f"{event.state or '–':9}", reason(event) + took,
    ]  # fmt: skip
    return "  ".join(words).rstrip()


def target(event: Event) -> str | None:
    """Whose decision it is, by the name that status and orders use: a serving instance or group
    of devices, where it is one's, else the device."""
    group = event.evidence.get("group")
    return group if isinstance(group, str) and event.what != "imbalance" else event.device


def word(event: Event) -> str:
    """What happened; a trip that mode observe only says is one that would have been."""
    return "would trip" if event.what == "trip" and event.mode == "observe" else event.what


def reason(event: Event) -> str:
    """Why, in one line: the event's own words, else its evidence."""
    evidence = event.evidence
    said = event.message or evidence.get("refused") or evidence.get("reason")
    if said:
        order = evidence.get("action") if event.what == "order" else None
        return f"{order}: {said}" if order else str(said)
    if event.what == "verify" and (checks := evidence.get("checks")):
        good = sum(bool(check.get("passed")) for check in checks)
        return f"{evidence.get('verdict')}: {good} of {len(checks)} checks"
    if event.what == "respond" and (steps := evidence.get("steps")):
        freed = sum(step.get("freed_bytes") or 0 for step in steps)
        names = dict.fromkeys(str(step.get("response")) for step in steps)
        fits = "the next batch fits" if evidence.get("fits") else "the next batch does not fit"
        return f"{', '.join(names)} freed {show_bytes(freed)}; {fits}"
    shown = [
        f"{key}={value}"
        for key, value in evidence.items()
        if isinstance(value, (str, int, float, bool)) and key not in ("command", "id", "from")
    ]
    return ", ".join(shown)
