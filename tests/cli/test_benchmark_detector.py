"""``mmctl benchmark detector`` on given recordings: the document, the files, mistakes."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from mmctl.engine.recording import Writer, header
from mmctl.engine.records import Event, Fits, Pool


def recording(path: Path, count: int, seed: int, conflicts: bool = True) -> str:
    draw = random.Random(seed)
    with Writer(path, header("n", "default", 10**18)) as writer:
        for number in range(count):
            now = 10**18 + number * 10**8
            large = conflicts and draw.random() < 0.1
            writer.write(
                Pool(
                    ts_ns=now, node="n", device="gpu0", reserved_bytes=2**28,
                    allocated_bytes=2**27, free_bytes=2**27, largest_free_bytes=2**24,
                    releasable_bytes=0, capacity_bytes=2**28, device_free_bytes=0,
                    fragmentation_ratio=0.875, vision_tokens=3000 if large else 100,
                    fits=Fits(fits=not large, allocations=1, peak_bytes=1),
                )
            )  # fmt: skip
            if large:
                writer.write(Event(ts_ns=now + 10**8, node="n", device="gpu0", what="oom"))
    return str(path)


def test_the_document_and_the_files(mmctl, tmp_path: Path) -> None:
    for extra in ("torch", "onnx", "onnxruntime"):
        pytest.importorskip(extra, reason=f"needs {extra}")
    files = [recording(tmp_path / f"{n}.ndjson", 200, n) for n in range(3)]
    out = tmp_path / "models"
    done = mmctl("benchmark", "detector", *files, "--quick", "--out", str(out), "-o", "json")
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert document["benchmark"] == "detector" and document["figures"]
    assert document["schema"] == 1 and document["environment"]["cores"] >= 1
    assert document["recordings"] == "given" and document["model"]["held"] == ["2.ndjson"]
    assert document["model"]["parameters"] > 1e5
    assert {(row["precision"], row["target"]) for row in document["agreement"]} == {
        (precision, target) for precision in ("fp32", "fp16", "int8") for target in ("rules", "oom")
    }
    for row in document["agreement"]:
        assert row["windows"] == 200 and row["basis"] == "measured"
    closed = [row for row in document["serving"] if row["load"] == "closed"]
    assert [row["serving"] for row in closed].count("naive") == 2
    for row in document["serving"]:
        assert row["p50_ms"] <= row["p99_ms"] and row["queries_per_s"] > 0
        assert (row["mean_batch"] == 1) == (row["serving"] == "naive")
        low, high = row["queries_factor_ci"]
        assert low <= row["queries_factor"] <= high
    assert set(document["files"]) == {
        str(path.relative_to(out)) for path in out.rglob("*") if path.is_file()
    }
    assert {"memory_conflict_int8_b32.onnx", "tensorrt.json"} <= set(document["files"])


def test_mistakes(mmctl, tmp_path: Path) -> None:
    quiet = recording(tmp_path / "quiet.ndjson", 300, 0, conflicts=False)
    for arguments, code, hint in [
        (["--held", "brust"], 2, "did you mean 'burst'"),
        (["--horizon", "soon"], 2, "--horizon"),
        ([quiet], 1, "no conflict to detect"),
        ([str(tmp_path / "none.ndjson")], 1, "none.ndjson"),
    ]:
        done = mmctl("benchmark", "detector", *arguments)
        if "extra" in done.stderr:
            pytest.skip(done.stderr)
        assert done.returncode == code and hint in done.stderr, done.stderr
        assert done.stderr.splitlines()[-1].startswith("mmctl: error: ")
