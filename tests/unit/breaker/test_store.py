"""What outlives a run: state, orders and the audit log."""

from __future__ import annotations

import json
import subprocess
import sys
import time
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


SERVER = """
import sys, time
from pathlib import Path
from mmctl.agent.channel import Channel
from mmctl.engine.records import Device, Event, Fits, Pool
fits = sys.argv[2] == "fits"
with Channel(Path(sys.argv[1])) as channel:
    channel.greet(Event(ts_ns=time.time_ns(), node="n", device="gpu0", what="agent",
                        evidence={"socket": sys.argv[1], "instance": "i0"}))
    while True:
        now = time.time_ns()
        channel.publish(Device(ts_ns=now, node="n", device="gpu0", kind="gpu", group="i0"))
        channel.publish(Pool(ts_ns=now, node="n", device="gpu0", reserved_bytes=1,
                             allocated_bytes=1, free_bytes=0, largest_free_bytes=0,
                             releasable_bytes=0, fragmentation_ratio=0.0,
                             fits=Fits(fits=fits, allocations=1, peak_bytes=1)))
        time.sleep(0.05)
"""


def serve(path: Path, fits: str) -> subprocess.Popen[bytes]:
    """A serving process of its own, with an agent; it takes commands and answers none."""
    path.unlink(missing_ok=True)
    process = subprocess.Popen([sys.executable, "-c", SERVER, str(path), fits])
    while not path.exists():
        assert process.poll() is None
        time.sleep(0.01)
    return process


def watched(path: Path, until: set[tuple[str, str | None]]) -> list[Event]:
    """Decisions of an enforcing watch up to one of ``until``, which is then killed."""
    command = [sys.executable, "-m", "mmctl", "breaker", "watch", f"agent:{path}", "--mode",
               "enforce", "-o", "ndjson"]  # fmt: skip
    process = subprocess.Popen(command, stdout=subprocess.PIPE)
    seen: list[Event] = []
    assert process.stdout is not None
    for line in process.stdout:
        seen.append(decode(line))  # type: ignore[arg-type]
        if (seen[-1].what, seen[-1].state) in until:
            break
    process.kill()
    process.wait()
    return [event for event in seen if event is seen[-1] or event.what == "state"]


def test_a_state_is_of_the_process_that_was_watched(tmp_path: Path, clean_home) -> None:
    path = tmp_path / "agent.sock"
    server = serve(path, "full")
    tripped = watched(path, {("trip", "open")})[-1]
    assert tripped.evidence["group"] == "i0"
    server.kill()
    server.wait()
    server = serve(path, "fits")
    events = watched(path, {("state", "closed"), ("state", "verifying")})
    assert [event.state for event in events] == ["unknown", "closed"], "the new one is let alone"
    assert "another process" in events[0].evidence["reason"]
    server.kill()
    server.wait()

    server = serve(path, "full")
    watched(path, {("trip", "open")})
    events = watched(path, {("state", "closed"), ("state", "verifying")})
    assert [event.state for event in events] == ["verifying"], "the same process is verified"
    give_order("hold", "i0", "new riser", None)
    assert watched(path, {("isolate", "isolated")})
    server.kill()
    server.wait()
    server = serve(path, "fits")
    (held,) = watched(path, {("state", "isolated"), ("state", "closed")})
    assert held.state == "isolated", "a hold by hand is not the process's"
    server.kill()
    server.wait()


def test_a_target_that_is_not_seen_is_neither_verified_nor_counted() -> None:
    watch(pool(1, True), pool(2, False))
    events = watch(*(pool(2e9 + at, True, "gpu1") for at in range(20)))
    assert [event.state for event in events if event.what == "state"] == ["closed"]
    state = read_state()
    assert state is not None and state.targets["gpu0"].memory.state == "open", "kept as it was"


def test_a_reset_of_what_is_not_seen_verifies_it_once_seen_or_forgets_it() -> None:
    watch(pool(1, True), pool(2, False))
    give_order("reset", "gpu0", "repaired", None)
    events = watch(pool(2e9, True, "gpu1"), pool(2e9 + 1, True), pool(2e9 + 2, True))
    states = [(event.device, event.state) for event in events if event.what == "state"]
    assert states == [("gpu0", "open"), ("gpu1", "closed"), ("gpu0", "verifying")]

    breaker, store = Breaker(profile(), "enforce"), Store()
    store.take_up(breaker)
    breaker.step(pool(3e9, True, "gpu1"))
    breaker.step(pool(3e9 + 11, True, "gpu1"))
    give_order("reset", "gpu0", "scrapped", None)
    (order,) = store.orders(round((3e9 + 12) * SECOND), "n")
    (forgotten,) = breaker.step(order)
    assert isinstance(forgotten, Event) and forgotten.state == "unknown"
    store.save(breaker)
    store.close()
    state = read_state()
    assert state is not None and set(state.targets) == {"gpu1"}


def test_a_demo_leaves_what_is_saved_for_the_next_lasting_run() -> None:
    watch(pool(1, True))
    give_order("hold", "gpu0", "riser", None)
    watch(pool(2, True))
    breaker, demo = Breaker(profile(), "enforce"), Store(restore=False)
    demo.take_up(breaker)
    for at, fits in ((3, True), (4, False)):
        breaker.step(pool(at, fits, "cpu0"))
        demo.save(breaker)
    demo.close()
    state = read_state()
    assert state is not None
    assert {name: each.memory.state for name, each in state.targets.items()} == {
        "gpu0": "isolated", "cpu0": "open",
    }  # fmt: skip
    watch(pool(5, True), pool(6, True, "cpu0"))
    state = read_state()
    assert state is not None
    assert {name: each.memory.state for name, each in state.targets.items()} == {
        "gpu0": "isolated", "cpu0": "closed",
    }  # fmt: skip


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
