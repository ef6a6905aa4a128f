"""The demo in virtual time: the truth of a seed, and what a breaker makes of it."""

from __future__ import annotations

import pytest

from mmctl.engine import profiles

pytest.importorskip("torch", reason="the demo's scenarios need torch")

from mmctl.demo import score
from mmctl.demo.virtual import START_NS, Outcome, VirtualRun, tapes_and_weights


def test_a_seed_has_one_truth_and_the_breaker_another_end() -> None:
    profile = profiles.load("default").profile
    tapes, weights = tapes_and_weights()

    def run(mode: profiles.Mode, seed: int = 0) -> Outcome:
        return VirtualRun(tapes, weights, "burst", seed, profile, mode).run()

    watched, off = run("observe"), run("off")
    assert watched.oom_ns is not None and off.oom_ns == watched.oom_ns, "one seed, one sequence"
    assert START_NS < watched.trips[0][0] <= watched.oom_ns - 100_000_000
    enforced = run("enforce")
    assert enforced.oom_ns is None and enforced.closed
    assert enforced.completed > watched.completed
    assert run("off", seed=1).oom_ns != watched.oom_ns


def test_the_table_counts_by_the_truth_and_in_halves() -> None:
    found = [
        score.Run(0, True, True, True, True, 0.1), score.Run(1, True, False, False, False, None),
        score.Run(2, False, False, False, False, None),
        score.Run(3, False, True, False, True, None),
    ]  # fmt: skip
    table = score.score("burst", "0-3", found)
    assert (table.runs, table.troubled, table.tripped, table.prevented) == (4, 2, 2, 1)
    assert (table.accuracy_ratio, table.false_trip_ratio, table.recovered) == (0.5, 0.25, 2)
    assert (table.lead_p50_s, table.lead_min_s) == (0.1, 0.1)
    assert score.halves(range(5)) == (range(3), range(3, 5))


@pytest.mark.parametrize("seed", [5000, 5001])
def test_a_leak_is_prevented_however_often_it_comes_back(seed: int) -> None:
    profile = profiles.load("default").profile
    tapes, weights = tapes_and_weights()
    ends = [
        VirtualRun(tapes, weights, "leak", seed, profile, mode).run() for mode in ("off", "enforce")
    ]
    assert ends[0].oom_ns is not None and ends[1].oom_ns is None
