"""The arithmetic of the evaluation, and its trace writer; the evaluation itself is a command."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from mmctl.benchmarks import fingerprints, timelines, zoo
from mmctl.engine import profiles
from mmctl.engine.access import kernels, kineto


def test_rank_correlation_with_ties() -> None:
    assert fingerprints.rank_correlation([1, 2, 3], [10, 20, 90]) == pytest.approx(1)
    assert fingerprints.rank_correlation([1, 2, 3], [3, 2, 1]) == pytest.approx(-1)
    # Spearman's rho of these, ties at their mean rank: 0.5 by hand
    assert fingerprints.rank_correlation([1, 2, 2, 3], [2, 1, 3, 3]) == pytest.approx(0.5)


def test_uniqueness_is_two_figures_and_n() -> None:
    found = fingerprints._uniqueness({"a": 0, "b": 0, "c": (1 << 20) - 1})
    assert found["distinct_ratio"] == pytest.approx(2 / 3)
    assert (found["pairs"], found["pairs_above_8_ratio"]) == (3, pytest.approx(2 / 3))


def test_changes_count_bits() -> None:
    found = fingerprints._changes({"a": 0b1111, "b": 0}, {"a": [0b1111, 0b0111], "b": [0b111, 0]})
    assert (found["bits_max"], found["n"], found["within_2_bits_ratio"]) == (3, 4, 0.75)


def test_families_are_split_once() -> None:
    families = {family for family, *_ in zoo.MODELS.values()}
    assert len(zoo.MODELS) >= 20 and set(zoo.FIT_FAMILIES) < families


def test_directions_separate_what_differs_and_ignore_noise() -> None:
    rng = np.random.default_rng(0)
    rows = np.concatenate([rng.normal(0, 3, (60, 20)), np.zeros((60, 4))], axis=1)
    noise = np.concatenate([rng.normal(0, 0.02, (60, 8, 20)), rng.normal(0, 5, (60, 8, 4))], axis=2)
    directions, offset = fingerprints._directions(rows, noise)
    bits = rows @ directions.T > offset
    moved = (rows[:, None, :] + noise) @ directions.T > offset
    assert directions.shape == (64, 24)
    assert (moved != bits[:, None, :]).mean() < 0.02
    assert 0.4 < bits.mean() < 0.6


def test_the_trace_written_for_the_comparison_is_one(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    written = timelines.write_trace(path, 2000)
    assert 1990 <= written <= 2000
    found = kernels.report(kineto.timeline(path, 0, profiles.load("default").profile.modality))
    assert 0 < found.overlap_ratio < 1 and len(found.streams) == 2
