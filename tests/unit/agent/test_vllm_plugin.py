"""The entry point for vLLM, loaded as vLLM loads its general plugins."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
from pathlib import Path

# What vllm.plugins.load_general_plugins does, in a process of its own.
LOAD = """
import sys, time
from importlib.metadata import EntryPoint
import tomli
groups = tomli.load(open('pyproject.toml', 'rb'))['project']['entry-points']
for name, value in groups['vllm.general_plugins'].items():
    plugin = EntryPoint(name, value, 'vllm.general_plugins').load()
    plugin()
    plugin()
print('loaded', 'torch' in sys.modules, flush=True)
sys.stdin.read()
"""
ROOT = Path(__file__).parents[3]


def load(environment: dict[str, str]) -> subprocess.Popen[str]:
    import os

    return subprocess.Popen(
        [sys.executable, "-c", LOAD], env={**os.environ, **environment}, cwd=ROOT, text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def test_without_the_variable_nothing_happens(tmp_path: Path) -> None:
    out, errors = load({"MMCTL_AGENT": ""}).communicate("")
    assert (out, errors) == ("loaded False\n", "") and not list(tmp_path.iterdir())


def test_a_worker_listens_says_so_and_refuses_what_it_cannot_do(tmp_path: Path) -> None:
    folder = tmp_path / "a"
    worker = load({"MMCTL_AGENT": str(folder)})
    assert worker.stdout is not None and worker.stdout.readline() == "loaded False\n"
    path = folder / f"{worker.pid}.sock"
    for _ in range(100):
        if path.exists():
            break
        time.sleep(0.02)
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(str(path))
        client.sendall(b'{"action":"subscribe"}\n')
        lines = client.makefile("r")
        agent = json.loads(lines.readline())
        assert agent["what"] == "agent" and agent["evidence"]["socket"] == str(path)
        client.sendall(b'{"id":"c","action":"respond","args":{"order":[]}}\n')
        answer = json.loads(lines.readline())
    assert answer["evidence"]["id"] == "c" and "no 'respond'" in answer["evidence"]["refused"]
    assert worker.communicate("")[1] == "" and worker.returncode == 0


def test_a_folder_that_cannot_be_made_does_not_stop_the_engine(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    out, errors = load({"MMCTL_AGENT": str(tmp_path / "file" / "x")}).communicate("")
    assert out == "loaded False\n" and errors.startswith("mmctl: the agent does not start")
