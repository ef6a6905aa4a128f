"""The demo's scenarios on real tensors: a worker per run, judged as the virtual runs are.

A run left alone (its breaker only observes, which no worker notices) is the truth of its seed
and tells how long before its end the first trip came; the same seed is run under an enforcing
breaker. Where nothing tripped the one run is both.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from mmctl.demo.score import Run
from mmctl.demo.virtual import acting
from mmctl.engine.breaker.loop import attend
from mmctl.engine.profiles import Mode, Profile
from mmctl.engine.records import Event, Pool, Request
from mmctl.engine.sources import open_sources

# The demo takes ten steps a second where the machine keeps up.
STEPS = {"calm": 300, "burst": 400, "fragmentation": 400, "leak": 600, "stall": 400}
SERVED_AGAIN = 3  # requests completed after the target closed
LIMIT_S = 900.0


class Ended(NamedTuple):
    """How a live run ended, at times of its records; ``trips_ns`` are of the rules that act."""

    oom_ns: int | None
    trips_ns: tuple[int, ...]
    closed: bool


def watch(scenario: str, seed: int, profile: Profile, mode: Mode) -> Ended:
    """One worker until memory is out, the recovery is complete, or the scenario's last step."""
    stop = threading.Event()
    records = attend(open_sources([f"demo:{scenario}?seed={seed}"], profile, stop), profile, mode)
    acts = acting(profile)
    oom_ns, trips, closed, served, steps = None, [], False, 0, 0
    last_s = time.monotonic() + LIMIT_S
    try:
        for record in records:
            if isinstance(record, Event):
                if record.what == "oom":
                    oom_ns = record.ts_ns
                    break
                tripped = record.what == "trip" and record.rule in acts
                if tripped:
                    trips.append(record.ts_ns)
                closed = record.what == "close" or (closed and not tripped)
            elif isinstance(record, Pool):
                steps += record.fits is not None  # once a step the next batch is tried
            elif isinstance(record, Request):
                served += closed and record.state == "completed"
            done = closed and served >= SERVED_AGAIN
            if done or steps >= STEPS[scenario] or time.monotonic() > last_s:
                break
    finally:
        stop.set()
        records.close()
    return Ended(oom_ns, tuple(trips), closed)


def run_live(scenario: str, seeds: Iterable[int], profile: Profile) -> Iterator[Run]:
    """Every seed, one after the other."""
    for seed in seeds:
        enforced = watch(scenario, seed, profile, "enforce")
        alone = enforced
        if enforced.trips_ns and scenario != "stall":
            alone = watch(scenario, seed, profile, "observe")
        yield judge(scenario, seed, alone, enforced)


def judge(scenario: str, seed: int, alone: Ended, enforced: Ended) -> Run:
    """The two ends of a seed side by side."""
    before = [at for at in alone.trips_ns if alone.oom_ns is None or at < alone.oom_ns]
    troubled = alone.oom_ns is not None or scenario == "stall"
    saved = bool(enforced.trips_ns) and enforced.oom_ns is None
    return Run(
        scenario=scenario, seed=seed, troubled=troubled, tripped=bool(before),
        prevented=troubled and saved, recovered=saved and enforced.closed,
        lead_s=(alone.oom_ns - before[0]) / 1e9 if alone.oom_ns and before else None,
    )  # fmt: skip
