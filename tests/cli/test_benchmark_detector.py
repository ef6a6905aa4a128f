"""``mmctl benchmark detector`` on given recordings: the document, the files, mistakes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.examples.files import detectable


def recording(path: Path, count: int, seed: int, conflicts: bool = True) -> str:
    detectable(seed, path, count, conflicts)
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
        if "needs the extra" in done.stderr:
            pytest.skip(done.stderr)
        assert done.returncode == code and hint in done.stderr, done.stderr
        assert done.stderr.splitlines()[-1].startswith("mmctl: error: ")
