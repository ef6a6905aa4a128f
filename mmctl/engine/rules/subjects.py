"""Whose record is this? Routes records to the series of devices, serving instances and nodes.

A device's rule may read its engine's metrics page: that of the instance named as the device's
group, else the only instance of the node. Where several could be meant, none is.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from mmctl.engine import records
from mmctl.engine.rules.signals import Scope


class Subject(NamedTuple):
    """A device, a serving instance or a node; ``name`` is empty for the node."""

    scope: Scope
    node: str
    name: str = ""

    def __str__(self) -> str:
        return self.name or self.node or "node"


class Route(NamedTuple):
    """One series that a record belongs to."""

    kind: str
    subject: Subject


class Router:
    """Remembers which subjects a node has; ``route`` is cheap for a known one."""

    def __init__(self) -> None:
        self.version = 0
        self._known: dict[tuple[Any, ...], tuple[Route, ...]] = {}
        self._subjects: dict[str, list[Subject]] = {}
        self._instances: dict[str, list[str]] = {}
        self._groups: dict[tuple[str, str], str] = {}

    def route(self, record: Any) -> tuple[Route, ...]:
        """The series of ``record``, none for a record that no rule can read."""
        kind = type(record)
        key: tuple[Any, ...]
        if kind is records.Memory:
            key = (kind, record.node, record.device)
        elif kind is records.Device:
            group = record.group
            if group and self._groups.get((record.node, record.device)) != group:
                self._groups[record.node, record.device] = group
                self._forget()
            key = (kind, record.node, record.device, record.kind)
        elif kind is records.Pool:
            name = record.device
            if record.pool != "default":
                name = f"{name}/{record.pool}"
            key = (kind, record.node, name)
        elif kind is records.Serving:
            key = (kind, record.node, record.instance)
        elif kind is records.Request or kind is records.Host:
            key = (kind, record.node)
        elif kind is records.Event:
            key = (kind, record.node, record.device or "")
        else:
            return ()
        routes = self._known.get(key)
        if routes is None:
            routes = self._routes(*key)
            self._known[key] = routes
        return routes

    def group(self, subject: Subject) -> str:
        """The name under which ``subject`` trips: all devices of one instance are one group."""
        device = subject.name.partition("/")[0]
        return self._groups.get((subject.node, device), device) or str(subject)

    def _forget(self) -> None:
        self._known.clear()
        self.version += 1

    def _meet(self, subject: Subject) -> Subject:
        known = self._subjects.setdefault(subject.node, [])
        if subject not in known:
            known.append(subject)
            self._forget()
        return subject

    def _routes(self, record: type, node: str, name: str = "", kind: str = "") -> tuple[Route, ...]:
        if record is records.Pool:
            return (Route("pool", self._meet(Subject("device", node, name))),)
        if record is records.Memory:
            return (Route("memory", self._meet(Subject("device", node, name))),)
        if record is records.Device:
            own = Route("device", self._meet(Subject("device", node, name)))
            return (own, *(self._everywhere("cpu", node) if kind == "cpu" else ()))
        if record is records.Request:
            return self._everywhere("request", node)
        if record is records.Host:
            return self._everywhere("host", node)
        if record is records.Event:
            scope: Scope = "device" if name else "node"
            if name in self._instances.get(node, ()):
                scope = "instance"
            return (Route("event", self._meet(Subject(scope, node, name))),)
        return self._serving(node, name)

    def _everywhere(self, kind: str, node: str) -> tuple[Route, ...]:
        self._meet(Subject("node", node))
        return tuple(Route(kind, subject) for subject in self._subjects[node])

    def _serving(self, node: str, instance: str) -> tuple[Route, ...]:
        instances = self._instances.setdefault(node, [])
        if instance not in instances:
            instances.append(instance)
        own = self._meet(Subject("instance", node, instance))
        readers = [own]
        for subject in self._subjects[node]:
            if subject.scope == "device":
                group = self._groups.get((node, subject.name.partition("/")[0]))
                if group == instance or (group is None and len(instances) == 1):
                    readers.append(subject)
        return tuple(
            Route(kind, subject) for subject in readers for kind in ("serving", "vision", "text")
        )


def part(kind: str, record: Any) -> Any:
    """What the signals of ``kind`` are read from: the record, or one modality of it."""
    return record.modalities.get(kind) if kind in ("vision", "text") else record
