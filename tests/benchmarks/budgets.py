"""Every budget of the design beside what a user would compare with, in one run.

``python tests/benchmarks/budgets.py [--only NAME,…]`` prints a Markdown table. CPU times are of
whole processes, the least of some runs; a peer that is not installed (nvitop, gpustat, HTA) is left
out. Needs a C compiler; the dashboard's row needs half a minute.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import os
import platform
import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

ROOT = Path(__file__).parents[2]
MIB = 2**20
TIMER = (
    "import resource,subprocess,sys;"
    "code=subprocess.run(sys.argv[1:],stdout=subprocess.DEVNULL,stderr=subprocess.DEVNULL).returncode;"
    "u=resource.getrusage(resource.RUSAGE_CHILDREN);"
    "print(u.ru_utime+u.ru_stime,u.ru_maxrss*1024,code)"
)


class Row(NamedTuple):
    """A line of the table: what was done, its budget, what was measured here, and the peer."""

    what: str
    budget: str
    measured: str
    peer: str


def process(*command: str, runs: int = 5, env: dict[str, str] | None = None) -> tuple[float, int]:
    """Least CPU seconds and largest resident bytes of a command; NaN where it fails."""
    found = []
    for _ in range(runs):
        done = subprocess.run(
            [sys.executable, "-c", TIMER, *command],
            capture_output=True, text=True, check=True, cwd=ROOT, env=env,
        )  # fmt: skip
        cpu, peak, code = done.stdout.split()
        found.append((float(cpu) if code == "0" else float("nan"), int(peak)))
    return min(cpu for cpu, _ in found), max(peak for _, peak in found)


def ms(seconds: float) -> str:
    return f"{1000 * seconds:.0f} ms"


def python(*arguments: str) -> tuple[str, ...]:
    return (sys.executable, *arguments)


def start() -> Iterator[Row]:
    """The command line before it does anything."""
    bare, _ = process(*python("-c", "pass"))
    peers = [f"python {ms(bare)}"]
    peers += [
        f"{name} {ms(process(*python('-m', name, '--version'))[0])}"
        for name in ("nvitop", "gpustat")
        if find_spec(name)
    ]
    version, _ = process(*python("-m", "mmctl", "--version"))
    text, _ = process(*python("-m", "mmctl", "probe", "--help"))
    yield Row("`mmctl --version`", "≤ 60 ms CPU", ms(version), ", ".join(peers))
    yield Row("`mmctl probe --help`", "≤ 110 ms CPU", ms(text), ", ".join(peers))


def probe() -> Iterator[Row]:
    """Eight devices of the NVML stand-in."""
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(
            ["cc", "-O1", "-fPIC", "-shared", "-Wl,-soname,libnvidia-ml.so.1", "-o",
             f"{folder}/libnvidia-ml.so.1", str(ROOT / "tests" / "nvmlstub.c"), "-lpthread"],
            check=True,
        )  # fmt: skip
        env = {**os.environ, "LD_LIBRARY_PATH": folder, "NVMLSTUB_SET": "count=8"}
        cpu, peak = process(*python("-m", "mmctl", "probe", "nvml:", "-o", "json"), env=env)
        peer = "–"
        if find_spec("gpustat"):
            other, other_peak = process(*python("-m", "gpustat", "--json"), env=env)
            peer = f"gpustat --json {ms(other)}, {other_peak / MIB:.0f} MiB"
    yield Row("`mmctl probe -o json`, 8 GPUs", "≤ 150 ms CPU, ≤ 40 MiB",
              f"{ms(cpu)}, {peak / MIB:.0f} MiB", peer)  # fmt: skip


def dashboard() -> Iterator[Row]:
    """A heatmap of 40×70 at 10 Hz, and one bare widget of that size."""
    done = subprocess.run(
        python(str(ROOT / "tests" / "tui" / "cost.py")), capture_output=True, text=True, check=True
    )
    bare, whole, quotient = done.stdout.splitlines()
    share, memory = whole.split(",")[:2]
    yield Row(
        "dashboard, 40×70 heatmap at 10 Hz", "≤ 25 % of a core, ≤ 70 MiB, ≤ 1.8 × the widget",
        f"{share.split(maxsplit=1)[1]},{memory}, {quotient.split()[-1]} ×",
        f"bare widget {bare.split(maxsplit=1)[1].split(',')[0]}",
    )  # fmt: skip


def snapshot() -> Iterator[Row]:
    """A trace of a million entries, explained, and one more allocator setting replayed."""
    from mmctl.benchmarks.long_trace import measure

    found = {row["program"]: row for row in measure(1_000_000)}

    def told(name: str) -> str:
        row = found[name]
        if row["cpu_s"] is None:
            return f"{name} failed"
        return f"{name.split(': ')[-1]} {row['cpu_s']:.1f} s, {row['peak_bytes'] / MIB:.0f} MiB"

    peers = ("torch viewer: stats", "torch viewer: trace", "pickle.load alone")
    yield Row("snapshot of 1 M trace entries", "≤ 4.5 s CPU, ≤ 800 MiB", told("mmctl: explained"),
              "torch's viewer " + "; ".join(told(name) for name in peers))  # fmt: skip
    more = found["mmctl: each further setting"]["cpu_s"]
    yield Row("one more allocator setting on it", "≤ 0.5 s CPU", f"{more:.2f} s", "–")


def page() -> Iterator[Row]:
    """An engine's metrics page of 500 KB, read again and again as a poll does."""
    from prometheus_client.parser import text_string_to_metric_families

    from mmctl.engine.sources.page import Page

    lines = []
    for engine in range(8):
        labels = f'engine="{engine}",model_name="m"'
        lines += [f"vllm:num_requests_running{{{labels}}} {engine}",
                  f"vllm:kv_cache_usage_perc{{{labels}}} 0.5"]  # fmt: skip
        for name in ("time_to_first_token", "inter_token_latency", "e2e_request_latency"):
            lines += [
                f'vllm:{name}_seconds_bucket{{{labels},le="{n / 10}"}} {n}' for n in range(25)
            ]
    # Most of a server's page is about other things: its HTTP handlers, its interpreter.
    while sum(map(len, lines)) < 490_000:
        n = len(lines)
        lines.append(
            f'http_request_duration_seconds_bucket{{handler="/v1/{n % 50}",le="{n / 9:.2f}"}} {n}'
        )
    text = "\n".join(lines) + "\n"
    ours = Page("here", "node")
    costs = [_cpu(lambda: ours.records(text, time.time_ns())) for _ in range(5)]
    peer = min(_cpu(lambda: list(text_string_to_metric_families(text))) for _ in range(3))
    yield Row(
        f"metrics page of {len(text) // 1000} KB", "≤ 20 ms",
        f"{ms(costs[0])} at first, {ms(min(costs[1:]))} again", f"prometheus_client {ms(peer)}",
    )  # fmt: skip


