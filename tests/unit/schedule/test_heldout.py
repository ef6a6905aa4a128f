"""Policies tuned alike and judged on seeds that none has seen; limits found by halving."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from mmctl.engine.schedule import fleet, heldout, sweep
from mmctl.engine.schedule.plan import Slo
from mmctl.engine.schedule.source import Source
from mmctl.engine.schedule.sweep import Job, Plan

SLO = Slo(ttft_s=2.0, itl_s=0.1, share_ratio=0.9)


def test_limits_are_found_side_by_side_and_end_at_the_bounds() -> None:
    true = {"a": 7.3, "b": 0.9, "never": 0.0, "always": 1e9}
    plans = [Plan(policy=name) for name in true]
    asked: list[int] = []

    def ratios(wanted: Sequence[tuple[Plan, float]]) -> list[float]:
        asked.append(len(wanted))
        return [1.0 if rate <= true[plan.policy] else 0.5 for plan, rate in wanted]

    found = dict(zip(true, heldout._limits(plans, SLO, ratios), strict=True))
    for name in ("a", "b"):
        assert found[name] == pytest.approx(true[name], rel=heldout.NEAR)
        assert found[name] <= true[name]
    assert found["never"] == heldout.RATE_LEAST and found["always"] >= heldout.RATE_MOST / 2
    assert len(asked) < 15 and asked[0] == 4


def test_every_policy_has_as_many_simulations_and_the_judge_sees_other_seeds() -> None:
    task = sweep.Task(
        source=Source(trace="azure", rate_per_s=1.0, count=40), devices="l40s:1",
        model="qwen3-vl-8b", engine=fleet.Engine(), ttft_slo_s=2.0, itl_slo_s=0.1,
    )  # fmt: skip
    done: list[Job] = []

    def here(jobs: Sequence[Job]) -> list[dict[str, Any]]:
        done.extend(jobs)
        return [sweep.one(*job) for job in jobs]

    names = ("colocated_fcfs", "perception")
    seeds = heldout.Seeds(tuning=(1,), held_out=(7,))
    found = heldout.compare(task, names, SLO, seeds, here, budget=3)
    tuning = {name: set[str]() for name in names}
    for given, plan in done:
        if given.source.seed == 1:
            tuning[plan.policy].add(plan.key)
    assert {len(plans) for plans in tuning.values()} == {3}
    judged = [(plan.policy, plan.key) for given, plan in done if given.source.seed == 7]
    assert len(set(judged)) == 2  # one set of parameters a policy
    by = {row["policy"]: row for row in found["policies"]}
    ours, theirs = by["perception"], by["colocated_fcfs"]
    factor = ours["goodput_per_device_hour"] / theirs["goodput_per_device_hour"]
    assert found["goodput_factor"] == pytest.approx(factor)
    assert found["best_baseline"] == "colocated_fcfs"
    assert found["text_three_times"] is (found["text_ttft_p99_factor"] >= 3)
