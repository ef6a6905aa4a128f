"""Intervals hold what they say: coverage on drawn runs, changes found, none made up."""

from __future__ import annotations

import numpy as np
import pytest

from mmctl.benchmarks.intervals import (
    RESOLUTION,
    change,
    estimate,
    figure,
    resolution,
    trimmed,
)


def test_two_runs_of_the_same_agree_within_their_intervals() -> None:
    """The median of a second run lies in the first one's interval about as often as promised."""
    chooser = np.random.default_rng(3)
    inside = 0
    for _ in range(400):
        first, second = np.exp(chooser.normal(0, 0.1, (2, 9)))
        found = estimate(first.tolist())
        inside += found.low <= np.median(second) <= found.high
    assert inside / 400 > 0.9


def test_an_interval_is_never_narrower_than_runs_differ() -> None:
    found = estimate([2.0, 2.0, 2.0])
    assert found.value == 2 and found.low == pytest.approx(2 * (1 - RESOLUTION))
    assert found.high == pytest.approx(2 * (1 + RESOLUTION))
    busy = estimate([2.0, 2.0, 2.0], resolution(0.8))
    assert busy.low < found.low and busy.high > found.high
    assert resolution(0) == RESOLUTION and resolution(7) == resolution(1)
    with pytest.raises(ValueError, match="no block"):
        estimate([])


def test_a_real_change_leaves_one_out_and_noise_does_not() -> None:
    chooser = np.random.default_rng(4)
    found, made_up = 0, 0
    for _ in range(200):
        before, after = np.exp(chooser.normal(0, 0.05, (2, 10)))
        quotient = change(before.tolist(), (after * 1.3).tolist())
        found += quotient.low > 1
        quotient = change(before.tolist(), after.tolist())
        made_up += quotient.low > 1 or quotient.high < 1
    assert found > 190 and made_up < 20


def test_a_trim_takes_both_ends() -> None:
    values = [*range(100)]
    assert trimmed(values, 0.05).tolist() == list(range(5, 95))
    assert trimmed([3.0, 1.0], 0.05).tolist() == [1.0, 3.0]
    assert figure("a", [1.0, 2.0, 3.0])["better"] == "lower"
