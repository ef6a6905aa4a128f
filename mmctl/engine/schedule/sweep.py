"""Many plans over one workload: a grid of equal budget for every policy, in processes or on Ray.

One task is one whole configuration. Finished rows go to a journal as they come, so that a
killed sweep goes on where it was; the table is in order of the plans, whoever made it.
"""

from __future__ import annotations

import heapq
import itertools
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec

from mmctl.engine import atomic
from mmctl.engine.errors import MissingExtraError, MmctlError
from mmctl.engine.schedule import figures, fleet, policies, simulate
from mmctl.engine.schedule.fleet import Engine
from mmctl.engine.schedule.source import Source
from mmctl.engine.schedule.workload import Workload

TRIES = 3

# What a plan may set, the usual value first; a policy is given the ones that it heeds.
TOKENS = (2048, 1024, 4096, 8192)
SEQUENCES = (256, 128, 64)
PATCHES = (16384, 4096, 65536)
ENCODERS = (0.25, 0.125, 0.375, 0.5)
IMAGES = (32, 8, 64)
AGES_S = (5.0, 1.0, 0.3)
DECODE_RATIOS = (0.3, 0.1, 1.0)
INLINE_IMAGES = (0, 1000)


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """One configuration to simulate. ``devices`` stands in for the task's, with their stages."""

    policy: str
    batched_tokens: int = 2048
    sequences: int = 256
    encode_patches: int = 16384
    encoders: float | None = None
    encode_images: int = 8
    age_s: float = policies.NEVER_S
    decode_ratio: float = 1.0
    inline_images: int = 0
    devices: str | None = None

    @property
    def key(self) -> str:
        """The plan as text: alike for equal plans, in every process."""
        return msgspec.json.encode(self).decode()


_OF_POLICY = [name for name in Plan.__struct_fields__ if hasattr(policies.Policy, name)]
"""What a plan sets of its policy: the fields that both have."""


def plan_of(policy: policies.Policy) -> Plan:
    """The plan with the policy's own values."""
    return Plan(policy=policy.name, **{name: getattr(policy, name) for name in _OF_POLICY})


def policy_of(plan: Plan) -> policies.Policy:
    """The policy with the plan's values; devices that the plan names keep their stages."""
    values = {name: getattr(plan, name) for name in _OF_POLICY}
    if plan.devices:
        values["encoders"] = None
    return msgspec.structs.replace(policies.one(plan.policy), **values)


class Task(msgspec.Struct, frozen=True, kw_only=True):
    """All that a worker needs besides the plan."""

    source: Source
    devices: str
    model: str
    engine: Engine
    ttft_slo_s: float
    itl_slo_s: float


def axes(policy: policies.Policy) -> dict[str, tuple[Any, ...]]:
    """What a sweep sets for a policy: only what makes a difference to it, so that of equal
    budgets none is spent on plans that are the same."""
    found: dict[str, tuple[Any, ...]] = {
        "batched_tokens": TOKENS, "sequences": SEQUENCES, "encode_patches": PATCHES
    }  # fmt: skip
    if policy.encoders:
        found |= {"encoders": ENCODERS, "encode_images": IMAGES}
    if policy.by_modality:
        found |= {"age_s": AGES_S, "encode_images": IMAGES, "inline_images": INLINE_IMAGES}
    if policy.routing == "perception":
        found["decode_ratio"] = DECODE_RATIOS
    return found


