"""Merging by event time: order, silence, duplicates, errors, stopping."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmctl.engine import streams
from mmctl.engine.errors import MmctlError
from mmctl.engine.records import AnyRecord, Device, Event
from mmctl.engine.streams import Windows


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


def reading(second: float, sm_ratio: float, device: str = "gpu0") -> Device:
    return Device(ts_ns=int(second * 1e9), node="n", device=device, kind="gpu", sm_ratio=sm_ratio)


def results(windows: Windows, *readings: Device) -> list[tuple[int, float, int, bool, bool]]:
    found = [summary for record in readings for summary in windows.step(record)]
    found += windows.flush()
    return [
        (s.ts_ns // 10**9, s.signals["sm_ratio"]["mean"], s.count, s.corrected, s.reopened)
        for s in found
    ]


def test_windows_give_their_result_when_they_end() -> None:
    got = results(Windows(1, 300), reading(0.1, 0.2), reading(0.9, 0.4), reading(1.5, 0.8))
    assert got == [(0, pytest.approx(0.3), 2, False, False), (1, 0.8, 1, False, False)]


def test_a_late_reading_enters_its_own_window_and_corrects_it() -> None:
    got = results(
        Windows(1, 300), reading(0.1, 0.2), reading(1.1, 0.5), reading(0.5, 0.4), reading(2.1, 0.5)
    )
    assert got == [
        (0, 0.2, 1, False, False), (0, pytest.approx(0.3), 2, True, False),
        (1, 0.5, 1, False, False), (2, 0.5, 1, False, False),
    ]  # fmt: skip


def test_older_than_the_watermark_reopens_its_window_at_once() -> None:
    windows = Windows(1, watermark_s=5)
    first = [s for r in (reading(0.1, 0.2), reading(9.0, 0.5)) for s in windows.step(r)]
    assert [s.corrected for s in first] == [False]
    (again,) = windows.step(reading(0.5, 0.4))
    assert again.corrected and again.reopened and again.revision == 1
    assert again.signals["sm_ratio"]["mean"] == pytest.approx(0.3)


def test_a_duplicate_counts_once_and_other_devices_have_their_own_windows() -> None:
    twice = reading(0.1, 0.2)
    got = results(Windows(1, 300), twice, twice, reading(0.1, 0.9, "gpu1"), reading(1.2, 0.1))
    assert got[0] == (0, 0.2, 1, False, False) and got[1][:3] == (0, 0.9, 1)


def test_windows_that_are_too_old_are_counted_not_kept() -> None:
    windows = Windows(1, watermark_s=2, keep=2)
    for second in range(0, 100, 10):
        windows.step(reading(second, 0.5))
    assert windows.step(reading(1.0, 0.5)) == [] and windows.lost == 1


@given(st.lists(st.tuples(st.integers(0, 50), st.floats(0, 1)), min_size=1, max_size=40))
def test_any_order_ends_with_the_same_windows(values: list[tuple[int, float]]) -> None:
    """Whatever the order of arrival, the last result of each window is that of all readings."""
    last: dict[int, tuple[float, int]] = {}
    windows = Windows(1, watermark_s=5)
    readings = list(dict.fromkeys(values))
    readings = [reading(second / 10, share) for second, share in readings]
    found = [s for record in readings for s in windows.step(record)] + windows.flush()
    for summary in found:
        last[summary.ts_ns // 10**9] = (summary.signals["sm_ratio"]["mean"], summary.count)
    truth: dict[int, list[float]] = {}
    for record in readings:
        truth.setdefault(record.ts_ns // 10**9, []).append(record.sm_ratio or 0.0)
    assert last == {
        second: (pytest.approx(sum(own) / len(own)), len(own)) for second, own in truth.items()
    }
