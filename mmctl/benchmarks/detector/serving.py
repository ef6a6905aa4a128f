"""Load on servers of the detector: queries a second and P99, naive against batched.

Every server is a process with one thread for the model; the load comes from this one. A closed
loop keeps a request of each client in flight; an open one sends at the moments of a Poisson
process whatever the answers do, and counts latency from those moments.
"""

from __future__ import annotations

import random
import select
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from mmctl.benchmarks.intervals import Estimate, estimate, figure
from mmctl.engine.errors import MmctlError
from mmctl.engine.records import Basis

CLIENTS = 32
OPEN_LOAD_RATIO = 0.8  # of what the naive server answers in a closed loop
REPLY_BYTES = 8
WARM_UP_S = 0.2


class Way(NamedTuple):
    """How a model is served: ``naive`` or ``batched``, and in which precision."""

    serving: str
    precision: str


WAYS = (
    Way("naive", "fp32"), Way("naive", "int8"), Way("batched", "fp32"), Way("batched", "fp16"),
    Way("batched", "int8"),
)  # fmt: skip


class Serving(msgspec.Struct, frozen=True, kw_only=True):
    """One way of serving under one load; medians over its rounds.

    Factors are against the naive FP32 serving and, where ``same_…``, against the naive serving
    in the same precision, each of the same round; intervals are of 95 %.
    """

    serving: str
    precision: str
    load: str
    queries_per_s: float
    p50_ms: float
    p99_ms: float
    queries_factor: float
    queries_factor_ci: tuple[float, float]
    p99_factor: float
    p99_factor_ci: tuple[float, float]
    same_queries_factor: float | None
    same_p99_factor: float | None
    mean_batch: float | None
    queries_per_s_blocks: tuple[float, ...]
    p99_ms_blocks: tuple[float, ...]
    basis: Basis = "measured"
    absent: dict[str, str] = {}


class Round(NamedTuple):
    """What one spell of load saw."""

    queries_per_s: float
    latencies_s: list[float]

    def quantile_ms(self, ratio: float) -> float:
        """The nearest-rank quantile of the latencies, ``ratio`` in [0, 1]."""
        ordered = sorted(self.latencies_s)
        return 1e3 * ordered[min(len(ordered) - 1, int(ratio * len(ordered)))]


@contextmanager
def serve(model: Path, mode: str, told: list[str]) -> Iterator[list[socket.socket]]:
    """The clients' ends of a server process; what it says at its end is put into ``told``."""
    pairs = [socket.socketpair() for _ in range(CLIENTS)]
    numbers = [theirs.fileno() for _, theirs in pairs]
    command = [sys.executable, "-m", "mmctl.benchmarks.detector.server", str(model), mode]
    process = subprocess.Popen(
        [*command, *map(str, numbers)], pass_fds=numbers, stdout=subprocess.PIPE, text=True
    )
    for _, theirs in pairs:
        theirs.close()
    try:
        yield [ours for ours, _ in pairs]
    finally:
        for ours, _ in pairs:
            ours.close()
        try:
            told.append(process.communicate(timeout=10)[0])
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()


def closed_loop(
    clients: Sequence[socket.socket], windows: Sequence[bytes], seconds: float
) -> Round:
    """Each client sends its next window when it has its answer."""
    poll = select.poll()
    by_number = {client.fileno(): client for client in clients}
    sent: dict[int, float] = {}
    number = 0
    for client in clients:
        poll.register(client, select.POLLIN)
        sent[client.fileno()] = time.perf_counter()
        client.sendall(windows[number % len(windows)])
        number += 1
    began = time.perf_counter()
    end = began + seconds
    latencies: list[float] = []
    last = began
    while sent:
        for place, _ in poll.poll():
            client = by_number[place]
            _receive(client)
            last = now = time.perf_counter()
            latencies.append(now - sent.pop(place))
            if now < end:
                sent[place] = now
                client.sendall(windows[number % len(windows)])
                number += 1
    return Round(len(latencies) / (last - began), latencies)


def open_loop(
    clients: Sequence[socket.socket], windows: Sequence[bytes], seconds: float, rate: float,
    seed: int,
) -> Round:  # fmt: skip
    """Requests come as a Poisson process of ``rate`` a second; one that finds no client free
    waits, and its latency counts from when it came."""
    draw = random.Random(seed)
    moments, at = [], 0.0
    while (at := at + draw.expovariate(rate)) < seconds:
        moments.append(at)
    poll = select.poll()
    by_number = {client.fileno(): client for client in clients}
    for client in clients:
        poll.register(client, select.POLLIN)
    free = deque(clients)
    came: dict[int, float] = {}
    latencies: list[float] = []
    number = 0
    began = time.perf_counter()
    while number < len(moments) or came:
        now = time.perf_counter() - began
        while number < len(moments) and moments[number] <= now and free:
            client = free.popleft()
            came[client.fileno()] = moments[number]
            client.sendall(windows[number % len(windows)])
            number += 1
        wait_ms = 1000.0
        if number < len(moments) and free:
            wait_ms = max(0.0, 1e3 * (moments[number] - (time.perf_counter() - began)))
        # Whole milliseconds would batch the requests by themselves: the last one is spun away.
        for place, _ in poll.poll(int(wait_ms)):
            client = by_number[place]
            _receive(client)
            latencies.append(time.perf_counter() - began - came.pop(place))
            free.append(client)
    return Round(len(latencies) / (time.perf_counter() - began), latencies)


