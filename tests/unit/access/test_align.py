"""Joining events of three sources, on made logs and on a recorded one."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from mmctl.engine.access import align
from mmctl.engine.errors import MmctlError, UsageError

S = 1_000_000_000
LOG = f"""Attaching 5 probes...
C {S} 0 0 0
K {S + 100} 7 71 1
S {S + 50} 0 71 40
N {S + 300} 7 71 5
Lost 3 events
K {2 * S + 5} 7 72 2
S {S + 250} 0 71 30
S {S + 280} 0 71 20
P {S + 1} 1 1 0
nonsense
"""


def joined(text: str = LOG, offset: int = 10 * S) -> align.Aligned:
    lines, lost = align.parse(text.splitlines())
    return align.join(lines, offset, lost)


def test_each_operation_carries_its_threads_waiting_since_the_one_before() -> None:
    found = joined()
    operations = [s for s in found.spans if s.kind != "scheduling"]
    assert [(s.kind, s.op_id, s.sched_delay_ns, s.pid) for s in operations] == [
        ("kernel", 0, 40, 7), ("npu_op", 0, 50, 7), ("kernel", 1, 0, 7),
    ]  # fmt: skip
    assert operations[0].ts_ns == 11 * S + 100  # on the epoch's clock
    waits = [s for s in found.spans if s.kind == "scheduling"]
    assert [(s.ts_ns - 11 * S, s.duration_ns) for s in waits] == [(10, 40), (220, 30), (260, 20)]
    assert [s.ts_ns for s in found.spans] == sorted(s.ts_ns for s in found.spans)


def test_late_records_count_in_their_own_window() -> None:
    first, second = joined().windows
    assert (first.launches, first.npu_ops, first.sched_delays, first.late) == (1, 1, 3, 2)
    assert (second.launches, second.late, second.sched_delay_p99_ns) == (1, 0, None)
    assert joined().lost == 3


def test_without_events_it_says_so() -> None:
    with pytest.raises(MmctlError, match="no event"):
        joined("Attaching 1 probe...\nC 5 0 0 0\n")


def test_probes_are_checked_before_they_become_a_program() -> None:
    assert align.parse_probe("libcudart.so.13", "f") == ("libcudart.so.13", "f")
    assert align.parse_probe("/x/lib.so:g", "f") == ("/x/lib.so", "g")
    for text in ("", ":f", "/x/lib.so:f }", '/x/"lib.so', "a b.so", "/x{1}.so:f"):
        with pytest.raises(UsageError):
            align.parse_probe(text, "f")


def test_the_program_probes_what_was_asked() -> None:
    text = align.program(align.Probe("/l.so", "go"), None, 42)
    assert "uprobe:/l.so:go /pid == 42/" in text and text.count("uprobe:") == 1


def test_the_clock_is_measured_against_boottime() -> None:
    offset = align.boottime_offset_ns()
    now = time.clock_gettime_ns(time.CLOCK_BOOTTIME) + offset
    assert abs(now - time.time_ns()) < 50_000_000


def test_a_log_of_another_script(data: Path) -> None:
    text = (data / "ebpf" / "three_source_bpftrace.txt").read_text()
    lines, _ = align.parse(text.splitlines())
    found = align.join(lines, 0)
    launches = [s for s in found.spans if s.kind == "kernel"]
    own = [int(line.split()[2]) for line in (data / "ebpf" / "app.out").read_text().splitlines()]
    assert len(launches) == len(own) == 1000
    late = [s.ts_ns - at for s, at in zip(launches, own, strict=True)]
    assert min(late) > 0 and sorted(late)[990] < 10_000
