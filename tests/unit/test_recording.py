from __future__ import annotations

import os
import signal
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from mmctl.engine import recording
from mmctl.engine.errors import MmctlError, Remark
from mmctl.engine.records import Device, Event, decode, encode

WRITE_FOR_EVER = """
import sys, time
from pathlib import Path
from mmctl.engine import recording
from mmctl.engine.records import Event
with recording.Writer(Path(sys.argv[1]), recording.header("n", "default")) as writer:
    for i in range(10**9):
        writer.write(Event(ts_ns=i, what="trip", evidence={"i": i}))
        print(i, flush=True)
"""


@pytest.mark.parametrize("name", ["run.ndjson", "run.ndjson.zst"])
def test_round_trip(tmp_path: Path, name: str) -> None:
    records = [Event(ts_ns=i, node="a", what="trip", evidence={"v": i / 3}) for i in range(50)]
    with recording.Writer(tmp_path / name, recording.header("a", "default")) as writer:
        for record in records:
            writer.write(record)
    head, *rest = recording.read(tmp_path / name)
    assert head.node == "a" and rest == records


@pytest.mark.parametrize("name", ["run.ndjson", "run.ndjson.zst"])
def test_survives_kill_9(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    child = subprocess.Popen(
        [sys.executable, "-c", WRITE_FOR_EVER, str(path)], stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None
    for _ in range(200):
        last = int(child.stdout.readline())
    os.kill(child.pid, signal.SIGKILL)
    child.communicate()
    _, *events = recording.read(path)
    assert [event.ts_ns for event in events] == list(range(len(events)))
    assert len(events) > last


@pytest.mark.parametrize("name", ["run.ndjson", "run.ndjson.zst"])
def test_cut_anywhere_loses_at_most_the_last_line(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    ends = []
    with recording.Writer(path, recording.header("a", "default")) as writer:
        for i in range(20):
            ends.append(path.stat().st_size)
            writer.write(Event(ts_ns=i, what="trip"))
    whole = path.read_bytes()
    for cut in range(ends[0], ends[-1]):
        path.write_bytes(whole[:cut])
        _, *events = recording.read(path)
        complete = sum(end <= cut for end in ends) - 1
        assert complete <= len(events) <= complete + 1


@pytest.mark.parametrize("name", ["run.ndjson", "run.ndjson.zst"])
def test_a_cut_inside_a_record_is_remarked_on_and_one_between_records_is_not(
    tmp_path: Path, name: str
) -> None:
    path = tmp_path / name
    ends = []
    with recording.Writer(path, recording.header("a", "default")) as writer:
        for i in range(5):
            writer.write(Event(ts_ns=i, what="trip"))
            ends.append(path.stat().st_size)
    whole = path.read_bytes()
    for cut in range(ends[0], ends[-1] + 1):
        path.write_bytes(whole[:cut])
        for look in (lambda: list(recording.read(path)), lambda: recording.index(path)):
            with warnings.catch_warnings(record=True) as found:
                warnings.simplefilter("always")
                look()
            # A line without its end alone is a whole record.
            cut_inside = cut not in ends and (name.endswith("zst") or cut + 1 not in ends)
            said = {str(one.message).partition(" ends in the middle of a record")[0]
                    for one in found if one.category is Remark}  # fmt: skip
            assert said == ({str(path)} if cut_inside else set()), cut


def test_broken_line_in_the_middle_is_named(tmp_path: Path) -> None:
    path = tmp_path / "run.ndjson"
    path.write_bytes(encode(recording.header("a", "p")) + b"\n{nonsense\n")
    with pytest.raises(MmctlError, match="line 2"):
        list(recording.read(path))


def test_unknown_fields_are_ignored_and_absent_is_null() -> None:
    record = decode('{"type":"device","ts_ns":1,"device":"gpu0","kind":"gpu","later":5}')
    assert isinstance(record, Device) and record.sm_ratio is None
    assert b'"sm_ratio":null' in encode(record)
