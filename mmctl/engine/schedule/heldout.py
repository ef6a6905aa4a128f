"""Policies compared fairly: each at its own best parameters, on workloads that none has seen.

Every policy is given the same number of simulations on tuning seeds. Then, on other seeds, the
highest rate is looked for at which it keeps the objective: goodput per device-hour there is
what the fleet is worth under it. At the rate where first come, first served reaches its limit,
the others' P99 to the first token is set beside its own. Figures are modelled.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np

from mmctl.engine.schedule import fleet, policies, sweep
from mmctl.engine.schedule.plan import Slo
from mmctl.engine.schedule.sweep import Job, Plan, Task

Row = dict[str, Any]
RunAll = Callable[[Sequence[Job]], list[Row]]

FCFS = "colocated_fcfs"
OURS = "perception"
RATE_LEAST, RATE_MOST = 0.25, 512.0  # requests a second that are looked at
NEAR = 0.03  # a limit is known this near, as a share of itself
TUNING_RATES = (1.0, 1.4)  # in units of the rate at which first come, first served has its limit


class Seeds(msgspec.Struct, frozen=True, kw_only=True):
    """Workloads to tune on, and others to judge by."""

    tuning: tuple[int, ...]
    held_out: tuple[int, ...]


def compare(
    task: Task, names: Sequence[str], slo: Slo, seeds: Seeds, run_all: RunAll, *,
    budget: int = 12, progress: Callable[[str], None] = lambda told: None,
) -> dict[str, Any]:  # fmt: skip
    """The policies ``names`` on one workload: its rates, a row a policy, and what stands.

    ``names`` holds FCFS and OURS. The rates are ``rate_per_s`` of the task's source, which is
    replaced.
    """
    usual = {name: sweep.plan_of(policies.one(name)) for name in names}

    def ratios(wanted: Sequence[tuple[Plan, float]], of: tuple[int, ...]) -> list[float]:
        rows = _rows(task, wanted, of, run_all)
        return [float(np.mean([row["slo_ratio"] for row in some])) for some in rows]

    progress(f"the rate at which {FCFS} as it is reaches its limit")
    (rough,) = _limits([usual[FCFS]], slo, lambda wanted: ratios(wanted, seeds.tuning))
    progress(f"tuning {len(names)} policies, {budget} plans each")
    tuned = _tuned(usual, rough, budget, ratios, seeds.tuning)
    progress(f"the limit of {FCFS} at its best")
    (at,) = _limits([tuned[FCFS]], slo, lambda wanted: ratios(wanted, seeds.tuning))
    progress("the limit of every policy on the held-out seeds")
    plans = [tuned[name] for name in names]
    limits = _limits(plans, slo, lambda wanted: ratios(wanted, seeds.held_out), start=at)
    progress("their figures there, and where first come, first served has its limit")
    there = _rows(task, list(zip(plans, limits, strict=True)), seeds.held_out, run_all)
    beside = _rows(task, [(plan, at) for plan in plans], seeds.held_out, run_all)
    low = _rows(task, [(plan, at / 4) for plan in plans], seeds.held_out, run_all)
    found = [
        _row(task, name, tuned[name], limit, *figures)
        for name, limit, *figures in zip(names, limits, there, beside, low, strict=True)
    ]
    return {"fcfs_limit_per_s": at, "policies": found, **_verdict(found)}


def _rows(
    task: Task, wanted: Sequence[tuple[Plan, float]], seeds: tuple[int, ...], run_all: RunAll
) -> list[list[Row]]:
    """Rows of each (plan, rate) on each of the seeds."""
    jobs: list[Job] = []
    for plan, rate in wanted:
        for seed in seeds:
            source = msgspec.structs.replace(task.source, rate_per_s=rate, seed=seed)
            jobs.append((msgspec.structs.replace(task, source=source), plan))
    rows = run_all(jobs)
    many = len(seeds)
    return [rows[i * many : (i + 1) * many] for i in range(len(wanted))]


def _limits(
    plans: Sequence[Plan], slo: Slo, ratios: Callable[[Sequence[tuple[Plan, float]]], list[float]],
    start: float = 4.0,
) -> list[float]:  # fmt: skip
    """The highest rate at which each plan keeps the objective, all searched side by side.

    By doubling from ``start`` and then halving the interval; RATE_LEAST where it keeps it at no
    rate that is looked at, RATE_MOST where at all.
    """
    low, high = [0.0] * len(plans), [0.0] * len(plans)
    rate = [start] * len(plans)
    open_ = list(range(len(plans)))
    while open_:
        kept = ratios([(plans[i], rate[i]) for i in open_])
        for i, ratio in zip(open_, kept, strict=True):
            if ratio >= slo.share_ratio:
                low[i] = rate[i]
            else:
                high[i] = rate[i]
            if not high[i]:
                rate[i] *= 2
            elif not low[i]:
                rate[i] /= 2
            else:
                rate[i] = (low[i] + high[i]) / 2
        open_ = [
            i for i in open_
            if RATE_LEAST <= rate[i] <= RATE_MOST
            and not (low[i] and high[i] and high[i] - low[i] < NEAR * high[i])
        ]  # fmt: skip
    return [found or RATE_LEAST for found in low]


def _tuned(
    usual: dict[str, Plan], rate: float, budget: int,
    ratios: Callable[[Sequence[tuple[Plan, float]], tuple[int, ...]], list[float]],
    seeds: tuple[int, ...],
) -> dict[str, Plan]:  # fmt: skip
    """The best plan of each policy: all on one seed at the higher rate, the best third on all
    seeds and rates. Every policy has as many simulations."""
    high = TUNING_RATES[-1] * rate
    tries = {name: sweep.around(plan, budget) for name, plan in usual.items()}
    first = [(plan, high) for plans in tries.values() for plan in plans]
    scores = iter(ratios(first, seeds[:1]))
    kept: dict[str, list[Plan]] = {}
    for name, plans in tries.items():
        scored = [(next(scores), -i, plan) for i, plan in enumerate(plans)]
        scored.sort(key=lambda entry: entry[:2], reverse=True)
        kept[name] = [plan for _, _, plan in scored[: max(1, budget // 3)]]
    second = [
        (plan, share * rate)
        for plans in kept.values() for plan in plans for share in TUNING_RATES
    ]  # fmt: skip
    scores = iter(ratios(second, seeds))
    best: dict[str, Plan] = {}
    for name, plans in kept.items():
        means = [float(np.mean([next(scores) for _ in TUNING_RATES])) for _ in plans]
        best[name] = plans[int(np.argmax(means))]
    return best


def _row(
    task: Task, name: str, plan: Plan, limit: float, there: list[Row], beside: list[Row],
    low: list[Row],
) -> Row:  # fmt: skip
    """Goodput is what goes on at the limit, without the time in which a run ends."""
    devices = len(fleet.parts(task.devices))
    share = _mean(there, "slo_ratio") or 0.0
    return {
        "policy": name,
        "limit_per_s": limit,
        "goodput_per_device_hour": 3600.0 * limit * share / devices,
        "slo_ratio": share,
        "at_fcfs_limit": _figures(beside),
        "at_low_load": _figures(low),
        "parameters": {
            axis: getattr(plan, axis) for axis in sweep.axes(policies.one(name))
        },
    }  # fmt: skip


def _figures(rows: list[Row]) -> Row:
    keys = (
        "text_ttft_p99_s", "vision_ttft_p99_s", "ttft_mean_s", "slo_ratio",
        "goodput_per_device_hour", "joules_per_request", "hol_blocking_s",
    )  # fmt: skip
    return {key: _mean(rows, key) for key in keys}


def _mean(rows: list[Row], key: str) -> float | None:
    values = [row[key] for row in rows if row[key] is not None]
    return float(np.mean(values)) if values else None


def _verdict(found: list[Row]) -> Row:
    """What is claimed of ours, and whether it stood: None where the workload cannot tell."""
    by = {row["policy"]: row for row in found}
    ours, fcfs = by[OURS], by[FCFS]
    others = [row for row in found if row is not ours]
    best = max(others, key=lambda row: row["goodput_per_device_hour"])
    mine, theirs = (
        row["at_fcfs_limit"]["text_ttft_p99_s"] for row in (ours, fcfs)
    )  # fmt: skip
    factor = theirs / mine if mine and theirs else None
    gain = ours["goodput_per_device_hour"] / best["goodput_per_device_hour"]
    return {
        "best_baseline": best["policy"],
        "goodput_factor": gain,
        "beats_every_baseline": gain > 1.0,
        "text_ttft_p99_factor": factor,
        "text_three_times": None if factor is None else factor >= 3.0,
    }
