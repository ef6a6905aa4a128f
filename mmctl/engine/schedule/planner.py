"""Which stage on which device, how many replicas, which limits: found by simulating.

Structures (colocated, queues by modality, E|PD, E|P|D) are laid over parts of the fleet; for
each the fewest devices that keep the objective are found by halving the interval. The limits of
the best are then refined by successive halving: many on a part of the workload, few on all of
it. What is told of the plan is of the whole workload.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np

from mmctl.engine.errors import UsageError
from mmctl.engine.schedule import figures, fleet, plan, policies, sweep
from mmctl.engine.schedule.costs import Model
from mmctl.engine.schedule.fleet import Device
from mmctl.engine.schedule.plan import Slo
from mmctl.engine.schedule.sweep import Job, Plan, Task

Row = dict[str, Any]
RunAll = Callable[[Sequence[Job]], list[Row]]

REFINED = 3  # so many structures have their limits refined
LEAST_REQUESTS = 200  # of a part of the workload that still tells good limits from bad ones


class Structure(NamedTuple):
    """A way to lay stages over devices, and the policy that serves it."""

    name: str
    policy: str
    encoders: float = 0.0
    prefillers: float = 0.0

    @property
    def least_devices(self) -> int:
        """The fewest devices that have one for every role."""
        return 1 + (self.encoders > 0) + (self.prefillers > 0)


STRUCTURES = (
    Structure("colocated, first come first served", "least_outstanding"),
    Structure("colocated, fewest waiting tokens", "jsq_tokens"),
    Structure("colocated, queues by modality", "perception"),
    Structure("E|PD, an eighth encodes", "perception", 0.125),
    Structure("E|PD, a quarter encodes", "perception", 0.25),
    Structure("E|P|D, a quarter each", "perception", 0.25, 0.25),
)


class Found(msgspec.Struct, frozen=True, kw_only=True):
    """The answer: the plan and its figures, whether it keeps the objective, the structures that
    were tried and why they were not taken, what a split costs, and how much was simulated."""

    chosen: plan.Chosen
    figures: Row
    kept: bool
    because: list[str]
    alternatives: list[Row]
    split_cost: list[Row]
    simulations: int


class _Search:
    """The fewest devices of one order on which one structure keeps the objective."""

    def __init__(self, structure: Structure, devices: Sequence[Device], model: Model) -> None:
        self.structure, self._devices, self._model = structure, devices, model
        self.low, self.high = structure.least_devices, len(devices)
        self.at = self.high
        self.best: tuple[Plan, Row] | None = None

    def next(self) -> Plan | None:
        """The plan to simulate next: on all devices first; None when nothing is left to try."""
        while self.low <= self.high:
            made = laid(self.structure, self._devices[: self.at], self._model)
            if made is not None:
                return made
            self.low = self.at + 1  # too little memory on these
            self.at = (self.low + self.high) // 2
        return None

    def tell(self, made: Plan, row: Row, kept: bool) -> None:
        """How the plan of ``next`` did."""
        if kept:
            self.best, self.high = (made, row), self.at - 1
        else:
            self.best = self.best or (made, row)
            self.low = self.at + 1
        self.at = (self.low + self.high) // 2


def laid(structure: Structure, devices: Sequence[Device], model: Model) -> Plan | None:
    """The structure on exactly these devices; None where they cannot hold the model so."""
    policy = policies.one(structure.policy)
    share = msgspec.structs.replace(
        policy, encoders=structure.encoders, prefillers=structure.prefillers or None
    )
    try:
        placed = policies.place(share, devices, model)
    except UsageError:
        return None
    roles = [figures.stages(device) for device in placed]
    if not (any("P" in role for role in roles) and any("D" in role for role in roles)):
        return None
    of = fleet.named(zip((device.given for device in placed), roles, strict=True))
    return msgspec.structs.replace(sweep.plan_of(policy), encoders=None, devices=of)


def search(
    task: Task, slo: Slo, run_all: RunAll, *, budget: int = 24,
    progress: Callable[[str], None] = lambda told: None,
) -> Found:  # fmt: skip
    """The plan that keeps ``slo`` with the most goodput per device-hour, or comes nearest to it.

    ``run_all`` gives the rows of jobs; ``budget`` is how many sets of limits are tried.
    Raises UsageError when no part of the devices can hold the model.
    """
    known: dict[tuple[int, Plan], Row] = {}

    def rows(plans: Sequence[Plan], count: int) -> list[Row]:
        new = [p for p in dict.fromkeys(plans) if (count, p) not in known]
        part = msgspec.structs.replace(task, source=task.source.part(count))
        found = run_all([(part, p) for p in new]) if new else []
        known.update(((count, p), row) for p, row in zip(new, found, strict=True))
        return [known[count, p] for p in plans]

    def score(row: Row) -> tuple[bool, float, float]:
        kept = keeps(row, slo)
        return kept, row["goodput_per_device_hour"] if kept else _share(row), -_joules(row)

    def best_of(plans: Sequence[Plan], count: int) -> list[tuple[Plan, Row]]:
        pairs = zip(plans, rows(plans, count), strict=True)
        return sorted(pairs, key=lambda pair: score(pair[1]), reverse=True)

    model = fleet.model(task.model)
    work = task.source.read()
    whole = work.requests
    given = fleet.parse(task.devices, model, task.engine)
    searches = _searches(given, model, vision=bool((work.images > 0).any()))
    while waiting := [(s, p) for s in searches if (p := s.next())]:
        progress(f"fewest devices: {len(waiting)} of {len(searches)} searches go on")
        for (one, made), row in zip(waiting, rows([p for _, p in waiting], whole), strict=True):
            one.tell(made, row, keeps(row, slo))
    least = [(s.structure.name, *s.best) for s in searches if s.best]
    if not least:
        raise UsageError(f"no part of '{task.devices}' can hold {model.name} and serve it")
    least = _distinct(sorted(least, key=lambda entry: score(entry[2]), reverse=True))
    tries = [
        near
        for _, made, _ in least[:REFINED]
        for near in sweep.around(made, max(2, budget // REFINED))
    ]
    size = max(LEAST_REQUESTS, whole // 4)
    while size < whole and len(tries) > 4:
        progress(f"{len(tries)} sets of limits on {size} requests")
        tries = [p for p, _ in best_of(tries, size)][: max(4, len(tries) // 2)]
        size *= 2
    progress(f"{len(tries)} sets of limits on {whole} requests")
    best, row = best_of([*tries, least[0][1]], whole)[0]
    short: Row | None = None
    while keeps(row, slo) and (fewer := _one_less(best)):
        progress(f"one device less: {len(fewer)} ways")
        near, near_row = best_of(fewer, whole)[0]
        if not keeps(near_row, slo):
            short = near_row
            break
        best, row = near, near_row
    progress("what a split costs")
    costs = _split_cost(task, run_all, model, given) if model.vision_layers else []
    queues = _queues(task, best, model, slo)
    return Found(
        chosen=plan.of(best, task.model, queues), figures=row, kept=keeps(row, slo),
        because=_because(row, short, slo, least, costs), split_cost=costs,
        alternatives=[_alternative(name, found, row, slo) for name, _, found in least],
        simulations=len(known) + 2 * len(costs),
    )  # fmt: skip


def keeps(row: Row, slo: Slo) -> bool:
    """Whether the objective is kept, to the end, and no request was left out."""
    return _share(row) >= slo.share_ratio and not row["lost"]


def _share(row: Row) -> float:
    """The share in the objective, of all or of the last third: the smaller one."""
    return float(min(row["slo_ratio"], row["late_slo_ratio"]))


def _joules(row: Row) -> float:
    joules = row["joules_per_request"]
    return math.inf if joules is None else float(joules)


def _searches(given: Sequence[Device], model: Model, *, vision: bool) -> list[_Search]:
    """Every structure that makes sense here, from the fastest device on and from the slowest."""
    fastest = sorted(given, key=lambda device: (policies.step_s(device), device.name))
    orders = [fastest]
    if len({device.given for device in given}) > 1:
        orders.append(fastest[::-1])
    splits = vision and model.vision_layers > 0
    return [
        _Search(structure, order, model)
        for structure in STRUCTURES
        if len(given) >= structure.least_devices and (splits or not structure.encoders)
        for order in orders
    ]


def _distinct(least: Sequence[tuple[str, Plan, Row]]) -> list[tuple[str, Plan, Row]]:
    """The first of each structure on the same devices: in another order they are no other plan."""
    found: dict[tuple[str, tuple[tuple[str, str], ...]], tuple[str, Plan, Row]] = {}
    for entry in least:
        name, made, _ = entry
        assert made.devices is not None
        found.setdefault((name, tuple(sorted(fleet.parts(made.devices)))), entry)
    return list(found.values())


def _one_less(made: Plan) -> list[Plan]:
    """The plan without one of its devices, once for each kind."""
    assert made.devices is not None
    parts = fleet.parts(made.devices)
    if len(parts) < 2:
        return []
    before = {letter for _, role in parts for letter in role}
    found = []
    for part in dict.fromkeys(parts):
        left = list(parts)
        left.remove(part)
        if {letter for _, role in left for letter in role} == before:
            found.append(msgspec.structs.replace(made, devices=fleet.named(left)))
    return found


def _split_cost(task: Task, run_all: RunAll, model: Model, given: Sequence[Device]) -> list[Row]:
    """Colocated, E|PD and E|P|D on all devices: the first token under the workload, and the
    tokens a device makes when there is always work; each against colocated."""
    structures = [
        Structure("colocated", "least_outstanding"),
        Structure("E|PD", "least_outstanding", 0.25),
        Structure("E|P|D", "least_outstanding", 0.25, 0.25),
    ]
    made = [
        (structure.name, p) for structure in structures
        if len(given) >= structure.least_devices and (p := laid(structure, given, model))
    ]  # fmt: skip
    if len(made) < 2:
        return []
    plans = [p for _, p in made]
    source = msgspec.structs.replace(task.source, saturated=True)
    full = msgspec.structs.replace(task, source=source)
    rows = run_all([(of, p) for of in (task, full) for p in plans])
    usual, busy = rows[: len(plans)], rows[len(plans) :]
    found = []
    for (name, p), row, at_once in zip(made, usual, busy, strict=True):
        first, rate = _mean_ttft(row), at_once["tokens_per_s_per_device"]
        base, base_rate = _mean_ttft(usual[0]), busy[0]["tokens_per_s_per_device"]
        found.append(
            {
                "structure": name, "devices": p.devices, "ttft_mean_s": first,
                "ttft_factor": first / base if first and base else None,
                "tokens_per_s_per_device": rate,
                "throughput_factor": rate / base_rate if rate and base_rate else None,
                "slo_ratio": row["slo_ratio"],
            }
        )  # fmt: skip
    return found


def _mean_ttft(row: Row) -> float | None:
    found: float | None = row["ttft_mean_s"]
    return found


def _alternative(name: str, row: Row, best: Row, slo: Slo) -> Row:
    good, most = row["goodput_per_device_hour"], best["goodput_per_device_hour"]
    if not keeps(row, slo):
        late = " of the last third" if row["late_slo_ratio"] < row["slo_ratio"] else ""
        why = f"{_share(row):.1%}{late} in the objective, {slo.share_ratio:.0%} asked"
    elif good < most:
        why = f"{good:.0f} good requests a device-hour, the plan {most:.0f}"
    else:
        why = "the plan's own structure, or as good"
    return {
        "structure": name, "devices": row["devices"], "slo_ratio": row["slo_ratio"],
        "text_ttft_p99_s": row["text_ttft_p99_s"], "vision_ttft_p99_s": row["vision_ttft_p99_s"],
        "goodput_per_device_hour": good, "joules_per_request": row["joules_per_request"],
        "why": why,
    }  # fmt: skip


def _because(
    row: Row, short: Row | None, slo: Slo, least: Sequence[tuple[str, Plan, Row]],
    costs: Sequence[Row],
) -> list[str]:  # fmt: skip
    """What speaks for the plan, in sentences with their figures."""
    many = len(row["stages"].split())
    told = [
        f"{row['slo_ratio']:.1%} of the requests keep the objective ({slo.share_ratio:.0%} asked) "
        f"on {many} device{'s' if many > 1 else ''}, {row['goodput_per_device_hour']:.0f} good "
        "ones a device-hour"
    ]
    if short is not None:
        told.append(f"with one device less, at best {short['slo_ratio']:.1%} ({short['devices']})")
    elif not keeps(row, slo):
        told.append("no plan on these devices keeps it: this one comes nearest")
    others = [entry for entry in least if entry[2]["devices"] != row["devices"]]
    if others:
        name, _, other = others[0]
        kept = "keeps" if keeps(other, slo) else "misses"
        told.append(
            f"next best: {name} on {other['devices']} {kept} it with {other['slo_ratio']:.1%}, "
            f"{other['goodput_per_device_hour']:.0f} a device-hour"
        )
    for cost in costs[1:]:
        first, rate = cost["ttft_factor"], cost["throughput_factor"]
        if first is None or rate is None:
            continue
        told.append(
            f"{cost['structure']} against colocated on all devices: first token "
            f"{_change(first)}, tokens a second and device {_change(rate)}"
        )
    return told


def _change(factor: float) -> str:
    return f"{factor - 1:+.0%}"


def _queues(task: Task, made: Plan, model: Model, slo: Slo) -> tuple[plan.Limits, ...]:
    """How deep each queue may be: what arrives in the time that the objective leaves for
    waiting, beside what a request needs from its start to its first token."""
    run = sweep.run_of(task, made)
    work, found = run.workload, run.result
    limits = []
    for queue, mine in (("vision", work.images > 0), ("stream", work.images == 0)):
        done = mine & (found.finish_s >= 0)
        rate = float(mine.sum()) / max(run.end_s, 1e-9)
        if not done.any():
            limits.append(
                plan.Limits(queue=queue, requests_per_s=rate, wait_p99_s=None, depth=None)
            )
            continue
        wait = (found.started_s - work.arrival_s)[done]
        service = float(np.median((found.first_s - found.started_s)[done]))
        depth = max(1, math.floor(rate * max(0.0, slo.ttft_s - service)))
        p99 = float(np.percentile(wait, 99))
        limits.append(plan.Limits(queue=queue, requests_per_s=rate, wait_p99_s=p99, depth=depth))
    return tuple(limits)
