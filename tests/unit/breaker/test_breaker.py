"""The breaker as a pure function: decisions, deadlines, groups, and the same again in a replay."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec
import pytest

from mmctl.engine import profiles
from mmctl.engine.breaker.breaker import Breaker
from mmctl.engine.breaker.loop import run
from mmctl.engine.breaker.state import Command
from mmctl.engine.records import AnyRecord, Device, Event, Fits, Pool, Request

SECOND = 10**9


def profile(**changes: object) -> profiles.Profile:
    loaded = profiles.load("default").profile
    rules = tuple(rule for rule in loaded.breaker.rules if rule.name == "fits")
    changes.setdefault("rules", rules)
    changes.setdefault("half_open_requests", 2)
    breaker = msgspec.structs.replace(loaded.breaker, **changes)
    return msgspec.structs.replace(loaded, breaker=breaker)


def pool(at: float, fits: bool, device: str = "gpu0") -> Pool:
    return Pool(
        ts_ns=round(at * SECOND), node="n", device=device, reserved_bytes=1, allocated_bytes=1,
        free_bytes=0, largest_free_bytes=0, releasable_bytes=0, fragmentation_ratio=0.0,
        fits=Fits(fits=fits, allocations=1, peak_bytes=1),
    )  # fmt: skip


def request(at: float, state: str = "completed") -> Request:
    return Request(ts_ns=round(at * SECOND), node="n", id=f"r{at}", state=state)


class Worker:
    """Answers commands as a worker would, by events in the stream."""

    def __init__(self, breaker: Breaker, **behaviour: object) -> None:
        self.breaker, self.behaviour = breaker, behaviour
        self.stream: list[AnyRecord] = []
        self.events: list[Event] = []
        self.commands: list[Command] = []

    def feed(self, *records: AnyRecord) -> None:
        for record in records:
            self.stream.append(record)
            outputs = self.breaker.step(record)
            self.events += [item for item in outputs if isinstance(item, Event)]
            for command in outputs:
                if isinstance(command, Command):
                    self.commands.append(command)
                    self.answer(command, record.ts_ns)  # type: ignore[union-attr]

    def answer(self, command: Command, now: int) -> None:
        evidence = {
            "respond": {"fits": True, "steps": []},
            "rebuild": {"ok": True},
            "verify": {"verdict": "pass", "checks": []},
        }.get(command.action)
        override = self.behaviour.get(command.action, {})
        if evidence is None or override == "silent":
            return
        self.feed(
            Event(
                ts_ns=now + SECOND // 10,
                node="n",
                what=command.action,
                device="gpu0",
                evidence={**evidence, **override, "id": command.id},  # type: ignore[dict-item]
            )
        )

    def whats(self) -> list[str]:
        return [f"{event.what}:{event.state}" for event in self.events]


def test_trip_respond_verify_half_open_close() -> None:
    worker = Worker(Breaker(profile(), "enforce"))
    worker.feed(pool(1, True), pool(2, False), pool(3, True), request(4), pool(4.5, True))
    worker.feed(request(5))
    assert worker.whats() == [
        "state:closed", "trip:open", "state:verifying", "half_open:half_open", "clear:half_open",
        "close:closed",
    ]  # fmt: skip
    trip = worker.events[1]
    assert trip.ts_ns == 2 * SECOND and trip.rule == "fits" and trip.mode == "enforce"
    assert trip.evidence["inputs"][0]["value"] is False
    assert [c.action for c in worker.commands] == ["respond", "verify", "admit", "admit"]
    assert worker.commands[-1].args == {"share": 1.0}


def test_observe_says_what_would_have_tripped_and_commands_nothing() -> None:
    worker = Worker(Breaker(profile(), "observe"))
    worker.feed(pool(1, True), pool(2, False), pool(2.5, False), pool(3, True), pool(4, False))
    assert worker.whats() == ["state:closed", "trip:closed", "clear:closed", "trip:closed"]
    assert worker.commands == [] and worker.events[1].mode == "observe"
    assert worker.events[1].evidence["would_respond"]


def test_off_evaluates_nothing() -> None:
    worker = Worker(Breaker(profile(), "off"))
    worker.feed(pool(1, True), pool(2, False))
    assert worker.events == []


def test_a_response_that_made_no_room_is_followed_by_a_rebuild() -> None:
    worker = Worker(Breaker(profile(), "enforce"), respond={"fits": False})
    worker.feed(pool(1, True), pool(2, False))
    assert [c.action for c in worker.commands] == ["respond", "rebuild", "verify", "admit"]


def test_wrong_answers_back_off_and_end_with_a_person() -> None:
    worker = Worker(Breaker(profile(), "enforce"), verify={"verdict": "fail"})
    worker.feed(pool(1, True), pool(2, False))
    for at in range(3, 60):
        worker.feed(pool(at, True))
    assert worker.whats()[-1] == "isolate:isolated"
    failed = [event for event in worker.events if "failures" in event.evidence]
    assert [event.evidence["failures"] for event in failed] == [1, 2, 3]
    waits = [event.evidence["backoff_s"] for event in failed[:2]]
    assert 0.75 * 5 <= waits[0] <= 1.25 * 5 and 0.75 * 10 <= waits[1] <= 1.25 * 10
    assert not any(event.what == "close" for event in worker.events)
    before = len(worker.commands)
    worker.feed(pool(100, False), pool(200, True))
    assert len(worker.commands) == before, "an isolated target is left alone"
    worker.behaviour["verify"] = {"verdict": "pass"}
    worker.feed(order(300, "reset"), request(301), pool(301.5, True), request(302))
    assert worker.breaker.machines["gpu0"].state == "closed"


def order(at: float, action: str, **more: object) -> Event:
    return Event(
        ts_ns=round(at * SECOND), node="n", what="order", device="gpu0",
        evidence={"action": action, "reason": "test", **more},
    )  # fmt: skip


def test_a_verification_by_hand_asks_and_changes_nothing() -> None:
    worker = Worker(Breaker(profile(), "enforce"))
    worker.feed(pool(1, True), order(2, "verify"), pool(2.5, True))
    assert [command.action for command in worker.commands] == ["verify"]
    assert worker.breaker.machines["gpu0"].state == "closed"
    worker = Worker(Breaker(profile(), "enforce"), respond="silent")
    worker.feed(pool(1, True), pool(2, False), order(2.5, "verify"))
    assert [command.action for command in worker.commands] == ["respond"], "a recovery goes first"
    assert (
        worker.events[-1].what == "refuse"
        and "gpu0 is open" in worker.events[-1].evidence["refused"]
    )


def greeting(at: float, pid: int) -> Event:
    return Event(
        ts_ns=round(at * SECOND), node="n", device="gpu0", what="agent",
        evidence={"pid": pid, "started_ns": 7, "instance": "i0"},
    )  # fmt: skip


def test_another_process_ends_the_recovery_of_the_old_one() -> None:
    worker = Worker(Breaker(profile(), "enforce"), respond="silent")
    worker.feed(greeting(0.5, 1), pool(1, True), pool(2, False), greeting(2.5, 1))
    assert worker.breaker.machines["gpu0"].state == "open", "the same one again changes nothing"
    worker.feed(greeting(3, 2), pool(3.5, True), pool(4, False))
    assert worker.whats()[-3:] == ["state:unknown", "state:closed", "trip:open"]
    identities = [command.id for command in worker.commands]
    assert [command.action for command in worker.commands] == ["respond", "respond"]
    assert len(set(identities)) == 2


@pytest.mark.parametrize(("action", "state"), [("hold", "isolated"), ("trip", "open")])
def test_what_a_person_ordered_holds_for_the_next_process(action: str, state: str) -> None:
    worker = Worker(Breaker(profile(), "enforce"))
    worker.feed(greeting(0.5, 1), pool(1, True), order(2, action, expires_ns=60 * SECOND))
    worker.feed(greeting(3, 2), pool(3.5, True))
    assert worker.breaker.machines["gpu0"].state == state
    assert [command.args for command in worker.commands] == [{"share": 0.0}] * 2, "held anew"
    worker.feed(pool(61, True))
    assert worker.commands[2].action == "verify"


@pytest.mark.parametrize("silent", ["respond", "verify"])
def test_silence_runs_into_the_deadline_at_its_own_time(silent: str) -> None:
    worker = Worker(Breaker(profile(verify_deadline_s=7.0), "enforce"), **{silent: "silent"})
    worker.feed(pool(1, True), pool(2, False), pool(50, True))
    event = next(event for event in worker.events if "failures" in event.evidence)
    late = 2 + 10 if silent == "respond" else 2.1 + 7
    assert event.ts_ns == pytest.approx(late * SECOND, abs=1)


def idle(worker: Worker, start: int, end: int) -> None:
    """Good telemetry every second, and nothing else."""
    worker.feed(*(pool(at, True) for at in range(start, end)))


def verifications(worker: Worker) -> int:
    return sum(command.action == "verify" for command in worker.commands)


def test_without_traffic_verifications_in_a_row_close() -> None:
    worker = Worker(Breaker(profile(half_open_deadline_s=30.0), "enforce"))
    worker.feed(pool(1, True), pool(2, False))
    idle(worker, 3, 200)
    assert worker.whats()[3:] == [
        "half_open:half_open", "clear:half_open",
        *["state:half_open"] * 3, "close:closed",
    ], "traffic is not taken away again"  # fmt: skip
    half_open, *_, closed = worker.events[3:]
    assert closed.evidence["verifications_passed"] == 3 == verifications(worker)
    assert closed.evidence["requests_completed"] == 0
    asked = [event.ts_ns for event in worker.events if "verified again" in str(event.evidence)]
    waits = [asked[0] - half_open.ts_ns, asked[1] - asked[0]]
    assert [round(wait / SECOND) for wait in waits] == [30, 61], "the second wait is longer"
    worker.feed(pool(200, False), pool(200.5, True))
    assert [e.what for e in worker.events].count("trip") == 2, "a new trip is a new recovery"


def test_requests_that_are_never_served_are_a_failed_recovery() -> None:
    worker = Worker(Breaker(profile(half_open_deadline_s=30.0), "enforce"))
    worker.feed(pool(1, True), pool(2, False))
    for at in range(3, 400, 2):
        worker.feed(pool(at, True), request(at + 0.5, "queued"))
        if worker.breaker.machines["gpu0"].state == "open":
            break
    failed = worker.events[-1]
    assert "requests came while half open and none was completed" in failed.evidence["reason"]
    assert failed.evidence["failures"] == 1 and verifications(worker) == 3
    assert not any(event.what == "close" for event in worker.events)


def test_one_request_served_closes_at_the_next_deadline() -> None:
    worker = Worker(Breaker(profile(half_open_deadline_s=30.0), "enforce"))
    worker.feed(pool(1, True), pool(2, False), pool(3, True), request(4))
    idle(worker, 5, 40)
    assert worker.whats()[-1] == "close:closed" and verifications(worker) == 1


def test_stale_telemetry_keeps_half_open_and_is_verified_less_and_less() -> None:
    worker = Worker(Breaker(profile(half_open_deadline_s=30.0, backoff_max_s=120.0), "enforce"))
    worker.feed(pool(1, True), pool(2, False), pool(3, True))
    for at in range(10, 7200, 5):
        worker.feed(Event(ts_ns=at * SECOND, node="n", what="notice"))
    assert worker.breaker.machines["gpu0"].state == "half_open"
    assert 7200 / 130 <= verifications(worker) <= 7200 / 120 + 4
    idle(worker, 7200, 7400)
    assert worker.whats()[-1] == "close:closed", "fresh again, and verified"


def test_a_rule_that_goes_on_opens_again_for_longer_each_time() -> None:
    """The rule tripped before and has not cleared, so it does not trip again."""
    hot = profiles.Rule(name="hot", when="temperature_c > 90", max_age_s=5.0)
    worker = Worker(Breaker(profile(rules=(hot,), half_open_deadline_s=30.0), "enforce"))
    for at in range(1, 400):
        worker.feed(
            Device(ts_ns=at * SECOND, node="n", device="gpu0", kind="gpu",
                   temperature_c=80 if at < 3 else 95)
        )  # fmt: skip
    again = [event.evidence for event in worker.events if "backoff_s" in event.evidence]
    assert all("a rule holds" in evidence["reason"] for evidence in again)
    assert {evidence["failures"] for evidence in again} == {0}
    waits = [evidence["backoff_s"] for evidence in again]
    assert len(waits) > 3 and waits == sorted(waits) and waits[3] > 5 * waits[0]


def test_a_gap_in_the_telemetry_is_not_a_row_of_failures() -> None:
    worker = Worker(Breaker(profile(), "enforce"))
    worker.feed(pool(1, True), pool(2, False), pool(3, True), pool(5000, True))
    assert worker.breaker.machines["gpu0"].memory.failures == 0


def test_trouble_while_half_open_opens_again() -> None:
    oom = Event(ts_ns=round(3.5 * SECOND), node="n", what="oom", device="gpu0")
    for trouble in (request(3.5, "failed"), pool(3.5, False), oom):
        worker = Worker(Breaker(profile(), "enforce"))
        worker.feed(pool(1, True), pool(2, False), pool(3, True), trouble)
        assert worker.breaker.machines["gpu0"].state == "open"
        assert worker.breaker.machines["gpu0"].memory.failures == 1


def test_stale_telemetry_is_unknown_and_closes_nothing() -> None:
    worker = Worker(Breaker(profile(), "enforce"))
    worker.feed(pool(1, True), request(20))
    assert worker.events[-1].state == "unknown" and worker.events[-1].ts_ns == 3 * SECOND
    worker.feed(pool(30, True), pool(31, False), pool(32, True), request(40), request(41))
    assert worker.breaker.machines["gpu0"].state == "half_open", "no fresh inputs, no closing"


def test_ranks_of_one_instance_trip_as_one_and_the_cap_refuses_the_rest() -> None:
    worker = Worker(Breaker(profile(), "enforce"), respond="silent")
    for rank in range(4):
        name = f"gpu{rank}"
        worker.feed(Device(ts_ns=0, node="n", device=name, kind="gpu", group=f"i{rank // 2}"))
        worker.feed(pool(1, True, name))
    worker.feed(pool(2, False, "gpu1"), pool(2.1, False, "gpu0"), pool(2.2, False, "gpu3"))
    trips = [event for event in worker.events if event.what == "trip"]
    assert [(t.device, t.evidence.get("also")) for t in trips] == [("gpu1", None), ("gpu0", True)]
    assert [c.device for c in worker.commands] == ["i0"]
    (refused,) = [event for event in worker.events if event.what == "refuse"]
    assert refused.device == "gpu3" and "at most 50%" in refused.evidence["refused"]
    named = [(e.what, e.device, e.evidence["group"]) for e in worker.events]
    assert named == [
        ("state", "gpu0", "i0"), ("state", "gpu2", "i1"), ("trip", "gpu1", "i0"),
        ("trip", "gpu0", "i0"), ("refuse", "gpu3", "i1"),
    ], "an event names a device, and its group beside"  # fmt: skip


def test_hold_is_by_hand_and_expires_into_a_verification() -> None:
    worker = Worker(Breaker(profile(), "enforce"))
    worker.feed(pool(1, True), order(2, "hold", expires_ns=10 * SECOND), pool(3, False))
    assert worker.breaker.machines["gpu0"].state == "isolated"
    worker.feed(pool(11, True))
    assert worker.breaker.machines["gpu0"].state == "half_open"


def test_a_replay_decides_the_same_at_the_same_times() -> None:
    worker = Worker(Breaker(profile(), "enforce"), verify={"verdict": "fail"})
    worker.feed(pool(1, True), pool(2, False))
    for at in range(3, 60):
        worker.feed(pool(at, True), request(at + 0.5))
    recorded = sorted([*worker.stream, *worker.events], key=lambda r: r.ts_ns)  # type: ignore[union-attr]
    again = [
        item
        for item in run(recorded, profile(), "enforce")
        if isinstance(item, Event) and item.what in ("trip", "state", "isolate", "clear")
    ]
    assert decisions(again) == decisions(worker.events)


def decisions(events: Iterable[Event]) -> list[tuple[int, str, str | None]]:
    return [(event.ts_ns, event.what, event.state) for event in events]


def test_a_target_that_is_only_observed_says_nothing_of_its_state() -> None:
    watched = profiles.Rule(name="slow", when="request_latency_s > 1s", max_age_s=5.0)
    for mode in ("inherit", "observe"):
        breaker = Breaker(profile(rules=(msgspec.structs.replace(watched, mode=mode),)), "enforce")
        outputs = [
            item
            for at, latency in ((1, 0.5), (2, 2.0), (3, 0.5), (20, 0.5))
            for item in breaker.step(
                msgspec.structs.replace(request(at), stages={"e2e_s": latency})
            )
        ]
        whats = [item.what for item in outputs if isinstance(item, Event)]
        assert "trip" in whats
        assert ("state" in whats) is (mode == "inherit")


def test_attention_that_spreads_over_heads_asks_for_the_light_branch() -> None:
    rules = tuple(
        rule
        for rule in profiles.load("default").profile.breaker.rules
        if rule.name == "entropy_deviation"
    )
    breaker = Breaker(profile(rules=rules), "enforce")

    def look(at: int, deviation: float) -> list[Event | Command]:
        evidence = {"entropy_ratio": 0.8, "entropy_std": deviation}
        return breaker.step(
            Event(ts_ns=at * SECOND, node="n", device="gpu0", what="entropy", evidence=evidence)
        )

    steady = [output for at in range(1, 40) for output in look(at, 0.10 + 0.02 * (at % 2))]
    assert not any(isinstance(output, Command) for output in steady)
    asked = [output for at in range(40, 44) for output in look(at, 0.30)]
    command = next(output for output in asked if isinstance(output, Command))
    assert command.action == "respond" and command.args["order"] == ["light_vision"]


def test_a_trip_says_what_the_next_batch_lacks() -> None:
    fits = Fits(
        fits=False, allocations=3, peak_bytes=1, need_bytes=72 << 20, cause="capacity", batch="r17"
    )
    tight = msgspec.structs.replace(
        pool(1, False), fits=fits, free_bytes=66 << 20, largest_free_bytes=20 << 20
    )
    for device_free, device in ((None, ""), (8 << 20, " and 8.0 MiB on the device")):
        worker = Worker(Breaker(profile(), "observe"))
        worker.feed(msgspec.structs.replace(tight, device_free_bytes=device_free), pool(2, True))
        trip, clear = (e for e in worker.events if e.what in ("trip", "clear"))
        assert trip.evidence["reason"] == (
            "r17 does not fit: its allocation 4 needs 72.0 MiB; free now are 66.0 MiB in the pool "
            f"(largest block 20.0 MiB){device} (capacity)"
        )
        assert trip.evidence["lack"]["need_bytes"] == 72 << 20
        assert clear.evidence["reason"] == "fits is true"


def test_bytes_are_told_as_people_read_them() -> None:
    rules = tuple(
        rule for rule in profiles.load("default").profile.breaker.rules if rule.name == "headroom"
    )
    worker = Worker(Breaker(profile(rules=rules), "observe"))
    short = msgspec.structs.replace(pool(1, True), fits=None, headroom_bytes=-132 << 20)
    worker.feed(short)
    reason = next(event for event in worker.events if event.what == "trip").evidence["reason"]
    assert reason == "known(fits) is false and headroom_bytes < 0 B is true at -132 MiB"
