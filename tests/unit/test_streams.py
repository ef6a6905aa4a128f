"""Merging by event time: order, silence, duplicates, errors, stopping."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest

from mmctl.engine import streams
from mmctl.engine.errors import MmctlError
from mmctl.engine.records import AnyRecord, Event


def events(*times: int, what: str = "x") -> Iterator[AnyRecord]:
    for ns in times:
        yield Event(ts_ns=ns, what=what)


def test_finite_feeds_come_out_in_order_of_event_time() -> None:
    slow = (time.sleep(0.02) or record for record in events(2, 5, 9, what="slow"))  # type: ignore[func-returns-value]
    merged = streams.merge(
        [streams.Feed(events(1, 4, 7, 8), False), streams.Feed(slow, False)], threading.Event()
    )
    assert [streams.time_ns(record) for record in merged] == [1, 2, 4, 5, 7, 8, 9]


def test_a_silent_live_feed_holds_nobody_up() -> None:
    stop = threading.Event()

    def silent() -> Iterator[AnyRecord]:
        while not stop.wait(0.05):
            pass
        yield from events(99)

    merged = streams.merge(
        [streams.Feed(events(1, 2, 3), False), streams.Feed(silent(), True)], stop
    )
    got = [streams.time_ns(next(merged)) for _ in range(3)]
    assert got == [1, 2, 3]
    stop.set()
    assert len(list(merged)) <= 1


def test_what_two_feeds_bring_twice_counts_once() -> None:
    merged = streams.merge(
        [streams.Feed(events(1, 2, 3, 3), False), streams.Feed(events(2, 3, 4), False)],
        threading.Event(),
    )
    assert [streams.time_ns(record) for record in merged] == [1, 2, 3, 3, 4]


def test_an_error_comes_after_what_was_read_before_it() -> None:
    def broken() -> Iterator[AnyRecord]:
        yield from events(1)
        raise MmctlError("line 2 is broken")

    merged = streams.merge(
        [streams.Feed(broken(), False), streams.Feed(events(5), False)], threading.Event()
    )
    assert streams.time_ns(next(merged)) == 1
    with pytest.raises(MmctlError, match="line 2"):
        list(merged)


def test_ticks_keep_their_schedule_when_the_work_takes_time() -> None:
    stop = threading.Event()
    times = []
    for _ in streams.ticks(0.02, stop, count=5):
        times.append(time.monotonic())
        time.sleep(0.015)
    slots = [(moment - times[0]) / 0.02 for moment in times]
    assert [round(slot) for slot in slots] == sorted({round(slot) for slot in slots})
    assert slots[4] >= 3.9  # ticks may be missed on a busy machine, never early


def test_stop_ends_ticks_that_wait_for_long() -> None:
    stop = threading.Event()
    threading.Timer(0.05, stop.set).start()
    assert list(streams.ticks(3600, stop)) == [0]
