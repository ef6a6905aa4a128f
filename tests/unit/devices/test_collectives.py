"""Logs and tables of collectives: several ages of nccl-tests, cut logs, odd tables."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from mmctl.engine.devices.collectives import is_log, is_table, operation, read
from mmctl.engine.errors import MmctlError

OLD = """# nThread 1 nGpus 2 minBytes 8 maxBytes 64 step: 2(factor) warmup iters: 5 iters: 20
#   Rank  0 Pid 1 on somewhere device  0 [0x00] A100-SXM4-40GB
#   Rank  1 Pid 1 on somewhere device  1 [0x00] A100-SXM4-40GB
#       size         count    type   redop     time   algbw   busbw  error     time   algbw
#        (B)    (elements)                     (us)  (GB/s)  (GB/s)            (us)  (GB/s)
           0             0   float             1.63    0.00    0.00    N/A     1.38    0.00
          64            16   float             34.4    0.00    0.00    N/A     35.2    0.00
  8589934592     268435456   float            33646  255.31  223.39    N/A    32669  262.94
# Avg bus bandwidth    : 58.2651
"""

NEW = """# Collective test starting: all_reduce_perf
# nThread 1 nGpus 2 minBytes 8 maxBytes 1024 step: 2(factor) warmup iters: 5 iters: 20
#  Rank  0 Group  0 Pid   2748 on  qualid device  0 [0x01] NVIDIA GeForce RTX 4070
#  Rank  1 Group  0 Pid   2748 on  qualid device  1 [0x03] NVIDIA GeForce RTX 4070
#       size         count      type   redop    root     time   algbw   busbw #wrong     time
#        (B)    (elements)                               (us)  (GB/s)  (GB/s)            (us)
           8             2     float     sum      -1     6.21    0.00    0.00      0     6.23
        1024           256      half     sum      -1       13    0.00    0.00      0     6.18
# Avg bus bandwidth    : 0.1
"""


def test_logs_without_and_with_a_root_column(tmp_path: Path) -> None:
    path = tmp_path / "alltoall.log"
    path.write_text(OLD)
    timings, notes = read(path)
    assert [(t.size_bytes, t.latency_us) for t in timings] == [(64, 34.4), (8589934592, 33646)]
    assert {(t.operation, t.ranks, t.system) for t in timings} == {
        ("alltoall", 2, "A100-SXM4-40GB")
    }
    assert notes == []
    path.write_text(NEW)
    timings, notes = read(path)
    assert [(t.size_bytes, t.latency_us, t.dtype) for t in timings] == [
        (8, 6.21, "float"), (1024, 13, "half"),
    ]  # fmt: skip
    assert timings[0].operation == "all_reduce" and timings[0].system.endswith("RTX 4070")


def test_lines_of_several_nodes_carry_a_prefix(tmp_path: Path) -> None:
    path = tmp_path / "x.log"
    path.write_text("".join(f"[1,0]<stdout>:{line}\n" for line in NEW.splitlines()))
    assert [t.latency_us for t in read(path).timings] == [6.21, 13]


@pytest.mark.parametrize("keep", [0.3, 0.62, 0.8, 0.9])
def test_a_cut_log_gives_what_was_whole_and_says_so(tmp_path: Path, keep: float) -> None:
    path = tmp_path / "alltoall.log"
    path.write_text(OLD[: int(len(OLD) * keep)])
    try:
        timings, notes = read(path)
    except MmctlError as error:
        assert "timing" in str(error) or "ranks" in str(error)
        return
    assert "ends early" in notes[0]
    assert {t.latency_us for t in timings} <= {34.4, 33646.0}


def test_a_table_counts_elements_and_milliseconds(tmp_path: Path) -> None:
    path = tmp_path / "nccl.csv"
    path.write_text(
        "device,op_name,nccl_dtype,num_gpus,message_size,latency\n"
        "H100,all_gather,half,8,512,0.0075\nH100,all_gather,int8,8,512,0.005\n"
        "H100,all_gather,half,8,512,0\nH100,all_gather,quarter,8,512,1\nH100,all_gather,half,8,,1\n"
    )
    timings, notes = read(path)
    assert [(t.size_bytes, t.latency_us) for t in timings] == [(1024, 7.5), (512, 5.0)]
    assert notes == ["nccl.csv: 3 rows without a usable time"]


def test_superbench_results_need_the_ranks(tmp_path: Path) -> None:
    path = tmp_path / "results-summary.jsonl"
    row = {"node": "a", "nccl-bw:nvlink/alltoall_1048576_time:0": 87.4, "gemm/fp16_time": 3.0,
           "nccl-bw:nvlink/alltoall_2097152_busbw:0": 20.0}  # fmt: skip
    path.write_text(json.dumps(row) + "\n")
    with pytest.raises(MmctlError, match="--ranks"):
        read(path)
    (timing,) = read(path, ranks=4).timings
    assert (timing.operation, timing.size_bytes, timing.latency_us) == ("alltoall", 1048576, 87.4)


def test_missing_columns_are_named(tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    path.write_text("op_name,num_gpu,message_size,latency\na,1,2,3\n")
    with pytest.raises(MmctlError, match=r"lacks the column num_gpus.*did you mean 'num_gpu'"):
        read(path)
    path.write_text("op_name,num_gpus,message_size,latency\n")
    with pytest.raises(MmctlError, match="no row"):
        read(path)


def test_damaged_files_end_in_one_line(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow", reason="needs the extra 'files'")
    chooser = random.Random(5)
    path = tmp_path / "x"
    for seed in (OLD.encode(), NEW.encode(), b"PAR1" + bytes(200) + b"PAR1"):
        for _ in range(150):
            content = bytearray(seed)
            for _ in range(chooser.randint(1, 6)):
                at = chooser.randrange(4, len(content))
                content[at : at + chooser.randint(0, 9)] = chooser.choice(
                    [b"", b"\xff", b"9" * 30, b"NaN", b"1e400", b"-1", b"\0", b"inf", b"\n"]
                )
            path.write_bytes(content)
            try:
                timings = read(path).timings
            except MmctlError as error:
                assert "\n" not in str(error)
            else:
                assert all(0 < t.latency_us < 1e13 and t.size_bytes > 0 for t in timings)


def test_kinds_are_known_by_content() -> None:
    assert is_log(OLD.encode()) and is_log(NEW.encode()) and not is_log(b"GPU0 X NV12")
    assert is_table(b"PAR1xyz") and is_table(b"op_name,message_size\n") and not is_table(b"x,y\n")
    names = {"allgather": "all_gather", "AlltoAll": "alltoall", "ReduceScatter": "reduce_scatter",
             "broadcast": "broadcast", "gemm": "unknown", "all_reduce": "all_reduce"}  # fmt: skip
    assert {name: operation(name) for name in names} == names
