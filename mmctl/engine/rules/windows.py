"""Functions over a moving window, kept up to date sample by sample.

A window of time holds the samples of ``(now - lag - seconds, now - lag]``, a window of samples
the last ``n``. Each accumulator can add and remove one sample; order statistics keep a sorted
list, moments and trends keep sums about a base and are recomputed before rounding can grow.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable
from typing import Protocol

# The deviation of a normal series is this many times its median absolute deviation.
MAD_SCALE = 1.4826
# Functions that speak of the whole window: unknown until the window has been seen through.
WHOLE = frozenset({"min", "max", "slope", "rate", "delta", "first"})
COVERED = 0.9
QUANTILES = {"median": 0.5, "p50": 0.5, "p95": 0.95, "p99": 0.99}


class Accumulator(Protocol):
    """What a window computes, one sample more or less at a time; times in seconds."""

    def add(self, at: float, value: float) -> None:
        """Take the sample that comes after all others."""

    def remove(self, at: float, value: float) -> None:
        """Give up the oldest sample, which is told again."""

    def result(self) -> float | None:
        """The function over the samples inside; None where it has no value."""


class _Moments:
    """Count, sum, mean and population deviation."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.count, self.sum, self.squares = 0, 0.0, 0.0
        self.largest = 0.0
        self.base: float | None = None

    def add(self, at: float, value: float) -> None:
        if self.base is None:
            self.base = value
        value -= self.base
        self.count += 1
        self.sum += value
        self.squares += value * value
        if self.squares > self.largest:
            self.largest = self.squares

    def remove(self, at: float, value: float) -> None:
        value -= self.base or 0.0
        self.count -= 1
        self.sum -= value
        self.squares -= value * value

    def worn(self) -> bool:
        """Whether what has left was so large that its rounding shows in what is left.

        Rounding leaves some 1e-16 of the largest sum of squares; the spread must stay far above.
        """
        spread = self.squares - self.sum * self.sum / self.count if self.count else 0.0
        return spread < 1e-9 * self.largest

    def result(self) -> float | None:
        n = self.count
        if self.name == "count":
            return float(n)
        if self.name == "sum":
            return self.sum + n * (self.base or 0.0)
        if n == 0 or self.base is None:
            return None
        mean = self.sum / n
        if self.name == "mean":
            return self.base + mean
        if n < 2:
            return None
        variance = self.squares / n - mean * mean
        return variance**0.5 if variance > 0 else 0.0


class _Trend:
    """Slope per second by least squares."""

    def __init__(self, name: str) -> None:
        self.count = 0
        self.t = self.y = self.tt = self.ty = 0.0
        self.base: tuple[float, float] | None = None

    def add(self, at: float, value: float, sign: int = 1) -> None:
        if self.base is None:
            self.base = (at, value)
        t, y = at - self.base[0], value - self.base[1]
        self.count += sign
        self.t += sign * t
        self.y += sign * y
        self.tt += sign * t * t
        self.ty += sign * t * y

    def remove(self, at: float, value: float) -> None:
        self.add(at, value, -1)

    def result(self) -> float | None:
        n = self.count
        if n < 2:
            return None
        spread = self.tt - self.t * self.t / n
        if spread <= 1e-12 * self.tt:
            return None
        return (self.ty - self.t * self.y / n) / spread


class _Sorted:
    """Median, quantiles (linear interpolation) and median absolute deviation."""

    def __init__(self, name: str) -> None:
        self.quantile = QUANTILES.get(name)
        self.values: list[float] = []

    def add(self, at: float, value: float) -> None:
        insort(self.values, value)

    def remove(self, at: float, value: float) -> None:
        del self.values[bisect_left(self.values, value)]

    def result(self) -> float | None:
        values = self.values
        if not values:
            return None
        if self.quantile is not None:
            return _quantile(values, self.quantile)
        return MAD_SCALE * _median_distance(values, _quantile(values, 0.5))


def _quantile(values: list[float], q: float) -> float:
    """The ``q`` quantile of sorted ``values``, linear between neighbours."""
    place = q * (len(values) - 1)
    low = int(place)
    if low + 1 == len(values):
        return values[low]
    return values[low] + (place - low) * (values[low + 1] - values[low])


