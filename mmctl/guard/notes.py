"""What the person who started the guard is told on the terminal: a line for each turn."""

from __future__ import annotations

import time
from collections.abc import Callable

from mmctl.engine.records import Event

_PAUSE_S = {"reject": 10.0}  # between two lines of the same; what comes meanwhile is counted
_SHORT_PAUSE_S = 1.0
_REFUSALS = frozenset(
    {"no_backend", "queue_wait", "images_deferred", "no_room", "queue_full", "admission_limited"}
)  # of requests with which nothing is wrong


class Notes:
    """Says events in words through ``say``; ``due`` says what was only counted."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._held: dict[tuple[str, ...], tuple[float, int, str]] = {}

    def take(self, event: Event) -> None:
        """Say ``event``, if it is one for the terminal and nothing alike was said just now."""
        said = words(event)
        if said is None:
            return
        reason = str(event.evidence.get("reason")) if event.what == "reject" else event.state
        key = (event.what, reason or "", event.device or "")
        until_s, count, _ = self._held.get(key, (0.0, 0, ""))
        if time.monotonic() < until_s:
            self._held[key] = (until_s, count + 1, said)
        else:
            self._tell(key, said, count)

    def due(self) -> None:
        """Say the latest of what was held back, with how many there were, once its pause is over;
        called now and then."""
        now = time.monotonic()
        for key, (until_s, count, said) in list(self._held.items()):
            if until_s <= now:
                del self._held[key]
                if count:
                    self._tell(key, said, count - 1)

    def _tell(self, key: tuple[str, ...], said: str, more: int) -> None:
        pause_s = _PAUSE_S.get(key[0], _SHORT_PAUSE_S)
        self._held[key] = (time.monotonic() + pause_s, 0, "")
        counted = f" (and {more} more like it)" if more else ""
        self._say(f"{time.strftime('%H:%M:%S')} {said}{counted}")


def words(event: Event) -> str | None:
    """An event in words; None where the audit log alone keeps it."""
    name, evidence = event.device or event.node or "", event.evidence
    match event.what:
        case "backend_down":
            return f"{name} is out: {event.message}"
        case "backend_up":
            return f"{name} answers again"
        case "trip":
            # The fault of a backend that is out has been said.
            would = "" if event.mode == "enforce" else " (observing: nothing is held)"
            return f"{name} tripped by rule {event.rule}{would}" if event.rule != "fault" else None
        case "verify":
            checks = evidence.get("checks") or ()
            good = sum(bool(check.get("passed")) for check in checks)
            found = evidence.get("refused") or (
                f"{evidence.get('verdict')}, {good} of {len(checks)} checks passed"
            )
            return f"{name} was asked its canaries: {found}"
        case "half_open":
            return f"{name} takes {evidence.get('share', 0):.0%} of the requests again"
        case "close":
            return f"{name} takes all requests again"
        case "isolate":
            why = evidence.get("next") or evidence.get("reason") or "by hand"
            return f"{name} takes no requests: {why}"
        case "pressure":
            return f"{name}: pressure {event.rule} is {event.state}: {event.message}"
        case "quarantine":
            return event.message
        case "reject" if evidence.get("reason") in _REFUSALS:
            return f"refused ({evidence['reason']}): {event.message}"
    return None
