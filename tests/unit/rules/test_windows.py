"""Moving windows against numpy over the same samples."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mmctl.engine.rules.windows import ACCUMULATORS, MAD_SCALE, Rolling

SECOND = 10**9
Samples = list[tuple[int, float]]


def expected(name: str, inside: Samples) -> float | None:
    """The definition of each function, computed anew."""
    v = np.array([value for _, value in inside])
    t = np.array([at - inside[0][0] for at, _ in inside]) / SECOND
    if name == "count":
        return float(len(v))
    if name == "sum":
        return float(v.sum())
    if len(v) == 0:
        return None
    quantiles = {"median": 50, "p50": 50, "p95": 95, "p99": 99}
    if name in quantiles:
        return float(np.percentile(v, quantiles[name]))
    if name == "mad":
        return float(MAD_SCALE * np.median(np.abs(v - np.median(v))))
    simple = {"mean": np.mean, "min": np.min, "max": np.max}
    if name in simple:
        return float(simple[name](v))
    if name == "std":
        return float(v.std()) if len(v) > 1 else None
    if name == "first":
        return float(v[0])
    if name == "delta":
        return float(v[-1] - v[0])
    if len(v) < 2 or t[-1] == t[0]:
        return None
    if name == "rate":
        steps = np.diff(v)
        return float(np.where(steps >= 0, steps, v[1:]).sum() / (t[-1] - t[0]))
    return float(np.polyfit(t, v, 1)[0])


gaps = st.integers(1, 400).map(lambda n: n * SECOND // 100)
values = st.floats(0, 1e6).map(lambda value: round(value, 3))
samples = st.lists(st.tuples(gaps, values), min_size=1, max_size=60)


@pytest.mark.parametrize("name", sorted(ACCUMULATORS))
@settings(max_examples=25, deadline=None)
@given(steps=samples, seconds=st.integers(1, 20), lag=st.sampled_from([0, 3]))
@example(  # a large value leaves nothing but its rounding behind
    [(10**7, 0.0), (10**7, 262142.0), (10**7, 1218.438), (99 * 10**7, 1218.438)], 1, 0
)
def test_a_window_of_time_equals_its_definition(
    name: str, steps: Samples, seconds: int, lag: int
) -> None:
    rolling = Rolling(name, seconds=seconds, samples=None, lag_s=lag)
    rolling.whole = False
    now, seen = 1_790_000_000 * SECOND, []
    for gap, value in steps:
        now += gap
        seen.append((now, value))
        rolling.push(now, value)
        end = now - lag * SECOND
        inside = [s for s in seen if end - seconds * SECOND < s[0] <= end]
        want, got = expected(name, inside), rolling.value(now)
        if want is None:
            assert got is None or (name in ("std", "slope", "rate") and len(inside) < 2)
        else:
            assert got is not None and math.isclose(got, want, rel_tol=1e-6, abs_tol=1e-3)


def test_a_window_that_speaks_of_a_span_waits_until_it_has_seen_it() -> None:
    rolling = Rolling("min", seconds=5, samples=None)
    values = []
    for second in range(8):
        rolling.push(second * SECOND, 1.0)
        values.append(rolling.value(second * SECOND))
    assert values == [None] * 5 + [1.0] * 3


def test_long_runs_do_not_lose_digits() -> None:
    """Bytes of a whole GPU: sums of squares would drown the deviation."""
    rolling = Rolling("std", seconds=10, samples=None)
    value = 0.0
    for tick in range(200_000):
        value = 8e10 + (tick % 7) * 1000.0
        rolling.push(tick * SECOND // 10, value)
    got = rolling.value(199_999 * SECOND // 10)
    assert got == pytest.approx(np.std([(t % 7) * 1000.0 for t in range(199_900, 200_000)]))


@pytest.mark.parametrize("lag", [0, 5])
def test_a_window_that_nobody_asks_holds_no_more_than_its_length(lag: int) -> None:
    """Behind an "and" whose left side is false no value is asked for, for days."""
    rolling = Rolling("slope", seconds=10, samples=None, lag_s=lag)
    for tick in range(100_000):
        rolling.push(tick * SECOND // 10, float(tick))
    assert len(rolling._inside) + len(rolling._waiting) <= 100 + 10 * lag + 256
    assert rolling.count(9_999 * SECOND + 9 * SECOND // 10) == 100
    assert rolling.value(9_999 * SECOND + 9 * SECOND // 10) == pytest.approx(10.0)
