"""Run a line as a shell does: to its end, or until it is told to end."""

from __future__ import annotations

import fcntl
import os
import pty
import select
import signal
import struct
import subprocess
import termios
import time
import uuid
from pathlib import Path
from typing import NamedTuple

LONGEST_S = 240.0
ALIVE_S = 4.0
END_S = 60.0
MARK = "MMCTL_EXAMPLE_RUN".removeprefix("MMCTL_")


class Ended(NamedTuple):
    """How a line ended; ``alive`` tells whether it had to be told to."""

    code: int
    out: str
    err: str
    alive: bool


def to_its_end(line: str, folder: Path, environment: dict[str, str]) -> Ended:
    """Run ``line`` and wait for it; the first command of a pipe that fails counts as well."""
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", line], cwd=folder, env=environment,
        stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=LONGEST_S,
    )  # fmt: skip
    return Ended(done.returncode, done.stdout, done.stderr, alive=False)


def until_told(
    line: str,
    folder: Path,
    environment: dict[str, str],
    *,
    terminal: bool,
    alive_s: float = ALIVE_S,
) -> Ended:
    """Start ``line``, with a terminal if asked, and terminate it after a while.

    Raises AssertionError when a process or a folder of it is left behind.
    """
    mark = uuid.uuid4().hex
    environment = {**environment, MARK: mark}
    out, err = folder / ".out", folder / ".err"
    with out.open("wb") as told, err.open("wb") as said:
        master, slave = pty.openpty() if terminal else (-1, -1)
        if terminal:
            fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 50, 160, 0, 0))
        process = subprocess.Popen(
            ["bash", "-c", line], cwd=folder, env=environment, start_new_session=True,
            stdin=slave if terminal else subprocess.DEVNULL,
            stdout=slave if terminal else told, stderr=slave if terminal else said,
            preexec_fn=(lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0)) if terminal else None,
        )  # fmt: skip
        if terminal:
            os.close(slave)
        try:
            alive = not _ends(process, alive_s, master, told)
            if alive:
                # A shell that waits is told as by a terminal; a command alone passes it on itself.
                tell = os.killpg if set("|>;") & set(line) else os.kill
                tell(process.pid, signal.SIGTERM)
                assert _ends(process, END_S, master, told), "it does not end when told to"
        finally:
            left = _marked(mark)
            for pid in left:
                os.kill(pid, signal.SIGKILL)
            process.wait(END_S)
            if terminal:
                os.close(master)
    assert not left, f"processes were left behind: {left}"
    code = process.returncode
    return Ended(
        128 - code if code < 0 else code, out.read_text("utf-8", "replace"),
        err.read_text("utf-8", "replace"), alive,
    )  # fmt: skip


def _ends(process: subprocess.Popen[bytes], seconds: float, master: int, told: object) -> bool:
    """Whether it ends within ``seconds``; what it draws meanwhile is kept."""
    end = time.monotonic() + seconds
    while process.poll() is None and time.monotonic() < end:
        if master < 0:
            time.sleep(0.05)
        elif select.select([master], [], [], 0.05)[0]:
            try:
                told.write(os.read(master, 65536))  # type: ignore[attr-defined]
            except OSError:  # its last process has let go of the terminal
                time.sleep(0.05)
    return process.poll() is not None


def _marked(mark: str) -> list[int]:
    """Processes that carry ``mark``, a moment after the end: what ends with them may still."""
    end = time.monotonic() + 5
    while True:
        found = []
        for entry in Path("/proc").iterdir():
            try:
                if entry.name.isdigit() and mark.encode() in (entry / "environ").read_bytes():
                    found.append(int(entry.name))
            except OSError:
                continue  # gone by now, or another user's
        if not found or time.monotonic() > end:
            return found
        time.sleep(0.1)
