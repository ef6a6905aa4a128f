"""Tasks and how two of them compare: pattern similarity, and predicted collision beside it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

import msgspec

from mmctl.engine.access import fingerprint, reuse
from mmctl.engine.access.accesses import Accesses
from mmctl.engine.access.memory_models import MemoryModel
from mmctl.engine.errors import MmctlError, UsageError, nearest
from mmctl.engine.profiles import Fingerprint

Algorithm = Literal["locality", "classic"]
ALGORITHMS = {"locality": fingerprint.locality, "classic": fingerprint.classic}
ACTIONS = {"high": "isolate bandwidth", "medium": "record and aggregate", "low": "ignore"}
ADVICE = (
    "give each task a MIG slice, which splits the cache and the channels (nvidia-smi mig)",
    "cap the smaller task's share of a shared GPU (CUDA_MPS_ACTIVE_THREAD_PERCENTAGE)",
    "run one after the other, on one stream or by stream priority",
    "place one of them on another device",
)
"""What an operator can do about a collision, from the most to the least isolating."""


class Task(msgspec.Struct, frozen=True, kw_only=True):
    """A task by its fingerprint (16 hex digits) and its reuse signature."""

    name: str
    algorithm: str
    fingerprint: str
    accesses: int
    traffic_bytes: int
    footprint_bytes: int
    signature: reuse.Signature

    @property
    def code(self) -> int:
        """The fingerprint's 64 bits as a number."""
        return int(self.fingerprint, 16)


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """Two tasks: how alike their patterns are, and what sharing a cache would cost them.

    ``band`` and ``action`` speak of pattern similarity only; they do not predict collisions.
    The two ratios are modelled (``reuse.collision``), over the traffic of both tasks.
    """

    a: str
    b: str
    distance: int
    band: Literal["high", "medium", "low"]
    band_of: str
    action: str
    predicted_extra_misses_ratio: float
    baseline_ratio: float
    alone_miss_ratio: tuple[float, float]
    together_miss_ratio: tuple[float, float]
    collision: bool
    advice: list[str]
    cache: str
    cache_bytes: int
    basis: str


def of(accesses: Accesses, algorithm: str) -> Task:
    """The task behind some accesses."""
    if algorithm not in ALGORITHMS:
        raise UsageError(f"no algorithm '{algorithm}'{nearest(algorithm, ALGORITHMS)}")
    found = reuse.signature(accesses)
    code = (
        fingerprint.classic(accesses)
        if algorithm == "classic"
        else fingerprint.locality(accesses, found)
    )
    return Task(
        name=accesses.name,
        algorithm=algorithm,
        fingerprint=f"{code:016x}",
        accesses=len(accesses),
        traffic_bytes=found.traffic_bytes,
        footprint_bytes=int(found.footprint_bytes[-1]),
        signature=found,
    )


def by_stream(accesses: Accesses) -> list[Accesses]:
    """One task per stream; the stream's name joins the task's where there are several."""
    if len(accesses.streams) == 1:
        return [accesses]
    parts = []
    for index, stream in enumerate(accesses.streams):
        part = accesses.where(accesses.stream == index)
        if len(part):
            parts.append(replace(part, name=f"{accesses.name}:{stream or 'default'}"))
    return parts


def compare(a: Task, b: Task, model: MemoryModel, settings: Fingerprint) -> Comparison:
    """Both answers for two tasks; UsageError when their codes are of different algorithms."""
    if a.algorithm != b.algorithm:
        raise UsageError(
            f"'{a.name}' is a {a.algorithm} fingerprint and '{b.name}' a {b.algorithm} one: "
            "make both with the same --algorithm"
        )
    distance = fingerprint.distance(a.code, b.code)
    band: Literal["high", "medium", "low"] = (
        "high" if distance < settings.high_below
        else "medium" if distance <= settings.low_above else "low"
    )  # fmt: skip
    found = reuse.collision(a.signature, b.signature, model.l2_bytes)
    collision = found.predicted_extra_misses_ratio > settings.collision_ratio
    return Comparison(
        a=a.name,
        b=b.name,
        distance=distance,
        band=band,
        band_of="pattern similarity",
        action=ACTIONS[band],
        predicted_extra_misses_ratio=found.predicted_extra_misses_ratio,
        baseline_ratio=found.baseline_ratio,
        alone_miss_ratio=found.alone_miss_ratio,
        together_miss_ratio=found.together_miss_ratio,
        collision=collision,
        advice=list(ADVICE) if collision or band == "high" else [],
        cache=model.name,
        cache_bytes=model.l2_bytes,
        basis="modelled",
    )


def order(distances: Sequence[Sequence[int]]) -> list[int]:
    """An order in which near tasks stand together: from the most isolated, always to the
    nearest not yet placed."""
    count = len(distances)
    if count == 0:
        return []
    start = max(range(count), key=lambda i: sum(distances[i]))
    placed = [start]
    while len(placed) < count:
        rest = [i for i in range(count) if i not in placed]
        placed.append(min(rest, key=lambda i: distances[placed[-1]][i]))
    return placed


def decode(content: Any, name: str) -> list[Task]:
    """Tasks from the output of ``fingerprint trace`` (a document, a task, or a list)."""
    items = content.get("tasks", [content]) if isinstance(content, dict) else content
    try:
        return msgspec.convert(items, list[Task])
    except msgspec.ValidationError as error:
        raise MmctlError(f"{name} holds no fingerprints: {error}") from None
