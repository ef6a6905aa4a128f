"""``mmctl benchmark towers``: the document and mistakes."""

from __future__ import annotations

import json

import pytest


def test_the_document(mmctl) -> None:
    pytest.importorskip("torch", reason="needs the extra 'torch'")
    arguments = ["--quick", "--devices", "cpu,cpu", "-o", "json"]
    done = mmctl("benchmark", "towers", *arguments, timeout=280)
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert document["benchmark"] == "towers" and all(f["blocks"] for f in document["figures"])
    assert document["schema"] == 1 and document["environment"]["cores"] >= 1
    rows = {row["way"]: row for row in document["towers"]}
    assert {"run after run", "bound T0", "bound T1", "unbound", "training, bound T1"} <= set(rows)
    for row in rows.values():
        assert row["devices"] == ["cpu", "cpu"] and row["basis"] == "measured"
        assert row["logits_error"] <= document["tolerance"]
        assert 0 <= row["overlap_ratio"] <= 1 and row["rounds"] >= 3
        low, high = row["speedup_ci"]
        assert low <= row["speedup_factor"] <= high
        assert (row["gradients_error"] is None) == (row["kind"] == "inference")
    assert rows["training, bound T1"]["gradients_error"] <= document["tolerance"]
    assert rows["bound T1"]["crossings"] == rows["bound T0"]["crossings"] + 1
    # Two processes of one device meet for the moment in which one hands over to the other.
    assert rows["run after run"]["overlap_ratio"] < 0.05 < rows["bound T1"]["overlap_ratio"]
    assert rows["unbound"]["waiting_bytes"] > rows["bound T1"]["waiting_bytes"]


def test_mistakes(mmctl) -> None:
    pytest.importorskip("torch", reason="needs the extra 'torch'")
    for devices, code, hint in [
        ("cpu", 1, "two devices"), ("cpu,nonsense", 2, "no device 'nonsense'"),
    ]:  # fmt: skip
        done = mmctl("benchmark", "towers", "--devices", devices)
        assert done.returncode == code and hint in done.stderr
        assert done.stderr.splitlines()[-1].startswith("mmctl: error: ")
