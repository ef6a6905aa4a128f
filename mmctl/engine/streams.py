"""Records of several sources merged by time: ticks, merge, duplicates, windows, watermark."""

from __future__ import annotations

import heapq
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from mmctl.engine.records import AnyRecord, Recording

_LOOK_S = 0.1
"""How often a waiting thread looks at ``stop``."""


def time_ns(record: AnyRecord) -> int:
    """When a record happened; a recording's header happened when the recording started."""
    return record.started_ns if isinstance(record, Recording) else record.ts_ns


def ticks(interval_s: float, stop: threading.Event, count: int | None = None) -> Iterator[int]:
    """0, 1, 2 … on a schedule that does not drift; a tick that was missed is left out.

    Ends after ``count`` ticks or when ``stop`` is set, within 100 ms.
    """
    start = time.monotonic()
    number = slot = 0
    while not stop.is_set() and (count is None or number < count):
        yield number
        number += 1
        if number == count:
            return
        slot += 1
        if interval_s > 0:
            slot = max(slot, int((time.monotonic() - start) / interval_s))
        while (left := start + slot * interval_s - time.monotonic()) > 0:
            if stop.wait(min(left, _LOOK_S)):
                return


class Feed(NamedTuple):
    """A blocking iterator to merge; a live one may be silent without holding up the others."""

    records: Iterator[AnyRecord]
    live: bool


class _Lane:
    """What one feed's thread has read, with its arrival, and the merge has not taken."""

    __slots__ = ("done", "error", "live", "queue")

    def __init__(self, live: bool) -> None:
        self.queue: deque[tuple[float, AnyRecord]] = deque()
        self.live = live
        self.done = False
        self.error: BaseException | None = None


def merge(
    feeds: Sequence[Feed], stop: threading.Event, patience_s: float = 0.05, depth: int = 4096
) -> Iterator[AnyRecord]:
    """Records of all feeds in order of event time, each feed read in a thread of its own.

    A record goes out when no other feed can still bring an earlier one: every finite feed is
    waited for, a live one for at most ``patience_s``; what comes later goes out late, and
    windows put it where it belongs. A record that another feed has already brought with the
    same time counts once. At most ``depth`` records of a feed wait. An exception of a feed is
    raised here after the records read before it. The feeds' threads end when this iterator
    is closed or ``stop`` is set.
    """
    if len(feeds) == 1:
        yield from feeds[0].records
        return
    changed = threading.Condition()
    ended = threading.Event()
    lanes = [_Lane(feed.live) for feed in feeds]

    def read(feed: Feed, lane: _Lane) -> None:
        try:
            for record in feed.records:
                with changed:
                    while len(lane.queue) >= depth and not (ended.is_set() or stop.is_set()):
                        changed.wait(_LOOK_S)
                    if ended.is_set():
                        return
                    lane.queue.append((time.monotonic(), record))
                    if len(lane.queue) == 1:
                        changed.notify_all()
        except BaseException as error:
            lane.error = error
        finally:
            close = getattr(feed.records, "close", None)
            if close is not None:
                close()
            with changed:
                lane.done = True
                changed.notify_all()

    threads = [
        threading.Thread(target=read, args=pair, daemon=True, name=f"feed {number}")
        for number, pair in enumerate(zip(feeds, lanes, strict=True))
    ]
    for thread in threads:
        thread.start()
    try:
        yield from _in_order(lanes, changed, stop, patience_s, depth)
    finally:
        ended.set()
        with changed:
            changed.notify_all()
        if stop.is_set():
            for thread in threads:
                thread.join(timeout=2.0)


def _in_order(
    lanes: list[_Lane], changed: threading.Condition, stop: threading.Event,
    patience_s: float, depth: int,
) -> Iterator[AnyRecord]:  # fmt: skip
    heads: list[tuple[int, int, float, AnyRecord]] = []  # a heap, at most one head a lane
    waiting = set(range(len(lanes)))  # lanes that have no head
    last_ns = -1
    same: list[tuple[int, AnyRecord]] = []  # what went out with last_ns, and from which lane
    while heads or waiting:
        with changed:
            for number in list(waiting):
                lane = lanes[number]
                if lane.queue:
                    arrival, record = lane.queue.popleft()
                    if len(lane.queue) == depth - 1:
                        changed.notify_all()
                    heapq.heappush(heads, (time_ns(record), number, arrival, record))
                    waiting.discard(number)
                elif lane.done:
                    if lane.error is not None:
                        error, lane.error = lane.error, None
                        raise error
                    waiting.discard(number)
                elif stop.is_set():
                    waiting.discard(number)  # what has been read goes out, nothing more is awaited
            hold_s = _hold(lanes, waiting, heads, patience_s)
            if hold_s > 0:
                changed.wait(hold_s)
                continue
        if not heads:
            continue
        ns, number, _, record = heapq.heappop(heads)
        waiting.add(number)
        if ns != last_ns:
            last_ns = ns
            same.clear()
        elif any(other != number and record == seen for other, seen in same):
            continue
        same.append((number, record))
        yield record


def _hold(
    lanes: list[_Lane], waiting: set[int], heads: list[tuple[int, int, float, AnyRecord]],
    patience_s: float,
) -> float:  # fmt: skip
    """Seconds to wait for the lanes without a head; 0 when the earliest head may go out."""
    if not waiting:
        return 0.0
    if not heads or not all(lanes[number].live for number in waiting):
        return _LOOK_S
    return patience_s - (time.monotonic() - heads[0][2])
