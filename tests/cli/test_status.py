"""``mmctl breaker status`` and ``log`` over what a breaker has left."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from mmctl.engine.breaker.state import Memory, Target
from mmctl.engine.breaker.store import State, append_audit, folder
from mmctl.engine.records import Event, encode


def _left(pid: int, *, lasting: bool) -> None:
    """The state of a breaker that saved an open target and ran as ``pid``."""
    memory = Memory(state="open", rule="fits", reason="asked for more than there is")
    target = Target(node="n", device="gpu0", memory=memory, lasting=lasting)
    state = State(saved_ns=1, pid=pid, mode="enforce", orders_read=0, targets={"gpu0": target})
    folder().mkdir(parents=True)
    (folder() / "state.json").write_bytes(msgspec.json.encode(state))


def _ended() -> int:
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        pass
    return process.pid


@pytest.mark.parametrize("lasting", [True, False])
def test_the_targets_of_a_demo_end_with_its_breaker(mmctl, lasting: bool) -> None:
    _left(_ended(), lasting=lasting)
    done = mmctl("breaker", "status", "-o", "json")
    assert [one["target"] for one in json.loads(done.stdout)["targets"]] == ["gpu0"] * lasting
    assert done.returncode == (3 if lasting else 0)


def test_a_demo_that_is_watched_is_shown(mmctl) -> None:
    _left(os.getpid(), lasting=False)
    done = mmctl("breaker", "status")
    assert done.returncode == 3 and "gpu0" in done.stdout


def test_a_target_that_is_gone_is_forgotten_with_a_reason(mmctl) -> None:
    _left(_ended(), lasting=True)
    assert mmctl("breaker", "forget", "gpu0").returncode == 2
    assert mmctl("breaker", "forget", "gpu0", "--reason", "card removed").returncode == 0
    done = mmctl("breaker", "status", "-o", "json")
    assert (done.returncode, json.loads(done.stdout)["targets"]) == (0, [])
    assert "forget: card removed" in mmctl("breaker", "log").stdout


def test_a_breaker_that_runs_forgets_nothing(mmctl) -> None:
    _left(os.getpid(), lasting=True)
    done = mmctl("breaker", "forget", "gpu0", "--reason", "card removed")
    assert done.returncode == 1 and "a breaker runs" in done.stderr


def test_the_log_gives_its_end_and_no_line_of_a_name_that_is_none(mmctl) -> None:
    append_audit([encode(Event(ts_ns=i, node="n", what="trip", device=f"gpu{i}")) for i in (1, 2)])
    assert "gpu2" in mmctl("breaker", "log", "-n", "1").stdout
    assert "gpu1" not in mmctl("breaker", "log", "-n", "1").stdout
    assert mmctl("breaker", "log", "-n", "-3").returncode == 2
    slip = mmctl("breaker", "log", "--what", "tripp")
    assert slip.returncode == 2 and "did you mean 'trip'?" in slip.stderr


@pytest.mark.parametrize("command", ["breaker replay", "breaker evaluate", "fingerprint trace"])
def test_an_empty_file_is_called_empty(mmctl, tmp_path: Path, command: str) -> None:
    (tmp_path / "none").touch()
    done = mmctl(*command.split(), "none", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (1, "mmctl: error: none is empty\n")
