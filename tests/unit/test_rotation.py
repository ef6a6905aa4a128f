"""Always-on recordings: rotation, full disks, cuts anywhere."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from mmctl.engine import recording
from mmctl.engine.errors import MmctlError
from mmctl.engine.records import Event

HEAD = recording.header("n", "default", 0)


def event(number: int) -> Event:
    return Event(ts_ns=number, node="n", what="x", message="m" * 100)


def numbers(path: Path) -> list[int]:
    return [record.ts_ns for record in recording.read(path) if isinstance(record, Event)]


@pytest.mark.parametrize("name", ["r.ndjson", "r.ndjson.zst"])
def test_files_rotate_and_the_newest_are_kept(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    with recording.Rotating(path, HEAD, 4096, 3, print) as writer:
        for number in range(1000):
            writer.write(event(number))
    files = [path.with_name(f"{name}.2"), path.with_name(f"{name}.1"), path]
    assert sorted(tmp_path.iterdir()) == sorted(files)
    kept = [number for file in files for number in numbers(file)]
    assert kept == list(range(kept[0], 1000))
    assert all(file.stat().st_size < 8192 for file in files)


@pytest.mark.parametrize("name", ["r.ndjson", "r.ndjson.zst"])
def test_a_cut_anywhere_loses_at_most_its_last_line(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    sizes = []
    with recording.Writer(path, HEAD) as writer:
        for number in range(60):
            writer.write(event(number))
            sizes.append(writer.size_bytes)
    content = path.read_bytes()
    cut = tmp_path / "cut"
    chooser = random.Random(1)
    for end in [*sizes[::7], *(chooser.randrange(sizes[0], len(content)) for _ in range(60))]:
        cut.write_bytes(content[:end])
        written = sum(size <= end for size in sizes)
        assert numbers(cut) == list(range(written)), end


def test_a_disk_that_fills_up_costs_the_oldest_file_and_not_the_stream(tmp_path: Path) -> None:
    """On a small file system of its own, in a name space of its own."""
    if shutil.which("unshare") is None:
        pytest.skip("no unshare to mount a small disk with")
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = f"mount -t tmpfs -o size=128k none {disk}"
    as_user = [] if os.geteuid() == 0 else ["-Ur"]
    if subprocess.run(
        ["unshare", *as_user, "-m", "sh", "-c", mount], capture_output=True
    ).returncode:
        pytest.skip("name spaces are not allowed here")
    script = f"""
from pathlib import Path
from mmctl.engine import recording
from mmctl.engine.records import Event
path = Path({str(disk)!r}) / "r.ndjson"
with recording.Rotating(path, recording.header("n", "d", 0), 40000, 9, print) as writer:
    for number in range(3000):
        writer.write(Event(ts_ns=number, node="n", what="x", message="m" * 100))
age = lambda part: 0 if part == path else -int(part.suffix[1:])
parts = sorted(path.parent.iterdir(), key=age)
kept = [r.ts_ns for part in parts for r in recording.read(part) if isinstance(r, Event)]
assert kept == list(range(kept[0], 3000)), (kept[0], len(kept))
assert len(kept) > 300
"""
    program = tmp_path / "fill.py"
    program.write_text(script)
    done = subprocess.run(
        ["unshare", *as_user, "-m", "sh", "-c", f"{mount} && exec {sys.executable} {program}"],
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "the disk is full: removed" in done.stdout


def test_a_recording_that_cannot_begin_says_so(tmp_path: Path) -> None:
    with pytest.raises(MmctlError, match="cannot record"):
        recording.Rotating(tmp_path / "no" / "r", HEAD, 4096, 2, print)


def test_each_file_says_by_which_rules_and_in_which_mode_it_decided(tmp_path: Path) -> None:
    path = tmp_path / "r.ndjson"
    rules = {"rules": [], "settings": {}, "order": []}
    refused = Event(ts_ns=2, node="n", what="reload", state="refused", mode="off")
    with recording.Rotating(path, HEAD, 4096, 3, print) as writer:
        writer.write(Event(ts_ns=0, node="n", what="breaker", mode="observe", evidence=rules))
        writer.write(Event(ts_ns=1, node="n", what="mode", mode="enforce"))
        writer.write(refused)
        for number in range(3, 200):
            writer.write(event(number))
    _, begin, first = [*recording.read(path)][:3]
    assert isinstance(begin, Event) and isinstance(first, Event)
    assert (begin.what, begin.mode, begin.evidence) == ("breaker", "enforce", rules)
    assert begin.ts_ns == first.ts_ns  # no hole between it and what follows
