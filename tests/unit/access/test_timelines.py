"""Readers of traces against files whose every figure is known."""

from __future__ import annotations

import gzip
import json
import random
import sqlite3
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmctl.engine import profiles
from mmctl.engine.access import inputs, kernels, kineto, nsys, trace_events
from mmctl.engine.access import timeline as tl
from mmctl.engine.errors import MmctlError
from mmctl.engine.records import Span

PATTERNS = profiles.load("default").profile.modality


def event(name: str, ts: Any, dur: Any, cat: str | None = "kernel", **args: Any) -> dict[str, Any]:
    found = {"ph": "X", "name": name, "ts": ts, "dur": dur, "pid": 0, "tid": 7, "args": args}
    return found if cat is None else {**found, "cat": cat}


def write(path: Path, events: list[Any], **beside: Any) -> Path:
    path.write_text(json.dumps({**beside, "traceEvents": events}))
    return path


def gemm(ts: Any, dur: Any, stream: Any = 7, correlation: int = 0) -> dict[str, Any]:
    return event("gemm", ts, dur, device=0, stream=stream, correlation=correlation)


def nccl(ts: Any, dur: Any, stream: Any = 20) -> dict[str, Any]:
    return event("ncclDevKernel_AllGather_RING_LL(x)", ts, dur, device=0, stream=stream)


def test_figures_of_a_known_trace(tmp_path: Path) -> None:
    path = write(
        tmp_path / "rank3.json",
        [
            nccl(50, 40), gemm(10, 20), gemm(60, 20),
            event("Memcpy HtoD", 0, 5, "gpu_memcpy", stream=22, device=0),
            event("cudaDeviceSynchronize", 0, 30, "cuda_runtime"),
        ],
    )  # fmt: skip
    found = kernels.report(kineto.timeline(path, 0, PATTERNS))
    assert found.rank == 3
    assert found.span_s == pytest.approx(90e-6)
    assert found.kernel_s == pytest.approx(40e-6)
    assert found.copy_s == pytest.approx(5e-6)
    assert found.collective_s == pytest.approx(40e-6)
    assert found.idle_s == pytest.approx(25e-6)
    assert found.overlap_ratio == found.overlap_unrounded_ratio == 0.5
    assert [(w.call, w.count, w.blocked_s) for w in found.waits] == [
        ("cudaDeviceSynchronize", 1, pytest.approx(30e-6))
    ]
    assert {s.stream: s.kernels for s in found.streams} == {"7": 2, "20": 1, "22": 0}


@pytest.mark.parametrize("as_number", [int, float, str])
def test_times_of_every_type(tmp_path: Path, as_number: type) -> None:
    events = [gemm(as_number(1_700_000_000_000_010), as_number(20)),
              gemm(as_number(1_700_000_000_000_050), as_number(10), stream="stream 7")]  # fmt: skip
    line = kineto.timeline(write(tmp_path / "t.json", events), 5, PATTERNS)
    assert line.start_ns.tolist() == [1_700_000_000_000_010_000, 1_700_000_000_000_050_000]
    assert line.end_ns.tolist() == [1_700_000_000_000_030_000, 1_700_000_000_000_060_000]
    assert line.streams == [("0", "7")] and line.rank == 5


def test_relative_times_stand_on_their_base(tmp_path: Path) -> None:
    path = write(tmp_path / "t.json", [gemm(0.5, 1.25)], baseTimeNanoseconds=10**18)
    line = kineto.timeline(path, 0, PATTERNS)
    assert line.start_ns.tolist() == [10**18 + 500] and line.end_ns.tolist() == [10**18 + 1750]


def test_overlap_is_rounded_as_hta_rounds(tmp_path: Path) -> None:
    line = kineto.timeline(
        write(tmp_path / "t.json", [nccl(0.5, 10.0), gemm(4.2, 3.7)]), 0, PATTERNS
    )
    found = kernels.report(line)
    assert found.overlap_ratio == pytest.approx(2 / 9)  # 5 to 7 of 1 to 10
    assert found.overlap_unrounded_ratio == pytest.approx(0.37)
    assert (found.hta.span_s, found.hta.kernel_s) == pytest.approx((9e-6, 2e-6))
    assert found.span_s == pytest.approx(10e-6) and found.kernel_s == pytest.approx(3.7e-6)


