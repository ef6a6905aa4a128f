"""The leak that a failure leaves: device memory in use that no process holds, and its growth."""

from __future__ import annotations

import re
from collections.abc import Iterable
from itertools import pairwise

import msgspec

from mmctl.engine.records import Basis, Device
from mmctl.engine.recovery.logs import Line

IDLE_BYTES = 1024 * 2**20
"""Memory that a driver may hold for itself on an idle device."""

GROWTH_BYTES_PER_MINUTE = 16 * 2**20
"""Slower growth than this, or over less than a minute, is no leak."""


class Leak(msgspec.Struct, frozen=True, kw_only=True):
    """Memory of ``device`` that nobody frees.

    ``growth_bytes_per_minute`` is absent with fewer than two readings; ``holder`` says whose it
    is as far as the readings tell.
    """

    device: str
    held_bytes: int
    growth_bytes_per_minute: float | None
    over_s: float
    readings: int
    holder: str
    evidence: str
    line: int | None = None
    basis: Basis = "measured"


_FIGURE = re.compile(
    r"(?P<device>gpu|npu|vram|hbm|device)\b[^,;:]{0,40}?\bmem\w*[^,;]{0,40}?"
    r"\b(?:in use|used|held|allocated|leaked|usage)\b[^,;\d]{0,20}(?P<size>\d[\d,]*(?:\.\d+)?)\s*"
    r"(?P<unit>[KMG]i?B)",
    re.I,
)
_UNITS = {"k": 2**10, "m": 2**20, "g": 2**30}


def leak_in_readings(readings: Iterable[Device]) -> Leak | None:
    """The greatest leak in readings of devices; absent where all memory is accounted for.

    Only readings that tell both the used bytes and every process's share count.
    """
    series: dict[str, list[tuple[float, int]]] = {}
    idle: dict[str, bool] = {}
    for reading in readings:
        if reading.used_bytes is None or reading.processes is None:
            continue
        shares = [process.used_bytes for process in reading.processes]
        known = [share for share in shares if share is not None]
        if len(known) == len(shares):
            held = max(0, reading.used_bytes - sum(known))
            series.setdefault(reading.device, []).append((reading.ts_ns / 1e9, held))
            idle[reading.device] = not shares
    found = []
    for device, points in series.items():
        growth = _growth(points)
        if _leaks(points, growth) or (idle[device] and points[-1][1] > IDLE_BYTES):
            found.append(_leak(device, points, growth, "no process holds it", "device readings"))
    return max(found, key=lambda leak: leak.held_bytes, default=None)


def leak_in_lines(lines: Iterable[Line]) -> Leak | None:
    """A leak that the log itself tells: figures of device memory in use that only grow."""
    series: dict[str, list[tuple[float, int]]] = {}
    evidence: dict[str, Line] = {}
    for line in lines:
        found = _FIGURE.search(line.text)
        if found and line.ts_s is not None:
            name = found["device"].lower()
            size = float(found["size"].replace(",", "")) * _UNITS[found["unit"][0].lower()]
            series.setdefault(name, []).append((line.ts_s, round(size)))
            evidence[name] = line
    leaks = []
    for name, points in series.items():
        growth = _growth(points)
        if len(points) >= 3 and _leaks(points, growth):
            last = evidence[name]
            leaks.append(
                _leak(name, points, growth, "the log does not say", last.raw.strip(), last.number)
            )
    return max(leaks, key=lambda leak: leak.held_bytes, default=None)


def _growth(points: list[tuple[float, int]]) -> float | None:
    """Bytes per minute by least squares; absent for one moment only."""
    count = len(points)
    mean_s = sum(at for at, _ in points) / count
    spread = sum((at - mean_s) ** 2 for at, _ in points)
    if not spread:
        return None
    return 60 * sum((at - mean_s) * held for at, held in points) / spread


def _leaks(points: list[tuple[float, int]], growth: float | None) -> bool:
    """Steady growth: over a minute or more, and hardly ever less than before."""
    if growth is None or points[-1][0] - points[0][0] < 60 or growth < GROWTH_BYTES_PER_MINUTE:
        return False
    steps = [b - a for (_, a), (_, b) in pairwise(points)]
    fallen = -sum(step for step in steps if step < 0)
    return fallen <= 0.05 * (points[-1][1] - points[0][1])


def _leak(
    device: str, points: list[tuple[float, int]], growth: float | None, holder: str,
    evidence: str, line: int | None = None,
) -> Leak:  # fmt: skip
    return Leak(
        device=device, held_bytes=points[-1][1], growth_bytes_per_minute=growth,
        over_s=points[-1][0] - points[0][0], readings=len(points), holder=holder,
        evidence=evidence, line=line,
    )  # fmt: skip
