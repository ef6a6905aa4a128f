"""Ctrl-C on what is run as ``python -m mmctl.…``: exit 130 and no traceback."""

from __future__ import annotations

import ast
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def test_every_module_that_can_be_run_ends_quietly() -> None:
    for path in sorted((ROOT / "mmctl").rglob("*.py")):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.If) and "__main__" in ast.unparse(node.test):
                body = ast.unparse(node)
                assert "quiet_interrupt()" in body or path.parent.name == "mmctl", path


def test_the_demo_ends_with_130_and_not_a_word(tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="needs the extra 'torch'")
    socket = tmp_path / "demo.sock"
    command = [sys.executable, "-m", "mmctl.demo", "--scenario", "calm", "--socket", str(socket)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE) as demo:
        assert demo.stderr is not None
        end = time.monotonic() + 60
        while not socket.exists() and time.monotonic() < end:
            time.sleep(0.05)
        demo.send_signal(signal.SIGINT)
        said = demo.stderr.read()
        assert demo.wait(60) == 130 and said == b""
    assert not socket.exists()
