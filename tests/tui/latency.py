"""How long a key waits for its screen beside sources that misbehave.

``python tests/tui/latency.py``: the real command in a real pseudo-terminal, where number
keys are typed and the time is taken until words that only the wanted screen has arrive. Prints
the median and the longest for each source, and beside them the CPU time that all threads of the
dashboard took meanwhile: on a machine that others use, what of the time is its own.
"""

from __future__ import annotations

import fcntl
import os
import pty
import select
import struct
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

HERE = Path(__file__)
WORDS = {b"3": b"Evidence", b"5": b"Queues", b"6": b"Collectives", b"1": b"Headroom"}
PRESSES = int(os.environ.get("MMCTL_LATENCY_N", "40"))
FLOOD_PER_S = 10_000


def flood() -> None:
    """Records of eight pools and devices to standard output, 10,000 a second."""
    import scenes

    from mmctl.engine.records import Recording, encode

    out = sys.stdout.buffer
    out.write(encode(Recording(node="a17", started_ns=0, profile="default", mmctl="0")) + b"\n")
    started, sent = time.monotonic(), 0
    with suppress(BrokenPipeError):
        while True:
            second = time.monotonic() - started
            now = time.time_ns()
            lines = [encode(scenes.gpu(second, now, i)) for i in range(8)]
            lines += [encode(scenes.pool(second, now, f"gpu{i}")) for i in range(8)]
            lines += lines[:8] * 5  # mostly small records, as a fleet sends
            out.write(b"\n".join(lines) + b"\n")
            out.flush()
            sent += len(lines)
            time.sleep(max(0.0, started + sent / FLOOD_PER_S - time.monotonic()))


@contextmanager
def page(kind: str) -> Iterator[str]:
    """A metrics page that hangs, answers rubbish, or goes away after three seconds."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if kind == "hang":
                time.sleep(60)
            self.send_response(200)
            self.end_headers()
            self.wfile.write(os.urandom(200_000) if kind == "garbage" else b"vllm:x 1\n")

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    if kind == "vanish":
        threading.Timer(3.0, lambda: (server.shutdown(), server.server_close())).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/metrics"
    finally:
        if kind != "vanish":
            server.shutdown()


def measured(sources: list[str], stdin: int | None) -> list[tuple[float, float]]:
    """Seconds from each key to its screen, and the dashboard's CPU seconds in them."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 50, 160, 0, 0))
    child = subprocess.Popen(
        [sys.executable, "-m", "mmctl", "top", *sources, "--screen", "overview", "--readonly"],
        stdin=slave if stdin is None else stdin, stdout=slave, stderr=slave,
        env={**os.environ, "TERM": "xterm-256color", "PYTHONPATH": str(HERE.parents[2])},
        preexec_fn=lambda: (os.setsid(), fcntl.ioctl(1, termios.TIOCSCTTY, 0)),
    )  # fmt: skip
    os.close(slave)
    found = []
    try:
        until(master, b"Headroom", 20.0)
        drain(master, 2.0)
        for i in range(PRESSES):
            key = list(WORDS)[i % len(WORDS)]
            begun, spent = time.monotonic(), cpu_s(child.pid)
            os.write(master, key)
            until(master, WORDS[key], 5.0)
            found.append((time.monotonic() - begun, cpu_s(child.pid) - spent))
            drain(master, 0.15)
    finally:
        os.write(master, b"q")
        drain(master, 0.5)
        child.kill()
        child.wait()
        os.close(master)
    return found


def cpu_s(pid: int) -> float:
    """CPU time of all threads of a process so far, to the nanosecond."""
    tasks = Path(f"/proc/{pid}/task").glob("*/schedstat")
    return sum(int(task.read_text().split()[0]) for task in tasks) / 1e9


def until(master: int, words: bytes, limit_s: float) -> None:
    seen, end = b"", time.monotonic() + limit_s
    while words not in seen:
        if time.monotonic() > end:
            raise SystemExit(f"{words!r} did not come in {limit_s} s; last: {seen[-300:]!r}")
        if select.select([master], [], [], 0.05)[0]:
            seen = seen[-4096:] + os.read(master, 1 << 16)


def drain(master: int, seconds: float) -> None:
    end = time.monotonic() + seconds
    while (left := end - time.monotonic()) > 0:
        if select.select([master], [], [], left)[0]:
            with suppress(OSError):
                os.read(master, 1 << 16)


def report(name: str, found: list[tuple[float, float]]) -> None:
    told = [name.ljust(8)]
    for what, values in zip(("", "own CPU "), zip(*found, strict=True), strict=True):
        ordered = sorted(values)
        middle, most = 1e3 * ordered[len(ordered) // 2], 1e3 * ordered[-1]
        told.append(f"{what}median {middle:5.0f} ms, longest {most:5.0f} ms")
    print("   ".join(told), flush=True)


def main() -> None:
    report("calm", measured(["host:"], None))
    environment = {**os.environ, "PYTHONPATH": f"{HERE.parents[2]}:{HERE.parent}"}
    feeder = subprocess.Popen(
        [sys.executable, str(HERE), "flood"], stdout=subprocess.PIPE, env=environment
    )
    assert feeder.stdout is not None
    report("flood", measured(["-"], feeder.stdout.fileno()))
    feeder.kill()
    for kind in ("hang", "garbage", "vanish"):
        with page(kind) as uri:
            report(kind, measured([uri, "host:"], None))


if __name__ == "__main__":
    flood() if sys.argv[1:] == ["flood"] else main()
