"""States of a run before, and whose they are: a state belongs to the processes it speaks of."""

from __future__ import annotations

from mmctl.engine.breaker.state import Target
from mmctl.engine.records import Event


class Past:
    """What is remembered of targets that were not met yet, and who serves those that were.

    ``processes`` holds, for each target, the process that serves each of its devices, as the agent
    in it named itself: pid and start.
    """

    def __init__(self) -> None:
        self.targets: dict[str, Target] = {}
        self.processes: dict[str, dict[str, str]] = {}

    def greet(self, event: Event) -> list[str]:
        """Take an agent's greeting; the targets that another process served until now."""
        device, instance = event.device, event.evidence.get("instance")
        pid, started_ns = event.evidence.get("pid"), event.evidence.get("started_ns")
        if device is None or pid is None:
            return []
        process, changed = f"{pid}@{started_ns}", []
        for name in dict.fromkeys((device, instance)):
            if not isinstance(name, str):
                continue
            serving = self.processes.setdefault(name, {})
            if serving.get(device, process) != process:
                changed.append(name)
            serving[device] = process
        return changed

    def take(self, name: str) -> tuple[Target | None, bool]:
        """The remembered state of a target, once; and whether the same processes serve it."""
        target = self.targets.pop(name, None)
        if target is None:
            return None, True
        serving = self.processes.get(name, {})
        self.processes[name] = {**target.processes, **serving}
        return target, self.processes[name] == {**serving, **target.processes}
