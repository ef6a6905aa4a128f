"""Communication against compute: what smaller gather batches and more vision work side by side
would give, and the published actions.

Signals come from records: ``collective`` spans and the waits of ``imbalance`` events, readings
of the devices that encode images, else the time in use of their vision spans. A point is a gather
batch and a vision parallelism as factors of what runs now: a gather of ``g`` times the items
takes α + (L - α)·g, L what was measured and α the fixed part of a collective; ``p`` times the
work side by side fills a device up to 1. Points are modelled, signals measured.
"""

from __future__ import annotations

import math
from collections import defaultdict
from typing import Any

import msgspec
import numpy as np

from mmctl.engine.records import AnyRecord, Device, Event, Span

GATHER_FACTORS = (2.0, 1.0, 0.5, 0.25, 0.125, 0.0625)
PARALLEL_FACTORS = (0.5, 1.0, 1.5, 2.0, 3.0, 4.0)
USE_MOST = 0.98  # a device is never modelled fuller than this
KEPT = 200_000  # of the latest collectives


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """Mean seconds of a collective above which gathers are made smaller, share of time in use
    of the vision devices below which more is encoded side by side, and the fixed seconds of a
    collective."""

    collective_s: float
    use_ratio: float
    fixed_s: float


class Signals:
    """Takes records in any order; ``report`` says what to do."""

    def __init__(self, vision: tuple[str, ...] = ()) -> None:
        self._given = vision
        self._collectives: list[float] = []
        self._begin: int | None = None
        self._end = 0
        self._use: dict[str, list[float]] = defaultdict(list)
        self._kinds: dict[str, str] = {}
        self._spans: dict[str, list[tuple[int, int]]] = defaultdict(list)

    def add(self, record: AnyRecord) -> None:
        """Take what the record says of collectives, vision spans, use and requests in flight."""
        if isinstance(record, Span):
            end = record.ts_ns + max(record.duration_ns, 0)
            self._begin = record.ts_ns if self._begin is None else min(self._begin, record.ts_ns)
            self._end = max(self._end, end)
            if record.kind == "collective":
                self._collective(record.duration_ns / 1e9)
            elif record.modality == "vision":
                self._spans[_key(record)].append((record.ts_ns, end))
        elif isinstance(record, Event) and record.what == "imbalance":
            waits = record.evidence.get("waits_s")
            told = [*waits.values()] if isinstance(waits, dict) else []
            for wait_s in told or [record.evidence.get("wait_s")]:
                if isinstance(wait_s, (int, float)) and math.isfinite(wait_s):
                    self._collective(float(wait_s))
        elif isinstance(record, Device) and record.sm_ratio is not None:
            self._use[_key(record)].append(record.sm_ratio)
            self._kinds[_key(record)] = record.kind

    def _collective(self, seconds: float) -> None:
        if seconds >= 0 and len(self._collectives) < KEPT:
            self._collectives.append(seconds)

    @property
    def known(self) -> bool:
        """Whether any signal was seen that an action could rest on."""
        return bool(self._collectives or self._spans or self._use)

    def report(self, limits: Limits, *, gather_batch: int | None = None) -> dict[str, Any]:
        """Signals with their reasons for absence, the actions, and the points with their front."""
        signals = self._signals()
        return {
            "signals": signals,
            "limits": msgspec.to_builtins(limits),
            "actions": _actions(signals, limits, gather_batch),
            "points": _points(signals, limits),
        }

    def _signals(self) -> dict[str, Any]:
        absent: dict[str, str] = {}
        mean = p99 = None
        if self._collectives:
            mean = float(np.mean(self._collectives))
            p99 = float(np.percentile(self._collectives, 99))
        else:
            absent["collective_mean_s"] = (
                "no collective among the records: mmctl probe kernels TRACE --record gives them"
            )
        span_s = (self._end - self._begin) / 1e9 if self._begin is not None else 0.0
        share = None
        if self._collectives and span_s > 0:
            # Ranks are counted one by one: of each the share of its own time.
            share = min(1.0, sum(self._collectives) / (span_s * max(1, len(self._devices()))))
        else:
            absent["communication_ratio"] = "no collective, or no spans over which to take it"
        use, basis = self._vision_use(span_s)
        if use is None:
            absent["vision_use_ratio"] = (
                "no reading of a device that encodes images: add nvml:, or name --vision"
            )
        return {
            "collectives": len(self._collectives), "collective_mean_s": mean,
            "collective_p99_s": p99, "communication_ratio": share,
            "vision_devices": self._devices(), "vision_use_ratio": use, "vision_use_from": basis,
            "span_s": span_s, "absent": absent,
        }  # fmt: skip

    def _devices(self) -> list[str]:
        """Named ones, else those with vision spans, else every device but processors."""
        seen = [*self._use, *self._spans]
        if self._given:
            return [key for key in dict.fromkeys(seen) if key.split("/")[-1] in self._given]
        if self._spans:
            return sorted(self._spans)
        return sorted(key for key in self._use if self._kinds[key] != "cpu")

    def _vision_use(self, span_s: float) -> tuple[float | None, str | None]:
        devices = self._devices()
        read = [np.mean(self._use[key]) for key in devices if self._use.get(key)]
        if read:
            return float(np.mean(read)), "device readings"
        if span_s > 0 and devices:
            busy = [_union_s(self._spans[key]) / span_s for key in devices]
            return min(1.0, float(np.mean(busy))), "vision spans"
        return None, None


