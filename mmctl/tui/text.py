"""Values as a person reads them: times of day, events, evidence."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

from mmctl.engine.records import Event
from mmctl.engine.units import show_bytes, show_seconds
from mmctl.tui.lines import ABSENT, clean

WORDS = {
    "half_open": "half open",
    "oom": "out of memory",
    "respond": "responded",
    "verify": "verified",
    "rebuild": "rebuilt",
    "close": "closed",
    "clear": "cleared",
    "trip": "tripped",
    "isolate": "isolated",
    "segment_free": "release burst",
}
# A state's role; the word stands beside it on every screen.
STATE_ROLES = {
    "closed": "good", "half_open": "warn", "verifying": "accent", "open": "bad",
    "isolated": "held", "unknown": "dim",
}  # fmt: skip
ROLES = {
    "trip": "bad", "oom": "bad", "fault": "bad", "isolate": "held", "respond": "warn",
    "rebuild": "warn", "verify": "accent", "half_open": "warn", "close": "good", "reset": "good",
}  # fmt: skip


def clock(ns: int | None, *, fraction: bool = False) -> str:
    """Time of day where the screen stands: ``14:02:11`` or ``14:02:11.204``."""
    if ns is None:
        return ABSENT
    shown = time.strftime("%H:%M:%S", time.localtime(ns // 1_000_000_000))
    return f"{shown}.{ns // 1_000_000 % 1000:03}" if fraction else shown


def ago(ns: int) -> str:
    """A span in the shortest words: ``0.1 s``, ``41 s``, ``4 min``, ``2 h``."""
    seconds = max(0.0, ns / 1e9)
    if seconds < 10:
        return f"{seconds:.1f} s"
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.0f} h"


def word(event: Event) -> str:
    """What happened, in words; a trip that only would have been says so."""
    if event.what == "trip" and event.mode == "observe":
        return "would trip"
    if event.what == "source":
        return {"up": "source back", "waiting": "awaited"}.get(event.state or "", "source lost")
    if event.what == "state" and event.state:
        return clean(event.state).replace("_", " ")
    return WORDS.get(event.what, clean(event.what).replace("_", " "))


def role(event: Event) -> str:
    """The colour that goes with the word."""
    if event.what == "trip" and event.mode == "observe":
        return "warn"
    if event.what == "verify" and passed(event) is False:
        return "bad"
    if event.what == "state":
        return STATE_ROLES.get(event.state or "", "dim")
    if event.what == "source":
        return {"up": "good", "waiting": "warn"}.get(event.state or "", "bad")
    return ROLES.get(event.what, "dim")


_OVER = re.compile(r"(?:sum|mean|median|min|max|std|mad|p\d+)\((\w+),")


_SECONDS = {"hold", "max_age"}  # of a rule, named as its profile names them


def value(name: str, given: Any) -> str:
    """A value with the unit that its name ends in."""
    if given is None or given == "" or given == [] or given == ():
        return ABSENT
    if isinstance(given, bool):
        return "yes" if given else "no"
    if isinstance(given, (int, float)):
        if inner := _OVER.match(name):  # "sum(released_bytes, 1s)" is in bytes, too
            name = inner[1]
        if name.endswith("bytes"):
            return show_bytes(given)
        if name.endswith("_ns"):
            return show_seconds(given / 1e9)
        if name in _SECONDS or (name.endswith("_s") and not name.endswith("per_s")):
            return show_seconds(given)
        return f"{given:,}" if isinstance(given, int) else f"{given:.4g}"
    if isinstance(given, dict):
        return ", ".join(f"{_bare(key)} {value(str(key), item)}" for key, item in given.items())
    if isinstance(given, (list, tuple)):
        return ", ".join(value(name, item) for item in given) or "none"
    return clean(given)


def _bare(key: object) -> str:
    """A key without the unit that its value carries: ``need_bytes`` is "need"."""
    label = clean(key)
    for unit in ("_ratio", "_bytes", "_ns", "_s"):
        label = label.removesuffix(unit)
    return label.replace("_", " ")


PASSED = ("pass", "passed", "consistent", True)


def passed(event: Event) -> bool | None:
    """Whether a verification passed; absent where the event has no verdict."""
    verdict = event.evidence.get("verdict")
    return None if verdict is None else verdict in PASSED


# Bookkeeping that a summary leaves out; the evidence panel still shows it.
_UNTOLD = {
    "when", "command", "id", "from", "held_s", "hold_s", "respond", "rules", "golden", "inputs",
    "reason", "condition",
}  # fmt: skip


def summary(event: Event) -> str:
    """One line on an event: its message, else the reason it gives, else its evidence."""
    if event.message:
        return clean(event.message)
    given = event.evidence
    if event.what == "breaker":
        rules = given.get("rules")
        count = f", {len(rules)} rules" if isinstance(rules, (list, tuple)) else ""
        return f"mode {event.mode}{count}"
    inputs = given.get("inputs")
    told = [
        _told(str(key), item)
        for key, item in given.items()
        if item is not None and key not in _UNTOLD
    ]
    if isinstance(inputs, (list, tuple)):
        told = [_compared(one) for one in inputs if isinstance(one, dict)] + told
    if given.get("reason") and not inputs:
        told.insert(0, clean(given["reason"]))
    return ", ".join(part for part in told if part)


def _compared(one: dict[str, Any]) -> str:
    name = str(one.get("name", ""))
    shown = f"{clean(name)} {value(name, one.get('value'))}"
    if one.get("threshold") is None or one["threshold"] == one.get("value"):
        return shown
    if isinstance(one.get("value"), bool):  # "fits yes", not "fits yes == no"
        return shown
    return f"{shown} {clean(one.get('comparison') or 'against')} {value(name, one['threshold'])}"


def _told(key: str, given: Any) -> str:
    """A piece of evidence in a few words; of a list of tables only the names, or the count."""
    label = _bare(key)
    if isinstance(given, (list, tuple)) and given and isinstance(given[0], dict):
        if all("passed" in one for one in given):
            return f"{sum(bool(one['passed']) for one in given)} of {len(given)} {label} passed"
        names = [one.get("response") or one.get("name") or one.get("signal") for one in given]
        return f"{label} {', '.join(clean(name) for name in names if name)}"
    if isinstance(given, dict):
        return f"{label} {value(key, given.get('value', given))}"
    return f"{label} {value(key, given)}"


class Told(NamedTuple):
    """A piece of evidence: what it is, its value, and what is to be known about it."""

    label: str
    value: str
    note: str = ""


def flat(evidence: dict[str, Any], prefix: str = "") -> Iterator[Told]:
    """Every value of the evidence; inner tables and lists of tables are spread out."""
    for key, item in evidence.items():
        label = prefix + clean(key)
        if isinstance(item, dict) and "value" in item:
            yield measured(str(key), item)
        elif isinstance(item, dict):
            yield from flat(item, f"{label}.")
        elif isinstance(item, (list, tuple)) and item and isinstance(item[0], dict):
            yield Told(label, "")
            for i, one in enumerate(item, 1):
                name = str(one.get("name") or one.get("signal") or one.get("response") or i)
                rest = {k: v for k, v in one.items() if k not in ("name", "signal", "response")}
                if "value" in rest:
                    told = measured(name, rest)
                    yield told._replace(label=f"  {told.label}")
                else:
                    yield Told(f"  {clean(name)}", value(str(key), rest))
        else:
            yield Told(label, value(str(key), item))


def measured(name: str, item: dict[str, Any]) -> Told:
    """An input of a rule: its value; its threshold, age and basis as the note."""
    notes = []
    if item.get("threshold") is not None:
        compared = clean(item.get("comparison") or "threshold")
        notes.append(f"{compared} {value(name, item['threshold'])}")
    if item.get("age_s") is not None:
        age_s = item["age_s"]
        notes.append(f"{show_seconds(age_s)} old" if age_s > 0 else "just read")
    if item.get("basis") is not None:
        notes.append(clean(item["basis"]))
    known = ("value", "threshold", "comparison", "age_s", "basis", "truth")
    if item.get("truth") is not None:
        notes.append("holds" if item["truth"] else "does not hold")
    notes += [
        f"{clean(key).replace('_', ' ')} {value(str(key), given)}"
        for key, given in item.items()
        if key not in known and given is not None
    ]
    return Told(clean(name), value(name, item["value"]), ", ".join(notes))
