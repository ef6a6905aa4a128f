"""Lines by size come back from tables that were made of them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mmctl.engine.devices.regimes import fit, predict
from mmctl.engine.errors import MmctlError

SIZES = 2.0 ** np.arange(8, 29)


def test_one_line_comes_back_exactly() -> None:
    found = fit(SIZES.tolist(), (12.5 + 3e-3 * SIZES).tolist())
    (line,) = found.regimes
    assert line.intercept == pytest.approx(12.5) and line.slope == pytest.approx(3e-3)
    assert found.held_out_error == pytest.approx(0, abs=1e-9)


def test_two_regimes_with_a_jump_come_back_with_their_place() -> None:
    small = SIZES < 2**17
    times = np.where(small, 9.0 + 1e-5 * SIZES, 40.0 + 4e-6 * SIZES)
    first, second = fit(SIZES.tolist(), times.tolist()).regimes
    assert (first.start, first.intercept) == (0, pytest.approx(9))
    assert first.slope == pytest.approx(1e-5)
    assert (second.intercept, second.slope) == (pytest.approx(40), pytest.approx(4e-6))
    assert 2**16 < second.start < 2**17


def test_a_wild_point_moves_no_line() -> None:
    times = 10.0 + 1e-4 * SIZES
    times[3] *= 5
    found = fit(SIZES.tolist(), times.tolist())
    clean = np.delete(np.arange(len(SIZES)), 3)
    errors = np.abs(predict(found.regimes, SIZES[clean]) / times[clean] - 1)
    assert errors.max() < 1e-6


def test_small_sizes_count_as_much_as_large_ones() -> None:
    """Least squares on the same noise is wrong by more than half at the smallest sizes."""
    noise = np.random.default_rng(0).uniform(0.9, 1.1, len(SIZES))
    times = (10.0 + 1e-3 * SIZES) * noise
    found = fit(SIZES.tolist(), times.tolist())
    assert np.abs(predict(found.regimes, SIZES) / times - 1)[:6].mean() < 0.1
    plain = np.polyval(np.polyfit(SIZES, times, 1), SIZES)
    assert np.abs(plain / times - 1)[:6].mean() > 0.5


@settings(max_examples=30, deadline=None)
@given(
    st.floats(1e-3, 1e3), st.floats(0, 1), st.integers(1, 24), st.integers(0, 10**6)
)  # fmt: skip
def test_whatever_the_noise_no_time_is_below_zero(
    intercept: float, slope: float, count: int, seed: int
) -> None:
    noise = np.random.default_rng(seed).lognormal(0, 0.3, count)
    sizes = 2.0 ** np.arange(count)
    found = fit(sizes.tolist(), ((intercept + slope * sizes) * noise).tolist())
    assert all(line.intercept >= 0 and line.slope >= 0 for line in found.regimes)
    starts = [line.start for line in found.regimes]
    assert starts == sorted(starts) and starts[0] == 0
    assert (predict(found.regimes, np.geomspace(0.1, 1e9, 50)) > 0).all()


def test_one_size_alone_and_no_point() -> None:
    found = fit([1024, 1024, 1024], [3.0, 4.0, 9.0])
    assert float(predict(found.regimes, [1024])[0]) == pytest.approx(3.0, abs=1.1)
    assert found.held_out_error is None
    for sizes, times in (([], []), ([1], [0.0]), ([1], [float("nan")]), ([1, 2], [1.0])):
        with pytest.raises(MmctlError):
            fit(sizes, times)
