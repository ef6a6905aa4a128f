"""Rules over records as they come: every sample updates what it feeds, then asks the rules.

Truth has three values. A missing, absent or stale input makes what rests on it unknown (None),
and an unknown rule is never true.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import Any, NamedTuple, TypeAlias

import msgspec

from mmctl.engine import profiles
from mmctl.engine.errors import UsageError
from mmctl.engine.records import AnyRecord
from mmctl.engine.rules import language
from mmctl.engine.rules.signals import KINDS, Scope, Signal, Value, getter, scope_of
from mmctl.engine.rules.subjects import Route, Router, Subject, part
from mmctl.engine.rules.windows import Rolling

Truth: TypeAlias = bool | None
Closure: TypeAlias = Callable[[int], Any]


class Rule(NamedTuple):
    """A rule of a profile, read and checked."""

    name: str
    when: language.Expression
    clear: language.Expression | None
    signals: tuple[Signal, ...]
    scope: Scope
    settings: profiles.Rule


class Input(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One comparison of a verdict: what was compared with what, how old it is, why unknown."""

    name: str
    value: Value = None
    comparison: str = ""
    threshold: Value = None
    truth: bool | None = None
    age_s: float | None = None
    samples: int | None = None
    basis: str | None = None
    reason: str | None = None


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """What a rule says of one subject at one moment, and why."""

    rule: str
    subject: str
    scope: Scope
    ts_ns: int
    truth: bool | None
    when: str
    inputs: tuple[Input, ...]
    reason: str


def compile_rules(rules: Iterable[profiles.Rule]) -> tuple[Rule, ...]:
    """Every rule read and checked; UsageError names all rules that cannot be read."""
    return _compiled(tuple(rules))


@lru_cache(maxsize=8)  # a thousand simulated breakers have the same rules
def _compiled(rules: tuple[profiles.Rule, ...]) -> tuple[Rule, ...]:
    compiled, problems = [], []
    for rule in rules:
        try:
            when = language.parse(rule.when)
            clear = language.parse(rule.clear) if rule.clear else None
            used = language.signals(when)
            if not used:
                raise UsageError("a rule needs at least one signal")
            everything = used + (language.signals(clear) if clear else ())
            signals = tuple(dict.fromkeys(everything))
            compiled.append(Rule(rule.name, when, clear, signals, scope_of(signals), rule))
        except UsageError as error:
            problems.append(f"rule '{rule.name}': {error}")
    if problems:
        raise UsageError("; ".join(problems))
    return tuple(compiled)


class Cell:
    """The newest value of a signal for one subject, and why it is absent."""

    __slots__ = ("basis", "reason", "step", "ts_ns", "value")

    def __init__(self) -> None:
        self.value: Value = None
        self.ts_ns = -1
        self.step = -1  # the number of the record that gave it
        self.basis: str | None = None
        self.reason: str | None = None


