"""``mmctl benchmark overlap``: the document and mistakes."""

from __future__ import annotations

import json
import sys

import pytest


def test_the_document(mmctl) -> None:
    pytest.importorskip("torch", reason="needs the extra 'torch'")
    done = mmctl("benchmark", "overlap", "--quick", "--ranks", "2", "-o", "json", timeout=200)
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert document["benchmark"] == "overlap" and all(f["blocks"] for f in document["figures"])
    assert document["schema"] == 1 and document["environment"]["cores"] >= 1
    transports = [row["transport"] for row in document["overlap"]]
    assert transports == ["loopback", "throttled"] or sys.platform != "linux"
    for row in document["overlap"]:
        assert row["ranks"] == 2 and row["equal"] and row["basis"] == "measured"
        assert row["rounds"] >= 3
        assert row["gather_ms"] > 0 and 0 <= row["gather_cpu_ratio"] <= 1
        assert (row["hidden_ratio"] is None) == ("hidden_ratio" in row["absent"])
    slow = document["overlap"][-1]
    if slow["transport"] == "throttled":
        assert slow["gather_ms"] > document["overlap"][0]["gather_ms"]


def test_mistakes(mmctl) -> None:
    for arguments, hint in [
        (["--link", "fast"], "--link"),
        (["--link", "1/s"], "1KB/s at least"),
        (["--ranks", "1"], "--ranks"),
    ]:
        done = mmctl("benchmark", "overlap", *arguments)
        assert done.returncode == 2 and hint in done.stderr
        assert done.stderr.count("\n") == 1
