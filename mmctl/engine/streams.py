"""Records of several sources merged by time: ticks, merge, duplicates, windows, watermark."""

from __future__ import annotations

import heapq
import math
import threading
import time
from array import array
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import msgspec

from mmctl.engine.records import AnyRecord, Device, Host, Pool, Recording, Serving, encode

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
    feeds: Sequence[Feed], stop: threading.Event, patience_s: float = 0.02, depth: int = 4096
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


class Summary(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="window"):
    """What one subject's readings in one window come to: statistics by signal.

    ``corrected`` says that an earlier result of this window was given before a late reading
    came; ``reopened`` that it came after the watermark had closed the window.
    """

    ts_ns: int
    end_ns: int
    node: str
    subject: str
    count: int
    signals: dict[str, dict[str, float]]
    revision: int = 0
    corrected: bool = False
    reopened: bool = False


class _Window:
    """The values of one subject in one window; enough to compute its result anew."""

    __slots__ = ("count", "node", "revision", "seen", "values")

    def __init__(self, node: str) -> None:
        self.node = node
        self.count = 0
        self.values: dict[str, array[float]] = {}
        self.seen: set[int] = set()
        self.revision = -1


class Windows:
    """Readings summed up in windows of event time, each reading in its own window however late.

    A window gives its result when a reading after its end has come. A later reading changes
    the window it belongs to, whose corrected result follows with the next window that ends, or
    at once when the watermark had passed it. A reading that comes twice counts once. Windows
    older than ``keep`` watermarks are forgotten; what comes for those is counted in ``lost``.
    """

    def __init__(self, width_s: float, watermark_s: float, keep: int = 12) -> None:
        self.width_ns = max(int(width_s * 1e9), 1)
        self.watermark_ns = int(watermark_s * 1e9)
        self.horizon_ns = keep * max(self.watermark_ns, self.width_ns)
        self.latest_ns = -1
        self.lost = 0
        self._windows: dict[tuple[int, str], _Window] = {}
        self._changed: dict[tuple[int, str], bool] = {}

    def step(self, record: AnyRecord) -> list[Summary]:
        """Take a reading; the results that it completes or corrects."""
        subject = subject_of(record)
        if subject is None:
            return []
        ns = time_ns(record)
        start = ns - ns % self.width_ns
        if start + self.horizon_ns < self.latest_ns:
            self.lost += 1
            return []
        key = (start, subject)
        window = self._windows.get(key)
        if window is None:
            window = self._windows[key] = _Window(getattr(record, "node", ""))
        mark = hash(encode(record))
        if mark in window.seen:
            return []
        window.seen.add(mark)
        window.count += 1
        for field in msgspec.structs.fields(type(record)):
            value = getattr(record, field.name)
            if type(value) in (int, float) and field.name not in _NO_SIGNAL:
                window.values.setdefault(field.name, array("d")).append(value)
        reopened = start + self.width_ns + self.watermark_ns <= self.latest_ns
        self._changed[key] = self._changed.get(key, False) or reopened
        before_ns, self.latest_ns = self.latest_ns, max(self.latest_ns, ns)
        ended = self.latest_ns // self.width_ns > before_ns // self.width_ns
        if ended:
            self._forget()
        return self._results(lambda begun, late: late or (ended and begun < self.latest_ns))

    def flush(self) -> list[Summary]:
        """The results of what is left at the end of the stream."""
        return self._results(lambda begun, late: True)

    def _results(self, due: Callable[[int, bool], bool]) -> list[Summary]:
        found = []
        for key, late in sorted(self._changed.items()):
            if late or due(key[0] + self.width_ns - 1, late):
                del self._changed[key]
                window = self._windows[key]
                window.revision += 1
                found.append(self._summary(key, window, late and window.revision > 0))
        return found

    def _summary(self, key: tuple[int, str], window: _Window, reopened: bool) -> Summary:
        return Summary(
            ts_ns=key[0], end_ns=key[0] + self.width_ns, node=window.node, subject=key[1],
            count=window.count, revision=window.revision, corrected=window.revision > 0,
            reopened=reopened,
            signals={name: _statistics(values) for name, values in window.values.items()},
        )  # fmt: skip

    def _forget(self) -> None:
        oldest = self.latest_ns - self.horizon_ns
        for key in [key for key in self._windows if key[0] < oldest]:
            del self._windows[key]
            self._changed.pop(key, None)


_NO_SIGNAL = ("ts_ns", "nvml_index", "torch_index", "pid")


def subject_of(record: AnyRecord) -> str | None:
    """What a reading is of: a device, an engine's instance, a pool, the host; None for others."""
    if isinstance(record, Device):
        return record.device
    if isinstance(record, Serving):
        return f"{record.engine} {record.instance}"
    if isinstance(record, Pool):
        return f"{record.device} {record.pool}"
    return "host" if isinstance(record, Host) else None


def _statistics(values: array[float]) -> dict[str, float]:
    ordered = sorted(values)
    last = len(ordered) - 1
    return {
        "mean": math.fsum(ordered) / len(ordered), "min": ordered[0], "max": ordered[last],
        **{f"p{share}": ordered[min(math.ceil(share / 100 * len(ordered)), len(ordered)) - 1]
           for share in (50, 95, 99)},
    }  # fmt: skip
