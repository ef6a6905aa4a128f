"""``mmctl probe kernels`` on files: the output's contract and exit codes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest


@pytest.fixture
def straggler(tmp_path: Path) -> list[str]:
    """Three ranks, five steps; rank 1 is 300 ms late in step 3."""
    paths = []
    for rank in range(3):
        events = []
        for step in range(5):
            late = 300_000 if step == 3 and rank == 1 else 0
            end = step * 10**6 + 400_000
            start = step * 10**6 + 50_000 + late + rank
            events.append(
                {"ph": "X", "cat": "kernel", "name": "ncclDevKernel_AllGather_RING_LL",
                 "ts": start, "dur": end - start, "pid": rank, "tid": 9,
                 "args": {"stream": 9, "device": rank}}
            )  # fmt: skip
        path = tmp_path / f"trace{rank}.json"
        path.write_text(json.dumps({"traceEvents": events, "distributedInfo": {"rank": rank}}))
        paths.append(str(path))
    return paths


def test_the_late_rank_in_every_format(mmctl, straggler: list[str], tmp_path: Path) -> None:
    done = mmctl("probe", "kernels", *straggler, "-o", "json")
    assert done.returncode == 3, done.stderr
    document = json.loads(done.stdout)
    assert document["schema"] == 1 and document["basis"] == "measured"
    assert {"rank", "file", "span_s", "kernel_s", "copy_s", "collective_s", "idle_s",
            "overlap_ratio", "streams"} <= set(document["ranks"][0])  # fmt: skip
    assert {"stream", "modality", "busy_s"} <= set(document["ranks"][0]["streams"][0])
    assert {"name", "group", "sequence", "wait_s", "skew_s"} <= set(document["collectives"][0])
    (item,) = document["imbalance"]
    assert item["late_rank"] == 1 and item["wait_s"] == pytest.approx(0.35, abs=1e-4)
    assert item["collective"] == "ncclDevKernel_AllGather_RING_LL"
    table = mmctl("probe", "kernels", *straggler)
    assert table.returncode == 3 and "Rank 1 came late" in table.stdout
    record = tmp_path / "spans.ndjson"
    lines = mmctl("probe", "kernels", *straggler, "-o", "ndjson", "--record", str(record))
    kinds = [json.loads(line)["type"] for line in lines.stdout.splitlines()]
    assert kinds[0] == "recording" and kinds.count("span") == 15 and kinds.count("event") == 1
    again = mmctl("probe", "kernels", str(record), "-o", "json")
    assert [r["collective_s"] for r in json.loads(again.stdout)["ranks"]] == [
        r["collective_s"] for r in document["ranks"]
    ]


def test_without_a_finding_it_exits_0(mmctl, straggler: list[str]) -> None:
    done = mmctl("probe", "kernels", straggler[0])
    assert done.returncode == 0 and "one rank only" in done.stderr


@pytest.mark.parametrize("content", [b"", b"not a trace", b'{"a": 1}', b'{"traceEvents": [{"ph"',
                                     b"SQLite format 3\0", b"\x1f\x8b\x08broken"])  # fmt: skip
def test_a_broken_file_is_one_line(mmctl, tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "x"
    path.write_bytes(content)
    done = mmctl("probe", "kernels", str(path))
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr.startswith("mmctl: error: ") and done.stderr.count("\n") == 1


def test_missing_members_of_dumps(mmctl, tmp_path: Path) -> None:
    def entry(sequence: int) -> dict[str, object]:
        return {"process_group": ["0", "default_pg"], "collective_seq_id": sequence,
                "profiling_name": "nccl:all_reduce", "state": "scheduled",
                "retired": False}  # fmt: skip

    config = {"0": {"name": "0", "desc": "default_pg", "ranks": "[0, 1, 2]"}}
    for rank in range(3):
        entries = [entry(7)] if rank == 2 else [entry(7), entry(8)]
        (tmp_path / f"_dump_{rank}").write_text(
            json.dumps({"version": "2.9", "pg_config": config, "entries": entries})
        )
    done = mmctl("probe", "kernels", str(tmp_path), "-o", "json")
    document = json.loads(done.stdout)
    assert done.returncode == 3
    assert document["missing"][0]["ranks"] == [2] and document["missing"][0]["sequence"] == 8
    assert [s["rank"] for s in document["suspects"]] == [2] and document["mismatches"] == []
