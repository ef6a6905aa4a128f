"""The two queues: how deep, how long, who came too late, and what other limits would change.

Fed with ``request`` records (queued, admitted, completed) and a CPU's ``device`` readings, live
or recorded. What other limits would change is a replay of the same arrivals and service times
through so many servers: modelled. The downscale loop watches the P99 of each second.
"""

from __future__ import annotations

from collections import deque
from typing import Any, Literal

import msgspec
import numpy as np

from mmctl.engine.records import AnyRecord, Device, Request
from mmctl.engine.schedule.figures import spread
from mmctl.engine.schedule.stages import serve

KEPT = 200_000  # of the latest requests of each queue
WINDOW_SAMPLES = 60
BASELINE_FACTOR = 1.2
DEGRADE_P99_S, DEGRADE_CPU_RATIO, DEGRADE_PERIODS = 0.8, 0.45, 3


class Limit(msgspec.Struct, frozen=True, kw_only=True):
    """A queue's limits: so many at once, each to start within ``deadline_s``."""

    queue: Literal["vision", "stream"]
    batch: int
    deadline_s: float


class _Lane:
    def __init__(self) -> None:
        self.waiting: dict[str, int] = {}
        self.running: dict[str, tuple[int, int]] = {}
        self.done: deque[tuple[int, int, int]] = deque(maxlen=KEPT)
        self.most_waiting = 0
        self.area_ns = 0  # integral of the number waiting
        self.last_ns: int | None = None
        self.first_ns: int | None = None

    def tick(self, ts_ns: int) -> None:
        if self.last_ns is None:
            self.first_ns = self.last_ns = ts_ns
        passed = max(0, ts_ns - self.last_ns)
        self.area_ns += passed * len(self.waiting)
        self.last_ns = max(self.last_ns, ts_ns)


class Queues:
    """Takes records in order of time; ``report`` says how the queues stand."""

    def __init__(self, limits: tuple[Limit, Limit]) -> None:
        self._limits = limits
        self._lanes = {limit.queue: _Lane() for limit in limits}
        self.downscale = Downscale()

    def add(self, record: AnyRecord) -> None:
        """Count a request in or out of its queue; a CPU's reading bounds downscaling."""
        if isinstance(record, Device) and record.kind == "cpu":
            self.downscale.cpu_ratio = record.sm_ratio
        if not isinstance(record, Request):
            return
        lane = self._lanes["vision" if record.images or record.vision_tokens else "stream"]
        lane.tick(record.ts_ns)
        if record.state == "queued":
            lane.waiting[record.id] = record.ts_ns
            lane.most_waiting = max(lane.most_waiting, len(lane.waiting))
        elif record.state == "admitted":
            arrived = lane.waiting.pop(record.id, record.ts_ns)
            lane.running[record.id] = (arrived, record.ts_ns)
        elif record.state == "completed":
            self._completed(lane, record)
        elif record.state in ("failed", "refused", "cancelled"):
            lane.waiting.pop(record.id, None)
            lane.running.pop(record.id, None)

    def _completed(self, lane: _Lane, record: Request) -> None:
        """Where no admission was told, the request itself says how long it had waited."""
        wait_s = record.queue_wait_s
        if wait_s is None:
            wait_s = record.stages.get("queue_wait_s")
        if record.id in lane.running:
            arrived, begun = lane.running.pop(record.id)
        elif record.id in lane.waiting:
            arrived = lane.waiting.pop(record.id)
            if wait_s is None:
                return
            begun = min(arrived + round(wait_s * 1e9), record.ts_ns)
        else:
            return
        lane.done.append((arrived, begun, record.ts_ns))
        self.downscale.add(record.ts_ns, (record.ts_ns - arrived) / 1e9)

    def report(self) -> list[dict[str, Any]]:
        """One entry a queue; what a queue without a finished request has not shown is absent."""
        return [self._report(limit, self._lanes[limit.queue]) for limit in self._limits]

    def _report(self, limit: Limit, lane: _Lane) -> dict[str, Any]:
        times = np.array(lane.done, float).reshape(-1, 3) / 1e9
        wait = times[:, 1] - times[:, 0]
        busy_s, most_running = _service(times)
        span_ns = (lane.last_ns or 0) - (lane.first_ns or 0)
        return {
            "queue": limit.queue,
            "batch": limit.batch,
            "deadline_s": limit.deadline_s,
            "finished": len(times),
            "depth": len(lane.waiting),
            "running": len(lane.running),
            "most_depth": lane.most_waiting,
            "most_running": most_running,
            "mean_depth": lane.area_ns / span_ns if span_ns else None,
            "utilisation_ratio": min(1.0, busy_s * 1e9 / span_ns)
            if span_ns and len(times)
            else None,
            "wait_s": spread(wait),
            "e2e_s": spread(times[:, 2] - times[:, 0]),
            "late_ratio": float((wait > limit.deadline_s).mean()) if len(wait) else None,
            "alternatives": _alternatives(times, limit, most_running),
        }


