"""What ``/`` takes: words that a row must hold, or a condition in the language of the rules.

``h100 gpu1`` holds words; ``sm_ratio < 5% and power_w > 300`` is a condition on devices,
``what == "trip"`` one on events. A condition is asked only of rows that have its signals; a
value that is absent makes it unknown, and an unknown row is not shown.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

from mmctl.engine.errors import UsageError
from mmctl.engine.records import Device, Record
from mmctl.engine.rules import truth
from mmctl.engine.rules.language import (
    Compare,
    Constant,
    Expression,
    Function,
    Logic,
    Read,
    parse,
    signals,
)
from mmctl.engine.rules.signals import getter
from mmctl.tui.snapshot import DeviceView, Snapshot
from mmctl.tui.ui import Ui

Records = Mapping[str, Record | None]  # by kind of series: "device", "pool", "event"
Closure = Callable[[int], Any]


class Condition:
    """A compiled condition; ``kinds`` are the series that it reads."""

    def __init__(self, text: str) -> None:
        tree = parse(text)
        self.kinds = {signal.kind for signal in signals(tree)}
        self._records: Records = {}
        self._truth = self._closure(tree)

    def __call__(self, records: Records) -> bool:
        """Whether it holds; a condition on other things than these lets them pass."""
        if not self.kinds & records.keys():
            return True
        self._records = records
        return self._truth(0) is True

    def _closure(self, node: Expression) -> Closure:
        if isinstance(node, Constant):
            return lambda _: node.value
        if isinstance(node, Read):
            get, kind = getter(node.signal), node.signal.kind

            def read(_: int) -> Any:
                record = self._records.get(kind)
                return None if record is None else get(record)

            return read
        if isinstance(node, Compare):
            return truth.compare(node.operator, self._closure(node.left), self._closure(node.right))
        if isinstance(node, Logic):
            return truth.logic(node.operator, tuple(self._closure(part) for part in node.parts))
        if isinstance(node, Function):
            return truth.function(node.name, tuple(self._closure(part) for part in node.arguments))
        raise UsageError(f"a filter looks at present values: '{node.text}' is over time")


def passes(text: str, records: Records, *words: str | None) -> bool:
    """Whether a row with these records and words passes; what cannot be read hides nothing."""
    compiled = _compiled(text)
    if compiled is None:
        row = " ".join(word for word in words if word).lower()
        return all(part in row for part in text.lower().split())
    return compiled(records) if isinstance(compiled, Condition) else True


def problem(text: str) -> str | None:
    """Why a condition cannot be read."""
    compiled = _compiled(text)
    return compiled if isinstance(compiled, str) else None


@lru_cache(maxsize=8)
def _compiled(text: str) -> Condition | str | None:
    """A condition, why it is none, or None for plain words."""
    if not any(sign in text for sign in "<>="):
        return None
    try:
        return Condition(text)
    except UsageError as error:
        return str(error)


def shown_devices(snapshot: Snapshot, ui: Ui) -> list[DeviceView]:
    """The devices that pass the filter, in order."""
    pools = {(p.record.node, p.record.device): p.record for p in snapshot.pools}

    def records(device: Device) -> Records:
        cpu = device if device.kind == "cpu" else None
        return {"device": device, "cpu": cpu, "pool": pools.get((device.node, device.device))}

    return [
        view
        for view in snapshot.devices
        if passes(ui.filter, records(view.record), view.record.node, view.record.device,
                  view.record.model, " ".join(view.record.throttle or ()))
    ]  # fmt: skip
