"""The benchmark of responses: every figure measured, none made up, the contract's fields."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

pytest.importorskip("torch", reason="needs the extra 'torch'")

from mmctl.benchmarks.responses import PUBLISHED


@pytest.fixture(scope="module")
def document():
    arguments = ["benchmark", "responses", "--device", "cpu", "--runs", "3", "--requests", "1"]
    done = subprocess.run(
        [sys.executable, "-m", "mmctl", *arguments, "--offload", "1MiB", "-o", "json"],
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_every_response_is_measured_on_its_shapes(document) -> None:
    rows = document["responses"]
    names = [row["name"] for row in rows]
    assert document["schema"] == 1 and document["threads"] == 1
    assert set(PUBLISHED) <= set(names) and names.count("quantize_vision") == 2
    for row in rows:
        assert set(row) >= {
            "name", "shape", "latency_ms", "freed_bytes", "freed_ratio", "error", "cosine_mean",
            "throughput_ratio", "published", "basis",
        }  # fmt: skip
        assert row["basis"] == "measured" and 0 < row["latency_ms"] <= row["latency_p50_ms"]
        assert row["freed_bytes"] == round(row["freed_ratio"] * row["size_bytes"])
        assert (row["link"] == "none") == (row["name"] != "offload_kv")


def test_the_promised_quality_and_saving(document) -> None:
    rows = document["responses"]
    by_name = {r["name"]: r for r in rows if "576" in r["shape"] or r["name"] == "offload_kv"}
    assert by_name["quantize_vision"]["cosine_mean"] >= 0.9998
    assert by_name["distill_half"]["cosine_mean"] >= 0.98
    assert by_name["distill"]["freed_ratio"] >= 0.55
    assert by_name["offload_kv"]["error"] == 0
    assert by_name["pca_deep"]["cosine_mean"] > 0.99
    assert by_name["truncate"]["error"] is None


def test_mistakes(mmctl) -> None:
    for arguments in (["--device", "nonsense"], ["--offload", "12 apples"], ["--runs", "0"]):
        done = mmctl("benchmark", "responses", *arguments)
        assert done.returncode == 2 and done.stderr.count("\n") == 1