class Instance:
    """A rule bound to one subject: closures over its cells and windows."""

    def __init__(self, rule: Rule, subject: Subject, cell: Callable[[Signal], Cell]) -> None:
        self.rule, self.subject = rule, subject
        self.max_age_ns = round(rule.settings.max_age_s * 1e9)
        self.windows: list[tuple[Rolling, Closure, tuple[Cell, ...]]] = []
        self._cell = cell
        self._closures: dict[int, Closure] = {}
        self._rolling: dict[int, Rolling] = {}
        self.when = self._build(rule.when)
        self.clear = self._build(rule.clear) if rule.clear else None

    def _build(self, node: language.Expression) -> Closure:
        closure = self._closure(node)
        self._closures[id(node)] = closure
        return closure

    def _closure(self, node: language.Expression) -> Closure:
        if isinstance(node, language.Constant):
            constant = node.value
            return lambda now: constant
        if isinstance(node, language.Read):
            return self._read(self._cell(node.signal))
        if isinstance(node, language.Window):
            return self._window(node)
        parts = tuple(map(self._build, language.children(node)))
        if isinstance(node, language.Compare):
            return compare(node.operator, *parts)
        if isinstance(node, language.Logic):
            return logic(node.operator, parts)
        return function(node.name, parts)

    def _read(self, cell: Cell) -> Closure:
        limit = self.max_age_ns

        def read(now: int) -> Value:
            return cell.value if now - cell.ts_ns <= limit else None

        return read

    def _window(self, node: language.Window) -> Closure:
        counts_truths = isinstance(node.argument, (language.Compare, language.Logic))
        name = "sum" if node.name == "count" and counts_truths else node.name
        rolling = Rolling(
            name, seconds=node.seconds, samples=node.samples, lag_s=node.lag_s,
            min_samples=max(1, self.rule.settings.min_samples),
        )  # fmt: skip
        argument = self._build(node.argument)
        cells = tuple(self._cell(signal) for signal in language.signals(node.argument))
        self.windows.append((rolling, argument, cells))
        self._rolling[id(node)] = rolling
        limit = self.max_age_ns

        def window(now: int) -> float | None:
            return rolling.value(now) if now - rolling.newest_ns <= limit else None

        return window

    def verdict(self, now: int, truth: Truth) -> Verdict:
        """``truth`` with every comparison that it rests on."""
        inputs = tuple(self._explain(self.rule.when, now))
        return Verdict(
            rule=self.rule.name, subject=str(self.subject), scope=self.subject.scope,
            ts_ns=now, truth=truth, when=self.rule.settings.when, inputs=inputs,
            reason=_reason(truth, inputs),
        )  # fmt: skip

    def _explain(self, node: language.Expression, now: int, wanted: bool = True) -> Iterable[Input]:
        """Every comparison as it must be for the rule to hold: turned round under a ``not``."""
        if isinstance(node, language.Logic):
            inside = wanted if node.operator != "not" else not wanted
            for inner in node.parts:
                yield from self._explain(inner, now, inside)
            return
        truth = self._closures[id(node)](now)
        if truth is not None:
            truth = bool(truth) is wanted
        if not isinstance(node, language.Compare):
            yield self._input(node, now, truth, "==", wanted)
            return
        left, right, operator = node.left, node.right, node.operator
        if not wanted:
            operator = _OPPOSITE[operator]
        if not language.signals(left) and language.signals(right) and operator in _MIRRORED:
            left, right, operator = right, left, _MIRRORED[operator]
        yield self._input(left, now, truth, operator, self._closures[id(right)](now))

    def _input(
        self, node: language.Expression, now: int, truth: Truth, comparison: str, threshold: Value
    ) -> Input:
        cells = [(signal, self._cell(signal)) for signal in language.signals(node)]
        seen = [cell.ts_ns for _, cell in cells if cell.ts_ns >= 0]
        age = (now - min(seen)) * 1e-9 if seen and len(seen) == len(cells) else None
        rolling = [
            self._rolling[id(inner)]
            for inner in language.walk(node)
            if isinstance(inner, language.Window)
        ]
        samples = min((window.count(now) for window in rolling), default=None)
        reason = self._why_unknown(cells, rolling, now) if truth is None else None
        basis = next((cell.basis for _, cell in cells if cell.basis), None)
        return Input(
            name=node.text, value=_plain(self._closures[id(node)](now)), comparison=comparison,
            threshold=_plain(threshold), truth=truth, age_s=age, samples=samples, basis=basis,
            reason=reason,
        )  # fmt: skip

    def _why_unknown(
        self, cells: list[tuple[Signal, Cell]], rolling: list[Rolling], now: int
    ) -> str:
        for signal, cell in cells:
            if cell.ts_ns < 0:
                return f"no {signal.kind} record has given {signal.name}"
            age = now - cell.ts_ns
            if age > self.max_age_ns:
                limit = self.max_age_ns * 1e-9
                return f"{signal.name} is {age * 1e-9:.3g} s old, more than {limit:g} s"
            if cell.value is None:
                return cell.reason or f"{signal.name} is absent"
        for window in rolling:
            if window.count(now) < window.needed:
                return f"{window.count(now)} of {window.needed} samples in the window"
            if window.whole and not window.covered(now):
                return "warming up: the window has not been seen through yet"
        return "not a number"


