"""Whether an expression compares like with like: bytes with bytes, and conditions with nothing.

A signal's unit is the end of its name, as in every record: ``used_bytes``, ``temperature_c``,
``generation_tokens_per_s``. A number without a unit goes with everything, and so does what has no
known unit; what is known and differs is a mistake, and so is a share compared with what lies
outside 0 to 1.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import NamedTuple

from mmctl.engine.errors import UsageError
from mmctl.engine.rules import language
from mmctl.engine.rules.signals import Holds

Powers = tuple[tuple[str, int], ...]


class Kind(NamedTuple):
    """What a part of an expression is.

    ``powers`` are those of the base units of a number, None where they are not known. A number
    that was written without a unit is ``free``: it may be of any unit beside them, so that
    ``5/min`` is of anything per second.
    """

    holds: Holds
    powers: Powers | None = None
    free: bool = False
    share: bool = False


_BARE = Kind("number", (), free=True)
_UNKNOWN = Kind("number")
_TRUTH = Kind("truth")

_UNITS: dict[str, Kind] = {
    "bytes_per_s": Kind("number", (("bytes", 1), ("s", -1))),
    "tokens_per_s": Kind("number", (("s", -1), ("tokens", 1))),
    "ratio_per_s": Kind("number", (("s", -1),)),
    "per_s": Kind("number", (("s", -1),), free=True),
    "bytes": Kind("number", (("bytes", 1),)),
    "tokens": Kind("number", (("tokens", 1),)),
    "ratio": Kind("number", (), share=True),
    "hz": Kind("number", (("s", -1),)),
    "ns": Kind("number", (("ns", 1),)),
    "s": Kind("number", (("s", 1),)),
    "c": Kind("number", (("°C", 1),)),
    "w": Kind("number", (("J", 1), ("s", -1))),
    "j": Kind("number", (("J", 1),)),
}
"""Units by the end of a name, the longer ends first; a literal's unit is one of them too."""

_WORDS = {
    (): "a ratio", (("s", 1),): "a time", (("ns", 1),): "in nanoseconds",
    (("bytes", 1),): "in bytes", (("tokens", 1),): "in tokens", (("°C", 1),): "in °C",
    (("J", 1),): "in joules",
    (("J", 1), ("s", -1)): "in watts", (("s", -1),): "a rate per second",
}  # fmt: skip
_HOLDS: dict[Holds, str] = {
    "text": "a text", "texts": "a list of texts", "truth": "a truth value", "number": "a number",
}  # fmt: skip

# Of a share they are shares too.
_SHARES = ("mean", "median", "min", "max", "p50", "p95", "p99", "first")
_OF_TRUTHS = ("min", "max", "first")


def check(condition: language.Expression) -> None:
    """UsageError, with every reason, for what is no condition or compares what cannot be."""
    reader = _Reader()
    reader.condition(condition)
    if reader.problems:
        raise UsageError("; ".join(dict.fromkeys(reader.problems)))


