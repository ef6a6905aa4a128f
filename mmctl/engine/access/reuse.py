"""Reuse: how much other memory is touched between two touches of the same block.

Two figures describe a task: the histogram of reuse windows (bytes of traffic between a touch
and the one before of the same block) and the footprint curve fp(w), the mean number of
distinct bytes in a window of w bytes of traffic (Xiang et al., "HOTL", ASPLOS 2013, eq. 2).
Footprints of tasks that share a cache add up, which is what makes co-location predictable. A
block is 64 bytes, or more where a trace would give too many.
"""

from __future__ import annotations

import msgspec
import numpy as np

from mmctl.engine.access.accesses import LINE_BYTES, Accesses, Int

MOST_BLOCKS = 1 << 19
WINDOWS_PER_OCTAVE = 2
FIRST_OCTAVE, LAST_OCTAVE = 6, 42


class Signature(msgspec.Struct, frozen=True, kw_only=True):
    """What is kept of a task's reuse: enough to predict misses alone and in company.

    ``footprint_bytes[i]`` and ``reuse_ratio[i]`` belong to a window of ``2**(6 + i/2)`` bytes of
    traffic: the mean bytes touched in it, and the share of traffic reused within it.
    """

    traffic_bytes: int
    footprint_bytes: list[float]
    reuse_ratio: list[float]


def windows() -> np.ndarray:
    """The windows of a signature, in bytes of traffic."""
    count = (LAST_OCTAVE - FIRST_OCTAVE) * WINDOWS_PER_OCTAVE + 1
    return np.exp2(FIRST_OCTAVE + np.arange(count) / WINDOWS_PER_OCTAVE)


def blocks(accesses: Accesses, most: int = MOST_BLOCKS) -> tuple[Int, int]:
    """The blocks that the accesses sweep, in order, and the size of a block in bytes."""
    size = LINE_BYTES
    while True:
        first = accesses.address // size
        count = (accesses.address + accesses.size_bytes - 1) // size - first + 1
        if int(count.sum()) <= most or size >= 1 << 30:
            break
        size *= 2
    total = int(count.sum())
    start = np.cumsum(count) - count
    return np.repeat(first - start, count) + np.arange(total), size


def signature(accesses: Accesses) -> Signature:
    """The reuse signature of a task that runs again and again, as serving does.

    The trace is taken as a circle: the first touch of a block reuses the last touch of the run
    before, so nothing is cold, and fp(w) = m − Σ (gap − w over gaps longer than w) / n.
    """
    sequence, size = blocks(accesses)
    gaps = np.sort(circular_gaps(sequence))
    n = len(sequence)
    w = np.minimum(windows() / size, n)
    tail = np.concatenate((np.cumsum(gaps[::-1])[::-1], [0])).astype(np.float64)
    place = np.searchsorted(gaps, w, side="right")
    missed = tail[place] - w * (n - place)
    footprint = np.minimum(len(np.unique(sequence)) - missed / n, w)
    return Signature(
        traffic_bytes=n * size,
        footprint_bytes=(footprint * size).tolist(),
        reuse_ratio=(place / n).tolist(),
    )


def circular_gaps(sequence: Int) -> Int:
    """Touches from each touch of a block to its next one, around the end to the beginning."""
    order = np.argsort(sequence, kind="stable")
    ordered = sequence[order]
    ends = np.concatenate((ordered[1:] != ordered[:-1], [True]))
    begins = np.concatenate(([True], ends[:-1]))
    following = np.empty_like(order)
    following[:-1] = order[1:]
    following[ends] = order[begins] + len(sequence)
    gaps: Int = following - order
    return gaps


def miss_ratio(task: Signature, cache_bytes: float, other: Signature | None = None,
               other_rate: float = 1.0) -> float:  # fmt: skip
    """Share of a task's traffic that misses a least-recently-used cache.

    With ``other`` beside it, at ``other_rate`` bytes of traffic for each byte of the task's own,
    a block survives as long as both footprints together fit. Modelled.
    """
    at = windows()
    used = np.array(task.footprint_bytes)
    if other is not None:
        used = used + np.interp(at * other_rate, at, other.footprint_bytes)
    if used[-1] <= cache_bytes:
        return 0.0
    window = np.exp2(np.interp(cache_bytes, used, np.log2(at)))
    reused = float(np.interp(np.log2(window), np.log2(at), task.reuse_ratio))
    return 1.0 - reused


class Collision(msgspec.Struct, frozen=True, kw_only=True):
    """Two tasks on one cache, at equal traffic: misses alone, together, and what is at risk.

    ``baseline_ratio`` is the share of traffic that hits when each runs alone: all that company
    could take away, whoever it is.
    """

    predicted_extra_misses_ratio: float
    baseline_ratio: float
    alone_miss_ratio: tuple[float, float]
    together_miss_ratio: tuple[float, float]


def collision(a: Signature, b: Signature, cache_bytes: float) -> Collision:
    """Predicted extra misses of both over the traffic of both, from their signatures."""
    alone = miss_ratio(a, cache_bytes), miss_ratio(b, cache_bytes)
    together = miss_ratio(a, cache_bytes, b), miss_ratio(b, cache_bytes, a)
    return Collision(
        predicted_extra_misses_ratio=max(0.0, (sum(together) - sum(alone)) / 2),
        baseline_ratio=1 - sum(alone) / 2,
        alone_miss_ratio=alone,
        together_miss_ratio=together,
    )
