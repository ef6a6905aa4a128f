"""Rules for the allocation hook: expressions compiled to its small stack machine.

The hook evaluates on every allocation, so it takes rules about the allocation itself
(``size_bytes``) over plain figures: no windows, no words.
"""

from __future__ import annotations

from mmctl.engine.errors import UsageError
from mmctl.engine.profiles import Mode, Profile
from mmctl.engine.rules import language
from mmctl.engine.rules.rule import Rule, compile_rules
from mmctl.native.layout import RULES, SIGNALS, HookRule, Instruction

(
    _END, _COMPARE_INPUT, _INPUT, _CONSTANT, _COMPARE, _AND, _OR, _NOT, _ADD, _SUBTRACT,
    _MULTIPLY, _DIVIDE, _NEGATE, _JUMP_IF_FALSE, _JUMP_IF_TRUE, _ALL,
) = range(16)  # fmt: skip
_COMPARISONS = {"<": 0, "<=": 1, ">": 2, ">=": 3, "==": 4, "!=": 5}
_ARITHMETIC = {"+": _ADD, "-": _SUBTRACT, "*": _MULTIPLY, "/": _DIVIDE}


def hook_rules(profile: Profile, mode: Mode) -> tuple[HookRule, ...]:
    """The profile's allocation rules, compiled; those that the hook cannot take are left out."""
    found = []
    for rule in compile_rules(profile.breaker.rules):
        if any(signal.name == "size_bytes" for signal in rule.signals):
            try:
                found.append(compile_rule(rule, mode))
            except UsageError:
                continue
    return tuple(found[:RULES])


def compile_rule(rule: Rule, mode: Mode) -> HookRule:
    """One rule for the hook; UsageError names what it cannot evaluate there."""
    code: list[Instruction] = []
    _emit(rule.when, code)
    own = "observe" if rule.settings.mode == "observe" else mode
    return HookRule(rule.name, own, rule.settings.max_age_s, tuple(code))


def _emit(node: language.Expression, code: list[Instruction]) -> None:
    if isinstance(node, language.Constant):
        if isinstance(node.value, str):
            raise UsageError(f"the hook knows no words: {node.text}")
        code.append(Instruction(_CONSTANT, constant=float(node.value)))
    elif isinstance(node, language.Read):
        code.append(Instruction(_INPUT, input=_place(node)))
    elif isinstance(node, language.Compare):
        _emit_compare(node, code)
    elif isinstance(node, language.Logic):
        _emit_logic(node, code)
    elif isinstance(node, language.Function) and (
        node.name in _ARITHMETIC or node.name == "negate"
    ):
        for argument in node.arguments:
            _emit(argument, code)
        code.append(Instruction(_ARITHMETIC.get(node.name, _NEGATE)))
    else:
        raise UsageError(f"the hook cannot evaluate '{node.text}'")


def _emit_compare(node: language.Compare, code: list[Instruction]) -> None:
    if node.operator not in _COMPARISONS:
        raise UsageError(f"the hook cannot evaluate '{node.text}'")
    comparison = _COMPARISONS[node.operator]
    left, right = node.left, node.right
    if _is_simple(node):
        assert isinstance(left, language.Read) and isinstance(right, language.Constant)
        code.append(
            Instruction(_COMPARE_INPUT, comparison, _place(left), constant=float(right.value))
        )
        return
    _emit(left, code)
    _emit(right, code)
    code.append(Instruction(_COMPARE, comparison))


def _is_simple(node: language.Expression) -> bool:
    """A comparison of one signal with a number: a single instruction."""
    return (
        isinstance(node, language.Compare)
        and node.operator in _COMPARISONS
        and isinstance(node.left, language.Read)
        and isinstance(node.right, language.Constant)
        and not isinstance(node.right.value, str)
    )


def _emit_logic(node: language.Logic, code: list[Instruction]) -> None:
    """Parts in turn; one that decides jumps over the rest."""
    if node.operator == "and" and all(map(_is_simple, node.parts)):
        code.append(Instruction(_ALL, jump=len(node.parts)))
        for part in node.parts:
            _emit(part, code)
        return
    _emit(node.parts[0], code)
    if node.operator == "not":
        code.append(Instruction(_NOT))
        return
    decides, joins = (_JUMP_IF_FALSE, _AND) if node.operator == "and" else (_JUMP_IF_TRUE, _OR)
    jumps = []
    for part in node.parts[1:]:
        jumps.append(len(code))
        code.append(Instruction(decides))
        _emit(part, code)
        code.append(Instruction(joins))
    for place in jumps:
        code[place] = code[place]._replace(jump=len(code))


def _place(node: language.Read) -> int:
    name = node.signal.name.rpartition(".")[2]
    if name not in SIGNALS:
        raise UsageError(f"the hook has no input '{node.text}'")
    return SIGNALS.index(name)