def _receive(client: socket.socket) -> None:
    if len(client.recv(REPLY_BYTES, socket.MSG_WAITALL)) < REPLY_BYTES:
        raise MmctlError("a server of the detector ended in the middle of the load")


def measure(
    models: dict[str, Path], windows: NDArray[np.float32], rounds: int, seconds: float,
    tell: Callable[[str, float], None] = lambda name, share: None,
) -> list[Serving]:  # fmt: skip
    """All ways in turn, ``rounds`` times, in a closed loop; then naive FP32 and the batched ways
    at one open load. ``models`` are files with an open batch, by precision."""
    requests = [window.tobytes() for window in windows]
    told: dict[Way, list[str]] = {way: [] for way in WAYS}
    closed: dict[Way, list[Round]] = {way: [] for way in WAYS}
    opened: dict[Way, list[Round]] = {way: [] for way in WAYS if way != ("naive", "int8")}
    total = rounds * (len(closed) + len(opened))
    done = 0
    with ExitStack() as stack:
        servers = {
            way: stack.enter_context(serve(models[way.precision], way.serving, told[way]))
            for way in WAYS
        }
        for way in WAYS:
            tell(f"warming up {way.serving} {way.precision}", 0.0)
            closed_loop(servers[way], requests, WARM_UP_S)
        for _ in range(rounds):
            for way in WAYS:
                tell(f"closed loop: {way.serving} {way.precision}", done / total)
                closed[way].append(closed_loop(servers[way], requests, seconds))
                done += 1
        base = [round_.queries_per_s for round_ in closed[WAYS[0]]]
        rate = OPEN_LOAD_RATIO * float(np.median(base))
        for number in range(rounds):
            for way in opened:
                tell(f"open loop: {way.serving} {way.precision}", done / total)
                opened[way].append(open_loop(servers[way], requests, seconds, rate, number))
                done += 1
    batches = {way: _mean_batch(told[way]) for way in WAYS}
    return [
        _row(way, load, found, batches[way])
        for load, found in (("closed", closed), (f"open {rate:.0f}/s", opened))
        for way in found
    ]


def figures(rows: Sequence[Serving]) -> list[dict[str, Any]]:
    """Each way as ``benchmark compare`` reads it."""
    return [
        item
        for row in rows
        for name in [f"{row.load.split()[0]}/{row.serving} {row.precision}"]
        for item in (
            figure(f"{name}/queries_per_s", row.queries_per_s_blocks, "higher"),
            figure(f"{name}/p99_ms", row.p99_ms_blocks),
        )
    ]


def _mean_batch(told: list[str]) -> float | None:
    """Requests per call, of what a server said at its end; over both loads."""
    numbers = told[0].split() if told else []
    return int(numbers[0]) / int(numbers[1]) if len(numbers) == 2 and int(numbers[1]) else None


def _factor(over: list[float], under: list[float]) -> Estimate:
    """The median over rounds of the quotients within a round."""
    return estimate([a / b for a, b in zip(over, under, strict=True)])


def _row(
    way: Way, load: str, found: dict[Way, list[Round]], mean_batch: float | None
) -> Serving:  # fmt: skip
    def queries(one: Way) -> list[float]:
        return [round_.queries_per_s for round_ in found[one]]

    def p99(one: Way) -> list[float]:
        return [round_.quantile_ms(0.99) for round_ in found[one]]

    plain, same = WAYS[0], Way("naive", way.precision)
    more = _factor(queries(way), queries(plain))
    slower = _factor(p99(way), p99(plain))
    alike = same in found
    absent = {}
    if not alike:
        absent["same_queries_factor"] = "no naive serving in this precision and load was measured"
    if mean_batch is None:
        absent["mean_batch"] = "the server did not tell"
    return Serving(
        serving=way.serving, precision=way.precision, load=load,
        queries_per_s=float(np.median(queries(way))),
        p50_ms=float(np.median([round_.quantile_ms(0.5) for round_ in found[way]])),
        p99_ms=float(np.median(p99(way))),
        queries_factor=more.value, queries_factor_ci=(more.low, more.high),
        p99_factor=slower.value, p99_factor_ci=(slower.low, slower.high),
        same_queries_factor=_factor(queries(way), queries(same)).value if alike else None,
        same_p99_factor=_factor(p99(way), p99(same)).value if alike else None,
        mean_batch=mean_batch, queries_per_s_blocks=tuple(queries(way)),
        p99_ms_blocks=tuple(p99(way)), absent=absent,
    )  # fmt: skip