def _median_distance(values: list[float], centre: float) -> float:
    """Median of ``|v - centre|`` over sorted ``values``, without sorting the distances.

    The k nearest values are neighbours: among all runs of k, the one whose farther end is
    nearest to the centre holds them, found by bisection.
    """
    n = len(values)

    def kth(k: int) -> float:
        low, high = 0, n - k
        while low < high:
            middle = (low + high) // 2
            if centre - values[middle] > values[middle + k] - centre:
                low = middle + 1
            else:
                high = middle
        return max(centre - values[low], values[low + k - 1] - centre)

    return kth(n // 2 + 1) if n % 2 else (kth(n // 2) + kth(n // 2 + 1)) / 2


class _Extremum:
    """Smallest or largest value, by a queue that only keeps what can still win."""

    def __init__(self, name: str) -> None:
        self.sign = 1.0 if name == "max" else -1.0
        self.queue: deque[float] = deque()

    def add(self, at: float, value: float) -> None:
        value *= self.sign
        while self.queue and self.queue[-1] < value:
            self.queue.pop()
        self.queue.append(value)

    def remove(self, at: float, value: float) -> None:
        if self.queue and self.queue[0] == value * self.sign:
            self.queue.popleft()

    def result(self) -> float | None:
        return self.queue[0] * self.sign if self.queue else None


class _Ends:
    """First value, difference of last and first, and the rate of a counter that may restart."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.samples: deque[tuple[float, float]] = deque()
        self.rise = 0.0

    def add(self, at: float, value: float) -> None:
        if self.samples:
            self.rise += _rise(self.samples[-1][1], value)
        self.samples.append((at, value))

    def remove(self, at: float, value: float) -> None:
        first = self.samples.popleft()
        self.rise = self.rise - _rise(first[1], self.samples[0][1]) if self.samples else 0.0

    def result(self) -> float | None:
        if not self.samples:
            return None
        (t0, first), (t1, last) = self.samples[0], self.samples[-1]
        if self.name == "first":
            return first
        if self.name == "delta":
            return last - first
        return self.rise / (t1 - t0) if t1 > t0 else None


def _rise(before: float, after: float) -> float:
    """What a counter gained; one that fell was restarted from 0."""
    return after - before if after >= before else after


ACCUMULATORS: dict[str, Callable[[str], Accumulator]] = {
    "mean": _Moments, "std": _Moments, "count": _Moments, "sum": _Moments,
    "median": _Sorted, "mad": _Sorted, "p50": _Sorted, "p95": _Sorted, "p99": _Sorted,
    "min": _Extremum, "max": _Extremum, "slope": _Trend,
    "rate": _Ends, "first": _Ends, "delta": _Ends,
}  # fmt: skip
_RECOMPUTE_AFTER = 4096
_TRIM_AFTER = 256  # samples since the window was last looked at


class Rolling:
    """A moving window over samples that come in order of time (nanoseconds)."""

    def __init__(
        self, name: str, *, seconds: float | None, samples: int | None, lag_s: float = 0.0,
        min_samples: int = 1,
    ) -> None:  # fmt: skip
        self.name = name
        self.length_ns = None if seconds is None else round(seconds * 1e9)
        self.samples = samples
        self.lag_ns = round(lag_s * 1e9)
        self.needed = samples or min_samples
        self.whole = name in WHOLE and seconds is not None
        self.first_ns: int | None = None
        self.newest_ns = -1
        self._make = ACCUMULATORS[name]
        self._accumulator = self._make(name)
        self._inside: deque[tuple[int, float]] = deque()
        self._waiting: deque[tuple[int, float]] = deque()
        self._removed = self._unseen = 0

    def push(self, ts_ns: int, value: float) -> None:
        """Take a sample; the caller keeps them in order of time."""
        if self.first_ns is None:
            self.first_ns = ts_ns
        self.newest_ns = ts_ns
        if self.lag_ns:
            self._waiting.append((ts_ns, value))
        else:
            self._enter(ts_ns, value)
        self._unseen += 1
        if self._unseen >= _TRIM_AFTER:  # behind an "and" that is false nobody asks for a value
            self._move(ts_ns)

    def count(self, now_ns: int) -> int:
        """Samples in the window that ends ``lag`` before ``now_ns``."""
        self._move(now_ns)
        return len(self._inside)

    def value(self, now_ns: int) -> float | None:
        """The function over the window, None while too few samples are in it."""
        self._move(now_ns)
        if len(self._inside) < self.needed and self.name not in ("count", "sum"):
            return None
        if self.whole and not self.covered(now_ns):
            return None
        return self._accumulator.result()

    def covered(self, now_ns: int) -> bool:
        """Whether the series began before (nearly all of) the window."""
        if self.length_ns is None:
            return len(self._inside) >= self.needed
        start = now_ns - self.lag_ns - COVERED * self.length_ns
        return self.first_ns is not None and self.first_ns <= start

    def _move(self, now_ns: int) -> None:
        self._unseen = 0
        end = now_ns - self.lag_ns
        while self._waiting and self._waiting[0][0] <= end:
            self._enter(*self._waiting.popleft())
        if self.length_ns is not None:
            start = end - self.length_ns
            while self._inside and self._inside[0][0] <= start:
                self._leave()

    def _enter(self, ts_ns: int, value: float) -> None:
        self._inside.append((ts_ns, value))
        self._accumulator.add(self._seconds(ts_ns), value)
        if self.samples is not None and len(self._inside) > self.samples:
            self._leave()

    def _leave(self) -> None:
        ts_ns, value = self._inside.popleft()
        self._accumulator.remove(self._seconds(ts_ns), value)
        self._removed += 1
        worn = isinstance(self._accumulator, _Moments) and self._accumulator.worn()
        if worn or self._removed >= max(_RECOMPUTE_AFTER, len(self._inside)) or not self._inside:
            self._removed = 0
            self._accumulator = self._make(self.name)
            for at, kept in self._inside:
                self._accumulator.add(self._seconds(at), kept)

    def _seconds(self, ts_ns: int) -> float:
        """Since the first sample: small numbers keep their digits."""
        return (ts_ns - (self.first_ns or 0)) * 1e-9
