"""Medians with the interval in which they would fall again: a bootstrap over blocks.

What is measured runs in rounds that take turns with everything else measured, so that a block
is a moment of the machine and not a neighbour of the block before. A block gives one value.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

LEVEL = 0.95
_DRAWS = 2000
RESOLUTION = 0.03
"""No interval is narrower than this to each side: clocks and placement differ between runs by
so much even on a quiet machine, which rounds of one run cannot see."""

_LOAD_SHARE = 0.5
"""What others do on the machine now they may do less or more of by the next run: this share of
the cores that they use is added to the resolution."""


class Estimate(NamedTuple):
    """A median of blocks and its interval."""

    value: float
    low: float
    high: float


def resolution(busy_ratio: float) -> float:
    """The least half width of an interval, as a share, on a machine that others keep this busy."""
    return RESOLUTION + _LOAD_SHARE * min(max(busy_ratio, 0.0), 1.0)


def estimate(blocks: Sequence[float], least: float = RESOLUTION) -> Estimate:
    """Median of ``blocks``, all above zero, and the interval for the median of another such run.

    ``least`` is the half width that the interval has at least, as a share. Another run scatters
    like this one, so the interval is that of the quotient of two medians: on the scale of powers
    √2 times as wide as the median's own. ValueError without a block.
    """
    if not len(blocks):
        raise ValueError("no block")
    values = np.asarray(blocks, float)
    middle = float(np.median(values))
    low, high = _ends(_medians(values, 1))
    return Estimate(
        middle,
        middle * min((low / middle) ** 2**0.5, 1 - least),
        middle * max((high / middle) ** 2**0.5, 1 + least),
    )


def figure(
    name: str, blocks: Sequence[float], better: str = "lower", least: float = RESOLUTION
) -> dict[str, Any]:
    """A figure as ``benchmark compare`` reads it: its name, estimate and blocks, and which way
    is better (``lower`` or ``higher``)."""
    found = estimate(blocks, least)
    return {
        "figure": name, "value": found.value, "low": found.low, "high": found.high,
        "better": better, "resolution_ratio": least, "blocks": [float(block) for block in blocks],
    }  # fmt: skip


def change(before: Sequence[float], after: Sequence[float], least: float = RESOLUTION) -> Estimate:
    """``after`` over ``before`` as a quotient of medians, with its interval, on each side at
    least √2 times ``least`` wide."""
    first, second = np.asarray(before, float), np.asarray(after, float)
    low, high = _ends(_medians(second, 2) / _medians(first, 3))
    middle = float(np.median(second) / np.median(first))
    # Each run has moments of its own that its blocks do not show.
    floor = 2**0.5 * least * middle
    return Estimate(middle, min(low, middle - floor), max(high, middle + floor))


def trimmed(values: Sequence[float], ratio: float) -> np.ndarray:
    """``values`` in order without the share ``ratio`` at each end."""
    ordered = np.sort(np.asarray(values, float))
    cut = int(len(ordered) * ratio)
    return ordered[cut : len(ordered) - cut] if len(ordered) > 2 * cut else ordered


def _ends(values: np.ndarray) -> tuple[float, float]:
    tail = (1 - LEVEL) / 2
    low, high = np.quantile(values, [tail, 1 - tail])
    return float(low), float(high)


def _medians(values: np.ndarray, seed: int) -> np.ndarray:
    drawn = np.random.default_rng(seed).integers(0, len(values), (_DRAWS, len(values)))
    return np.asarray(np.median(values[drawn], axis=1))
