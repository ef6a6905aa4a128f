"""Rules over records as they come: every sample updates what it feeds, then asks the rules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from mmctl.engine.records import AnyRecord
from mmctl.engine.rules.rule import Cell, Instance, Rule, Verdict
from mmctl.engine.rules.signals import KINDS, Signal, Value, getter
from mmctl.engine.rules.subjects import Route, Router, Subject, part
from mmctl.engine.rules.truth import Closure, Truth
from mmctl.engine.rules.windows import Rolling


class Answer(NamedTuple):
    """The truth of one rule for one subject after a record."""

    instance: Instance
    truth: Truth


def _fed(cells: tuple[Cell, ...], step: int) -> bool:
    """Whether this record gave any of ``cells``; most often it gave them all."""
    return cells[0].step == step or any(cell.step == step for cell in cells)


class Plan(NamedTuple):
    """What a record of one route updates and asks, prepared once."""

    reads: tuple[tuple[str, Signal, Callable[[Any], Value], Cell], ...]
    windows: tuple[tuple[Rolling, Closure, tuple[Cell, ...]], ...]
    instances: tuple[tuple[Instance, tuple[Cell, ...]], ...]


class Live:
    """All rules over a stream of records.

    A rule is asked whenever one of its signals has a new sample. Time never goes back: a record
    that comes late is judged at the newest time seen, and changes nothing where a newer sample
    of the same signal is known.
    """

    def __init__(self, rules: tuple[Rule, ...]) -> None:
        self.rules = rules
        self.router = Router()
        self.instances: dict[tuple[str, Subject], Instance] = {}
        self.now = 0
        self._step = 0
        self._cells: dict[tuple[Signal, Subject], Cell] = {}
        self._plans: dict[int, tuple[tuple[Route, ...], Plan]] = {}
        self._version = -1

    def reload(self, rules: tuple[Rule, ...]) -> list[Instance]:
        """Go on with ``rules``; those of an old name and definition keep their windows.

        Gives back the instances that end. What a rule reads is kept for all; its windows begin
        anew where it is new or changed.
        """
        old = {rule.name: rule for rule in self.rules}
        self.rules = tuple(
            old[rule.name]
            if rule.name in old and old[rule.name].settings == rule.settings
            else rule
            for rule in rules
        )
        kept = {id(rule) for rule in self.rules}
        ended = [each for each in self.instances.values() if id(each.rule) not in kept]
        self.instances = {
            key: each for key, each in self.instances.items() if id(each.rule) in kept
        }
        self._plans.clear()
        return ended

    def step(self, record: AnyRecord) -> list[Answer]:
        """Take ``record`` in and answer for every rule that it could have changed."""
        routes = self.router.route(record)
        if not routes:
            return []
        if self.router.version != self._version:
            self._plans.clear()
            self._version = self.router.version
        # By identity: the router gives the same tuple again, and hashing it is slow.
        found = self._plans.get(id(routes))
        plan = self._plan(routes) if found is None else found[1]
        self._step = step = self._step + 1
        ts_ns = record.ts_ns  # type: ignore[union-attr]
        self.now = now = max(self.now, ts_ns)
        self._update(plan, record, ts_ns)
        for rolling, argument, cells in plan.windows:
            if ts_ns >= rolling.newest_ns and _fed(cells, step):
                value = argument(now)
                if value is not None:
                    rolling.push(ts_ns, value)
        return [
            Answer(instance, instance.when(now))
            for instance, cells in plan.instances
            if _fed(cells, step)
        ]

    def _update(self, plan: Plan, record: Any, ts_ns: int) -> None:
        for kind, signal, read, cell in plan.reads:
            if ts_ns < cell.ts_ns:
                continue
            source = record if kind not in MODALITIES else part(kind, record)
            value = None if source is None else read(source)
            if value is None and occasional(signal):
                continue
            if isinstance(value, float) and value != value:
                value = None
            cell.value, cell.ts_ns, cell.step = value, ts_ns, self._step
            if value is None:
                cell.reason = _absent(record, signal)
            cell.basis = getattr(record, "basis", "measured")

    def _plan(self, routes: tuple[Route, ...]) -> Plan:
        kinds: dict[Subject, set[str]] = {}
        for route in routes:
            kinds.setdefault(route.subject, set()).add(route.kind)
        touched = [
            self._instance(rule, subject)
            for subject, given in kinds.items()
            for rule in self.rules
            if _applies(rule, subject, given, self.instances)
        ]
        reads = {
            (signal, subject): (signal.kind, signal, getter(signal), self._of(signal, subject))
            for subject, given in kinds.items()
            for rule in self.rules
            if concerns(rule, subject)
            for signal in rule.signals
            if signal.kind in given
        }
        updated = {id(read[3]) for read in reads.values()}
        windows = tuple(
            window
            for instance in touched
            for window in instance.windows
            if any(id(cell) in updated for cell in window[2])
        )
        asked = tuple((instance, self._inputs(instance, updated)) for instance in touched)
        plan = Plan(tuple(reads.values()), windows, asked)
        self._plans[id(routes)] = (routes, plan)
        return plan

    def _inputs(self, instance: Instance, updated: set[int]) -> tuple[Cell, ...]:
        cells = (self._of(signal, instance.subject) for signal in instance.rule.signals)
        return tuple(cell for cell in cells if id(cell) in updated)

    def _of(self, signal: Signal, subject: Subject) -> Cell:
        return self._cells.setdefault((signal, subject), Cell())

    def _instance(self, rule: Rule, subject: Subject) -> Instance:
        key = (rule.name, subject)
        if key not in self.instances:
            self._plans.clear()  # series that met no rule before now meet this one
            self.instances[key] = Instance(rule, subject, lambda s: self._of(s, subject))
        return self.instances[key]

    def verdicts(self, now: int) -> list[Verdict]:
        """Every rule of every subject as it stands at ``now``, with reasons."""
        return [instance.verdict(now, instance.when(now)) for instance in self.instances.values()]


# Records that are events, not readings: what they do not carry has not changed.
OCCASIONAL = frozenset({"memory", "event", "request"})


def occasional(signal: Signal) -> bool:
    """Whether an absent value says nothing: of events, and of a pool seen between dry runs."""
    return signal.kind in OCCASIONAL or signal.name == "fits"


MODALITIES = frozenset({"vision", "text"})


def _applies(
    rule: Rule, subject: Subject, given: set[str], known: dict[tuple[str, Subject], Instance]
) -> bool:
    """A rule concerns a subject of its own scope once one of the subject's own series is seen."""
    used = {signal.kind for signal in rule.signals}
    if not used & given or not concerns(rule, subject):
        return False
    if (rule.name, subject) in known:
        return True
    own = {kind for kind in used if KINDS[kind].scope == rule.scope}
    return bool(own & given)


def concerns(rule: Rule, subject: Subject) -> bool:
    """Whether ``rule`` is about subjects of this scope.

    An event of a node as a whole has no device: a rule on events alone serves any subject.
    """
    return subject.scope == rule.scope or all(signal.kind == "event" for signal in rule.signals)


def _absent(record: Any, signal: Signal) -> str | None:
    reasons = getattr(record, "absent", None)
    return reasons.get(signal.name.rpartition(".")[2]) if reasons else None
