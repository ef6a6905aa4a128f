"""The rules' expression language: signals, units, windows; parsed by ``ast`` on a whitelist.

    size_bytes > 16MiB and fragmentation_ratio > 0.65
    p99(ttft_p99_s, 10s) > 800ms            a window of time
    min(attention_entropy, 3) > 0.85        a window of three samples
    mean(log(latency_s), 3s, 10s)           a window of 3 s that ended 10 s ago
    time_to(total_bytes, used_bytes, 60s) < 5min
    "hw_slowdown" in throttle

A window is over a time or a number of samples, and may end before now; its functions are
``WINDOWS``. ``FUNCTIONS`` are of the present: ``at_least`` and ``at_most`` bound a value, ``known``
is whether there is one. ``time_to(level, signal, window)`` is when the signal's slope reaches it.

Sizes, times, rates and percentages become plain numbers in bytes, seconds, per second and
ratios. Nothing is ever executed: the tree is read, not run.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from typing import NamedTuple, TypeAlias

import msgspec

from mmctl.engine.errors import UsageError, suggestion
from mmctl.engine.rules.signals import SIGNALS, Signal
from mmctl.engine.units import BYTES, SECONDS

WINDOWS = (
    "mean", "std", "median", "mad", "min", "max", "p50", "p95", "p99",
    "rate", "slope", "count", "sum", "first", "delta",
)  # fmt: skip
FUNCTIONS = {"log": 1, "abs": 1, "sqrt": 1, "at_least": 2, "at_most": 2, "known": 1}
COMPARISONS: dict[type[ast.cmpop], str] = {
    ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">=", ast.Eq: "==", ast.NotEq: "!=",
    ast.In: "in", ast.NotIn: "not in",
}  # fmt: skip
MIRRORED = {"<": ">", ">": "<", "<=": ">=", ">=": "<=", "==": "==", "!=": "!="}
"""A comparison with its sides exchanged."""
ARITHMETIC: dict[type[ast.operator], str] = {
    ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/",
}  # fmt: skip
MAX_CHARACTERS, MAX_NODES = 2000, 300
DEFAULT_TREND_S = 60.0


class Node(msgspec.Struct, frozen=True, kw_only=True):
    """A part of an expression; ``text`` is how it reads."""

    text: str


class Constant(Node, frozen=True):
    """A number, in base units, a text or a truth value.

    ``unit`` is the end of the name of a signal in the same unit: ``bytes``, ``s``, ``ratio``,
    ``per_s`` …; empty where none was written.
    """

    value: float | str | bool
    unit: str = ""


class Read(Node, frozen=True):
    """The newest value of a signal."""

    signal: Signal


class Function(Node, frozen=True):
    """Arithmetic and functions of their arguments' present values."""

    name: str
    arguments: tuple[Expression, ...]


class Window(Node, frozen=True):
    """A function over the past values of an expression.

    Exactly one of ``seconds`` and ``samples`` is set; the window ends ``lag_s`` before now.
    """

    name: str
    argument: Expression
    seconds: float | None = None
    samples: int | None = None
    lag_s: float = 0.0


class Compare(Node, frozen=True):
    """A comparison of two values; unknown when one of them is."""

    operator: str
    left: Expression
    right: Expression


class Logic(Node, frozen=True):
    """``and``, ``or`` and ``not`` in three-valued logic."""

    operator: str
    parts: tuple[Expression, ...]


Expression: TypeAlias = "Constant | Read | Function | Window | Compare | Logic"


