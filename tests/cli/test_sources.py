"""Sources that are not there, as an operator meets them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from mmctl.engine.recording import header
from mmctl.engine.records import encode


@pytest.mark.parametrize("command", ["breaker watch", "probe", "breaker rules", "schedule queues"])
def test_an_address_without_its_scheme_is_corrected(mmctl, command: str) -> None:
    done = mmctl(*command.split(), "localhost:8000")
    assert done.returncode == 2
    assert done.stderr == (
        "mmctl: error: no source or file 'localhost:8000'; for a metrics page give "
        "http://localhost:8000/metrics\n"
    )


@pytest.mark.parametrize(
    "arguments",
    [
        ("breaker", "verify", "--golden", "x", "--endpoint"),
        ("benchmark", "guard", "--mixture", "--backend"),
    ],
)
def test_so_is_one_behind_an_option(mmctl, arguments: tuple[str, ...]) -> None:
    done = mmctl(*arguments, "127.0.0.1:9")
    assert done.returncode == 2 and "is no URL such as http://127.0.0.1:9" in done.stderr


@pytest.mark.parametrize("command", ["breaker watch", "probe"])
def test_what_may_still_come_can_be_waited_for(mmctl, tmp_path, command: str) -> None:
    uri = f"agent:{tmp_path / 'w.sock'}"
    at_once = mmctl(*command.split(), uri)
    assert at_once.returncode == 4 and "; --wait 30s waits for it" in at_once.stderr
    waited = mmctl(*command.split(), uri, "--wait", "300ms")
    assert waited.returncode == 4 and "--wait" not in waited.stderr
    assert command == "probe" or "waiting" in waited.stdout


def test_without_a_driver_and_a_source_the_others_are_named(mmctl) -> None:
    done = mmctl("breaker", "watch", "--duration", "500ms")
    if "NVML" not in done.stdout:
        pytest.skip("there is an NVIDIA driver here")
    assert done.returncode == 0 and done.stderr == (
        "no NVIDIA device here: name what to watch, such as http://127.0.0.1:8000/metrics, "
        "agent:PATH or demo:burst\n"
    )


def test_nothing_read_is_said(mmctl) -> None:
    head = encode(header("n", "default")).decode() + "\n"
    assert mmctl("probe", "-", input=head).stdout == "(nothing)\n"


def test_a_hooked_process_that_has_allocated_nothing_yet_is_told_apart(mmctl) -> None:
    if shutil.which("cc") is None:
        pytest.skip("no C compiler")
    command = [sys.executable, "-m", "mmctl", "breaker", "run", "--", "sleep", "60"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as running:
        assert running.stderr is not None
        uri = running.stderr.readline().split()[0]
        pid = uri.partition(":")[2]
        quiet = mmctl("probe", uri)
        running.terminate()
    assert quiet.returncode == 4
    assert f"process {pid} is under the hook and has allocated nothing" in quiet.stderr
    assert f"no hook is in process {os.getpid()}" in mmctl("probe", f"hook:{os.getpid()}").stderr
    assert f"there is no process {pid}" in mmctl("probe", uri).stderr


@pytest.mark.parametrize("command", ["breaker replay", "probe", "top --once --size 80x24"])
def test_a_recording_that_was_cut_is_said_once_and_shown(mmctl, tmp_path, command):
    whole = (Path(__file__).parents[1] / "fixtures/readers/recording.ndjson").read_bytes()
    path = tmp_path / "cut.ndjson"
    path.write_bytes(whole[:-9])
    cut = mmctl(*command.split(), str(path))
    path.write_bytes(whole)
    done = mmctl(*command.split(), str(path))
    assert cut.returncode == done.returncode
    assert cut.stderr.count(f"{path} ends in the middle of a record") == 1
    assert "middle of a record" not in done.stderr