def _service(times: np.ndarray) -> tuple[float, int]:
    """Seconds in which at least one finished request was in work, and the most at once."""
    if not len(times):
        return 0.0, 0
    moments = np.concatenate([times[:, 1], times[:, 2]])
    change = np.concatenate([np.ones(len(times)), -np.ones(len(times))])
    order = np.lexsort((change, moments))  # who leaves at a moment goes before who comes
    inside = np.cumsum(change[order])
    return float(np.diff(moments[order])[inside[:-1] > 0].sum()), int(inside.max())


def _alternatives(times: np.ndarray, limit: Limit, seen: int) -> list[dict[str, Any]]:
    """Waits if so many had been served at once, each taking as long as it did."""
    if not len(times):
        return []
    order = np.argsort(times[:, 0], kind="stable")
    arrival, service = times[order, 0] - times[:, 0].min(), (times[:, 2] - times[:, 1])[order]
    found = []
    for servers in sorted({max(1, seen // 2), max(1, seen), 2 * max(1, seen), limit.batch}):
        wait = serve(arrival, service, servers) - arrival
        found.append(
            {
                "servers": servers,
                "basis": "modelled",
                "wait_s": spread(wait),
                "late_ratio": float((wait > limit.deadline_s).mean()),
            }
        )
    return found


class Downscale:
    """The elastic loop: P99 of each second's requests against its own baseline, and the CPU's use.

    ``decisions`` tell when it would act: after three seconds in a row for which the matrix asks
    for something, while the CPU has room. Without a reading of the CPU it decides nothing.
    """

    def __init__(self) -> None:
        self.cpu_ratio: float | None = None
        self.decisions: list[dict[str, Any]] = []
        self.baseline_s: float | None = None
        self._second: int | None = None
        self._values: list[float] = []
        self._window: deque[float] = deque(maxlen=WINDOW_SAMPLES)
        self._over = 0
        self._action = "none"

    def add(self, ts_ns: int, latency_s: float) -> None:
        """A request's latency; every second that has passed is decided about."""
        second = ts_ns // 1_000_000_000
        if self._second is not None and second > self._second:
            self._close(self._second + 1)
            if second > self._second + 1:
                self._over = 0  # a second without a request is no third one in a row
        self._second = second if self._second is None else max(second, self._second)
        self._values.append(latency_s)

    def _close(self, second: int) -> None:
        values, self._values = self._values, []
        if not values:
            return
        p99 = float(np.percentile(values, 99))
        self._window.append(p99)
        self.baseline_s = BASELINE_FACTOR * float(np.percentile(list(self._window), 99))
        cpu = self.cpu_ratio
        if cpu is None:
            return
        wanted = action_of(cpu, p99)
        self._over = self._over + 1 if wanted != "none" else 0
        action = wanted if self._over >= DEGRADE_PERIODS else "none"
        if action != self._action:
            self.decisions.append(
                {"ts_ns": second * 1_000_000_000, "action": action, "p99_s": p99,
                 "cpu_ratio": cpu, "baseline_s": self.baseline_s}
            )  # fmt: skip
            self._action = action


def action_of(cpu_ratio: float, p99_s: float) -> str:
    """The matrix of SPEC B12, what to give up first; ``none`` where nothing is asked for."""
    if cpu_ratio < 0.40 and p99_s > 0.9:
        return "close_noncore_workers"
    if 0.40 <= cpu_ratio <= 0.60 and p99_s > 0.75:
        return "cache_warm"
    if cpu_ratio < DEGRADE_CPU_RATIO and p99_s > DEGRADE_P99_S:
        return "degrade"
    return "none"
