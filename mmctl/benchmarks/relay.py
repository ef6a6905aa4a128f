"""What the guard costs: latency it adds, requests a core passes, memory over many requests.

Three processes: a backend that answers at once, the guard as the command line starts it, and a
load generator. The first and the last are bare protocols of asyncio, so that what is measured
is the guard. Direct and guarded load alternate in short rounds, because a machine's noise comes
in stretches; throughput is given by the guard's own CPU time as well.
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import msgspec

from mmctl.engine.errors import MmctlError, quiet_interrupt

BUDGET = {
    "added_p50_s": 0.002, "added_p99_s": 0.008, "requests_per_core_second": 1000.0,
}  # fmt: skip
ROUND_S = 2.0
MESSAGES = [
    {"role": "system", "content": "You are a helpful assistant that answers in one sentence."},
    {"role": "user", "content": "How many legs do seven spiders and three flies have? " * 4},
]
REQUEST = msgspec.json.encode({"model": "fast", "messages": MESSAGES, "max_tokens": 32})
ANSWER = msgspec.json.encode(
    {
        "id": "chatcmpl-1", "object": "chat.completion", "created": 1, "model": "fast",
        "choices": [
            {
                "index": 0, "finish_reason": "stop",
                "message": {"role": "assistant", "content": "Seventy-four legs altogether."},
            }
        ],
        "usage": {"prompt_tokens": 77, "completion_tokens": 8, "total_tokens": 85},
    }
)  # fmt: skip


class _Backend(asyncio.Protocol):
    """Answers every request with the same completion, as soon as its body is there."""

    MODELS = msgspec.json.encode({"object": "list", "data": [{"id": "fast", "object": "model"}]})

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport: Any = transport
        self.rest = b""

    def data_received(self, data: bytes) -> None:
        self.rest += data
        while (end := self.rest.find(b"\r\n\r\n")) >= 0:
            whole = end + 4 + _length(self.rest[:end])
            if len(self.rest) < whole:
                return
            body = self.MODELS if self.rest.startswith(b"GET ") else ANSWER
            self.rest = self.rest[whole:]
            self.transport.write(
                b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nServer: fast\r\n"
                b"Content-Length: %d\r\n\r\n%s" % (len(body), body)
            )


def _length(head: bytes) -> int:
    for line in head.split(b"\r\n"):
        name, _, value = line.partition(b":")
        if name.lower() == b"content-length":
            return int(value)
    return 0


class _Client(asyncio.Protocol):
    """One connection; ``ask`` sends the request and waits for the whole answer."""

    def __init__(self, port: int) -> None:
        self.request = (
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1:%d\r\n"
            b"Content-Type: application/json\r\nAuthorization: Bearer benchmark\r\n"
            b"User-Agent: relay\r\nAccept: */*\r\nContent-Length: %d\r\n\r\n%s"
        ) % (port, len(REQUEST), REQUEST)
        self.rest = b""
        self.waiting: asyncio.Future[bytes] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport: Any = transport

    def data_received(self, data: bytes) -> None:
        self.rest += data
        end = self.rest.find(b"\r\n\r\n")
        if end < 0 or len(self.rest) < end + 4 + _length(self.rest[:end]):
            return
        answer, self.rest = self.rest, b""
        if self.waiting is not None and not self.waiting.done():
            self.waiting.set_result(answer)

    def connection_lost(self, exc: Exception | None) -> None:
        if self.waiting is not None and not self.waiting.done():
            self.waiting.set_exception(exc or ConnectionResetError("closed"))

    async def ask(self) -> float:
        """Seconds from the request to its whole answer; MmctlError for another answer."""
        self.waiting = asyncio.get_running_loop().create_future()
        begun = time.perf_counter()
        self.transport.write(self.request)
        answer = await self.waiting
        took = time.perf_counter() - begun
        if not answer.endswith(ANSWER):
            raise MmctlError(f"the server answered something else: {answer[:200]!r}")
        return took


async def backend() -> None:
    """Serve until killed; the address is the first line of the output."""
    server = await asyncio.get_running_loop().create_server(_Backend, "127.0.0.1", 0)
    print(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", flush=True)
    await server.serve_forever()


async def _clients(port: int, count: int) -> list[_Client]:
    loop = asyncio.get_running_loop()
    made = [loop.create_connection(lambda: _Client(port), "127.0.0.1", port) for _ in range(count)]
    return [client for _, client in await asyncio.gather(*made)]


async def steady(ports: Sequence[int], rate_per_s: float, rounds: int) -> list[list[float]]:
    """Latencies at a steady rate from each of ``ports``, which take turns of ``ROUND_S``."""
    pools = [await _clients(port, 8) for port in ports]
    taken: list[list[float]] = [[] for _ in ports]
    for turn in range(rounds * len(ports)):
        clients, found = list(pools[turn % len(ports)]), taken[turn % len(ports)]
        free: asyncio.Queue[_Client] = asyncio.Queue()
        for client in clients:
            free.put_nowait(client)

        async def one(free: asyncio.Queue[_Client] = free, found: list[float] = found) -> None:
            waited = time.perf_counter()
            client = await free.get()
            waited = time.perf_counter() - waited
            found.append(waited + await client.ask())
            free.put_nowait(client)

        begun = time.perf_counter()
        tasks = []
        for number in range(int(rate_per_s * ROUND_S)):
            ahead = begun + number / rate_per_s - time.perf_counter()
            await asyncio.sleep(max(0.0, ahead))
            tasks.append(asyncio.create_task(one()))
        await asyncio.gather(*tasks)
    return taken


async def flood(port: int, requests: int, at_once: int = 16) -> float:
    """Seconds that ``requests`` take, ``at_once`` at a time."""
    clients = await _clients(port, at_once)
    left = iter(range(requests))

    async def work(client: _Client) -> None:
        for _ in left:
            await client.ask()

    begun = time.perf_counter()
    await asyncio.gather(*(work(client) for client in clients))
    return time.perf_counter() - begun


@contextmanager
def _process(command: list[str], folder: str | None = None) -> Iterator[tuple[Any, int]]:
    """A child of ours and the port of the address that it says; its state goes to ``folder``."""
    where = {"XDG_STATE_HOME": folder, "XDG_RUNTIME_DIR": folder} if folder else {}
    child = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        env={**os.environ, **where},
    )  # fmt: skip
    try:
        assert child.stdout is not None
        said = []
        for line in child.stdout:
            said.append(line)
            if "http://" in line:
                yield child, int(line.partition("http://")[2].split()[0].rpartition(":")[2])
                return
        raise MmctlError(f"{' '.join(command[2:5])} did not start: {''.join(said).strip()}")
    finally:
        child.terminate()
        child.wait(10)


def python_process(module: str) -> AbstractContextManager[tuple[Any, int]]:
    """A server of ours in a process of its own."""
    return _process([sys.executable, "-m", module])


@contextmanager
def guard_process(urls: Sequence[str], *options: str) -> Iterator[tuple[Any, int]]:
    """The guard as the command line starts it, once it knows its backends; when it enforces,
    once their goldens are recorded too."""
    backends = [word for url in urls for word in ("--backend", url)]
    command = [sys.executable, "-m", "mmctl", "breaker", "guard", *backends, *options]
    with (
        tempfile.TemporaryDirectory(prefix="mmctl-") as folder,
        _process([*command, "--listen", "127.0.0.1:0"], folder) as (child, port),
    ):
        status = f"http://127.0.0.1:{port}/mmctl/status"
        for _ in range(1200):
            with urllib.request.urlopen(status, timeout=30) as answer:
                found = json.load(answer)
            met = all(backend["models"] for backend in found["backends"])
            if met and (found["mode"] != "enforce" or found["goldens"]):
                break
            time.sleep(0.1)
        else:
            raise MmctlError(f"the guard is not ready: {found['goldens_problem']}")
        yield child, port


def measure(
    *, rate_per_s: float = 200.0, rounds: int = 5, requests: int = 5000, mode: str = "observe"
) -> dict[str, Any]:
    """Latency added at ``rate_per_s`` and throughput over ``requests``, measured here."""
    import psutil

    with ExitStack() as stack:
        _, fast = stack.enter_context(python_process("mmctl.benchmarks.relay"))
        child, port = stack.enter_context(
            guard_process([f"http://127.0.0.1:{fast}"], "--mode", mode)
        )
        guard = psutil.Process(child.pid)
        asyncio.run(flood(port, 2000))
        direct, through = asyncio.run(steady([fast, port], rate_per_s, rounds))
        before, resident = guard.cpu_times(), guard.memory_info().rss
        took_s = asyncio.run(flood(port, requests))
        after = guard.cpu_times()
        cpu_s = after.user + after.system - before.user - before.system
        return {
            "mode": mode, "basis": "measured", "rate_per_s": rate_per_s,
            "latency_samples": len(through),
            **_added(direct, through),
            "requests": requests,
            "requests_per_second": requests / took_s,
            "requests_per_core_second": requests / cpu_s,
            "cpu_s_per_request": cpu_s / requests,
            "resident_bytes": guard.memory_info().rss,
            "resident_growth_bytes": guard.memory_info().rss - resident,
        }  # fmt: skip


def within(found: dict[str, Any]) -> bool:
    """Whether a measurement keeps the budget."""
    slow = any(found[name] > BUDGET[name] for name in ("added_p50_s", "added_p99_s"))
    return not slow and found["requests_per_core_second"] >= BUDGET["requests_per_core_second"]


def _added(direct: list[float], through: list[float]) -> dict[str, float]:
    found: dict[str, float] = {}
    for name, rank in (("p50", 50), ("p99", 99)):
        a, b = (statistics.quantiles(values, n=100)[rank - 1] for values in (direct, through))
        found |= {f"direct_{name}_s": a, f"guarded_{name}_s": b, f"added_{name}_s": b - a}
    return found


if __name__ == "__main__":
    with quiet_interrupt():
        asyncio.run(backend())