def test_last_step_and_work_without_launch_are_left_out(tmp_path: Path) -> None:
    def launch(ts: int, correlation: int) -> dict[str, Any]:
        return event("cudaLaunchKernel", ts, 2, "cuda_runtime", correlation=correlation)

    events = [
        event("ProfilerStep#1", 0, 50, "user_annotation"),
        event("ProfilerStep#2", 50, 50, "user_annotation"),
        launch(10, 1), launch(60, 2),
        gemm(20, 5, correlation=1), gemm(70, 5, correlation=2), gemm(1, 5, correlation=99),
    ]  # fmt: skip
    line = kineto.timeline(write(tmp_path / "t.json", events), 0, PATTERNS)
    assert line.start_ns.tolist() == [20_000]
    assert (line.dropped_last_step, line.dropped_no_launch) == (1, 1)
    assert kernels.report(line).launch_delay.p50_s == pytest.approx(10e-6)


def test_modality_from_the_innermost_annotation(tmp_path: Path) -> None:
    def launch(ts: int, correlation: int) -> dict[str, Any]:
        return event("cudaLaunchKernel", ts, 1, "cuda_runtime", correlation=correlation)

    events = [
        event("nn.Module: LlamaModel_0", 0, 100, "python_function"),
        event("nn.Module: CLIPVisionModel_0", 20, 20, "python_function"),
        launch(10, 1), launch(30, 2), launch(50, 3), launch(200, 4),
        gemm(110, 10, 7, 1), gemm(110, 20, 8, 2), gemm(120, 10, 7, 3), gemm(300, 10, 9, 4),
    ]  # fmt: skip
    found = kernels.report(kineto.timeline(write(tmp_path / "t.json", events), 0, PATTERNS))
    assert {s.stream: s.modality for s in found.streams} == {"7": "text", "8": "vision", "9": None}
    assert found.concurrency.both_s == pytest.approx(20e-6)
    assert found.concurrency.concurrency_ratio == 1.0


