"""A rule of a profile, read and checked; and bound to one subject, with its windows.

Truth has three values. A missing, absent or stale input makes what rests on it unknown (None),
and an unknown rule is never true.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import Any, NamedTuple

import msgspec

from mmctl.engine import profiles
from mmctl.engine.errors import UsageError
from mmctl.engine.rules import dimensions, language
from mmctl.engine.rules.signals import Scope, Signal, Value, scope_of
from mmctl.engine.rules.subjects import Subject
from mmctl.engine.rules.truth import Closure, Truth, compare, function, logic
from mmctl.engine.rules.windows import Rolling
from mmctl.engine.units import show_bytes


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


def check(condition: str) -> None:
    """UsageError for what cannot be a rule's ``when`` or ``clear``."""
    _condition(condition)


def _condition(text: str) -> tuple[language.Expression, tuple[Signal, ...]]:
    """A condition and its signals."""
    tree = language.parse(text)
    used = language.signals(tree)
    if not used:
        raise UsageError("a rule needs at least one signal")
    dimensions.check(tree)
    return tree, used


@lru_cache(maxsize=8)  # a thousand simulated breakers have the same rules
def _compiled(rules: tuple[profiles.Rule, ...]) -> tuple[Rule, ...]:
    compiled, problems = [], []
    for rule in rules:
        try:
            when, used = _condition(rule.when)
            clear, more = _condition(rule.clear) if rule.clear else (None, ())
            signals = tuple(dict.fromkeys(used + more))
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
            yield self._input(node, now, truth, "==", wanted, node)
            return
        left, right, operator = node.left, node.right, node.operator
        if not wanted:
            operator = _OPPOSITE[operator]
        if not language.signals(left) and language.signals(right) and operator in language.MIRRORED:
            left, right, operator = right, left, language.MIRRORED[operator]
        if operator in _HOLDS:  # of a list, which is what is read
            left, right, operator = right, left, _HOLDS[operator]
        yield self._input(left, now, truth, operator, self._closures[id(right)](now), node)

    def _input(
        self, node: language.Expression, now: int, truth: Truth, comparison: str,
        threshold: Value, whole: language.Expression,
    ) -> Input:  # fmt: skip
        """``node`` as it was compared; why it is unknown may lie anywhere in the ``whole``."""
        cells = [(signal, self._cell(signal)) for signal in language.signals(node)]
        seen = [cell.ts_ns for _, cell in cells if cell.ts_ns >= 0]
        age = (now - min(seen)) * 1e-9 if seen and len(seen) == len(cells) else None
        samples = min((window.count(now) for window in self._windows_in(node)), default=None)
        reason = self._why_unknown(whole, now) if truth is None else None
        basis = next((cell.basis for _, cell in cells if cell.basis), None)
        return Input(
            name=node.text, value=_plain(self._closures[id(node)](now)), comparison=comparison,
            threshold=_plain(threshold), truth=truth, age_s=age, samples=samples, basis=basis,
            reason=reason,
        )  # fmt: skip

    def _windows_in(self, node: language.Expression) -> list[Rolling]:
        inside = language.walk(node)
        return [self._rolling[id(one)] for one in inside if isinstance(one, language.Window)]

    def _why_unknown(self, node: language.Expression, now: int) -> str:
        for signal in language.signals(node):
            cell = self._cell(signal)
            if cell.ts_ns < 0:
                return f"no {signal.kind} record has given {signal.name}"
            age = now - cell.ts_ns
            if age > self.max_age_ns:
                limit = self.max_age_ns * 1e-9
                return f"{signal.name} is {age * 1e-9:.3g} s old, more than {limit:g} s"
            if cell.value is None:
                return cell.reason or f"{signal.name} is absent"
        for window in self._windows_in(node):
            if window.count(now) < window.needed:
                return f"{window.count(now)} of {window.needed} samples in the window"
            if window.whole and not window.covered(now):
                return "warming up: the window has not been seen through yet"
        return f"{node.text} has no value, as a division by zero has none"


_OPPOSITE = {
    "<": ">=", ">=": "<", ">": "<=", "<=": ">", "==": "!=", "!=": "==", "in": "not in",
    "not in": "in",
}  # fmt: skip


_HOLDS = {"in": "holds", "not in": "lacks"}


def _plain(value: Any) -> Value:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _reason(truth: Truth, inputs: tuple[Input, ...]) -> str:
    shown = [item for item in inputs if item.truth is truth] or list(inputs)
    if truth is None:
        return next((item.reason for item in shown if item.reason), "unknown")
    return " and ".join(map(_compared, shown))


def _compared(item: Input) -> str:
    """``headroom_bytes < 0 B is true at -132 MiB``; of what is itself true or false, its value."""
    if isinstance(item.threshold, bool) and isinstance(item.value, bool):
        return f"{item.name} is {_show(item.name, item.value)}"
    threshold, value = (_show(item.name, one) for one in (item.threshold, item.value))
    truth = "true" if item.truth else "false"
    return f"{item.name} {item.comparison} {threshold} is {truth} at {value}"


def _show(name: str, value: Value) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (int, float)) and name.endswith("_bytes"):
        return show_bytes(value)
    if isinstance(value, tuple):
        return ", ".join(map(str, value)) or "none"
    return f"{value:.6g}" if isinstance(value, float) else str(value)
