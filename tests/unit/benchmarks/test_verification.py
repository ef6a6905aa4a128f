"""Damage is caught from the answers alone; healthy restarts never fail. 200 seeds: by command."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="needs the extra 'torch'")

from mmctl.benchmarks import verification  # noqa: E402
from mmctl.engine import profiles  # noqa: E402

SETTINGS = profiles.load("default").profile.recovery


@pytest.fixture(scope="module")
def goldens():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield verification.recorded(SETTINGS)
    torch.set_num_threads(threads)


@pytest.mark.parametrize(
    "fault", ["zeroed_head", "exponent_bit", "scaled_matrix", "swapped_matrices", "swapped_rows"]
)
def test_damage_is_caught(goldens, fault: str) -> None:
    verdict = verification.damaged(goldens, SETTINGS, fault, seed=11)
    assert verdict.verdict == "inconsistent"


def test_other_batches_and_threads_are_consistent(goldens) -> None:
    for number in (1, 2):
        verdict = verification.healthy(goldens, SETTINGS, number)
        assert verdict.verdict == "consistent", [c for c in verdict.checks if not c.passed]
