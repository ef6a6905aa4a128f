"""The command itself: what it refuses, how it ends, what others see of it."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from mmctl.benchmarks.relay import REQUEST, python_process
from mmctl.engine.recording import read
from mmctl.engine.records import Guard, Request
from tests.integration.guard.parts import ROOT, Killable

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def backend() -> Iterator[str]:
    with python_process("mmctl.benchmarks.relay") as (_, port):
        yield f"http://127.0.0.1:{port}"


def start(*options: str) -> tuple[subprocess.Popen[str], str, str]:
    """A running guard, its address, and the socket of its records."""
    command = [sys.executable, "-m", "mmctl", "breaker", "guard", "--listen", "127.0.0.1:0"]
    child = subprocess.Popen([*command, *options], stderr=subprocess.PIPE, text=True, cwd=ROOT)
    assert child.stderr is not None
    said = child.stderr.readline()
    assert "guarding on" in said, said + child.stderr.read()
    url = said.partition("guarding on ")[2].split()[0]
    return child, url, said.rpartition("agent:")[2].strip()


def post(url: str) -> dict[str, Any]:
    request = urllib.request.Request(url + "/v1/chat/completions", data=REQUEST)
    with urllib.request.urlopen(request, timeout=30) as answer:
        found: dict[str, Any] = json.load(answer)
    return found


@pytest.mark.parametrize(
    ("options", "code", "said"),
    [
        ([], 2, "name a server: --backend"),
        (["--backend", "localhost:8000"], 2, "is no address such as http://127.0.0.1:8000"),
        (["--backend", "http://a:1", "--backend", "http://a:1/v1"], 2, "named twice"),
        (["--backend", "http://a:1", "--respond", "shrink_image"], 2,
         "did you mean 'shrink_images'"),
        (["--backend", "http://a:1", "--memory", "much"], 2, "--memory"),
        (["--backend", "http://a:1", "--listen", "here"], 2, "no address"),
        (["--backend", "http://a:1", "--source", "nvmll:"], 2, "nvml"),
    ],
)  # fmt: skip
def test_what_it_refuses(mmctl: Run, options: list[str], code: int, said: str) -> None:
    done = mmctl("breaker", "guard", *options)
    assert (done.returncode, done.stdout) == (code, "")
    assert said in done.stderr
    assert done.stderr.startswith("mmctl: error: ")
    assert done.stderr.count("\n") == 1


def test_a_port_in_use(mmctl: Run, backend: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        done = mmctl("breaker", "guard", "--backend", backend, "--listen", address)
    assert done.returncode == 1
    assert "choose another --listen" in done.stderr


def test_it_serves_is_seen_and_ends(mmctl: Run, backend: str, tmp_path: Path) -> None:
    record = tmp_path / "guard.ndjson"
    child, url, where = start("--backend", backend, "--mode", "enforce", "--record", str(record))
    try:
        for _ in range(5):
            assert post(url)["usage"]["prompt_tokens"] == 77
        with urllib.request.urlopen(url + "/ready", timeout=30) as answer:
            assert json.load(answer)["ready"] is True
        seen = mmctl("top", f"agent:{where}", "--once", "-o", "json")
        assert backend.removeprefix("http://") in seen.stdout
        with urllib.request.urlopen(url + "/mmctl/metrics", timeout=30) as answer:
            page = answer.read().decode()
        assert 'mmctl_guard_requests_total{instance="",' in page
        status = mmctl("breaker", "status", "-o", "json")
        assert json.loads(status.stdout)["mode"] == "enforce"
    finally:
        child.send_signal(signal.SIGTERM)
        assert child.wait(30) == 143
    assert not Path(where).exists()
    records = list(read(record))
    ended = [r for r in records if isinstance(r, Request) and r.state == "completed"]
    assert [(r.images, r.vision_tokens, r.tenant) for r in ended] == [(0, 0, "(none)")] * 5
    assert [r.requests for r in records if isinstance(r, Guard) and r.instance][-1] == 5
    assert mmctl("breaker", "replay", str(record)).returncode == 0


def test_two_guards_side_by_side(backend: str) -> None:
    """The second keeps no state and says so; both serve."""
    first, url, _ = start("--backend", backend, "--mode", "enforce")
    command = [sys.executable, "-m", "mmctl", "breaker", "guard", "--listen", "127.0.0.1:0"]
    second = subprocess.Popen(
        [*command, "--backend", backend, "--mode", "enforce"], stderr=subprocess.PIPE, text=True,
        cwd=ROOT, env=os.environ,
    )  # fmt: skip
    try:
        assert second.stderr is not None
        assert "another breaker keeps the state" in second.stderr.readline()
        other = second.stderr.readline().partition("guarding on ")[2].split()[0]
        assert post(url) == post(other)
    finally:
        for child in (first, second):
            child.send_signal(signal.SIGINT)
        assert [child.wait(30) for child in (first, second)] == [130, 130]


def test_it_says_what_happens_and_ends_quietly(tmp_path: Path) -> None:
    """Killed while idle, back, asked, used; then Ctrl-C while its only backend is down."""
    engine, errors, profile = Killable(tmp_path / "log"), tmp_path / "errors", tmp_path / "p.toml"
    profile.write_text('extends = "default"\n[guard]\nprobe = "50ms"\n')
    engine.start()
    command = [sys.executable, "-m", "mmctl", "breaker", "guard", "--listen", "127.0.0.1:0"]
    with open(errors, "w") as out:
        guard = subprocess.Popen(
            [*command, "--backend", engine.url, "--mode", "enforce", "--profile", str(profile)],
            stderr=out, cwd=ROOT,
        )  # fmt: skip

    def said(words: str, times: int = 1) -> None:
        for _ in range(1200):
            if errors.read_text().count(words) >= times:
                return
            time.sleep(0.05)
        raise AssertionError(f"never said {words!r}:\n{errors.read_text()}")

    try:
        said("goldens of tiny")
        engine.kill()
        said("is out: connection refused")
        engine.start()
        said("canaries: consistent")
        said("takes 20% of the requests again")
        engine.kill()
        said("is out: connection refused", 2)
    finally:
        engine.kill()
        guard.send_signal(signal.SIGINT)
        assert guard.wait(30) == 130
    assert "Traceback" not in errors.read_text()
