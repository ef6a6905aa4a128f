"""Under pressure or not: the profile's ``[[guard.rules]]`` over the guard's view of a backend."""

from __future__ import annotations

from collections.abc import Iterable

from mmctl.engine import profiles
from mmctl.engine.errors import UsageError
from mmctl.engine.records import AnyRecord
from mmctl.engine.rules.live import Live
from mmctl.engine.rules.rule import Instance, compile_rules
from mmctl.guard.treatment import unknown

Change = tuple[str, bool, str]
"""A rule that began or ceased to hold, and why."""


class Pressure:
    """Which responses are in force for each backend; a rule holds until its ``clear`` does."""

    def __init__(self, rules: Iterable[profiles.Rule]) -> None:
        rules = tuple(rules)
        for rule in rules:
            check(rule.respond, f"[[guard.rules]] {rule.name}")
        self._live = Live(compile_rules(rules))
        self._since_ns: dict[int, int] = {}
        self._holding: dict[str, dict[str, Instance]] = {}

    def step(self, backend: str, record: AnyRecord) -> list[Change]:
        """Take a reading of ``backend`` in; the rules that changed their mind."""
        changes: list[Change] = []
        holding = self._holding.setdefault(backend, {})
        for instance, truth in self._live.step(record):
            name, now = instance.rule.name, self._live.now
            if name in holding:
                over = instance.clear(now) is True if instance.clear else truth is False
                if over:
                    del holding[name]
                    changes.append((name, False, instance.rule.settings.clear or "over"))
                continue
            if not truth:
                self._since_ns.pop(id(instance), None)
                continue
            since = self._since_ns.setdefault(id(instance), now)
            if now - since >= instance.rule.settings.hold_s * 1e9:
                holding[name] = instance
                changes.append((name, True, instance.verdict(now, truth).reason))
        return changes

    def responses(self, backend: str) -> frozenset[str]:
        """What the rules that hold of ``backend`` ask for."""
        holding = self._holding.get(backend, {}).values()
        return frozenset(name for one in holding for name in one.rule.settings.respond)


def check(names: Iterable[str], where: str) -> frozenset[str]:
    """``names`` of responses that the guard has; UsageError for others."""
    names = frozenset(names)
    for said in unknown(sorted(names)):
        raise UsageError(f"{where}: {said}")
    return names
