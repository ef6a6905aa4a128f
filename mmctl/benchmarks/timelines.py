"""What reading a profiler trace costs: this program and HTA on one file, in one run."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from mmctl.engine.errors import MmctlError
from mmctl.engine.records import SCHEMA

_HTA = """
import sys, logging, warnings
warnings.filterwarnings("ignore"); logging.disable(logging.CRITICAL)
from hta.trace_analysis import TraceAnalysis
t = TraceAnalysis(trace_files={0: sys.argv[1]}, trace_dir=".")
idle = t.get_temporal_breakdown(visualize=False)
overlap = t.get_comm_comp_overlap(visualize=False)
print(float(idle["idle_time(us)"][0]), float(overlap["comp_comm_overlap_pctg"][0]))
"""


def write_trace(path: Path, events: int) -> int:
    """A trace of a training job in the profiler's own layout; the number of events written.

    Per step: operators, their launches, flow arrows and kernels on two streams, every tenth
    kernel a collective that overlaps computation.
    """
    written = 0
    with open(path, "w") as out:
        out.write('{\n  "schemaVersion": 1,\n  "distributedInfo": {"rank": 0, "world_size": 8},\n')
        out.write('  "traceEvents": [\n')
        at, step, correlation = 1_700_000_000_000_000, 0, 1
        while written < events - 8:
            if written % 50_000 < 8:
                out.write(_event("user_annotation", f"ProfilerStep#{step}", at, 75_000, 900, 1, ""))
                step += 1
                written += 1
            name = f"aten::op_{correlation % 97}"
            args = f'"External id": {correlation}, "Ev Idx": {correlation}'
            out.write(_event("cpu_op", name, at, 9, 900, 1, args))
            link = f'"External id": {correlation}, "correlation": {correlation}'
            out.write(_event("cuda_runtime", "cudaLaunchKernel", at + 2, 5, 900, 1, link))
            arrow = f'"id": {correlation}, "pid": 900, "tid": 1, "ts": {at + 2}, "cat": "ac2g"'
            out.write(f'  {{"ph": "s", {arrow}, "name": "ac2g"}},\n')
            out.write(f'  {{"ph": "f", {arrow}, "name": "ac2g", "bp": "e"}},\n')
            stream = 20 if correlation % 10 == 0 else 7
            kernel = (
                "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
                if stream == 20
                else f"void cutlass::Kernel<cutlass_80_tensorop_gemm_{correlation % 31}>(Params)"
            )
            more = (
                f'{link}, "device": 0, "context": 1, "stream": {stream}, "grid": [64, 1, 1], '
                '"block": [128, 1, 1], "registers per thread": 90, "shared memory": 49152'
            )
            length = 60 if stream == 20 else 7
            out.write(_event("kernel", kernel, at + 20, length, 0, stream, more))
            written += 5
            correlation += 1
            at += 11
        out.write(_event("user_annotation", f"ProfilerStep#{step}", at, 10, 900, 1, "", end="\n"))
        out.write("  ]\n}\n")
    return written + 1


def _event(
    cat: str, name: str, ts: int, dur: int, pid: int, tid: int, args: str, end: str = ",\n"
) -> str:
    return (
        f'  {{\n    "ph": "X", "cat": "{cat}", "name": "{name}", "pid": {pid}, "tid": {tid},\n'
        f'    "ts": {ts}, "dur": {dur},\n    "args": {{\n      {args}\n    }}\n  }}{end}'
    )


def compare(hta_python: str, events: int = 1_000_000) -> dict[str, Any]:
    """CPU time and peak memory of both on a trace of ``events`` events.

    ``hta_python`` is the interpreter of an environment that holds HolisticTraceAnalysis.
    Raises MmctlError when either fails.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        written = write_trace(path, events)
        ours = _measure(
            [sys.executable, "-m", "mmctl", "probe", "kernels", str(path), "-o", "json"]
        )
        theirs = _measure([hta_python, "-c", _HTA, str(path)])
    rank = _document(ours["output"])
    idle_us, overlap = (float(word) for word in theirs.pop("output").split()[-2:])
    ours.pop("output")
    return {
        "schema": SCHEMA,
        "basis": "measured",
        "events": written,
        "mmctl": ours,
        "hta": theirs,
        "cpu_factor": theirs["cpu_s"] / ours["cpu_s"],
        "memory_factor": theirs["peak_bytes"] / ours["peak_bytes"],
        "overlap_error": abs(100 * rank["overlap_ratio"] - overlap) / 100,
        "idle_error_s": abs(rank["idle_s"] - idle_us / 1e6),
    }


def _document(output: str) -> dict[str, Any]:
    import msgspec

    rank: dict[str, Any] = msgspec.json.decode(output.encode())["ranks"][0]
    return rank


def _measure(command: list[str]) -> dict[str, Any]:
    """CPU seconds, peak bytes and output of a child process."""
    with tempfile.TemporaryFile() as out:
        child = subprocess.Popen(command, stdout=out, stderr=subprocess.DEVNULL)
        _, status, usage = os.wait4(child.pid, 0)
        child.returncode = os.waitstatus_to_exitcode(status)
        out.seek(0)
        output = out.read().decode()
    if child.returncode not in (0, 3):
        raise MmctlError(f"'{command[0]} …' ended with code {child.returncode}")
    return {
        "cpu_s": usage.ru_utime + usage.ru_stime,
        "peak_bytes": usage.ru_maxrss * 1024,
        "output": output,
    }
