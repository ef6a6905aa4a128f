"""Another profile or mode while the breaker runs: what stays, what begins anew, the same again."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest

from mmctl.engine import profiles
from mmctl.engine.breaker import reload
from mmctl.engine.breaker.breaker import Breaker
from mmctl.engine.breaker.loop import run, without_changes
from mmctl.engine.breaker.state import Command
from mmctl.engine.errors import UsageError
from mmctl.engine.recording import header
from mmctl.engine.records import AnyRecord, Device, Event, decode, encode

SECOND = 10**9
BUSY = profiles.Rule(name="busy", when="mean(sm_ratio, 10s) > 0.5", min_samples=3)
HOT = profiles.Rule(name="hot", when="temperature_c > 80", respond=("hold_admission",))
WARM = msgspec.structs.replace(HOT, when="temperature_c > 60")


def profile(*rules: profiles.Rule, **changes: object) -> profiles.Profile:
    loaded = profiles.load("default").profile
    breaker = msgspec.structs.replace(loaded.breaker, rules=rules, **changes)
    return msgspec.structs.replace(loaded, breaker=breaker)


def reading(at: float, **fields: object) -> Device:
    return Device(ts_ns=round(at * SECOND), node="n", device="gpu0", kind="gpu", **fields)


def change(before: profiles.Profile, after: profiles.Profile, at: float, mode: str) -> Event:
    loaded = profiles.Loaded("other", after, {}, {})
    return reload.reload_event(loaded, before, mode, round(at * SECOND), "n")  # type: ignore[arg-type]


def feed(breaker: Breaker, *records: AnyRecord) -> tuple[list[Event], list[Command]]:
    out = [item for record in records for item in breaker.step(record)]
    events = [item for item in out if isinstance(item, Event)]
    return events, [item for item in out if isinstance(item, Command)]


def test_windows_of_the_same_rule_are_kept_and_a_changed_one_begins_anew() -> None:
    old, new = profile(BUSY, HOT), profile(BUSY, WARM)
    breaker = Breaker(old, "observe")
    feed(breaker, *(reading(at, sm_ratio=0.9, temperature_c=70.0) for at in (1, 2)))
    assert breaker.reload(new, 2 * SECOND) == []
    events, _ = feed(breaker, reading(3, sm_ratio=0.9, temperature_c=70.0))
    assert [(e.what, e.rule) for e in events] == [("trip", "busy"), ("trip", "hot")]
    assert events[0].evidence["inputs"][0]["samples"] == 3
    breaker.reload(profile(msgspec.structs.replace(BUSY, when="mean(sm_ratio, 9s) > 0.5")), 0)
    verdicts = breaker.live.verdicts(3 * SECOND)
    assert not verdicts, "a changed rule is bound by its next record"
    events, _ = feed(breaker, reading(4, sm_ratio=0.9), reading(5, sm_ratio=0.9))
    assert events == [] and breaker.live.verdicts(5 * SECOND)[0].truth is None


def test_an_alarm_of_the_same_rule_stays_and_one_of_a_removed_rule_ends() -> None:
    breaker = Breaker(profile(BUSY, HOT), "observe")
    feed(breaker, *(reading(at, sm_ratio=0.9, temperature_c=90.0) for at in (1, 2, 3)))
    out = breaker.reload(profile(BUSY), 4 * SECOND)
    (cleared,) = [item for item in out if isinstance(item, Event)]
    assert (cleared.what, cleared.rule) == ("clear", "hot")
    assert cleared.evidence["condition"] == "the rule was changed or removed"
    events, _ = feed(breaker, reading(5, sm_ratio=0.9, temperature_c=90.0))
    assert events == [], "busy has tripped already and still holds"


def test_states_holds_and_deadlines_stay() -> None:
    breaker = Breaker(profile(HOT), "enforce")
    feed(breaker, reading(1, temperature_c=90.0))
    before = msgspec.structs.replace(breaker.machines["gpu0"].memory)
    assert before.state == "open" and before.deadline_ns is not None
    breaker.reload(profile(HOT, BUSY, verify_deadline_s=1.0), 2 * SECOND)
    assert breaker.machines["gpu0"].memory == before
    answer = Event(ts_ns=2 * SECOND, node="n", what="respond", device="gpu0",
                   evidence={"id": before.waiting_for, "fits": True})  # fmt: skip
    (verifying,), _ = feed(breaker, answer)
    assert verifying.state == "verifying" and verifying.evidence["deadline_s"] == 1.0


def test_a_profile_with_a_bad_rule_changes_nothing() -> None:
    breaker = Breaker(profile(HOT), "observe")
    bad = msgspec.structs.replace(HOT, name="bad", when="temprature_c > 1")
    with pytest.raises(UsageError, match="temperature_c"):
        breaker.reload(profile(HOT, bad), 0)
    event = Event(ts_ns=1, what="reload", mode="enforce", evidence={"rules": [{"name": 3}]})
    (refused,), _ = feed(breaker, event)
    assert refused.what == "refuse" and "cannot be read" in refused.evidence["refused"]
    assert [rule.name for rule in breaker.live.rules] == ["hot"] and breaker.mode == "observe"


def test_what_was_only_observed_is_acted_on_once_the_mode_is_enforce() -> None:
    breaker = Breaker(profile(HOT), "observe")
    feed(breaker, reading(1, temperature_c=90.0))
    events, commands = feed(
        breaker, reload.mode_event("enforce", SECOND, "n"), reading(2, temperature_c=90.0)
    )
    assert [(e.what, e.mode) for e in events] == [("trip", "enforce")]
    assert [command.action for command in commands] == ["respond"]


def test_a_recovery_is_finished_in_observe_mode() -> None:
    breaker = Breaker(profile(HOT), "enforce")
    _, (respond,) = feed(breaker, reading(1, temperature_c=90.0))
    feed(breaker, reload.mode_event("observe", 2 * SECOND, "n"))
    answer = Event(ts_ns=2 * SECOND, node="n", what="respond", device="gpu0",
                   evidence={"id": respond.id, "fits": True})  # fmt: skip
    (verifying,), (verify,) = feed(breaker, answer)
    assert verifying.state == "verifying" and verify.action == "verify"
    passed = msgspec.structs.replace(answer, what="verify",
                                     evidence={"id": verify.id, "verdict": "pass"})  # fmt: skip
    (half,), (admit,) = feed(breaker, passed)
    assert half.state == "half_open" and 0 < admit.args["share"] < 1
    reset = Event(ts_ns=3 * SECOND, node="n", what="order", device="gpu0",
                  evidence={"action": "reset", "reason": "r"})  # fmt: skip
    (again,), _ = feed(breaker, reset)
    assert again.state == "verifying", "a person may end what an enforcing breaker began"


def test_off_lets_traffic_through_and_what_comes_after_verifies_first() -> None:
    breaker = Breaker(profile(HOT), "enforce")
    feed(breaker, reading(1, temperature_c=90.0))
    (event,), (admit,) = feed(breaker, reload.mode_event("off", 2 * SECOND, "n"))
    assert admit.args == {"share": 1.0} and event.state == "open"
    assert feed(breaker, reading(3, temperature_c=90.0)) == ([], [])
    events, commands = feed(
        breaker, reload.mode_event("enforce", 4 * SECOND, "n"), reading(5, temperature_c=20.0)
    )
    assert events[0].state == "verifying" and commands[0].action == "verify"


def session() -> list[AnyRecord]:
    """A recording in which the rules change, then the mode."""
    old, new = profile(HOT), profile(WARM, BUSY)
    records: list[AnyRecord] = [reading(at, temperature_c=70.0, sm_ratio=0.9) for at in (1, 2)]
    records.append(change(old, new, 2.5, "observe"))
    records += [reading(at, temperature_c=70.0, sm_ratio=0.9) for at in (3, 4)]
    records.append(reload.mode_event("enforce", 4 * SECOND, "n"))
    records += [reading(at, temperature_c=70.0, sm_ratio=0.9) for at in (5, 6)]
    return list(run(records, old, "observe"))


def decisions(records: list[AnyRecord]) -> list[tuple[object, ...]]:
    return [
        (e.ts_ns, e.what, e.rule, e.mode, e.state, e.evidence)
        for e in records
        if isinstance(e, Event) and e.what in ("trip", "clear", "state", "refuse")
    ]


def test_a_replay_changes_where_the_session_changed() -> None:
    recorded = session()
    tripped = [(e[1], e[2], e[3]) for e in decisions(recorded) if e[1] == "trip"]
    assert tripped == [
        ("trip", "hot", "observe"), ("trip", "hot", "enforce"), ("trip", "busy", "enforce"),
    ]  # fmt: skip
    begun = next(r for r in recorded if isinstance(r, Event) and r.what == "breaker")
    first = reload.with_policy(profile(), begun.evidence)
    again = list(run(recorded, first, begun.mode))
    assert decisions(again) == decisions(recorded)
    throughout = list(run(without_changes(recorded), first, "observe"))
    assert not [e for e in decisions(throughout) if e[1] == "trip"], "the old rules alone: cool"


def test_the_event_says_what_changed() -> None:
    old = profile(HOT, BUSY)
    event = change(old, profile(WARM, verify_deadline_s=3.0), 1, "observe")
    assert event.message == (
        "profile 'other': 1 changed (hot); 1 removed (busy); settings verify_deadline; "
        "0 rules kept"
    )  # fmt: skip


def test_a_file_is_read_again_when_it_changes(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(reload, "LOOK_S", 0.0)
    path = tmp_path / "mine.toml"
    path.write_text('[[breaker.rules]]\nname = "hot"\nwhen = "temperature_c > 80"\n')
    loaded = profiles.load(str(path))
    changes = reload.Changes(loaded, str(path))

    def events() -> list[Event]:
        return list(changes.events(loaded.profile, "observe", 1, "n"))

    assert events() == []
    path.write_text('[[breaker.rules]]\nname = "hot"\nwhen = "temperature_c > 9"\n')
    (event,) = events()
    assert event.state is None and event.evidence["changed"] == ["hot"]
    path.write_text('[[breaker.rules]]\nname = "hot"\nwhen = "temprature_c > 99"\n')
    (event,) = events()
    assert event.state == "refused" and "temperature_c" in (event.message or "")
    assert events() == [], "once"
    changes.use("no-such-profile")
    (event,) = events()
    assert event.state == "refused" and changes.name == str(path)
    changes.use("paper")
    changes.switch("enforce")
    event, mode = events()
    assert event.evidence["profile"] == "paper" and mode.mode == "enforce"


def test_a_running_watch_follows_its_profile(tmp_path: Path, clean_home) -> None:
    path, out = tmp_path / "mine.toml", tmp_path / "out.ndjson"
    rule = '[[breaker.rules]]\nname = "mine"\nwhen = "host.available_bytes {}"\n'
    path.write_text(rule.format("< 0"))
    with open(out, "wb") as file:
        watch = subprocess.Popen(
            [sys.executable, "-m", "mmctl", "breaker", "watch", "host:", "--profile", str(path),
             "-o", "ndjson"], stdout=file, stderr=subprocess.PIPE,
        )  # fmt: skip

    def wait(condition) -> list[Event]:
        for _ in range(400):
            text = out.read_bytes()
            whole = text[: text.rfind(b"\n") + 1]
            events = [decode(line) for line in whole.splitlines()]
            if found := [e for e in events if condition(e)]:
                return found  # type: ignore[return-value]
            assert watch.poll() is None, watch.stderr and watch.stderr.read()
            time.sleep(0.05)
        raise AssertionError(out.read_text())

    try:
        wait(lambda e: e.what == "breaker")
        path.write_text(rule.format("> nothing"))
        os.kill(watch.pid, signal.SIGHUP)
        (refused,) = wait(lambda e: e.what == "reload")
        assert refused.state == "refused" and refused.message.startswith("the old profile stays")
        path.write_text(rule.format("> 0"))  # found without a signal
        wait(lambda e: e.what == "reload" and e.state is None)
        assert wait(lambda e: e.what == "trip")[0].rule == "mine"
        watch.terminate()
        assert watch.wait(20) == 143
    finally:
        watch.kill()


def test_a_terminal_that_is_closed_ends_the_watch(tmp_path: Path, clean_home) -> None:
    out = tmp_path / "out"
    pid, terminal = pty.fork()
    if pid == 0:
        file = os.open(out, os.O_WRONLY | os.O_CREAT)
        os.dup2(file, 1)
        os.execv(sys.executable, [sys.executable, "-m", "mmctl", "breaker", "watch", "host:",
                                  "-o", "ndjson"])  # fmt: skip
    try:
        for _ in range(400):
            if out.exists() and out.stat().st_size:
                break
            time.sleep(0.05)
        assert out.stat().st_size, "the watch runs"
        os.kill(pid, signal.SIGHUP)
        time.sleep(0.5)
        assert os.waitpid(pid, os.WNOHANG) == (0, 0), "asked at its terminal, it reads again"
    finally:
        os.close(terminal)
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == 143


def test_a_recording_made_with_the_breaker_off_is_decided_in_observe_mode(mmctl, tmp_path):
    hot = [
        Device(ts_ns=n * 10**9, node="n", device="gpu0", kind="gpu", temperature_c=95.0)
        for n in range(1, 30)
    ]
    begin = Event(ts_ns=10**9, node="n", what="breaker", mode="off")
    path = tmp_path / "night.ndjson"
    path.write_bytes(b"\n".join(map(encode, [header("n", "default", 1), begin, *hot])) + b"\n")
    done = mmctl("breaker", "replay", str(path), "-o", "json")
    document = json.loads(done.stdout)
    assert (done.returncode, document["mode"]) == (3, "observe")
    assert "too_hot" in {one["rule"] for one in document["rules"] if one["trips"]}
    assert "recorded with the breaker off" in done.stderr
    off = mmctl("breaker", "replay", str(path), "--mode", "off", "-o", "json")
    assert (off.returncode, json.loads(off.stdout)["decisions"]) == (0, [])
