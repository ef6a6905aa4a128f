"""A worker that is told to encode images in the light branch, and what it says of attention."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="needs the extra 'torch'")

pytestmark = pytest.mark.timeout(200)


@pytest.fixture
def worker(tmp_path: Path) -> Iterator[socket.socket]:
    path = tmp_path / "worker"
    command = [sys.executable, "-m", "mmctl.demo", "--socket", str(path)]
    command += ["--scenario", "calm", "--image-every", "3"]
    process = subprocess.Popen(command, stdin=subprocess.PIPE)
    while not path.exists():
        assert process.poll() is None
        time.sleep(0.05)
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(str(path))
        connection.sendall(b'{"action": "subscribe"}\n')
        yield connection
    process.kill()
    process.wait()


def test_attention_is_published_and_the_branch_switches_both_ways(worker: socket.socket) -> None:
    lines = worker.makefile("rb")

    def until(found: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        return next(record for record in map(json.loads, lines) if found(record))

    def tell(action: str, **args: object) -> dict[str, Any]:
        worker.sendall(json.dumps({"id": action, "action": action, "args": args}).encode() + b"\n")
        return until(lambda r: r.get("what") == action)["evidence"]

    def completed(since_ns: int) -> set[int]:
        """Vision tokens of a request that came after ``since_ns`` and is done."""
        late = until(lambda r: r.get("state") == "queued" and r["images"] and r["ts_ns"] > since_ns)
        done = until(lambda r: r.get("id") == late["id"] and r.get("state") == "completed")
        return {done["vision_tokens"]}

    look = until(lambda record: record.get("what") == "entropy")
    assert len(look["evidence"]["entropy_per_head"]) == 4 * 6
    assert 0 < look["evidence"]["entropy_ratio"] <= 1 < look["evidence"]["entropy_nats"]
    assert look["evidence"]["entropy_std"] > 0 and look["device"] and look["node"]
    assert completed(look["ts_ns"]) < {16**2, 24**2}
    switched = tell("respond", order=["light_vision"])
    assert [step["response"] for step in switched["steps"]] == ["light_vision"]
    assert completed(time.time_ns()) < {8**2, 12**2}
    assert tell("verify")["verdict"] == "consistent"
    assert tell("light_vision", on=False)["on"] is False
    assert completed(time.time_ns()) < {16**2, 24**2}
