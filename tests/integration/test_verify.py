"""A worker that the verifier did not start: healthy, damaged after the goldens, restarted."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="needs the extra 'torch'")

from mmctl.engine.recovery.faults import FAULTS

pytestmark = pytest.mark.timeout(400)
Start = Callable[..., str]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    workers: list[subprocess.Popen[bytes]] = []

    def begin(*arguments: str) -> str:
        path = tmp_path / f"worker{len(workers)}"
        command = [sys.executable, "-m", "mmctl.demo", "--socket", str(path), *arguments]
        workers.append(subprocess.Popen(command, stdin=subprocess.PIPE))
        while not path.exists():
            assert workers[-1].poll() is None
            time.sleep(0.05)
        return str(path)

    yield begin
    for worker in workers:
        worker.kill()
        worker.wait()


def command(path: str, action: str, **args: object) -> None:
    """One command over the socket, and its answer."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(path)
        connection.sendall(b'{"action": "subscribe"}\n')
        connection.sendall(json.dumps({"id": "t", "action": action, "args": args}).encode() + b"\n")
        for line in connection.makefile("rb"):
            record = json.loads(line)
            if record.get("what") == action and record["evidence"].get("id") == "t":
                assert "refused" not in record["evidence"], record
                return


def test_damage_is_found_from_outside_and_a_restart_is_consistent(
    start: Start, mmctl, tmp_path: Path
) -> None:
    golden = tmp_path / "golden.json"
    first = start("--scenario", "calm")
    recorded = mmctl("breaker", "verify", "--golden", str(golden), "--worker", first, "-o", "json")
    assert recorded.returncode == 0 and json.loads(recorded.stdout)["verdict"] == "recorded"

    restarted = start("--scenario", "fault", "--fault-at", "1000000")
    fresh = mmctl("breaker", "verify", "--golden", str(golden), "--worker", restarted)
    assert fresh.returncode == 0, fresh.stdout
    command(restarted, "fault", kind="exponent_bit", seed=3)
    damaged = mmctl("breaker", "verify", "--golden", str(golden), "--worker", restarted,
                    "-o", "json")  # fmt: skip
    document = json.loads(damaged.stdout)
    assert damaged.returncode == 3 and document["verdict"] == "inconsistent"
    assert {"name", "value", "golden", "tolerance", "passed"} <= document["checks"][0].keys()
    assert "logits" in {check["name"] for check in document["checks"] if not check["passed"]}

    nobody = str(tmp_path / "nobody")
    gone = mmctl("breaker", "verify", "--golden", str(golden), "--worker", nobody)
    assert gone.returncode == 3 and "no answer from the worker" in gone.stdout
    missing = mmctl("breaker", "verify", "--golden", str(tmp_path / "new"), "--worker", nobody)
    assert missing.returncode == 1 and missing.stderr.count("\n") == 1


def test_a_callable_and_mistakes(mmctl, tmp_path: Path) -> None:
    (tmp_path / "served.py").write_text(
        "def good(image, question):\n"
        "    return 'A red circle.' if 'Describe' in question else 'red'\n"
        "def reworded(image, question):\n"
        "    return 'One crimson disc.' if 'Describe' in question else 'It is red.'\n"
        "def wrong(image, question):\n"
        "    return 'A blue circle.' if 'Describe' in question else 'red'\n"
        "def broken(image, question):\n"
        "    raise ValueError('no')\n"
    )

    def verify(function: str, *more: str):
        return mmctl("breaker", "verify", "--golden", "golden.json", "--callable",
                     f"served:{function}", *more, cwd=tmp_path)  # fmt: skip

    assert verify("good").returncode == 0
    assert verify("good").returncode == 0
    assert verify("reworded").returncode == 0
    wrong = verify("wrong")
    assert wrong.returncode == 3 and "says blue circle" in wrong.stdout
    assert verify("broken").returncode == 3
    for function, hint in [("nothing", "no function"), ("good:x", "no function")]:
        done = verify(function)
        assert done.returncode == 2 and hint in done.stderr
    assert mmctl("breaker", "verify", "--golden", "x").returncode == 2


def test_every_fault_changes_weights_and_says_where() -> None:
    import torch

    from mmctl.engine.model import build
    from mmctl.engine.recovery.faults import inject

    healthy = build().state_dict()
    for name in FAULTS:
        model = build()
        said = inject(model, name, 5)
        changed = [key for key, value in model.state_dict().items()
                   if not torch.equal(value, healthy[key])]  # fmt: skip
        assert changed and changed[0].split(".out.")[0] in said.replace(": head", "")
