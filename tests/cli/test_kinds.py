"""A file given to the wrong command: the message says what it is and which command takes it."""

from __future__ import annotations

import gzip
import json
import sqlite3
from pathlib import Path

import pytest

from mmctl.benchmarks.recorder import Recorder, dump
from mmctl.engine.recording import Writer, header
from mmctl.engine.records import Event

MIB = 1 << 20


def _write(folder: Path) -> dict[str, Path]:
    """A file of each kind, under a name that says nothing."""
    made = {kind: folder / f"{kind}.bin" for kind in (
        "snapshot", "nsys", "trace", "packed", "recording", "ptx", "model", "profile", "message",
    )}  # fmt: skip
    recorder = Recorder(capacity=8 * MIB)
    recorder.malloc(MIB)
    dump(made["snapshot"], recorder.snapshot())
    with sqlite3.connect(made["nsys"]) as database:
        database.execute("create table t (a)")
    trace = json.dumps({"schemaVersion": 1, "deviceProperties": [], "traceEvents": []})
    made["trace"].write_text(trace)
    made["packed"].write_bytes(gzip.compress(trace.encode()))
    Writer(made["recording"], header("n", "default", 0)).close()
    made["ptx"].write_text(".version 8.0\n.target sm_90\n.address_size 64\n")
    made["model"].write_text(json.dumps({"architectures": ["X"], "model_type": "x"}))
    made["profile"].write_text('extends = "default"\n[breaker]\nmode = "observe"\n')
    made["message"].write_text("torch.OutOfMemoryError: Tried to allocate 2.00 GiB.\n")
    return made


@pytest.mark.parametrize(
    ("command", "kind", "told"),
    [
        ("breaker replay", "snapshot", "a memory snapshot: mmctl probe snapshot {}"),
        ("breaker watch", "snapshot", "a memory snapshot: mmctl probe snapshot {}"),
        ("breaker diagnose", "snapshot", "a memory snapshot: mmctl probe snapshot {}"),
        ("probe", "snapshot", "a memory snapshot: mmctl probe snapshot {}"),
        ("top --once", "snapshot", "a memory snapshot: mmctl probe snapshot {}"),
        ("breaker replay", "nsys", "an Nsight Systems export: mmctl probe kernels {}"),
        ("breaker replay", "trace", "a profiler's trace: mmctl probe kernels {}"),
        ("probe", "packed", "a profiler's trace: mmctl probe kernels {}"),
        ("probe snapshot", "recording", "a recording: mmctl breaker replay {}"),
        ("probe model", "recording", "a recording: mmctl breaker replay {}"),
        ("fingerprint trace", "ptx", "PTX: mmctl fingerprint instrument {} --out traced.ptx"),
        ("breaker replay", "model", "a model's configuration: mmctl probe model {}"),
        ("probe", "profile", "a profile: --profile {} with any command, or mmctl profile"),
        ("probe snapshot", "profile", "a profile: --profile {} with any command, or mmctl"),
        ("probe", "message", "a log with an out-of-memory message: mmctl probe snapshot {}"),
    ],
)
def test_the_command_that_takes_it_is_named(mmctl, tmp_path: Path, command, kind, told) -> None:
    path = str(_write(tmp_path)[kind])
    done = mmctl(*command.split(), path)
    assert done.returncode in (1, 4) and done.stderr.count("\n") == 1
    assert done.stderr.startswith(f"mmctl: error: {path} is {told.replace('{}', path)}")


def test_a_recording_that_quotes_a_message_is_no_log(mmctl, tmp_path: Path) -> None:
    """With its header and without, and on standard input; a log's message is read as before."""
    said = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."
    path = tmp_path / "night.ndjson"
    with Writer(path, header("n", "default", 0)) as writer:
        writer.write(Event(ts_ns=1, what="oom", message=said))
    found = mmctl("probe", "snapshot", str(path))
    assert (found.returncode, found.stdout) == (1, "")
    assert found.stderr.endswith(f"is a recording: mmctl breaker replay {path}\n")
    piped = mmctl("probe", "snapshot", "-", input=path.read_text())
    assert piped.stderr.startswith("mmctl: error: standard input holds records, not a log")
    path.write_text(path.read_text().split("\n", 1)[1])
    assert "holds records, not a log" in mmctl("probe", "snapshot", str(path)).stderr
    path.write_text(f"12:00 INFO serving\n12:01 {said}\n")
    found = mmctl("probe", "snapshot", str(path))
    assert found.returncode == 3 and "at line 2: cause " in found.stdout


def test_a_broken_file_of_the_right_kind_and_a_file_behind_an_option_keep_their_message(
    mmctl, tmp_path: Path
) -> None:
    made = _write(tmp_path)
    made["snapshot"].write_bytes(made["snapshot"].read_bytes()[:-20])
    cut = mmctl("probe", "snapshot", str(made["snapshot"]))
    assert cut.returncode == 1 and "is a memory snapshot" not in cut.stderr
    behind = mmctl("schedule", "simulate", "azure", "--rate", "1", "--plan", str(made["snapshot"]))
    assert behind.returncode == 1 and "is a memory snapshot" not in behind.stderr
