"""What a person orders from the screen: events that go into the stream before the breaker.

The breaker sees an order as it sees any record, so a recording of the session replays it.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Generator, Iterable, Iterator
from typing import NamedTuple

from mmctl.engine.breaker.loop import attend, run
from mmctl.engine.breaker.reload import Changes
from mmctl.engine.breaker.store import Store
from mmctl.engine.profiles import Loaded, Mode
from mmctl.engine.records import AnyRecord, Event, Recording


class Order(NamedTuple):
    """An action on a device: trip, hold or reset."""

    action: str
    node: str
    device: str


class Orders:
    """From the screen to the thread that reads the sources.

    ``changes`` takes another profile (``use``) or mode (``switch``) while the breaker runs.
    ``name`` is the profile's as it was asked for, None for the selected one; ``mode`` None
    lets the profile's own hold.
    """

    def __init__(self, loaded: Loaded, name: str | None = None, mode: Mode | None = None) -> None:
        self.changes = Changes(loaded, name, mode)
        self._waiting: queue.SimpleQueue[Order] = queue.SimpleQueue()

    def put(self, order: Order) -> None:
        """Give an order; it is carried out before the next record."""
        self._waiting.put(order)

    def decided(
        self, records: Iterable[AnyRecord], store: Store | None, *, acts: bool
    ) -> Iterator[AnyRecord]:
        """Records with orders and the breaker's decisions between them.

        Without ``acts`` no command leaves this process. ``store`` keeps the audit log and is
        closed at the end by who acts.
        """
        profile = self.changes.loaded.profile
        mode = self.changes.mode or profile.breaker.mode
        with_orders = self._between(records)
        try:
            if acts:
                yield from attend(with_orders, profile, mode, store=store, changes=self.changes)
            else:
                yield from run(with_orders, profile, mode, store=store, changes=self.changes)
        finally:
            with_orders.close()

    def _between(self, records: Iterable[AnyRecord]) -> Generator[AnyRecord, None, None]:
        try:
            for record in records:
                yield record
                now = time.time_ns() if isinstance(record, Recording) else record.ts_ns
                while not self._waiting.empty():
                    order = self._waiting.get()
                    yield Event(
                        ts_ns=now, node=order.node, device=order.device, what="order",
                        evidence={"action": order.action, "reason": "from the dashboard"},
                    )  # fmt: skip
        finally:
            close = getattr(records, "close", None)
            if close is not None:
                close()
