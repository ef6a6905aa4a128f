"""What outlives a run: state, orders and the audit log."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from mmctl.engine.breaker.breaker import Breaker
from mmctl.engine.breaker.loop import run
from mmctl.engine.breaker.reload import mode_event
from mmctl.engine.breaker.store import Store, folder, give_order, read_audit, read_state
from mmctl.engine.errors import MmctlError
from mmctl.engine.records import Event, decode
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


def test_a_run_that_only_observes_leaves_open_what_an_enforcing_one_left_open() -> None:
    watch(pool(1, True), pool(2, False))
    watch(pool(2e9, True), mode="observe")
    state = read_state()
    assert state is not None and state.mode == "observe"
    assert state.targets["gpu0"].memory.state == "open"
    switched = mode_event("enforce", round(3e9 * SECOND), "n")
    events = watch(pool(3e9, True), switched, pool(3e9 + 1, True), mode="observe")
    states = [event.state for event in events if event.what == "state"]
    assert states == ["closed", "verifying"], "it is verified before traffic comes back"


def test_the_state_survives_kill_9_between_trip_and_close(tmp_path: Path, clean_home) -> None:
    path = tmp_path / "mine.toml"
    rule = '[breaker]\ninherit_rules = false\n[[breaker.rules]]\nname = "mine"\nwhen = "{}"\n'
    command = [sys.executable, "-m", "mmctl", "breaker", "watch", "host:", "--mode", "enforce",
               "--profile", str(path), "-o", "ndjson"]  # fmt: skip

    def until(what: str, state: str) -> tuple[subprocess.Popen[bytes], list[Event]]:
        process = subprocess.Popen(command, stdout=subprocess.PIPE)
        seen: list[Event] = []
        assert process.stdout is not None
        for line in process.stdout:
            seen.append(decode(line))  # type: ignore[arg-type]
            if seen[-1].what == what and seen[-1].state == state:
                break
        return process, seen

    path.write_text(rule.format("host.available_bytes > 0"))
    process, seen = until("trip", "open")
    process.kill()
    process.wait()
    assert seen[-1].rule == "mine"
    state = read_state()
    assert state is not None and state.targets[seen[-1].node].memory.state == "open"
    kept = [record for record in read_audit() if isinstance(record, Event)]
    assert [event.what for event in kept].count("trip") == 1
    path.write_text(rule.format("host.available_bytes < 0"))
    process, seen = until("state", "verifying")
    process.kill()
    process.wait()
    states = [event.state for event in seen if event.what in ("state", "close", "half_open")]
    assert states == ["verifying"], "nothing closes on a restart"


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


def test_an_order_given_before_any_breaker_ran_waits_for_the_first() -> None:
    give_order("hold", "gpu0", "new riser", None)
    first = Store()
    (order,) = first.orders(SECOND, "n")
    first.close()
    assert (order.device, order.evidence["action"]) == ("gpu0", "hold")
    passing = Store(restore=False)
    assert list(passing.orders(SECOND, "n")) == []
    passing.close()
