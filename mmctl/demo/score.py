"""The table of ``breaker evaluate --scenarios``: prevented, missed and false, over many seeds.

Truth is how the same seed ends when nobody acts: out of memory, or stalled. It never is a rule.
Seeds come in two halves, because thresholds may be looked at on the first and not after it.
"""

from __future__ import annotations

import os
import signal
import zlib
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, Literal

import msgspec

from mmctl.demo.virtual import Outcome, run_seed
from mmctl.engine import compiling
from mmctl.engine.breaker.evaluate import median, wilson
from mmctl.engine.breaker.reload import policy
from mmctl.engine.errors import MmctlError
from mmctl.engine.profiles import Profile

# From so many seeds on the allocator's loop is worth compiling, a quarter of a minute once.
WORTH_COMPILING = 20

Basis = Literal["modelled", "measured"]
"""Virtual runs are modelled, live ones measured."""


class ScenarioScore(msgspec.Struct, frozen=True, kw_only=True):
    """One scenario over a run of seeds; ratios with Wilson's 95 % intervals.

    ``part`` is ``tuning`` (thresholds may have been looked at on these seeds), ``held_out`` or
    ``all``. ``troubled`` seeds run out of memory or stall when nobody acts, ``tripped`` ones
    tripped before that, ``prevented`` ones did not run out of memory under an enforcing breaker,
    and ``recovered`` ones closed again at least once in it. False trips are a share of the runs
    that end well by themselves.
    """

    scenario: str
    part: str
    seeds: str
    runs: int
    troubled: int
    tripped: int
    prevented: int
    recovered: int
    false_trips: int
    accuracy_ratio: float
    accuracy_ci_ratio: tuple[float, float] | None
    false_trip_ratio: float | None
    false_trip_ci_ratio: tuple[float, float] | None
    lead_p50_s: float | None
    lead_min_s: float | None
    basis: Basis


class Run(msgspec.Struct, frozen=True):
    """One seed: its truth, its first trip, and how it ended under an enforcing breaker."""

    scenario: str
    seed: int
    troubled: bool
    tripped: bool
    prevented: bool
    recovered: bool
    lead_s: float | None


class Results:
    """The file of what was run: one line a seed, appended as it is done.

    Lines of other rules, or of live runs among virtual ones, are an error: their figures must
    not be mixed.
    """

    def __init__(self, path: Path, profile: Profile, basis: Basis = "modelled") -> None:
        self.path = path
        self.rules = f"{basis}-{zlib.crc32(msgspec.json.encode(policy(profile))):08x}"
        self.known: dict[tuple[str, int], Run] = {}
        try:
            self._file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
            content = path.read_bytes()
            whole = content.rfind(b"\n") + 1
            os.ftruncate(self._file, whole)  # a last line that a kill has cut is run again
        except OSError as error:
            raise MmctlError(f"cannot keep results in {path}: {error.strerror}") from None
        for number, line in enumerate(content[:whole].splitlines(), 1):
            try:
                made_by, run = msgspec.json.decode(line, type=tuple[str, Run])
            except msgspec.DecodeError:
                raise MmctlError(f"{path}, line {number}: no result of a seed") from None
            if made_by != self.rules:
                raise MmctlError(
                    f"{path} holds results of other runs ({made_by}, not {self.rules}): "
                    "name another file"
                )
            self.known[run.scenario, run.seed] = run

    def keep(self, run: Run) -> None:
        """Append a result: whole, or not at all."""
        os.write(self._file, msgspec.json.encode([self.rules, run]) + b"\n")

    def close(self) -> None:
        """Let go of the file; what was kept is in it."""
        os.close(self._file)


def run_seeds(
    scenario: str, seeds: Iterable[int], profile: Profile, jobs: int = 1
) -> Iterator[Run]:
    """Every seed, as they are done, in ``jobs`` processes."""
    wanted = list(seeds)
    fast = compiling.available() if len(wanted) >= WORTH_COMPILING else None
    if jobs <= 1:
        for seed in wanted:
            yield judge(scenario, seed, *run_seed(scenario, seed, profile, fast))
        return
    pool = ProcessPoolExecutor(jobs, initializer=_begin, initargs=(profile, fast))
    try:
        yield from pool.map(_run, [(scenario, seed) for seed in wanted])
    except BaseException:  # told to end: a seed, or its compiling, would take a minute
        for process in list((pool._processes or {}).values()):
            process.kill()
        raise
    finally:
        pool.shutdown(cancel_futures=True)


_given: list[Any] = []


def _begin(profile: Profile, fast: bool | None) -> None:
    """In a process of its own: what all its seeds need. An interrupt is for the parent."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _given[:] = [profile, fast]


def _run(task: tuple[str, int]) -> Run:
    return judge(*task, *run_seed(*task, *_given))


def judge(scenario: str, seed: int, oom_ns: int | None, enforced: Outcome) -> Run:
    """A seed that ends at ``oom_ns`` by itself, and its run under an enforcing breaker.

    What happened before the first trip is the same in both; a trip at or after the end of the
    one that was left alone came too late.
    """
    before = [at for at, _ in enforced.trips if oom_ns is None or at < oom_ns]
    troubled = oom_ns is not None or scenario == "stall"
    saved = bool(enforced.trips) and enforced.oom_ns is None
    return Run(
        scenario=scenario, seed=seed, troubled=troubled, tripped=bool(before),
        prevented=troubled and saved, recovered=saved and enforced.closed,
        lead_s=(oom_ns - before[0]) / 1e9 if oom_ns is not None and before else None,
    )  # fmt: skip


def score(
    scenario: str, part: str, seeds: range, found: Sequence[Run], basis: Basis = "modelled"
) -> ScenarioScore:
    """The figures of some runs."""
    right = sum(run.tripped == run.troubled for run in found)
    healthy = [run for run in found if not run.troubled]
    false = sum(run.tripped for run in healthy)
    leads = [run.lead_s for run in found if run.lead_s is not None]
    return ScenarioScore(
        scenario=scenario, part=part, seeds=f"{seeds[0]}-{seeds[-1]}", runs=len(found),
        troubled=sum(run.troubled for run in found),
        tripped=sum(run.tripped for run in found),
        prevented=sum(run.prevented for run in found),
        recovered=sum(run.recovered for run in found), false_trips=false,
        accuracy_ratio=right / len(found), accuracy_ci_ratio=wilson(right, len(found)),
        false_trip_ratio=false / len(healthy) if healthy else None,
        false_trip_ci_ratio=wilson(false, len(healthy)),
        lead_p50_s=median(leads), lead_min_s=min(leads, default=None), basis=basis,
    )  # fmt: skip


def halves(seeds: range) -> tuple[range, range]:
    """The seeds that thresholds were looked at on, and those that they were not."""
    middle = (len(seeds) + 1) // 2
    return seeds[:middle], seeds[middle:]
