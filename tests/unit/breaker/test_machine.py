"""The state machine, told step by step."""

from __future__ import annotations

from typing import Any

from mmctl.engine import profiles
from mmctl.engine.breaker.machine import Machine
from mmctl.engine.breaker.state import Command, Output
from mmctl.engine.records import Event

SECOND = 10**9


def told(machine: Machine, at: int, what: str, **evidence: Any) -> list[Output]:
    """The worker's answer to the command that the machine waits for."""
    answer = {"id": machine.memory.waiting_for, **evidence}
    return machine.answer(Event(ts_ns=at * SECOND, node="n", what=what, evidence=answer), True)


def actions(found: list[Output]) -> list[str]:
    return [item.action for item in found if isinstance(item, Command)]


def test_a_rebuild_asked_for_while_verifying_is_done_before_half_open() -> None:
    machine = Machine("gpu0", "n", profiles.load("default").profile.breaker, ("hold_admission",))
    machine.known(0, 100 * SECOND)
    assert actions(machine.trip(1 * SECOND, "fits", {})) == ["respond"]
    assert actions(told(machine, 2, "respond", fits=True)) == ["verify"]
    machine.trip(3 * SECOND, "leak", {}, rebuild=True)
    assert machine.state == "verifying"
    assert actions(told(machine, 4, "verify", verdict="consistent")) == ["rebuild"]
    assert machine.state == "open"
    assert actions(told(machine, 5, "rebuild")) == ["verify"]
    assert actions(told(machine, 6, "verify", verdict="consistent")) == ["admit"]
    assert machine.state == "half_open"
