"""The table of ``breaker evaluate --scenarios``: prevented, missed and false, over many seeds.

Truth is how the same seed ends when nobody acts: out of memory, or stalled. It never is a rule.
Seeds come in two halves, because thresholds may be looked at on the first and not after it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor

import msgspec

from mmctl.demo.virtual import Outcome, runs
from mmctl.engine.breaker.evaluate import median, wilson
from mmctl.engine.profiles import Profile


class ScenarioScore(msgspec.Struct, frozen=True, kw_only=True):
    """One scenario over a run of seeds; ratios with Wilson's 95 % intervals.

    ``troubled`` seeds run out of memory or stall when nobody acts, ``tripped`` ones tripped
    before that, ``prevented`` ones did not run out of memory under an enforcing breaker, and
    ``recovered`` ones were closed again within the run.
    """

    scenario: str
    seeds: str
    runs: int
    troubled: int
    tripped: int
    prevented: int
    recovered: int
    false_trips: int
    accuracy_ratio: float
    accuracy_ci_ratio: tuple[float, float] | None
    false_trip_ratio: float
    false_trip_ci_ratio: tuple[float, float] | None
    lead_p50_s: float | None
    lead_min_s: float | None
    basis: str = "modelled"


class Run(msgspec.Struct, frozen=True):
    """One seed: its truth, its first trip, and how it ended under an enforcing breaker."""

    seed: int
    troubled: bool
    tripped: bool
    prevented: bool
    recovered: bool
    lead_s: float | None


def run_seeds(scenario: str, seeds: range, profile: Profile, jobs: int = 1) -> Iterator[Run]:
    """Every seed, as they are done, in ``jobs`` processes."""
    if jobs <= 1:
        for seed, watched, enforced in runs(scenario, seeds, profile):
            yield _judge(scenario, seed, watched, enforced)
        return
    size = max(1, min(10, len(seeds) // (4 * jobs)))
    parts = [seeds[start : start + size] for start in range(0, len(seeds), size)]
    pool = ProcessPoolExecutor(jobs)
    try:
        for part in pool.map(_part, [(scenario, part, profile) for part in parts]):
            yield from part
    finally:
        pool.shutdown(cancel_futures=True)


def _part(given: tuple[str, range, Profile]) -> list[Run]:
    scenario, seeds, profile = given
    return [
        _judge(scenario, seed, watched, enforced)
        for seed, watched, enforced in runs(scenario, seeds, profile)
    ]


def _judge(scenario: str, seed: int, watched: Outcome, enforced: Outcome | None) -> Run:
    ended = watched.oom_ns
    before = [at for at, _ in watched.trips if ended is None or at < ended]
    troubled = ended is not None or scenario == "stall"
    return Run(
        seed=seed, troubled=troubled, tripped=bool(before),
        prevented=troubled and enforced is not None and enforced.oom_ns is None,
        recovered=enforced is not None and enforced.oom_ns is None and enforced.closed,
        lead_s=(ended - before[0]) / 1e9 if ended is not None and before else None,
    )  # fmt: skip


def score(scenario: str, seeds: str, found: Sequence[Run]) -> ScenarioScore:
    """The figures of some runs."""
    right = sum(run.tripped == run.troubled for run in found)
    healthy = [run for run in found if not run.troubled]
    false = sum(run.tripped for run in healthy)
    leads = [run.lead_s for run in found if run.lead_s is not None]
    return ScenarioScore(
        scenario=scenario, seeds=seeds, runs=len(found),
        troubled=sum(run.troubled for run in found),
        tripped=sum(run.tripped for run in found),
        prevented=sum(run.prevented for run in found),
        recovered=sum(run.recovered for run in found), false_trips=false,
        accuracy_ratio=right / len(found), accuracy_ci_ratio=wilson(right, len(found)),
        false_trip_ratio=false / len(found), false_trip_ci_ratio=wilson(false, len(found)),
        lead_p50_s=median(leads), lead_min_s=min(leads, default=None),
    )  # fmt: skip


def halves(seeds: range) -> tuple[range, range]:
    """The seeds that thresholds were looked at on, and those that they were not."""
    middle = (len(seeds) + 1) // 2
    return seeds[:middle], seeds[middle:]