def _cpu(work: Callable[[], Any]) -> float:
    started = time.process_time()
    work()
    return time.process_time() - started


HTA = """
import sys, warnings
warnings.filterwarnings("ignore")
from hta.trace_analysis import TraceAnalysis
read = TraceAnalysis(trace_files=dict(enumerate(sys.argv[1:])), trace_dir="/")
read.get_temporal_breakdown(visualize=False)
read.get_comm_comp_overlap(visualize=False)
"""


def kernels() -> Iterator[Row]:
    """Profiler traces of two ranks, 300,000 events together: where the time of a step went."""
    with tempfile.TemporaryDirectory() as folder:
        files = [str(Path(folder) / f"rank{rank}.json") for rank in range(2)]
        for rank, file in enumerate(files):
            Path(file).write_bytes(msgspec.json.encode(_trace(rank, 50_000)))
        cpu, peak = process(*python("-m", "mmctl", "probe", "kernels", *files), runs=2)
        peer = "–"
        if find_spec("hta"):
            other, other_peak = process(*python("-c", HTA, *files), runs=2)
            peer = f"HTA {other:.1f} s, {other_peak / MIB:.0f} MiB"
    yield Row("`mmctl probe kernels`, 300,000 events", "–", f"{cpu:.1f} s, {peak / MIB:.0f} MiB",
              peer)  # fmt: skip


