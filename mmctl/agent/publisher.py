"""What a serving process says of itself: pool, device, serving and request records."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

import psutil
import torch

from mmctl.agent.device_pool import AgentPool
from mmctl.engine.memory.dryrun import Step, headroom
from mmctl.engine.memory.state import Window, pool_record
from mmctl.engine.records import (
    AnyRecord,
    Device,
    Fits,
    Latencies,
    Request,
    Serving,
    latency_quantiles,
)

INTERVAL_NS = 100_000_000
HEAT_ROWS = 40
RECENT = 200
"""Latency quantiles are of this many finished requests."""

ABSENT = {
    "bandwidth_ratio": "a CPU has no memory-bandwidth counter here",
    "temperature_c": "not read by the agent",
    "power_w": "not read by the agent",
}

ABSENT_ON_GPU = dict.fromkeys(
    ("sm_ratio", "bandwidth_ratio", "temperature_c", "power_w"), "the source nvml: reads it"
)


class Load(NamedTuple):
    """What a server has in hand: counts of requests, of tokens in storage, and of its output."""

    running: int
    waiting: int
    vision_tokens: int
    text_tokens: int
    generated_tokens: int
    oldest_wait_s: float


class Timing(NamedTuple):
    """Times of one request in seconds: to the first token, per further token, in all."""

    modality: str
    ttft_s: float
    itl_s: float | None
    e2e_s: float


class Publisher:
    """Makes records of a pool and the server on it, at least ten a second while it works."""

    def __init__(
        self,
        pool: AgentPool,
        emit: Callable[[AnyRecord], None],
        engine: str,
        instance: str,
        heat_window_s: float = 60.0,
    ) -> None:
        self.pool, self.emit, self.engine, self.instance = pool, emit, engine, instance
        self.node, self.device = pool.node, pool.device
        self.window = Window(heat_window_s)
        self.process = psutil.Process()
        self.process.cpu_percent()
        self.last_ns = 0
        self.load: Load | None = None
        self.timings: deque[Timing] = deque(maxlen=RECENT)
        self.tokens: deque[tuple[int, int]] = deque(maxlen=64)
        pool.tick = self.tick

    def tick(self) -> None:
        """Called after every allocation: shows the pool in the middle of a long step."""
        if time.time_ns() - self.last_ns >= INTERVAL_NS:
            self._pool(None, None)

    def step(self, load: Load, fits: Fits, outlook: Sequence[Step]) -> None:
        """All records at the end of a step: ``fits`` is the dry run of what runs next, headroom
        is what ``outlook`` would leave, with the batch that still waits for company."""
        self.load = load
        self._pool(fits, headroom(self.pool.allocator, outlook))
        self._serving(load)

    def _pool(self, fits: Fits | None, headroom_bytes: int | None) -> None:
        self._device()  # first: it says which group the pool's device is of
        self.last_ns = time.time_ns()
        load = self.load
        allocator = self.pool.allocator
        self.emit(
            pool_record(
                allocator, self.window, ts_ns=self.last_ns, node=self.node, device=self.device,
                rows=HEAT_ROWS, fits=fits, headroom_bytes=headroom_bytes,
                vision_tokens=load.vision_tokens if load else None,
                text_tokens=load.text_tokens if load else None,
                base_address=allocator.base_address or None,
                span_bytes=allocator.capacity_bytes if allocator.base_address else None,
                basis=self.pool.basis,
            )
        )  # fmt: skip

    def _device(self) -> None:
        capacity = self.pool.allocator.capacity_bytes or 0
        on_gpu = self.pool.torch_device == "cuda"
        busy = self.process.cpu_percent() / 100 / torch.get_num_threads()
        self.emit(
            Device(
                ts_ns=time.time_ns(), node=self.node, device=self.device,
                kind="gpu" if on_gpu else "cpu", group=self.instance,
                model=torch.cuda.get_device_name() if on_gpu else "emulated pool on the CPU",
                sm_ratio=None if on_gpu else round(min(busy, 1.0), 3),
                total_bytes=capacity, used_bytes=self.pool.reserved_bytes,
                free_bytes=capacity - self.pool.reserved_bytes,
                absent=ABSENT_ON_GPU if on_gpu else ABSENT,
            )
        )  # fmt: skip

    def _serving(self, load: Load) -> None:
        now = time.time_ns()
        self.tokens.append((now, load.generated_tokens))
        while len(self.tokens) > 2 and now - self.tokens[1][0] > 1_000_000_000:
            self.tokens.popleft()
        rate = None
        (then, before), (_, after) = self.tokens[0], self.tokens[-1]
        if now > then:
            rate = (after - before) * 1e9 / (now - then)
        held = self.pool.bytes_of
        capacity = self.pool.allocator.capacity_bytes or 0
        self.emit(
            Serving(
                ts_ns=now, node=self.node, engine=self.engine, instance=self.instance,
                running=load.running, waiting=load.waiting, queue_wait_s=load.oldest_wait_s,
                kv_ratio=min(held["text"] / capacity, 1.0) if capacity else None,
                vision_tokens=load.vision_tokens, text_tokens=load.text_tokens,
                generation_tokens_per_s=rate,
                modalities={
                    modality: Latencies(
                        **latency_quantiles(t for t in self.timings if t.modality == modality)
                    )
                    for modality in ("vision", "text")
                },
                **latency_quantiles(self.timings),
            )
        )  # fmt: skip

    def request(
        self, id: str, state: str, images: int, vision_tokens: int, text_tokens: int,
        output_tokens: int, stages: dict[str, float] | None = None,
    ) -> None:  # fmt: skip
        """A request came, or got its output."""
        self.emit(
            Request(
                ts_ns=time.time_ns(), node=self.node, id=id, state=state, images=images,
                vision_tokens=vision_tokens, text_tokens=text_tokens,
                output_tokens=output_tokens, stages=stages or {},
            )
        )  # fmt: skip