def parse(text: str) -> Expression:
    """The expression tree of ``text``; UsageError, with a suggestion, for anything else."""
    if len(text) > MAX_CHARACTERS:
        raise UsageError(f"an expression has at most {MAX_CHARACTERS} characters, not {len(text)}")
    plain, quantities = _plain_numbers(text)
    try:
        tree = ast.parse(plain.strip(), mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        reason = getattr(error, "msg", str(error))
        raise UsageError(f"cannot read the expression '{text.strip()}': {reason}") from None
    if sum(1 for _ in ast.walk(tree)) > MAX_NODES:
        raise UsageError(f"the expression '{text[:40]}…' is too long")
    return _Reader(plain.strip(), quantities).read(tree.body)


def walk(node: Expression) -> Iterator[Expression]:
    """``node`` and everything inside it, inner parts first."""
    for part in children(node):
        yield from walk(part)
    yield node


def children(node: Expression) -> tuple[Expression, ...]:
    """The parts directly inside ``node``."""
    if isinstance(node, Function):
        return node.arguments
    if isinstance(node, Window):
        return (node.argument,)
    if isinstance(node, Compare):
        return (node.left, node.right)
    if isinstance(node, Logic):
        return node.parts
    return ()


def signals(node: Expression) -> tuple[Signal, ...]:
    """Every signal that ``node`` reads, each once, in order of appearance."""
    return tuple(dict.fromkeys(part.signal for part in walk(node) if isinstance(part, Read)))


_STRING = r"\"[^\"]*\"|'[^']*'"
_UNITS = "|".join(sorted(map(re.escape, [*BYTES, *SECONDS]), key=len, reverse=True))
_PER = "|".join(sorted(map(re.escape, SECONDS), key=len, reverse=True))
_QUANTITY = re.compile(
    rf"({_STRING})|(?<![\w.])(\d+(?:\.\d*)?(?:[eE][-+]?\d+)?)\s*"
    rf"(?:({_UNITS}|%)?\s*/\s*({_PER})(?![\w(])|({_UNITS})(?!\w)|(%))"
)


class _Quantity(NamedTuple):
    """A number with a unit as it was written, and the unit."""

    written: str
    unit: str


def _plain_numbers(text: str) -> tuple[str, dict[str, _Quantity]]:
    """``text`` with every quantity as a plain number, and what those numbers were.

    Each unit leaves a mark that no other literal has (a time's trailing ``e0``, leading zeros of
    the others), so that a window of ``10s`` is told from one of 10 samples.
    """
    quantities: dict[str, _Quantity] = {}

    def plain(found: re.Match[str]) -> str:
        if found[1] is not None:
            return found[1]
        number = float(found[2])
        if found[4]:
            worth = 0.01 if found[3] == "%" else BYTES.get(found[3] or "", 1)
            unit = "ratio_per_s" if found[3] == "%" else "bytes_per_s" if found[3] else "per_s"
            literal = repr(number * worth / SECONDS[found[4]])
        elif found[6]:
            unit, literal = "ratio", repr(number / 100)
        elif found[5] in BYTES:
            unit, literal = "bytes", repr(number * BYTES[found[5]])
        else:
            unit, literal = "s", f"{number * SECONDS[found[5]]:.12f}e0"
        literal = "0" * _MARKS.index(unit) + literal
        quantities[literal] = _Quantity(found[0], unit)
        return literal

    return _QUANTITY.sub(plain, text), quantities


_MARKS = ("s", "bytes", "ratio", "per_s", "bytes_per_s", "ratio_per_s")
_LITERAL = re.compile(r"(?<![\w.])\d+\.?\d*(?:e[-+]?\d+)?")


class _Reader:
    """Reads a Python tree into ours, refusing what is not on the whitelist."""

    def __init__(self, source: str, quantities: dict[str, _Quantity]) -> None:
        self.source, self.quantities = source, quantities

    def text(self, node: ast.expr) -> str:
        """How ``node`` reads, with numbers as they were written and times in seconds."""
        return _LITERAL.sub(self._written, self._segment(node))

    def _segment(self, node: ast.expr) -> str:
        return ast.get_source_segment(self.source, node) or ""

    def _written(self, found: re.Match[str]) -> str:
        quantity = self.quantities.get(found[0])
        if quantity is None:
            return found[0]
        return f"{float(found[0]):g}s" if quantity.unit == "s" else quantity.written

    def _unit(self, node: ast.expr) -> str:
        quantity = self.quantities.get(self._segment(node))
        return quantity.unit if quantity else ""

    def refuse(self, node: ast.expr, what: str) -> UsageError:
        return UsageError(f"{what} in '{self.text(node)}'")

    def read(self, node: ast.expr) -> Expression:
        text = self.text(node)
        if isinstance(node, ast.BoolOp):
            operator = "and" if isinstance(node.op, ast.And) else "or"
            return Logic(text=text, operator=operator, parts=tuple(map(self.read, node.values)))
        if isinstance(node, ast.UnaryOp):
            inner = self.read(node.operand)
            if isinstance(node.op, ast.Not):
                return Logic(text=text, operator="not", parts=(inner,))
            if isinstance(node.op, ast.USub):
                return Function(text=text, name="negate", arguments=(inner,))
            raise self.refuse(node, "unknown operator")
        if isinstance(node, ast.BinOp):
            name = ARITHMETIC.get(type(node.op))
            if name is None:
                raise self.refuse(node, "only + - * / are known")
            arguments = (self.read(node.left), self.read(node.right))
            return Function(text=text, name=name, arguments=arguments)
        if isinstance(node, ast.Compare):
            return self.compare(node)
        if isinstance(node, ast.Call):
            return self.call(node)
        if isinstance(node, (ast.Name, ast.Attribute)):
            return self.name(node)
        if isinstance(node, ast.Constant) and isinstance(node.value, (bool, int, float, str)):
            value = float(node.value) if type(node.value) is int else node.value
            return Constant(text=text, value=value, unit=self._unit(node))
        raise self.refuse(node, f"'{type(node).__name__.lower()}' is not allowed")

    def compare(self, node: ast.Compare) -> Expression:
        """``a < b < c`` is ``a < b and b < c``."""
        terms = [node.left, *node.comparators]
        parts: list[Expression] = []
        for left, operator, right in zip(terms, node.ops, terms[1:], strict=False):
            name = COMPARISONS.get(type(operator))
            if name is None:
                raise self.refuse(node, "'is' is not allowed")
            parts.append(
                Compare(
                    text=f"{self.text(left)} {name} {self.text(right)}",
                    operator=name,
                    left=self.read(left),
                    right=self.read(right),
                )
            )
        if len(parts) == 1:
            return parts[0]
        return Logic(text=self.text(node), operator="and", parts=tuple(parts))

    def name(self, node: ast.expr) -> Expression:
        text = self.text(node)
        if text in ("true", "false"):
            return Constant(text=text, value=text == "true")
        signal = SIGNALS.get(text)
        if signal is None:
            hint = suggestion(text, SIGNALS) or "; mmctl breaker rules --signals lists all"
            raise UsageError(f"unknown signal '{text}'{hint}")
        return Read(text=text, signal=signal)

    def call(self, node: ast.Call) -> Expression:
        known = (*WINDOWS, *FUNCTIONS, "time_to")
        name = node.func.id if isinstance(node.func, ast.Name) else self.text(node.func)
        if name not in known:
            raise UsageError(f"unknown function '{name}'{suggestion(name, known)}")
        if node.keywords or any(isinstance(item, ast.Starred) for item in node.args):
            raise self.refuse(node, "arguments have no names")
        if name == "time_to":
            return self.time_to(node)
        if name in FUNCTIONS:
            if len(node.args) != FUNCTIONS[name]:
                raise self.refuse(node, f"{name} takes {FUNCTIONS[name]} argument(s)")
            arguments = tuple(map(self.read, node.args))
            return Function(text=self.text(node), name=name, arguments=arguments)
        if not 2 <= len(node.args) <= 3:
            raise self.refuse(node, f"{name} takes an expression, a window and perhaps a lag")
        lag = self.seconds(node.args[2]) if len(node.args) == 3 else 0.0
        return self.window(name, node, node.args[0], node.args[1], lag)

    def window(
        self, name: str, node: ast.Call, argument: ast.expr, length: ast.expr, lag: float
    ) -> Window:
        inner = self.read(argument)
        if not signals(inner):
            raise self.refuse(node, "a window needs a signal")
        if self._unit(length) == "s":
            seconds: float | None = self.seconds(length)
            if not seconds:
                raise self.refuse(node, "a window is longer than 0")
            return Window(
                text=self.text(node), name=name, argument=inner, seconds=seconds, lag_s=lag
            )
        value = length.value if isinstance(length, ast.Constant) else None
        if type(value) is not int or not 1 <= value <= 1_000_000:
            raise self.refuse(node, "a window is a time such as 10s or a number of samples")
        return Window(text=self.text(node), name=name, argument=inner, samples=value, lag_s=lag)

    def seconds(self, node: ast.expr) -> float:
        if self._unit(node) == "s":
            return float(self._segment(node))
        raise self.refuse(node, "a time such as 10s is needed")

    def time_to(self, node: ast.Call) -> Expression:
        """Seconds until an expression reaches a level at its slope; infinite if it never does."""
        if not 2 <= len(node.args) <= 3:
            raise self.refuse(node, "time_to takes a level, a field and perhaps a window")
        level, field = self.read(node.args[0]), self.read(node.args[1])
        seconds = self.seconds(node.args[2]) if len(node.args) == 3 else DEFAULT_TREND_S
        if not signals(field):
            raise self.refuse(node, "time_to needs a signal")
        slope = Window(
            text=f"slope({field.text}, {seconds:g}s)", name="slope", argument=field,
            seconds=seconds,
        )  # fmt: skip
        return Function(text=self.text(node), name="time_to", arguments=(level, field, slope))