def test_ascend_events_have_no_category(tmp_path: Path) -> None:
    def on(pid: int, name: str, ts: str, dur: float) -> dict[str, Any]:
        return {"ph": "X", "pid": pid, "tid": 2, "name": name, "ts": ts, "dur": dur,
                "args": {"Stream Id": 4, "Task Type": "AI_CORE"}}  # fmt: skip

    def process(pid: int, name: str) -> dict[str, Any]:
        return {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": name}}

    events = [
        on(8, "MatMulV2", "1696756723436489.210", 20.0),
        on(9, "hcom_allReduce__123_0_1", "1696756723436499.210", 20.0),
        on(10, "Computing", "1696756723436489.210", 20.0),
        on(11, "aclnnMatmul", "1696756723436400.000", 5.0),
        process(8, "Ascend Hardware"), process(9, "Communication"),
        process(10, "Overlap Analysis"), process(11, "CANN"),
    ]  # fmt: skip
    path = tmp_path / "trace_view.json"
    path.write_text(json.dumps(events))  # a bare list, as msprof writes it
    found = kernels.report(kineto.timeline(path, 0, PATTERNS))
    assert found.kernel_s == found.collective_s == pytest.approx(20e-6)
    assert found.overlap_ratio == pytest.approx(0.5, abs=0.06)
    assert {s.stream for s in found.streams} == {"4"}


def test_device_work_of_other_vendors(tmp_path: Path) -> None:
    events = [
        event("runFunction", 0, 2, "mtia_runtime", correlation=1),
        event("fba_kernel", 5, 10, "mtia_ccp_events", device=0, stream=3, correlation=1),
        event("dma_in", 15, 5, "mtia_ccp_events", device=0, stream=4, correlation=2),
        event("future vendor's op", 30, 5, "some_new_category", stream=1),
        event("gpu annotation", 0, 500, "gpu_user_annotation", stream=3),
        event("Event Sync", 0, 500, "cuda_sync", stream=3),
    ]
    found = kernels.report(kineto.timeline(write(tmp_path / "t.json", events), 0, PATTERNS))
    assert found.kernel_s == pytest.approx(15e-6) and found.copy_s == pytest.approx(5e-6)


TRICKY = [
    event('a "},{" b', 1, 2, stream=7), gemm(5, 1), {"ph": "i", "name": "}", "ts": 3},
    event("nested", 7, 1, "cpu_op", shapes=[{"a": [1]}, {"b": []}]),
    {"ph": "s", "id": 1, "cat": "ac2g", "ts": 1}, gemm(9, 1), nccl(11, 4),
]  # fmt: skip


@pytest.mark.parametrize("piece", [16, 64, 200, 1 << 20])
@pytest.mark.parametrize("indent", [None, 2])
def test_any_cut_gives_the_same_events(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, piece: int, indent: int | None
) -> None:
    beside = {"schemaVersion": 1, "deviceProperties": [{"id": 0}, {"id": 1}]}
    path = tmp_path / "t.json.gz"
    text = json.dumps({"traceEvents": TRICKY, **beside}, indent=indent)
    path.write_bytes(gzip.compress(text.encode()))
    monkeypatch.setattr(trace_events, "PIECE_BYTES", piece)
    seen: list[Any] = []
    found = trace_events.read(path, seen.extend)
    complete = [e.name for e in seen if isinstance(e, trace_events.Complete)]
    assert complete == [e["name"] for e in TRICKY if e["ph"] == "X"]
    assert found["deviceProperties"] == beside["deviceProperties"]


def test_numbers_and_escapes_that_are_no_json(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    path.write_text(
        '{"traceEvents": [{"ph": "X", "cat": "kernel", "name": "k", "ts": 1, "dur": 2, "pid": 0,'
        ' "tid": 7, "args": {"occupancy": nan, "bandwidth": Infinity, "stream": 7}},'
        '{"ph": "X", "cat": "kernel", "name": "C:\\Users\\x", "ts": 4, "dur": 2, "pid": 0,'
        ' "tid": 7, "args": {"stream": 7}}]}'
    )
    line = kineto.timeline(path, 0, PATTERNS)
    assert len(line) == 2 and "C:\\Users\\x" in line.names


@pytest.mark.parametrize("cut", [20, 150, 400])
def test_a_cut_file_is_an_error(tmp_path: Path, cut: int) -> None:
    whole = json.dumps({"traceEvents": [gemm(i, 1) for i in range(9)], "b": 1})
    path = tmp_path / "t.json"
    path.write_text(whole[:cut])
    with pytest.raises(MmctlError):
        kineto.timeline(path, 0, PATTERNS)
    path.with_suffix(".gz").write_bytes(gzip.compress(whole.encode())[: cut // 4])
    with pytest.raises(MmctlError):
        kineto.timeline(path.with_suffix(".gz"), 0, PATTERNS)


@pytest.mark.parametrize("seed", range(150))
def test_damaged_files_are_errors_and_nothing_else(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    text = bytearray(json.dumps({"traceEvents": TRICKY, "distributedInfo": {"rank": 1}}).encode())
    for _ in range(rng.randrange(1, 8)):
        at = rng.randrange(len(text))
        text[at : at + rng.randrange(9)] = rng.choice(
            [b"{", b"]", b'"', b"\xff", b"1e999", b"", b","]
        )
    path = tmp_path / "t.json"
    path.write_bytes(text)
    try:
        lines, _ = inputs.load([path], PATTERNS, lambda _: [])
        for line in lines:
            kernels.report(line)
    except MmctlError as error:
        assert str(path) in str(error)


INTERVALS = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 20)), max_size=12)


@given(INTERVALS, INTERVALS)
def test_interval_arithmetic(a: list[tuple[int, int]], b: list[tuple[int, int]]) -> None:
    def columns(intervals: list[tuple[int, int]]) -> tuple[tl.Int, tl.Int]:
        start = np.array([s for s, _ in intervals], np.int64)
        return start, start + np.array([d for _, d in intervals], np.int64)

    def covered(intervals: list[tuple[int, int]]) -> set[int]:
        return {t for start, length in intervals for t in range(start, start + length)}

    assert tl.length(*columns(a)) == len(covered(a))
    assert tl.intersection(tl.merge(*columns(a)), tl.merge(*columns(b))) == len(
        covered(a) & covered(b)
    )


def export(path: Path, *, old: bool) -> Path:
    """An Nsight export with the columns of an early or a late schema."""
    db = sqlite3.connect(path)
    kernel = "shortName INTEGER" if old else "demangledName INTEGER, greenContextId INTEGER"
    db.executescript(
        f"""CREATE TABLE StringIds (id INTEGER, value TEXT);
        INSERT INTO StringIds VALUES (1,'gemm'),(2,'ncclDevKernel_AllReduce'),
            (3,'cudaLaunchKernel_v7000'),(4,'cudaDeviceSynchronize_v3020');
        CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL (start INTEGER, end INTEGER, deviceId INTEGER,
            streamId INTEGER, correlationId INTEGER, globalPid INTEGER, {kernel});
        CREATE TABLE CUPTI_ACTIVITY_KIND_RUNTIME (start INTEGER, end INTEGER,
            correlationId INTEGER, globalTid INTEGER, nameId INTEGER);
        CREATE TABLE NVTX_EVENTS (start INTEGER, end INTEGER, eventType INTEGER, text TEXT,
            globalTid INTEGER);"""
    )
    pid = 5 << 24
    name = "shortName" if old else "demangledName"
    db.executemany(
        f"INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL (start,end,deviceId,streamId,correlationId,"
        f"globalPid,{name}) VALUES (?,?,?,?,?,?,?)",
        [(3000, 5000, 0, 7, 11, pid, 1), (1000, 3500, 0, 13, 12, pid, 2), (0, 9, 1, 7, 13, pid, 1)],
    )
    db.executemany(
        "INSERT INTO CUPTI_ACTIVITY_KIND_RUNTIME VALUES (?,?,?,?,?)",
        [(500, 600, 11, pid + 1, 3), (400, 450, 12, pid + 1, 3), (700, 900, 14, pid + 1, 4)],
    )
    db.execute("INSERT INTO NVTX_EVENTS VALUES (450, 800, 59, 'vision_encoder', ?)", (pid + 1,))
    db.commit()
    db.close()
    return path


@pytest.mark.parametrize("old", [True, False])
def test_nsight_exports_of_two_schemas(tmp_path: Path, old: bool) -> None:
    first, second = nsys.timelines(export(tmp_path / "r.sqlite", old=old), PATTERNS)
    found = kernels.report(first)
    assert found.span_s == pytest.approx(4e-6) and found.idle_s == 0
    assert found.overlap_unrounded_ratio == pytest.approx(0.2)
    assert {s.stream: s.modality for s in found.streams} == {"7": "vision", "13": None}
    assert found.launch_delay.max_s == pytest.approx(2.5e-6)
    assert [(w.call, w.count) for w in found.waits] == [("cudaDeviceSynchronize", 1)]
    assert second.rank == 1 and len(second) == 1


def test_an_export_without_gpu_work_is_refused(tmp_path: Path) -> None:
    db = sqlite3.connect(tmp_path / "e.sqlite")
    db.execute("CREATE TABLE StringIds (id INTEGER, value TEXT)")
    db.commit()
    db.close()
    with pytest.raises(MmctlError, match="no GPU work"):
        nsys.timelines(tmp_path / "e.sqlite", PATTERNS)


def test_spans_of_a_recording(tmp_path: Path) -> None:
    path = tmp_path / "r.ndjson"
    path.write_text('{"type":"recording","schema":1,"node":"","started_ns":0}\n')
    spans = [
        Span(ts_ns=0, device="gpu0", stream="7", name="vit", kind="kernel", duration_ns=2000,
             modality="vision"),
        Span(ts_ns=1000, device="gpu0", stream="8", name="decode", kind="kernel",
             duration_ns=2000, modality="text"),
    ]  # fmt: skip
    (line,), dumps = inputs.load([path], PATTERNS, lambda _: spans)
    assert dumps == [] and kernels.report(line).concurrency.concurrency_ratio == 0.5


def test_figures_of_hta_on_real_traces(data: Path) -> None:
    oracle = [4.50, 2.47, 7.88, 3.31, 0.56, 0.64, 7.56, 9.51]
    lines, _ = inputs.load([data / "kineto" / "dlrm_8_ranks"], PATTERNS, lambda _: [])
    found = [kernels.report(line) for line in lines]
    assert [round(100 * r.overlap_ratio, 2) for r in found] == oracle
    assert [round(1e6 * r.idle_s) for r in found[:2]] == [6419, 6428]
    for name, overlap, idle in [
        ("trace_diff__control__control.json.gz", 47.03, 62119),
        ("negative_queue_length_values_check__rank0.json.gz", 1.37, 705853),
    ]:
        report = kernels.report(kineto.timeline(data / "kineto" / name, 0, PATTERNS))
        assert round(100 * report.overlap_ratio, 2) == overlap
        assert round(1e6 * report.idle_s) == idle


def test_every_real_trace_reads(data: Path) -> None:
    for path in sorted((data / "kineto").rglob("*.json.gz")):
        kernels.report(kineto.timeline(path, 0, PATTERNS))
    for line in nsys.timelines(data / "nsys" / "mfu_2gpu_before.sqlite", PATTERNS):
        report = kernels.report(line)
        assert report.overlap_ratio == 0