def grid(names: Sequence[str], plans: int) -> list[Plan]:
    """About ``plans`` plans, the same number for each policy, nearest to its own values first."""
    each = max(1, plans // len(names))
    return [plan for name in names for plan in around(plan_of(policies.one(name)), each)]


def around(plan: Plan, count: int) -> list[Plan]:
    """``plan`` and its nearest neighbours: one value changed first, then two, and so on."""
    of = axes(policies.one(plan.policy))
    if plan.devices:
        of.pop("encoders", None)
    values = {
        name: tuple(dict.fromkeys((getattr(plan, name), *values))) for name, values in of.items()
    }
    # By the number of values changed and how far: lazily, a full grid may hold thousands.
    places = itertools.product(*(range(len(column)) for column in values.values()))
    nearest = heapq.nsmallest(count, places, key=lambda at: (sum(map(bool, at)), sum(at), at))
    return [
        msgspec.structs.replace(
            plan, **{name: column[i] for (name, column), i in zip(values.items(), at, strict=True)}
        )
        for at in nearest
    ]


@lru_cache(maxsize=4)
def _work(source: Source) -> Workload:
    return source.read()


def run_of(task: Task, plan: Plan) -> simulate.Run:
    """Simulate one plan."""
    model = fleet.model(task.model)
    engine = msgspec.structs.replace(
        task.engine, batched_tokens=plan.batched_tokens, sequences=plan.sequences
    )
    work = _work(task.source)
    policy = policy_of(plan)
    devices = policies.place(
        policy, fleet.parse(plan.devices or task.devices, model, engine), model
    )
    rule = policies.rule(
        policy, output_mean=float(work.output_tokens.mean()), seed=task.source.seed
    )
    return simulate.run(work, devices, rule, model, engine, policy=plan.policy)


def one(task: Task, plan: Plan) -> dict[str, Any]:
    """The figures of one plan, without anything that depends on who ran it or when."""
    run = run_of(task, plan)
    row = figures.summary(run, ttft_slo_s=task.ttft_slo_s, itl_slo_s=task.itl_slo_s)
    return {
        **msgspec.to_builtins(plan),
        "age_s": None if plan.age_s >= policies.NEVER_S else plan.age_s,
        "stages": " ".join(figures.stages(device) for device in run.devices),
        **{f"{m}_{name}_p99_s": _figure(row, m, f"{name}_s", "p99")
           for m in ("text", "vision") for name in ("ttft", "itl")},
        "ttft_mean_s": row["ttft_mean_s"],
        "slo_ratio": row["slo_ratio"],
        "late_slo_ratio": row["late_slo_ratio"],
        "goodput_per_device_hour": row["goodput_per_device_hour"],
        "tokens_per_s_per_device": row["tokens_per_s_per_device"],
        "joules_per_request": row["joules_per_request"],
        "device_hours": row["device_hours"],
        "hol_blocking_s": row["hol_blocking_s"],
        "lost": row["lost"],
    }  # fmt: skip


def _figure(row: dict[str, Any], modality: str, name: str, which: str) -> float | None:
    spread = row["modalities"][modality][name]
    return spread[which] if spread else None


Job = tuple[Task, Plan]
Rows = Iterator[tuple[Job, dict[str, Any]]]


def run(
    task: Task, plans: Sequence[Plan], *, engine: str = "processes", workers: int | None = None,
    address: str | None = None, journal: Path | None = None,
    progress: Callable[[int, int], None] = lambda done, of: None,
) -> list[dict[str, Any]]:  # fmt: skip
    """The row of every plan, in order of the plans.

    With a ``journal`` rows already in it are taken from there, and new ones are added as they
    come. A worker that dies loses nothing: its plan is run again, up to three times.
    """
    rows = _kept(journal, task) if journal else {}
    left: list[Job] = [(task, plan) for plan in plans if plan.key not in rows]
    progress(len(plans) - len(left), len(plans))
    if left:
        with runner(engine, workers, address) as jobs, open(
            journal or os.devnull, "a", encoding="utf-8"
        ) as file:  # fmt: skip
            for (_, plan), row in jobs(left):
                rows[plan.key] = row
                line = {"task": _mark(task), "plan": plan.key, "row": row}
                file.write(json.dumps(line) + "\n")
                file.flush()
                progress(len(rows), len(plans))
    return [rows[plan.key] for plan in plans]


@contextmanager
def runner(
    engine: str = "processes", workers: int | None = None, address: str | None = None
) -> Iterator[Callable[[Sequence[Job]], Rows]]:
    """Where jobs are run: give it jobs, and it gives each with its row as they are done."""
    if engine == "ray":
        with _ray(address) as jobs:
            yield jobs
        return
    pool = _Processes(workers or os.cpu_count() or 1)
    try:
        yield pool.run
    finally:
        pool.close()


def all_rows(
    jobs: Callable[[Sequence[Job]], Rows], wanted: Sequence[Job],
    progress: Callable[[int, int], None] = lambda done, of: None,
) -> list[dict[str, Any]]:  # fmt: skip
    """The rows of ``wanted`` in its order; what stands in it twice is simulated once."""
    once = list(dict.fromkeys(wanted))
    found: dict[Job, dict[str, Any]] = {}
    progress(0, len(once))
    for job, row in jobs(once):
        found[job] = row
        progress(len(found), len(once))
    return [found[job] for job in wanted]


def _mark(task: Task) -> str:
    return msgspec.json.encode(task).decode()


def _kept(journal: Path, task: Task) -> dict[str, dict[str, Any]]:
    """Rows of an earlier sweep of the same task; a last line that was cut is dropped."""
    rows: dict[str, dict[str, Any]] = {}
    if not journal.is_file():
        return rows
    text = journal.read_text("utf-8", "replace")
    for number, line in enumerate(text.splitlines(), 1):
        try:
            entry = json.loads(line)
            if entry["task"] == _mark(task):
                rows[entry["plan"]] = entry["row"]
        except (ValueError, KeyError, TypeError):
            if number < text.count("\n") + 1 - text.endswith("\n"):
                raise MmctlError(f"{journal}, line {number}: no row of a sweep") from None
    if text and not text.endswith("\n"):
        atomic.write(journal, text[: text.rfind("\n") + 1])
    return rows


class _Processes:
    """A pool of spawned processes that outlives the death of any of them."""

    def __init__(self, workers: int) -> None:
        self._workers = workers
        self._pool: Any = None

    def _open(self) -> Any:
        from concurrent.futures import ProcessPoolExecutor
        from multiprocessing import get_context

        if self._pool is None:
            self._pool = ProcessPoolExecutor(self._workers, mp_context=get_context("spawn"))
        return self._pool

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
            self._pool = None

    def run(self, jobs: Sequence[Job]) -> Rows:
        from concurrent.futures import as_completed
        from concurrent.futures.process import BrokenProcessPool

        left = dict.fromkeys(jobs, 0)
        while left:
            # A dead worker breaks the whole pool: a new one goes on with what is not done.
            try:
                pool = self._open()
                tasks = {pool.submit(one, *job): job for job in left}
                for future in as_completed(tasks):
                    row = future.result()
                    del left[tasks[future]]
                    yield tasks[future], row
            except BrokenProcessPool:
                self.close()
                for job in left:
                    left[job] += 1
                worst = max(left.values())
                if worst >= TRIES:
                    raise MmctlError(
                        f"workers died {worst} times: too little memory for {self._workers} at "
                        "once? (--workers)"
                    ) from None


def _between(before: Any) -> Callable[[], None]:
    """Obeys a SIGTERM, as ``before`` would have, when it is called: an exit within a call of Ray
    comes out as another one, and Ray's own handler ends with 15."""
    asked: list[int] = []

    def obey() -> None:
        with suppress(ValueError):  # only the main thread takes signals
            signal.signal(signal.SIGTERM, lambda number, _: asked.append(number))
        if asked and callable(before):
            before(asked[0], None)
        elif asked:
            sys.exit(128 + asked[0])

    return obey


@contextmanager
def _ray(address: str | None) -> Iterator[Callable[[Sequence[Job]], Rows]]:
    try:
        import ray
    except ImportError:
        raise MissingExtraError("--engine ray", "ray") from None
    obey = _between(signal.getsignal(signal.SIGTERM))
    ours = not ray.is_initialized()
    if ours:
        options: dict[str, Any] = {"address": address} if address else {"num_cpus": os.cpu_count()}
        ray.init(include_dashboard=None if address else False, log_to_driver=False, **options)
    obey()  # from here on
    remote = ray.remote(max_retries=TRIES)(one)

    def run(jobs: Sequence[Job]) -> Rows:
        pending = {remote.remote(*job): job for job in jobs}
        while pending:
            done, _ = ray.wait(list(pending), timeout=0.5)
            obey()
            for reference in done:
                yield pending.pop(reference), ray.get(reference)

    try:
        yield run
    finally:
        if ours:
            ray.shutdown()


def pareto(rows: Sequence[dict[str, Any]]) -> list[int]:
    """The places of rows that no other beats: joules a request, text P99, goodput.

    A row with an absent figure is no candidate. Of equal rows the first stays.
    """

    def aims(row: dict[str, Any]) -> tuple[float, float, float] | None:
        energy, late = row["joules_per_request"], row["text_ttft_p99_s"]
        good = row["goodput_per_device_hour"]
        late = late if late is not None else row["vision_ttft_p99_s"]
        if late is None or good is None:
            return None
        return (energy if energy is not None else 0.0, late, -good)

    found = []
    points = [aims(row) for row in rows]
    for i, mine in enumerate(points):
        if mine is None:
            continue
        beaten = any(
            other is not None
            and all(a <= b for a, b in zip(other, mine, strict=True))
            and (other != mine or j < i)
            for j, other in enumerate(points) if j != i
        )  # fmt: skip
        if not beaten:
            found.append(i)
    return found
