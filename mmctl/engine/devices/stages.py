"""What a stage costs: overhead plus the larger of its compute and its memory time.

The model is t = overhead + max(flops / rate, bytes / bandwidth), fitted by relative error; a
side that no point shows is absent. Which points are bound by memory is found by trying every
cut by arithmetic intensity.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from mmctl.engine.errors import MmctlError
from mmctl.engine.records import Basis

STAGES = ("vision_encode", "alignment", "cross_attn_fusion", "text_decode_step")

_REWEIGHTINGS = 4

LEAST_POINTS = 6
"""A model of three constants needs as many points, and as many to be judged by."""

PRICE_OF_DOUBLING = 0.05
"""A batch twice as large must serve so much more per second, for the wait until it is full."""


class Point(msgspec.Struct, frozen=True, kw_only=True):
    """One shape of a stage and the time it took. ``fitted`` says that the model has seen it."""

    stage: str
    shape: dict[str, int]
    flops: float
    bytes: float
    seconds: float
    seconds_low: float | None = None
    seconds_high: float | None = None
    modelled_s: float | None = None
    fitted: bool = True


class Roofline(msgspec.Struct, frozen=True, kw_only=True):
    """``overhead_s`` + max(flops / ``flops_per_s``, bytes / ``bandwidth_bytes_per_s``)."""

    overhead_s: float
    flops_per_s: float | None
    bandwidth_bytes_per_s: float | None
    basis: Basis = "measured"
    absent: dict[str, str] = {}


class Stage(msgspec.Struct, frozen=True, kw_only=True):
    """A stage, its points and its model; ``mape`` is of the points kept out of the fit,
    ``mape_fitted`` of the others. The model itself is fitted to all."""

    stage: str
    system: str
    points: list[Point]
    model: dict[str, Any]
    mape: float | None
    mape_fitted: float
    bound: str | None = None
    absent: dict[str, str] = {}


def seconds(model: Roofline, flops: Any, size_bytes: Any) -> np.ndarray:
    """The time of work by ``model``."""
    compute = np.asarray(flops, float) / (model.flops_per_s or math.inf)
    memory = np.asarray(size_bytes, float) / (model.bandwidth_bytes_per_s or math.inf)
    return np.asarray(model.overhead_s + np.maximum(compute, memory))


def fit(points: Sequence[Point]) -> Roofline:
    """The model of least mean relative error; MmctlError for no point or a time that is none.

    The cut between points bound by memory and by compute is the one whose models, each without
    one point, meet that point best: with few points the best fit alone would follow the noise.
    """
    flops = np.array([p.flops for p in points], float)
    moved = np.array([p.bytes for p in points], float)
    times = np.array([p.seconds for p in points], float)
    if not len(times) or not (times > 0).all():
        raise MmctlError("a stage needs points with times above zero")
    order = np.argsort(flops / np.maximum(moved, 1))
    best: tuple[float, np.ndarray] | None = None
    for cut in range(len(order) + 1):
        memory = np.zeros(len(order), bool)
        memory[order[:cut]] = True
        columns = np.stack(
            [np.ones(len(times)), np.where(memory, 0, flops), np.where(memory, moved, 0)], axis=1
        )
        error = _left_out(columns, flops, moved, times)
        if best is None or error < best[0] - 1e-9:
            best = error, columns
    assert best is not None
    return _roofline(_smallest_errors(best[1], times))


def _left_out(
    columns: np.ndarray, flops: np.ndarray, moved: np.ndarray, times: np.ndarray
) -> float:
    """Mean relative error on each point of the model fitted to the others."""
    if len(times) < 4:
        found = _roofline(_smallest_errors(columns, times))
        return float(np.mean(np.abs(seconds(found, flops, moved) / times - 1)))
    errors = []
    for number in range(len(times)):
        kept = np.arange(len(times)) != number
        found = _roofline(_smallest_errors(columns[kept], times[kept]))
        modelled = float(seconds(found, flops[number], moved[number]))
        errors.append(abs(modelled / times[number] - 1))
    return float(np.mean(errors))


def _roofline(values: np.ndarray) -> Roofline:
    overhead, per_flop, per_byte = (float(value) for value in values)
    absent = {}
    if per_flop <= 0:
        absent["flops_per_s"] = "no point was bound by compute"
    if per_byte <= 0:
        absent["bandwidth_bytes_per_s"] = "no point was bound by memory"
    return Roofline(
        overhead_s=overhead, flops_per_s=1 / per_flop if per_flop > 0 else None,
        bandwidth_bytes_per_s=1 / per_byte if per_byte > 0 else None, absent=absent,
    )  # fmt: skip


def _smallest_errors(columns: np.ndarray, times: np.ndarray) -> np.ndarray:
    """Coefficients, none below zero, of least summed relative error (by reweighted squares)."""
    weights = 1 / times
    found = _non_negative(columns * weights[:, None], times * weights)
    for _ in range(_REWEIGHTINGS):
        errors = np.abs(columns @ found / times - 1)
        weights = 1 / times / np.sqrt(np.maximum(errors, 0.01))
        found = _non_negative(columns * weights[:, None], times * weights)
    return found


def _non_negative(columns: np.ndarray, target: np.ndarray) -> np.ndarray:
    """Least squares without negative coefficients: every choice of those above zero is tried."""
    count = columns.shape[1]
    best, least = np.zeros(count), math.inf
    for size in range(1, count + 1):
        for chosen in itertools.combinations(range(count), size):
            part = columns[:, chosen]
            values = np.linalg.lstsq(part, target, rcond=None)[0]
            if (values < 0).any():
                continue
            error = float(np.sum((part @ values - target) ** 2))
            if error < least - 1e-15:
                least = error
                best = np.zeros(count)
                best[list(chosen)] = values
    return best


def judged(stage: str, system: str, points: Sequence[Point]) -> Stage:
    """The stage with a model fitted to every other point and its error on the rest.

    Points are taken in turn by rising flops, so that both halves span all sizes. Fewer than
    ``LEAST_POINTS`` are all fitted, and the error elsewhere is absent.
    """
    ordered = sorted(points, key=lambda p: (p.flops, p.bytes))
    if len(ordered) < LEAST_POINTS:
        seen, out = list(ordered), []
    else:
        seen, out = ordered[::2], ordered[1::2]
    half = fit(seen)
    both = [
        msgspec.structs.replace(
            point, fitted=point in seen,
            modelled_s=float(seconds(half, point.flops, point.bytes)),
        )
        for point in ordered
    ]  # fmt: skip
    whole = fit(ordered)
    return Stage(
        stage=stage, system=system, points=both, model=msgspec.to_builtins(whole),
        mape=mape([p for p in both if not p.fitted]) if out else None,
        mape_fitted=mape([p for p in both if p.fitted]), bound=bound(whole, ordered),
        absent={} if out else {"mape": "too few points to keep half out"},
    )  # fmt: skip


def mape(points: Sequence[Point]) -> float:
    """Mean absolute relative error of the modelled times."""
    return float(np.mean([abs((p.modelled_s or 0.0) / p.seconds - 1) for p in points]))


def bound(model: Roofline, points: Sequence[Point]) -> str:
    """What most of the time of the largest points goes to: compute, memory or overhead."""
    sums = dict.fromkeys(("compute", "memory", "overhead"), 0.0)
    for point in points[len(points) // 2 :]:
        compute = point.flops / (model.flops_per_s or math.inf)
        memory = point.bytes / (model.bandwidth_bytes_per_s or math.inf)
        sums["compute" if compute >= memory else "memory"] += max(compute, memory)
        sums["overhead"] += model.overhead_s
    return max(sums, key=lambda name: sums[name])


def batch_for(gains: dict[int, float], most: int) -> int:
    """The batch to use: the best gain in items per second, less the price of each doubling.

    ``gains`` are items per second by batch over those one at a time; ``most`` the largest
    batch to advise.
    """
    usable = {batch: gain for batch, gain in gains.items() if batch <= most} | {1: 1.0}
    worth = {
        batch: gain * (1 - PRICE_OF_DOUBLING) ** math.log2(batch) for batch, gain in usable.items()
    }
    return max(sorted(worth), key=lambda batch: worth[batch])
