"""What a person orders from the screen: events that go into the stream before the breaker.

The breaker sees an order as it sees any record, so a recording of the session replays it.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Generator, Iterable, Iterator
from typing import NamedTuple

from mmctl.engine.breaker.loop import attend, run
from mmctl.engine.breaker.reload import mode_event
from mmctl.engine.breaker.store import Store
from mmctl.engine.profiles import Mode, Profile
from mmctl.engine.records import AnyRecord, Event, Recording


class Order(NamedTuple):
    """An action on a device: trip, hold or reset."""

    action: str
    node: str
    device: str


class Orders:
    """A queue from the screen to the thread that reads the sources."""

    def __init__(self) -> None:
        self._waiting: queue.SimpleQueue[Order | Mode] = queue.SimpleQueue()

    def put(self, order: Order | Mode) -> None:
        """Give an order, or another mode; it is carried out before the next record."""
        self._waiting.put(order)

    def decided(
        self, records: Iterable[AnyRecord], profile: Profile, mode: Mode, store: Store | None,
        *, acts: bool,
    ) -> Iterator[AnyRecord]:  # fmt: skip
        """Records with orders and the breaker's decisions between them.

        Without ``acts`` no command leaves this process. ``store`` keeps the audit log and is
        closed at the end by who acts.
        """
        with_orders = self._between(records)
        try:
            if acts:
                yield from attend(with_orders, profile, mode, store=store)
            else:
                yield from run(with_orders, profile, mode, store=store)
        finally:
            with_orders.close()

    def _between(self, records: Iterable[AnyRecord]) -> Generator[AnyRecord, None, None]:
        try:
            for record in records:
                yield record
                now = time.time_ns() if isinstance(record, Recording) else record.ts_ns
                while not self._waiting.empty():
                    order = self._waiting.get()
                    if isinstance(order, Order):
                        yield Event(
                            ts_ns=now, node=order.node, device=order.device, what="order",
                            evidence={"action": order.action, "reason": "from the dashboard"},
                        )  # fmt: skip
                    else:
                        yield mode_event(order, now, record.node)
        finally:
            close = getattr(records, "close", None)
            if close is not None:
                close()
