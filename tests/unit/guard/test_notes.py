"""What is said on the terminal, and how often."""

from __future__ import annotations

from typing import Any

import pytest

from mmctl.engine.records import Event
from mmctl.guard import notes


def event(what: str, **more: Any) -> Event:
    return Event(ts_ns=0, node="a:1", device="a:1", what=what, **more)


def test_alike_is_counted_and_said_later(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(notes.time, "monotonic", lambda: now)
    said: list[str] = []
    told = notes.Notes(said.append)
    for number in range(50):
        refused = event("reject", message=f"refusal {number}", evidence={"reason": "no_backend"})
        told.take(refused)
    told.take(event("backend_down", message="connection refused"))
    told.take(event("reject", message="another kind", evidence={"reason": "queue_full"}))
    assert [line.partition(" ")[2] for line in said] == [
        "refused (no_backend): refusal 0",
        "a:1 is out: connection refused",
        "refused (queue_full): another kind",
    ]
    told.due()
    assert len(said) == 3
    now += 11
    told.due()
    told.due()
    assert [line.partition(" ")[2] for line in said[3:]] == [
        "refused (no_backend): refusal 49 (and 48 more like it)"
    ]


def test_what_the_log_alone_keeps() -> None:
    """Requests with which something is wrong, and steps that people do not wait for."""
    assert notes.words(event("reject", message="bad", evidence={"reason": "body_broken"})) is None
    assert notes.words(event("respond")) is None
    assert notes.words(event("shrink", message="from 4 to 1")) is None
    assert notes.words(event("verify", evidence={"refused": "no goldens"})) is not None
