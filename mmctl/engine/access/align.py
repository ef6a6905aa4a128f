"""Kernel launches, NPU submissions and scheduling delays on one clock, by eBPF.

bpftrace writes a line per event with ``nsecs``, which is CLOCK_BOOTTIME; what to add for the
epoch is measured against the same clock. Lines of different processors arrive out of order and
are put in order of their own time. The scheduling delay of an operation is the time its thread
waited for a processor since the thread's operation before.
"""

from __future__ import annotations

import math
import re
import time
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec

from mmctl.engine.errors import MmctlError, UsageError
from mmctl.engine.records import Span

LAUNCH, NPU = "cudaLaunchKernel", "aclrtLaunchKernel"
WINDOW_NS = 1_000_000_000


class Probe(NamedTuple):
    """A function of a library to watch."""

    library: str
    symbol: str


class Line(NamedTuple):
    """One event as bpftrace wrote it: K launch, N submission, S scheduling, P calibration."""

    kind: str
    ns: int
    pid: int
    tid: int
    value: int


class Window(msgspec.Struct, frozen=True, kw_only=True):
    """A second of event time; ``late`` of its records came after one of a later window."""

    ts_ns: int
    launches: int
    npu_ops: int
    sched_delays: int
    sched_delay_p99_ns: int | None
    late: int


class Aligned(msgspec.Struct, frozen=True, kw_only=True):
    """Everything on one clock: spans in order of time, and windows over them."""

    spans: list[Span]
    windows: list[Window]
    lost: int


def parse_probe(text: str, default_symbol: str) -> Probe:
    """``LIBRARY:SYMBOL`` or a library alone, watched at its usual symbol."""
    library, _, symbol = text.rpartition(":") if ":" in text else (text, "", default_symbol)
    if not library or not re.fullmatch(r"[\w.$@]+", symbol):
        raise UsageError(f"'{text}' is not LIBRARY or LIBRARY:SYMBOL")
    if re.search(r"[\s\"'{}:]", library):
        raise UsageError(f"'{library}' cannot be the path of a library to probe")
    return Probe(library, symbol)


def program(
    launch: Probe | None, npu: Probe | None, pid: int | None = None,
    calibrate: tuple[str, str, int] | None = None,
) -> str:  # fmt: skip
    """The bpftrace program; ``calibrate`` is (library, symbol, pid) of a function to time."""
    condition = f" /pid == {pid}/" if pid is not None else ""
    parts = ['BEGIN { printf("C %llu 0 0 0\\n", nsecs); }']
    for kind, probe in (("K", launch), ("N", npu)):
        if probe is not None:
            parts.append(
                f"uprobe:{probe.library}:{probe.symbol}{condition} "
                f'{{ printf("{kind} %llu %d %d %llu\\n", nsecs, pid, tid, arg0); @hot[tid] = 1; }}'
            )
    parts.append(
        "tracepoint:sched:sched_wakeup, tracepoint:sched:sched_wakeup_new "
        "{ @ready[args->pid] = nsecs; }"
    )
    parts.append(
        "tracepoint:sched:sched_switch {\n"
        "  if (args->prev_state == 0) { @ready[args->prev_pid] = nsecs; }\n"
        "  $since = @ready[args->next_pid];\n"
        "  if ($since != 0) {\n"
        "    if (@hot[args->next_pid]) {\n"
        '      printf("S %llu 0 %d %llu\\n", nsecs, args->next_pid, nsecs - $since);\n'
        "    }\n"
        "    delete(@ready[args->next_pid]);\n"
        "  }\n"
        "}"
    )
    if calibrate is not None:
        library, symbol, caller = calibrate
        parts.append(
            f"uprobe:{library}:{symbol} /pid == {caller}/ "
            '{ printf("P %llu %d %d 0\\n", nsecs, pid, tid); }'
        )
    parts.append("END { clear(@ready); clear(@hot); }")
    return "\n".join(parts)


_LINE = re.compile(r"([CKNSP]) (\d+) (\d+) (\d+) (\d+)\s*\Z")
_OLD = re.compile(r"([KNS]) (\d+) (\d+) ([0-9a-f]+)(?: [0-9a-f]+)?\s*\Z")
_LOST = re.compile(r"Lost (\d+) events")


def parse(lines: Iterable[str]) -> tuple[list[Line], int]:
    """Events of a log, in the order written, and how many bpftrace says it lost.

    Both the lines of ``program`` and those of ``K ns tid hex``, ``N ns tid id`` and
    ``S ns tid delay`` scripts are read; anything else is skipped.
    """
    found: list[Line] = []
    lost = 0
    for text in lines:
        if match := _LINE.match(text):
            found.append(Line(match[1], *(int(match[i]) for i in range(2, 6))))
        elif match := _OLD.match(text):
            base = 16 if match[1] == "K" else 10
            try:
                value = int(match[4], base)
            except ValueError:
                continue
            found.append(Line(match[1], int(match[2]), 0, int(match[3]), value))
        elif match := _LOST.search(text):
            lost += int(match[1])
    return found, lost