def _key(record: Span | Device) -> str:
    return f"{record.node}/{record.device}" if record.node else record.device


def _union_s(spans: list[tuple[int, int]]) -> float:
    """Seconds in which at least one of the spans ran."""
    total, reach = 0, -(1 << 62)
    for begin, end in sorted(spans):
        total += max(0, end - max(begin, reach))
        reach = max(reach, end)
    return total / 1e9


def _actions(
    signals: dict[str, Any], limits: Limits, gather_batch: int | None
) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    mean, use = signals["collective_mean_s"], signals["vision_use_ratio"]
    if mean is not None and mean > limits.collective_s:
        factor = _gather_factor(mean, limits)
        to = max(1, math.floor(gather_batch * factor)) if gather_batch and factor else None
        found.append(
            {
                "action": "smaller_gather_batch", "signal": "collective_mean_s", "value": mean,
                "limit": limits.collective_s, "factor": factor, "from": gather_batch, "to": to,
                "why": f"collectives take {1e3 * mean:.1f} ms on average, more than "
                f"{1e3 * limits.collective_s:.1f} ms"
                + ("" if factor else ": no batch is small enough, the link itself is slow"),
            }
        )  # fmt: skip
    if use is not None and use < limits.use_ratio:
        factor = limits.use_ratio / use if use > 0 else None
        found.append(
            {
                "action": "more_vision_parallelism", "signal": "vision_use_ratio", "value": use,
                "limit": limits.use_ratio, "factor": factor, "from": None, "to": None,
                "why": f"the vision devices are in use {use:.0%} of the time, less than "
                f"{limits.use_ratio:.0%}"
                + ("" if factor else ": they do nothing, more side by side would not help"),
            }
        )  # fmt: skip
    return found


def _gather_factor(mean_s: float, limits: Limits) -> float | None:
    """The largest share of the gather batch that brings the mean to its limit."""
    if mean_s <= limits.fixed_s or limits.collective_s <= limits.fixed_s:
        return None
    return (limits.collective_s - limits.fixed_s) / (mean_s - limits.fixed_s)


def _points(signals: dict[str, Any], limits: Limits) -> list[dict[str, Any]]:
    """Each gather batch with each parallelism; absent signals leave their figures absent."""
    mean, use = signals["collective_mean_s"], signals["vision_use_ratio"]
    share = signals["communication_ratio"]
    gathers = GATHER_FACTORS if mean is not None else (1.0,)
    parallels = PARALLEL_FACTORS if use is not None else (1.0,)
    found = []
    for g in gathers:
        latency = None
        cost = None
        if mean is not None:
            fixed = min(limits.fixed_s, mean)
            latency = fixed + (mean - fixed) * g
            # As many items are gathered in all: 1/g times as many collectives of this length.
            cost = (latency / g) / mean if mean > 0 else 1.0
        for p in parallels:
            filled = None if use is None else min(USE_MOST, max(use, 0.0) * p)
            done = 1.0 if not use or filled is None else filled / use
            found.append(
                {
                    "gather_batch_factor": g, "vision_parallelism_factor": p,
                    "collective_mean_s": latency,
                    "communication_ratio": None if share is None or cost is None
                    else min(1.0, share * cost * done),
                    "communication_factor": cost, "vision_use_ratio": filled,
                    "within_limits": (latency is None or latency <= limits.collective_s)
                    and (filled is None or filled >= limits.use_ratio),
                }
            )  # fmt: skip
    front = _front(found)
    return [{**point, "front": i in front} for i, point in enumerate(found)]


def _front(points: list[dict[str, Any]]) -> set[int]:
    """Points that no other beats in latency, communication an item, idle vision time and the
    memory of work side by side; what is absent counts alike for all."""

    def aims(point: dict[str, Any]) -> tuple[float, ...]:
        return (
            point["collective_mean_s"] or 0.0, point["communication_factor"] or 0.0,
            -(point["vision_use_ratio"] or 0.0), point["vision_parallelism_factor"],
        )  # fmt: skip

    goals = [aims(point) for point in points]
    return {
        i for i, mine in enumerate(goals)
        if not any(
            all(a <= b for a, b in zip(other, mine, strict=True)) and other != mine
            for other in goals
        )
    }  # fmt: skip
