"""What outlives a run: state, orders and the audit log."""

from __future__ import annotations

import json

import pytest

from mmctl.engine.breaker.breaker import Breaker
from mmctl.engine.breaker.loop import run
from mmctl.engine.breaker.store import Store, folder, give_order, read_audit, read_state
from mmctl.engine.errors import MmctlError
from mmctl.engine.records import Event
from tests.unit.breaker.test_breaker import SECOND, pool, profile


def watch(*records: object, mode: str = "enforce") -> list[Event]:
    store = Store()
    try:
        return [
            item
            for item in run(records, profile(), mode, lambda command: None, store=store)  # type: ignore[arg-type]
            if isinstance(item, Event)
        ]
    finally:
        store.close()


def test_an_open_breaker_is_still_open_after_a_restart_and_tries_again() -> None:
    watch(pool(1, True), pool(2, False), pool(3, True))
    state = read_state()
    assert state is not None and state.targets["gpu0"].memory.state == "open"
    events = watch(pool(2e9, True), pool(2e9 + 1, True))
    assert [event.state for event in events if event.what == "state"][-1] == "verifying"


def test_orders_are_read_once_and_expired_ones_never() -> None:
    watch(pool(1, True))
    give_order("hold", "gpu0", "riser", None)
    give_order("trip", "gpu0", "long ago", 5)
    events = watch(pool(10, True))
    assert [e.evidence["reason"] for e in events if e.what == "isolate"] == ["riser"]
    assert not [event for event in watch(pool(20, True)) if event.what == "order"]
    state = read_state()
    assert state is not None and state.targets["gpu0"].memory.state == "isolated"


def test_orders_are_refused_where_nothing_is_enforced_or_known() -> None:
    watch(pool(1, True))
    give_order("hold", "gpu0", "riser", None)
    (refused,) = [e for e in watch(pool(2, True), mode="observe") if e.what == "refuse"]
    assert "mode observe" in refused.evidence["refused"]
    give_order("hold", "gpu9", "riser", None)
    (refused,) = [e for e in watch(pool(3, True)) if e.what == "refuse"]
    assert "no target 'gpu9'" in refused.evidence["refused"]


def test_the_audit_log_has_inputs_and_thresholds_and_survives_a_cut() -> None:
    watch(pool(1, True), pool(2, False))
    path = folder() / "audit.ndjson"
    with path.open("ab") as file:
        file.write(b'{"type": "event", "ts_')
    kept = [record for record in read_audit() if isinstance(record, Event)]
    (trip,) = [event for event in kept if event.what == "trip"]
    assert trip.evidence["inputs"][0]["name"] == "fits" and trip.evidence["when"] == "not fits"
    assert path.stat().st_mode & 0o077 == 0


def test_one_process_keeps_the_state_and_a_damaged_file_is_named() -> None:
    store = Store()
    with pytest.raises(MmctlError, match="another breaker"):
        Store()
    store.close()
    (folder() / "state.json").write_text("{")
    with pytest.raises(MmctlError, match="damaged"):
        Store()


def test_the_state_file_is_not_rewritten_for_every_record() -> None:
    store, breaker = Store(), Breaker(profile(), "enforce")
    for at in range(7, 9):
        breaker.step(pool(at + 1, True))
        store.save(breaker)
    first = json.loads((folder() / "state.json").read_text())["saved_ns"]
    breaker.step(pool(9, True))
    store.save(breaker)
    store.close()
    assert breaker.machines["gpu0"].memory.known_until_ns == 11 * SECOND
    assert json.loads((folder() / "state.json").read_text())["saved_ns"] == first
