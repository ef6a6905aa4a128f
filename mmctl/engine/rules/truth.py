"""Three-valued truth: comparisons, logic and functions over values that may be unknown (None).

A closure gives the value of an expression at a moment; these join closures into larger ones.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeAlias

Truth: TypeAlias = bool | None
Closure: TypeAlias = Callable[[int], Any]


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
