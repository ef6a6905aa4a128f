"""What expressions compute, on whole columns: comparisons, functions, and windows that roll.

The same answers as ``truth`` and ``windows`` give sample by sample. Unknown is NaN.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from mmctl.engine.rules import truth as truths
from mmctl.engine.rules.windows import ACCUMULATORS

Array: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"


class Words(NamedTuple):
    """A column that is not numbers: places (NaN is unknown) in a list of distinct values."""

    places: Array
    distinct: list[Any]


def spread(item: Any, count: int) -> Array:
    """A constant or a column as numbers; words are numbers only in so far as they are there."""
    if isinstance(item, Words):
        return np.where(np.isnan(item.places), np.nan, 1.0)
    if isinstance(item, np.ndarray):
        return item
    if isinstance(item, str):
        return np.full(count, np.nan)
    return np.full(count, float(item))


def as_truth(item: Any, count: int) -> Array:
    """``count`` truths: 1.0 where a constant or a column holds, 0.0 where not, NaN unknown."""
    values = spread(item, count)
    return np.where(np.isnan(values), np.nan, (values != 0).astype(np.float64))


_COMPARE: dict[str, Any] = {
    "<": np.less, "<=": np.less_equal, ">": np.greater, ">=": np.greater_equal,
    "==": np.equal, "!=": np.not_equal,
}  # fmt: skip


def compare(operator: str, left: Any, right: Any, count: int) -> Array:
    """``count`` truths of a comparison of columns, words or constants; NaN where one is unknown."""
    if isinstance(left, (str, Words)) or isinstance(right, (str, Words)):
        return _compare_words(operator, left, right, count)
    if operator in ("in", "not in"):
        return np.full(count, np.nan)
    a, b = spread(left, count), spread(right, count)
    result = _COMPARE[operator](a, b).astype(np.float64)
    unknown = np.isnan(a) | np.isnan(b)
    return np.where(unknown, np.nan, result) if unknown.any() else result


def _compare_words(operator: str, left: Any, right: Any, count: int) -> Array:
    """Each pair of distinct values is compared once, by the live comparison."""
    (a_places, a_items), (b_places, b_items) = _distinct(left, count), _distinct(right, count)
    pair: list[Any] = [None, None]
    truth = truths.compare(operator, lambda _: pair[0], lambda _: pair[1])
    table = np.empty((len(a_items), len(b_items)))
    for i, pair[0] in enumerate(a_items):
        for j, pair[1] in enumerate(b_items):
            answer = truth(0)
            table[i, j] = np.nan if answer is None else float(answer)
    unknown = np.isnan(a_places) | np.isnan(b_places)
    if not table.size:
        return np.full(count, np.nan)
    rows, columns = (np.where(unknown, 0, p).astype(np.int64) for p in (a_places, b_places))
    return np.where(unknown, np.nan, table[rows, columns])


def _distinct(side: Any, count: int) -> tuple[Array, list[Any]]:
    if isinstance(side, Words):
        return side.places, side.distinct
    if not isinstance(side, np.ndarray):
        return np.zeros(count), [side]
    known = ~np.isnan(side)
    items, inverse = np.unique(side[known], return_inverse=True)
    places = np.full(count, np.nan)
    places[known] = inverse
    return places, items.tolist()


def function(name: str, parts: list[Array]) -> Array:
    """Arithmetic and functions on columns of equal length; NaN where ``truth.function`` has None.

    ``time_to`` takes level, value and slope per second, and gives seconds.
    """
    with np.errstate(all="ignore"):
        if name == "known":
            return (~np.isnan(parts[0])).astype(np.float64)
        if name == "time_to":
            level, value, slope = parts
            rising = np.where(slope > 0, (level - value) / slope, np.inf)
            result = np.where(value >= level, 0.0, rising)
            return np.where(np.isnan(level) | np.isnan(value) | np.isnan(slope), np.nan, result)
        if name == "/":
            return np.where(parts[1] == 0, np.nan, parts[0] / parts[1])
        if name == "log":
            return np.where(parts[0] > 0, np.log(parts[0]), np.nan)
        if name in _UNARY:
            return _UNARY[name](parts[0])
        return _BINARY[name](parts[0], parts[1])


_UNARY: dict[str, Any] = {"negate": np.negative, "abs": np.abs, "sqrt": np.sqrt}
_BINARY: dict[str, Any] = {
    "+": np.add, "-": np.subtract, "*": np.multiply,
    "at_least": np.maximum, "at_most": np.minimum,
}  # fmt: skip


ORDERED = frozenset({"median", "p50", "p95", "p99", "mad"})


def _sums(values: Array) -> Array:
    """Running sums with a leading 0, in the widest float there is."""
    total = np.empty(len(values) + 1, np.longdouble)
    total[0] = 0
    np.cumsum(values, dtype=np.longdouble, out=total[1:])
    return total


def _moments(name: str) -> Callable[[Array, Array, Array, Array], Array]:
    def roll(ts: Array, values: Array, low: Array, high: Array) -> Array:
        n = (high - low).astype(np.float64)
        if name == "count":
            return n
        base = values[0]
        shifted = values - base
        total = _sums(shifted)
        sums = (total[high] - total[low]).astype(np.float64)
        if name == "sum":
            return sums + n * base
        with np.errstate(invalid="ignore", divide="ignore"):
            mean = sums / n
            if name == "mean":
                return base + mean
            squares = _sums(shifted.astype(np.longdouble) ** 2)
            variance = (squares[high] - squares[low]) / n - mean.astype(np.longdouble) ** 2
            deviation = np.sqrt(np.maximum(variance, 0)).astype(np.float64)
            return np.where(n >= 2, deviation, np.nan)

    return roll


def _slope(ts: Array, values: Array, low: Array, high: Array) -> Array:
    t = ((ts - ts[0]) * 1e-9).astype(np.longdouble)
    y = values - values[0]
    parts = [_sums(part_) for part_ in (t, y, t * t, t * y)]
    st, sy, stt, sty = (total[high] - total[low] for total in parts)
    n = (high - low).astype(np.longdouble)
    with np.errstate(invalid="ignore", divide="ignore"):
        spread = stt - st * st / n
        slope = (sty - st * sy / n) / spread
    # One instant has no slope; what rounding leaves of its spread is not one.
    instant = ts[np.maximum(high - 1, 0)] <= ts[np.minimum(low, len(ts) - 1)]
    return np.where((n < 2) | instant, np.nan, slope).astype(np.float64)


def _extremum(operation: Any) -> Callable[[Array, Array, Array, Array], Array]:
    def roll(ts: Array, values: Array, low: Array, high: Array) -> Array:
        """Two overlapping runs of a power of two cover a window: one table per power."""
        result = np.full(len(low), np.nan)
        length = high - low
        table, power = values, 0
        level = np.where(length > 0, np.log2(np.maximum(length, 1)).astype(np.int64), -1)
        for power in range(int(level.max(initial=-1)) + 1):
            if power:
                half = 1 << (power - 1)
                table = operation(table[:-half], table[half:])
            at = np.flatnonzero(level == power)
            result[at] = operation(table[low[at]], table[high[at] - (1 << power)])
        return result

    return roll


def _ends(name: str) -> Callable[[Array, Array, Array, Array], Array]:
    def roll(ts: Array, values: Array, low: Array, high: Array) -> Array:
        last, first = np.maximum(high - 1, 0), np.minimum(low, len(ts) - 1)
        if name == "first":
            return values[first]
        if name == "delta":
            return values[last] - values[first]
        steps = np.diff(values)
        rises = _sums(np.where(steps >= 0, steps, values[1:]))
        seconds = (ts[last] - ts[first]) * 1e-9
        with np.errstate(invalid="ignore", divide="ignore"):
            rate = (rises[last] - rises[first]).astype(np.float64) / seconds
        return np.where(seconds > 0, rate, np.nan)

    return roll


def ordered(name: str, ts: Array, values: Array, low: Array, high: Array) -> Array:
    """Order statistics, by the same sorted list that live windows keep."""
    accumulator = ACCUMULATORS[name](name)
    items = values.tolist()
    result = np.full(len(low), np.nan)
    left = right = 0
    for i, (a, b) in enumerate(zip(low.tolist(), high.tolist(), strict=True)):
        while right < b:
            accumulator.add(0.0, items[right])
            right += 1
        while left < min(a, right):
            accumulator.remove(0.0, items[left])
            left += 1
        value = accumulator.result()
        if value is not None:
            result[i] = value
    return result


ROLL: dict[str, Callable[[Array, Array, Array, Array], Array]] = {
    "mean": _moments("mean"), "std": _moments("std"), "sum": _moments("sum"),
    "count": _moments("count"), "slope": _slope, "min": _extremum(np.minimum),
    "max": _extremum(np.maximum), "rate": _ends("rate"), "first": _ends("first"),
    "delta": _ends("delta"),
}  # fmt: skip