def _trace(rank: int, launches: int) -> dict[str, Any]:
    """A PyTorch profiler's trace: operators that launch kernels, each tenth of them a collective
    on its own stream."""
    host, device = {"pid": 1, "tid": 1, "ph": "X"}, {"pid": 0, "ph": "X"}
    events: list[dict[str, Any]] = []
    for n in range(launches):
        at_us, step = 1000.0 + 20 * n, launches // 10
        joint = n % 10 == 9
        stream = 20 if joint else 7
        name = "ncclDevKernel_AllReduce_Sum_f16_RING_LL(args)" if joint else f"gemm_{n % 40}"
        if n % step == 0:
            events.append({**host, "name": f"ProfilerStep#{n // step}", "cat": "user_annotation",
                           "ts": at_us - 1, "dur": 20 * step - 2, "args": {}})  # fmt: skip
        events += [
            {**host, "name": f"aten::op_{n % 40}", "cat": "cpu_op", "ts": at_us, "dur": 9,
             "args": {"External id": n}},
            {**host, "name": "cudaLaunchKernel", "cat": "cuda_runtime", "ts": at_us + 2, "dur": 4,
             "args": {"correlation": n + 1, "External id": n}},
            {**device, "name": name, "cat": "kernel", "ts": at_us + 12, "dur": 15 + n % 7 + rank,
             "tid": stream, "args": {"correlation": n + 1, "stream": stream, "device": 0}},
        ]  # fmt: skip
    return {"schemaVersion": 1, "distributedInfo": {"rank": rank}, "traceEvents": events}


def hook() -> Iterator[Row]:
    """The allocation hook in front of a fake CUDA runtime."""
    from mmctl import native
    from mmctl.engine import profiles
    from mmctl.engine.breaker.hook_rule import hook_rules
    from mmctl.native import layout

    here = ROOT / "tests" / "unit" / "native"
    with tempfile.TemporaryDirectory() as folder:
        library = f"{folder}/libcudart.so.13"
        subprocess.run(["cc", "-O2", "-shared", "-fPIC", "-Wl,-soname,libcudart.so.13", "-o",
                        library, str(here / "fake_cudart.c")], check=True)  # fmt: skip
        subprocess.run(["cc", "-O2", '-DFAKE="libcudart.so.13"', "-o", f"{folder}/app",
                        str(here / "app.c"), library, f"-Wl,-rpath,{folder}", "-ldl",
                        "-lpthread"], check=True)  # fmt: skip
        control = layout.Control(Path(folder) / "control")
        control.write("enforce", hook_rules(profiles.load("paper").profile, "enforce"))
        for signal in ("fragmentation_ratio", "vision_tokens", "text_tokens"):
            control.give(signal, 0.9 if signal == "fragmentation_ratio" else 600.0, 2**62)
        env = {
            **os.environ, "LD_PRELOAD": str(native.library("hook")), "LD_LIBRARY_PATH": folder,
            "MMCTL_HOOK_FOLDER": folder, "MMCTL_HOOK_CONTROL": str(control.path),
        }  # fmt: skip
        best = [float("inf")] * 3
        for _ in range(5):
            done = subprocess.run(
                [f"{folder}/app"], input="bench 1000000\n", env=env, capture_output=True, text=True
            )
            best = [min(pair) for pair in zip(best, map(float, done.stdout.split()), strict=True)]
        control.close()
    bare, hooked, rule = best
    yield Row("allocation hook: the rule", "≤ 20 ns", f"{rule:.0f} ns", "–")
    yield Row("allocation hook: malloc and free", "≤ 100 ns a call more than the bare one",
              f"{(hooked - bare) / 2:.0f} ns a call", f"bare {bare / 2:.0f} ns a call")  # fmt: skip