_OPPOSITE = {
    "<": ">=", ">=": "<", ">": "<=", "<=": ">", "==": "!=", "!=": "==", "in": "not in",
    "not in": "in",
}  # fmt: skip
_MIRRORED = {"<": ">", ">": "<", "<=": ">=", ">=": "<=", "==": "==", "!=": "!="}


def _plain(value: Any) -> Value:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _reason(truth: Truth, inputs: tuple[Input, ...]) -> str:
    shown = [item for item in inputs if item.truth is truth] or list(inputs)
    if truth is None:
        return next((item.reason for item in shown if item.reason), "unknown")
    return " and ".join(
        f"{item.name} {item.comparison} {_show(item.threshold)} is "
        f"{'true' if item.truth else 'false'} at {_show(item.value)}"
        for item in shown
    )


def _show(value: Value) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def compare(operator: str, left: Closure, right: Closure) -> Closure:
    """A comparison that is unknown where either side is."""
    if operator in ("in", "not in"):
        wanted = operator == "in"

        def within(now: int) -> Truth:
            item, among = left(now), right(now)
            if item is None or among is None:
                return None
            return (item in among) is wanted if isinstance(among, (str, tuple, list)) else None

        return within
    operation = _COMPARE[operator]

    def comparison(now: int) -> Truth:
        a, b = left(now), right(now)
        if a is None or b is None:
            return None
        try:
            return operation(a, b)
        except TypeError:
            return None

    return comparison


_COMPARE: dict[str, Callable[[Any, Any], bool]] = {
    "<": lambda a, b: a < b, "<=": lambda a, b: a <= b, ">": lambda a, b: a > b,
    ">=": lambda a, b: a >= b, "==": lambda a, b: a == b, "!=": lambda a, b: a != b,
}  # fmt: skip


def logic(operator: str, parts: tuple[Closure, ...]) -> Closure:
    """Kleene's and, or, not: unknown unless the known parts decide."""
    if operator == "not":
        (only,) = parts

        def negation(now: int) -> Truth:
            truth = only(now)
            return None if truth is None else not truth

        return negation
    decides = operator == "or"

    def joined(now: int) -> Truth:
        result: Truth = not decides
        for item in parts:
            truth = item(now)
            if truth is None:
                result = None
            elif bool(truth) is decides:
                return decides
        return result

    return joined


def function(name: str, parts: tuple[Closure, ...]) -> Closure:
    """A function of numbers, unknown where an argument is or where it has no value."""
    if name == "known":
        (only,) = parts
        return lambda now: only(now) is not None
    operation = _FUNCTIONS[name]

    def apply(now: int) -> float | None:
        values = []
        for item in parts:
            value = item(now)
            if value is None:
                return None
            values.append(value)
        try:
            result = operation(*values)
        except (ArithmeticError, ValueError, TypeError):
            return None
        return None if result != result else result

    return apply


def _time_to(level: float, value: float, slope: float) -> float:
    """Seconds until ``level`` at ``slope`` per second: 0 when there, infinite when never."""
    if value >= level:
        return 0.0
    return (level - value) / slope if slope > 0 else math.inf


_FUNCTIONS: dict[str, Callable[..., float]] = {
    "+": lambda a, b: a + b, "-": lambda a, b: a - b, "*": lambda a, b: a * b,
    "/": lambda a, b: a / b, "negate": lambda a: -a, "abs": abs, "log": math.log,
    "sqrt": math.sqrt, "at_least": max, "at_most": min, "time_to": _time_to,
}  # fmt: skip


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
