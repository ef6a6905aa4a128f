"""The dashboard in a real terminal: tmux draws it, keys go in, the terminal comes back."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from mmctl.engine.records import encode
from tests.tui import scenes

ROOT = Path(__file__).parents[2]

if shutil.which("tmux") is None:
    pytest.skip("tmux is not installed", allow_module_level=True)


class Terminal:
    """A tmux session of its own server, with a shell in it."""

    def __init__(self, folder: Path, columns: int, rows: int) -> None:
        self._tmux = ["tmux", "-S", str(folder / "tmux"), "-f", "/dev/null"]
        self._run("new-session", "-d", "-x", str(columns), "-y", str(rows), "-c", str(ROOT), "sh")

    def _run(self, *arguments: str) -> str:
        done = subprocess.run([*self._tmux, *arguments], capture_output=True, text=True, timeout=20)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def type(self, line: str) -> None:
        self._run("send-keys", "-l", line)
        self._run("send-keys", "Enter")

    def key(self, *names: str) -> None:
        self._run("send-keys", *names)

    def text(self) -> str:
        return self._run("capture-pane", "-p")

    def wait(self, *words: str, seconds: float = 60.0) -> str:
        """The screen once it holds every word."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            shown = self.text()
            if all(word in shown for word in words):
                return shown
            time.sleep(0.1)
        raise AssertionError(f"{words} never came:\n{self.text()}")

    def close(self) -> None:
        subprocess.run([*self._tmux, "kill-server"], capture_output=True, timeout=20)


@pytest.fixture
def recording(tmp_path: Path) -> str:
    path = tmp_path / "burst.ndjson"
    path.write_bytes(b"".join(encode(record) + b"\n" for record in scenes.burst(31)))
    return shlex.quote(str(path))


@pytest.fixture
def terminal(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Terminal]:
    terminal = Terminal(tmp_path, *getattr(request, "param", (80, 24)))
    try:
        yield terminal
    finally:
        terminal.close()


TOP = f"{shlex.quote(sys.executable)} -m mmctl top"


@pytest.mark.parametrize("terminal", [(160, 50), (100, 30), (80, 24)], indirect=True)
def test_screens_move_and_the_terminal_comes_back(terminal: Terminal, recording: str) -> None:
    terminal.type(f"{TOP} {recording}; echo code=$?")
    first = terminal.wait("Devices", "gpu1", "play")
    terminal.key("n", "n")
    terminal.wait("HALF OPEN")
    assert terminal.text() != first
    terminal.key("2")
    assert "┃" in terminal.wait("layer conflict", "vision")
    terminal.key("3")
    terminal.wait("Evidence", "tripped")
    terminal.key("4")
    terminal.wait("recovery of", "gpu0")
    terminal.key("q")
    shown = terminal.wait("code=0")
    assert "Devices" not in shown and "Traceback" not in shown
    terminal.type("echo al''ive")
    terminal.wait("alive")


def test_interrupt_and_termination_give_the_terminal_back(
    terminal: Terminal, recording: str, tmp_path: Path
) -> None:
    terminal.type(f"{TOP} {recording}; echo code=$?")
    terminal.wait("gpu1")
    terminal.key("C-c")
    terminal.wait("code=130")
    pid = tmp_path / "pid"
    terminal.type(f"clear; sh -c 'echo $$ >{pid}; exec {TOP} {recording}'; echo code=$?")
    terminal.wait("gpu1")
    os.kill(int(pid.read_text()), signal.SIGTERM)
    terminal.wait("code=143")


# A screen with a fault: the key t raises.
FAULTY = """from mmctl.tui.app import Top
Top.action_theme = lambda self: 1 / 0
from mmctl.cli.main import main
main()"""


def test_an_enforcing_breaker_outlives_a_screen_that_fails(
    terminal: Terminal, tmp_path: Path
) -> None:
    script = tmp_path / "faulty.py"
    script.write_text(FAULTY)
    top = f"XDG_STATE_HOME={tmp_path} {shlex.quote(sys.executable)} {script} top host:"
    terminal.type(f"{top} --mode enforce; echo code=$?")
    terminal.wait("cpu0")
    terminal.key("t")
    shown = terminal.wait("the screen has failed", "goes on in mode enforce")
    assert "code=1" not in shown
    terminal.key("C-c")
    terminal.wait("code=130")
    terminal.type(f"clear; {top}; echo code=$?")
    terminal.wait("cpu0")
    terminal.key("t")
    terminal.wait("unexpected ZeroDivisionError", "code=1")


def test_a_terminal_that_goes_away_ends_it(tmp_path: Path) -> None:
    """A closed window, a lost ssh: no process is left behind that holds the breaker's lock."""
    import pty

    master, slave = pty.openpty()
    environment = {**os.environ, "TERM": "xterm-256color", "XDG_STATE_HOME": str(tmp_path)}
    shown = subprocess.Popen(
        [sys.executable, "-c", LEADER, sys.executable, "-m", "mmctl", "top", "host:"],
        stdin=slave, stdout=slave, stderr=slave, env=environment, cwd=ROOT, start_new_session=True,
    )  # fmt: skip
    os.close(slave)
    seen, deadline = b"", time.monotonic() + 60
    while b"cpu0" not in seen and time.monotonic() < deadline:
        seen += os.read(master, 1 << 16)
    os.close(master)
    assert shown.wait(30) == 143


# Takes the terminal for its own, as a login shell does, and becomes the command.
LEADER = """import fcntl, os, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execv(sys.argv[1], sys.argv[1:])"""


def test_a_piped_source_leaves_the_keys_to_the_terminal(terminal: Terminal, recording) -> None:
    terminal.type(f"cat {recording} | {TOP} -; echo code=$?")
    terminal.wait("gpu1", "END OF RECORDS")
    terminal.key("3")
    terminal.wait("Evidence")
    terminal.key("q")
    terminal.wait("code=0")


def test_without_colour_everything_is_still_told(terminal: Terminal, recording: str) -> None:
    terminal.type(f"NO_COLOR=1 TERM=xterm {TOP} {recording}; echo code=$?")
    shown = terminal.wait("gpu1", "CLOSED")
    assert "█" in shown and "▓" in shown
    terminal.key("q")
    terminal.wait("code=0")