class _Reader:
    """The kind of every part, and what is wrong with them."""

    def __init__(self) -> None:
        self.problems: list[str] = []

    def condition(self, node: language.Expression) -> None:
        kind = self.kind(node)
        if kind.holds != "truth":
            self.problems.append(
                f"'{node.text}' is {_HOLDS[kind.holds]}, no condition: compare it with something"
            )

    def kind(self, node: language.Expression) -> Kind:
        if isinstance(node, language.Constant):
            if isinstance(node.value, bool):
                return _TRUTH
            if isinstance(node.value, str):
                return Kind("text")
            return _UNITS[node.unit] if node.unit else _BARE
        if isinstance(node, language.Read):
            if node.signal.holds != "number":
                return Kind(node.signal.holds)
            name = f"_{node.signal.name}"
            return next((k for end, k in _UNITS.items() if name.endswith(f"_{end}")), _UNKNOWN)
        if isinstance(node, language.Window):
            return self.window(node)
        if isinstance(node, language.Compare):
            self.comparison(node)
            return _TRUTH
        if isinstance(node, language.Logic):
            for part in node.parts:
                self.condition(part)
            return _TRUTH
        return self.function(node)

    def window(self, node: language.Window) -> Kind:
        inner = self.kind(node.argument)
        if node.name == "count":
            return _BARE
        if inner.holds == "truth":
            return _TRUTH if node.name in _OF_TRUTHS else _BARE
        if inner.holds != "number":
            self.problems.append(
                f"'{node.argument.text}' is {_HOLDS[inner.holds]}, and {node.name} is of numbers"
            )
            return _UNKNOWN
        if node.name in ("rate", "slope"):
            return _joined(inner, _UNITS["s"], operator.sub)
        return inner._replace(share=inner.share and node.name in _SHARES)

    def function(self, node: language.Function) -> Kind:
        kinds = [self.kind(part) for part in node.arguments]
        if node.name == "known":
            return _TRUTH
        if node.name == "log":
            return _BARE
        if node.name == "sqrt":
            return _BARE if kinds[0] == _BARE else _UNKNOWN
        if node.name in ("negate", "abs"):
            return kinds[0]._replace(share=False)
        if node.name in ("*", "/"):
            return _joined(kinds[0], kinds[1], operator.add if node.name == "*" else operator.sub)
        left, right = node.arguments[:2]
        if not _alike(*kinds[:2]):
            self.differ(left, kinds[0], right, kinds[1])
            return _UNKNOWN
        if node.name == "time_to":
            return _UNITS["s"]
        known = [kind for kind in kinds if kind.powers is not None]
        return min(known, key=lambda kind: kind.free, default=_UNKNOWN)._replace(share=False)

    def comparison(self, node: language.Compare) -> None:
        left, right = self.kind(node.left), self.kind(node.right)
        if node.operator in ("in", "not in"):
            if left.holds != "text":
                self.problems.append(f"'{node.left.text}' is no text, as '{node.operator}' needs")
            if right.holds not in ("text", "texts"):
                self.problems.append(f"'{node.right.text}' is no list of texts in '{node.text}'")
        elif not _alike(left, right):
            self.differ(node.left, left, node.right, right)
        elif left.share:
            self.share(node, node.left, node.operator, node.right)
        elif right.share:
            mirrored = language.MIRRORED[node.operator]
            self.share(node, node.right, mirrored, node.left)

    def share(
        self, node: language.Compare, share: language.Expression, name: str,
        limit: language.Expression,
    ) -> None:  # fmt: skip
        """What a share is compared with must leave room on both sides of it."""
        value = _number(limit)
        if value is None:
            return
        ends = {_COMPARE[name](end, value) for end in (0.0, 1.0)}
        if len(ends) == 2 or 0 < value < 1:
            return
        said = "always holds" if ends == {True} else "never holds"
        hint = f"; did you mean {value:g}%?" if 1 < value <= 100 else ""
        self.problems.append(f"'{node.text}' {said}: '{share.text}' is a ratio, from 0 to 1{hint}")

    def differ(
        self, left: language.Expression, a: Kind, right: language.Expression, b: Kind
    ) -> None:
        self.problems.append(f"'{left.text}' is {_said(a)}, '{right.text}' {_said(b)}")


def _number(node: language.Expression) -> float | None:
    """The value of a number, perhaps with a minus before it."""
    if isinstance(node, language.Function) and node.name == "negate":
        inner = _number(node.arguments[0])
        return None if inner is None else -inner
    if isinstance(node, language.Constant) and isinstance(node.value, float):
        return node.value
    return None


def _joined(a: Kind, b: Kind, join: Callable[[int, int], int]) -> Kind:
    """A product or a quotient; a number without a unit is a mere factor."""
    if a.powers is None or b.powers is None:
        return _UNKNOWN
    if b == _BARE:
        return a._replace(share=False)
    left, right = dict(a.powers), dict(b.powers)
    powers = {unit: join(left.get(unit, 0), right.get(unit, 0)) for unit in {*left, *right}}
    # No literal is written per token, so that what is per token goes with what it is of.
    kept = tuple(
        sorted((u, power) for u, power in powers.items() if power and (u, power) != ("tokens", -1))
    )
    free = (a.free and a != _BARE) or b.free or (a == _BARE and join is operator.sub)
    return Kind("number", kept, free=free)


def _alike(a: Kind, b: Kind) -> bool:
    if a.holds != b.holds:
        return {a.holds, b.holds} == {"number", "truth"} and _BARE in (a, b)
    if a.powers is None or b.powers is None or a.powers == b.powers:
        return True
    return (a.free and {*a.powers} <= {*b.powers}) or (b.free and {*b.powers} <= {*a.powers})


def _said(kind: Kind) -> str:
    if kind.powers is None or kind == _BARE:
        return _HOLDS[kind.holds]
    if kind.powers in _WORDS:
        return _WORDS[kind.powers]
    above = "·".join(_power(unit, power) for unit, power in kind.powers if power > 0)
    below = "·".join(_power(unit, -power) for unit, power in kind.powers if power < 0)
    return f"in {above or '1'}{f'/{below}' if below else ''}"


def _power(unit: str, power: int) -> str:
    return unit if power == 1 else f"{unit}^{power}"


_COMPARE: dict[str, Callable[[float, float], bool]] = {
    "<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge,
    "==": operator.eq, "!=": operator.ne,
}  # fmt: skip
