"""Times as straight lines by size, one line per regime, fitted by relative error.

A transfer or a kernel changes its ways with the size: protocols, waves over the processors,
caches. Each regime is ``intercept + slope · size``; a sum of squares would be ruled by the
largest sizes and be wrong by thousands of percent at the small ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from mmctl.engine.errors import MmctlError

MOST = 4
"""Regimes at most."""

_LEAST_SIZES = 3
"""A regime has at least so many different sizes: a line through two says nothing of itself."""

_FOLDS = 5
_GAIN = 1.05
"""A further regime must lower the held-out error by this factor."""

_EXACT_POINTS = 48
"""Lines through every pair of points are tried up to so many points, else through medians."""


class Regime(msgspec.Struct, frozen=True, kw_only=True):
    """A line for sizes from ``start`` on, in the units of what was fitted."""

    start: float
    intercept: float
    slope: float


class Fitted(msgspec.Struct, frozen=True, kw_only=True):
    """Regimes by rising ``start``, and their mean relative error on sizes kept out of the fit."""

    regimes: tuple[Regime, ...]
    held_out_error: float | None


def fit(sizes: Sequence[float], times: Sequence[float], most: int = MOST) -> Fitted:
    """The regimes of least mean relative error, as many as pay on sizes that were kept out.

    ``times`` must be above zero. One size alone gives one regime without slope. Raises MmctlError
    for no point, or one that is no time.
    """
    x, y = np.asarray(sizes, float), np.asarray(times, float)
    if not len(x) or len(x) != len(y):
        raise MmctlError("no points to fit")
    if not (np.isfinite(x).all() and np.isfinite(y).all() and (y > 0).all() and (x >= 0).all()):
        raise MmctlError("times must be above zero and sizes not below")
    x, y = _thinned(x, y)
    distinct = np.unique(x)
    most = max(1, min(most, len(distinct) // _LEAST_SIZES))
    errors = _held_out(x, y, distinct, most)
    count = 1
    if errors is not None:
        count = next(k for k, e in enumerate(errors, 1) if e <= _GAIN * min(errors))
    return Fitted(
        regimes=_partitions(x, y, count)[-1],
        held_out_error=None if errors is None else float(errors[count - 1]),
    )


def predict(regimes: Sequence[Regime], sizes: Any) -> np.ndarray:
    """The time at each size."""
    x = np.asarray(sizes, float)
    starts = np.array([regime.start for regime in regimes])
    place = np.clip(np.searchsorted(starts, x, side="right") - 1, 0, None)
    intercepts = np.array([regime.intercept for regime in regimes])
    slopes = np.array([regime.slope for regime in regimes])
    return np.asarray(intercepts[place] + slopes[place] * x)


def _thinned(x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The points, or where they are many the median at each size."""
    if len(x) <= _EXACT_POINTS:
        return x, y
    distinct = np.unique(x)
    return distinct, np.array([np.median(y[x == size]) for size in distinct])


def _held_out(x: np.ndarray, y: np.ndarray, distinct: np.ndarray, most: int) -> list[float] | None:
    """Mean relative error on sizes kept out, by number of regimes; None for too few sizes."""
    if len(distinct) < 2 * _LEAST_SIZES:
        return None
    totals = np.zeros(most)
    for fold in range(_FOLDS):
        out = np.isin(x, distinct[fold::_FOLDS])
        tried = _partitions(x[~out], y[~out], most)
        for count in range(most):
            regimes = tried[min(count, len(tried) - 1)]
            totals[count] += np.sum(np.abs(predict(regimes, x[out]) / y[out] - 1))
    return list(totals / len(x))


def _partitions(x: np.ndarray, y: np.ndarray, most: int) -> list[tuple[Regime, ...]]:
    """The best cut into one regime, into two, … up to ``most``, by dynamic programming."""
    order = np.argsort(x, kind="stable")
    x, y = x[order], y[order]
    distinct, first = np.unique(x, return_index=True)
    edges = [*first, len(x)]
    last = len(distinct)
    least = min(_LEAST_SIZES, last)
    cells = {
        (i, j): _line(x[edges[i] : edges[j]], y[edges[i] : edges[j]])
        for i in range(last)
        for j in range(i + least, last + 1)
    }
    best: dict[tuple[int, int], tuple[float, tuple[int, ...]]] = {(0, 0): (0.0, ())}
    found = []
    for count in range(1, most + 1):
        for end in range(1, last + 1):
            ways = [
                (best[count - 1, i][0] + cells[i, end][2], (*best[count - 1, i][1], i))
                for i in range(end)
                if (count - 1, i) in best and (i, end) in cells
            ]
            if ways:
                best[count, end] = min(ways)
        if (count, last) not in best:
            break
        starts = best[count, last][1]
        found.append(
            tuple(
                Regime(
                    start=0.0 if i == 0 else float(np.sqrt(distinct[i - 1] * distinct[i])),
                    intercept=cells[i, end][0],
                    slope=cells[i, end][1],
                )
                for i, end in zip(starts, (*starts[1:], last), strict=True)
            )
        )
    return found


def _line(x: np.ndarray, y: np.ndarray) -> tuple[float, float, float]:
    """Intercept and slope, neither below zero, of least summed relative error, and that sum.

    Such a line goes through two of the points, or through one of them flat or from the origin:
    all are tried.
    """
    i, j = np.triu_indices(len(x), 1)
    apart = x[i] != x[j]
    i, j = i[apart], j[apart]
    slope = (y[j] - y[i]) / (x[j] - x[i])
    through = y / np.where(x > 0, x, np.inf)
    slopes = np.concatenate([np.zeros(len(x)), slope, through])
    intercepts = np.concatenate([y, y[i] - slope * x[i], np.zeros(len(x))])
    fit_for_use = (slopes >= 0) & (intercepts >= 0) & (slopes + intercepts > 0)
    slopes, intercepts = slopes[fit_for_use], intercepts[fit_for_use]
    errors = np.abs((intercepts[:, None] + slopes[:, None] * x) / y - 1).sum(axis=1)
    least = int(errors.argmin())
    return float(intercepts[least]), float(slopes[least]), float(errors[least])