def rules() -> Iterator[Row]:
    """All default rules over device records: decoded, and from NDJSON; then one live sample."""
    from mmctl.engine import profiles
    from mmctl.engine.breaker.breaker import Breaker
    from mmctl.engine.records import Device, decode, encode
    from mmctl.engine.rules.columns import Columns
    from mmctl.engine.rules.rule import compile_rules

    profile = profiles.load("default").profile
    compiled = compile_rules(profile.breaker.rules)
    records: list[Any] = [
        Device(ts_ns=n * 12_500_000, node="n", device=f"gpu{n % 8}", kind="gpu",
               sm_ratio=n % 97 / 97, total_bytes=80 << 30, used_bytes=n % 80 << 30,
               temperature_c=50.0 + n % 31, power_w=300.0, throttle=())
        for n in range(200_000)
    ]  # fmt: skip
    lines = [encode(record) for record in records]

    def offline(found: Any) -> None:
        for _ in Columns(compiled, found).truths():
            pass

    decoded = min(_cpu(lambda: offline(records)) for _ in range(3))
    text = min(_cpu(lambda: offline(map(decode, lines))) for _ in range(3))
    bare = msgspec.json.Decoder(Device)
    peer = min(_cpu(lambda: [bare.decode(line) for line in lines]) for _ in range(3))
    count = len(records)
    yield Row("default rules over decoded records", "≥ 500,000/s", f"{count / decoded:,.0f}/s", "–")
    yield Row("default rules from NDJSON", "≥ 250,000/s", f"{count / text:,.0f}/s",
              f"msgspec decodes {count / peer:,.0f}/s")  # fmt: skip
    breaker = Breaker(profile, "observe")
    live = _cpu(lambda: [breaker.step(record) for record in records[:20_000]]) / 20_000
    yield Row("a live sample through all default rules", "≤ 200 µs", f"{1e6 * live:.0f} µs", "–")


def arrival() -> Iterator[Row]:
    """14,000 records a second of two sources, from their time to the breaker's decision."""
    from mmctl.engine import profiles, streams
    from mmctl.engine.breaker.breaker import Breaker
    from mmctl.engine.records import Device

    stop = threading.Event()
    rate, seconds = 7000, 8

    def source(name: str) -> Iterator[Any]:
        started = time.monotonic()
        for n in range(rate * seconds):
            ahead = started + n / rate - time.monotonic()
            if ahead > 0.002:
                time.sleep(ahead)
            yield Device(ts_ns=time.time_ns(), node=name, device=f"gpu{n % 8}", kind="gpu",
                         temperature_c=50.0, used_bytes=n, total_bytes=80 << 30)  # fmt: skip

    breaker = Breaker(profiles.load("default").profile, "observe")
    delays: queue.SimpleQueue[int] = queue.SimpleQueue()
    gc.freeze()
    for record in streams.merge([streams.Feed(source(name), True) for name in "ab"], stop):
        breaker.step(record)
        delays.put(time.time_ns() - record.ts_ns)
    ordered = sorted(delays.get() for _ in range(delays.qsize()))
    yield Row("14,000 records/s, arrival to decision", "P99 ≤ 87 ms",
              f"P99 {ordered[len(ordered) * 99 // 100] / 1e6:.1f} ms", "–")  # fmt: skip


ROWS: dict[str, Callable[[], Iterator[Row]]] = {
    "start": start, "probe": probe, "dashboard": dashboard, "snapshot": snapshot, "page": page,
    "kernels": kernels, "hook": hook, "rules": rules, "arrival": arrival,
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default=",".join(ROWS), help="some of: " + ", ".join(ROWS))
    chosen = parser.parse_args().only.split(",")
    load, cores = os.getloadavg()[0], os.cpu_count()
    print(f"{platform.machine()}, {cores} cores, load {load:.1f} at the start, "
          f"Python {platform.python_version()}, {datetime.date.today()}\n")  # fmt: skip
    print("| what | budget | measured | in the same run |\n|---|---|---|---|")
    for name in chosen:
        for row in ROWS[name]():
            print("| " + " | ".join(row) + " |", flush=True)


if __name__ == "__main__":
    main()