def join(lines: list[Line], offset_ns: int, lost: int = 0, node: str = "") -> Aligned:
    """Spans on the epoch's clock (``offset_ns`` added), and windows of event time.

    Launches and submissions are numbered in order of time; each carries its thread's waiting
    since its operation before. Raises MmctlError when there is no event at all.
    """
    events = [line for line in lines if line.kind in "KNS"]
    if not events:
        raise MmctlError("no event was seen: did the program call the probed functions?")
    late = _late(events, offset_ns)
    spans: list[Span] = []
    waited: dict[int, int] = defaultdict(int)
    numbers = {"K": 0, "N": 0}
    for line in sorted(events, key=lambda e: e.ns):
        at = line.ns + offset_ns
        if line.kind == "S":
            waited[line.tid] += line.value
            spans.append(_span(at - line.value, "cpu0", "scheduling", line, line.value, None, node))
            continue
        kind: Literal["kernel", "npu_op"] = "kernel" if line.kind == "K" else "npu_op"
        device = "gpu0" if line.kind == "K" else "npu0"
        delay = waited.pop(line.tid, 0)
        spans.append(_span(at, device, kind, line, 0, numbers[line.kind], node, delay))
        numbers[line.kind] += 1
    spans.sort(key=lambda span: span.ts_ns)
    return Aligned(spans=spans, windows=_windows(events, offset_ns, late), lost=lost)


def _span(
    at: int, device: str, kind: Literal["kernel", "npu_op", "scheduling"], line: Line,
    duration: int, op_id: int | None, node: str, delay: int | None = None,
) -> Span:  # fmt: skip
    name = {"kernel": "launch", "npu_op": "submit", "scheduling": "wait for a processor"}[kind]
    return Span(
        ts_ns=at, node=node, device=device, stream=str(line.tid), name=name, kind=kind,
        duration_ns=duration, op_id=op_id, pid=line.pid or line.tid,
        sched_delay_ns=line.value if kind == "scheduling" else delay,
    )  # fmt: skip


def _late(events: list[Line], offset_ns: int) -> dict[int, int]:
    """Records per window that came after a record of a later window had come."""
    late: dict[int, int] = defaultdict(int)
    newest = -1
    for line in events:
        window = (line.ns + offset_ns) // WINDOW_NS
        if window < newest:
            late[window] += 1
        newest = max(newest, window)
    return late


def _windows(events: list[Line], offset_ns: int, late: dict[int, int]) -> list[Window]:
    members: dict[int, list[Line]] = defaultdict(list)
    for line in events:
        members[(line.ns + offset_ns) // WINDOW_NS].append(line)
    found = []
    for window, inside in sorted(members.items()):
        delays = sorted(line.value for line in inside if line.kind == "S")
        found.append(
            Window(
                ts_ns=window * WINDOW_NS,
                launches=sum(line.kind == "K" for line in inside),
                npu_ops=sum(line.kind == "N" for line in inside),
                sched_delays=len(delays),
                sched_delay_p99_ns=delays[math.ceil(0.99 * len(delays)) - 1] if delays else None,
                late=late.get(window, 0),
            )
        )
    return found


def boottime_offset_ns() -> int:
    """What added to CLOCK_BOOTTIME gives the epoch: the tightest of several readings."""
    best = None
    for _ in range(20):
        before = time.clock_gettime_ns(time.CLOCK_BOOTTIME)
        now = time.time_ns()
        after = time.clock_gettime_ns(time.CLOCK_BOOTTIME)
        if best is None or after - before < best[0]:
            best = (after - before, now - (before + after) // 2)
    assert best is not None
    return best[1]


def missing() -> str | None:
    """What keeps this process from probing the kernel, in words; None when nothing does."""
    import shutil

    if shutil.which("bpftrace") is None:
        return "bpftrace is not installed"
    status = Path("/proc/self/status").read_text()
    found = re.search(r"^CapEff:\s*([0-9a-f]+)", status, re.MULTILINE)
    held = int(found[1], 16) if found else 0
    sys_admin, perfmon, bpf = 1 << 21, 1 << 38, 1 << 39
    if not held & sys_admin and not (held & perfmon and held & bpf):
        return "this process has neither CAP_SYS_ADMIN nor CAP_BPF and CAP_PERFMON: run it as root"
    return None
