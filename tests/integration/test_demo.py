"""The main job on real tensors: a worker process, watched, tripped, recovered, replayed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="needs the extra 'torch'")

from mmctl.engine import recording
from mmctl.engine.breaker.breaker import DECISIONS

pytestmark = pytest.mark.timeout(400)
Record = dict[str, Any]


def watch(*arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "mmctl", "breaker", "watch", *arguments]
    return subprocess.Popen(
        [*command, "-o", "ndjson", "--all"], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True,
    )  # fmt: skip


def read(process: subprocess.Popen[str], until: Callable[[list[Record]], bool]) -> list[Record]:
    """Events and requests up to and with the one that satisfies ``until``, or to the end."""
    assert process.stdout is not None
    seen: list[Record] = []
    for line in process.stdout:
        record = json.loads(line)
        if record["type"] in ("event", "request"):
            seen.append(record)
            if until(seen):
                break
    return seen


def end(process: subprocess.Popen[str]) -> int:
    """Interrupt, and the exit code."""
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    return process.returncode


def names(records: list[Record]) -> list[str]:
    return [record["what"] for record in records if record["type"] == "event"]


def in_order(wanted: list[str], found: list[str]) -> bool:
    rest: Iterator[str] = iter(found)
    return all(name in rest for name in wanted)


@pytest.mark.parametrize("scenario", ["burst", "fragmentation"])
def test_off_ends_out_of_memory_and_observe_says_so_before(scenario: str) -> None:
    off, observe = watch(f"demo:{scenario}", "--mode", "off"), watch(f"demo:{scenario}")
    with ThreadPoolExecutor() as readers:
        without, seen = readers.map(lambda process: read(process, lambda _: False), (off, observe))
    assert off.wait(60) == 3 and names(without)[-1] == "oom" and "trip" not in names(without)
    assert observe.wait(60) == 3
    trip = next(r for r in seen if r["type"] == "event" and r["what"] == "trip")
    oom = seen[-1]
    assert trip["mode"] == "observe" and trip["rule"] == "fits" and trip["evidence"]["inputs"]
    assert oom["what"] == "oom" and oom["ts_ns"] - trip["ts_ns"] >= 100_000_000
    same = ("step", "need_bytes", "free_bytes", "largest_free_bytes", "device_free_bytes", "batch")
    assert [oom["evidence"][key] for key in same] == [without[-1]["evidence"][key] for key in same]


def test_a_reader_that_hangs_holds_no_trip(clean_home: Path) -> None:
    process = watch("demo:burst", "--mode", "enforce")  # nobody reads what it prints
    audit = clean_home / "state" / "mmctl" / "breaker" / "audit.ndjson"
    done: list[str] = []
    until = time.monotonic() + 240
    while not {"trip", "respond", "admit"} <= set(done) and time.monotonic() < until:
        time.sleep(0.5)
        lines = audit.read_bytes().splitlines() if audit.exists() else []
        done = [json.loads(line)["what"] for line in lines]
    assert in_order(["trip", "respond", "verify", "admit"], done)
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 130  # it does not wait for the reader either
    process.communicate()


@pytest.mark.parametrize("scenario", ["burst", "fragmentation"])
def test_enforce_recovers_and_its_recording_replays(scenario: str, tmp_path: Path) -> None:
    path = tmp_path / "run.ndjson.zst"
    process = watch(f"demo:{scenario}", "--mode", "enforce", "--record", str(path))

    def served_again(seen: list[Record]) -> bool:
        closed = [i for i, record in enumerate(seen) if record.get("what") == "close"]
        return bool(closed) and any(r.get("state") == "completed" for r in seen[closed[0] :])

    seen = read(process, served_again)
    assert end(process) in (3, 130)
    assert in_order(["trip", "respond", "verify", "half_open", "close"], names(seen))
    assert "oom" not in names(seen) and served_again(seen)
    respond = next(record for record in seen if record.get("what") == "respond")
    assert respond["evidence"]["fits"] and len(respond["evidence"]["steps"]) >= 2
    verify = next(record for record in seen if record.get("what") == "verify")
    assert verify["evidence"]["verdict"] == "consistent" and len(verify["evidence"]["checks"]) > 10
    recorded = [
        (record.ts_ns, record.what, record.device, record.state, record.rule, record.evidence)
        for record in recording.read(path)
        if type(record).__name__ == "Event" and record.what in DECISIONS - {"breaker"}
    ]
    again = subprocess.run(
        [sys.executable, "-m", "mmctl", "breaker", "replay", str(path), "-o", "ndjson"],
        capture_output=True, text=True,
    )  # fmt: skip
    replayed = [
        tuple(row[key] for key in ("ts_ns", "what", "device", "state", "rule", "evidence"))
        for row in map(json.loads, again.stdout.splitlines())
    ]
    assert json.loads(json.dumps(recorded)) == json.loads(json.dumps(replayed))


def test_calm_trips_nothing() -> None:
    process = watch("demo:calm", "--mode", "enforce", "--duration", "30s")
    seen = read(process, lambda _: False)
    assert process.wait(60) == 0
    assert any(record.get("state") == "completed" for record in seen)
    assert not {"trip", "oom", "respond"} & set(names(seen))


def test_a_worker_that_is_killed_is_reported_and_nothing_is_left() -> None:
    process = watch("demo:calm")
    seen = read(process, lambda records: records[-1].get("what") == "agent")
    pid = seen[-1]["evidence"]["pid"]
    os.kill(pid, signal.SIGKILL)
    rest = read(process, lambda _: False)
    assert rest[-1]["what"] == "fault" and rest[-1]["evidence"]["exit_code"] == -signal.SIGKILL
    assert process.wait(30) == 1
    assert process.stderr is not None and "worker died" in process.stderr.read()


def test_mmctl_killed_takes_its_worker_along() -> None:
    process = watch("demo:calm")
    seen = read(process, lambda records: records[-1].get("what") == "agent")
    process.kill()
    process.wait()
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        try:
            os.kill(seen[-1]["evidence"]["pid"], 0)
        except ProcessLookupError:
            return
        time.sleep(0.1)
    pytest.fail("the worker outlived its mmctl")
