"""Records in, snapshot out: what is counted, kept, shared and left absent."""

from __future__ import annotations

import threading

import msgspec
import pytest
import scenes

from mmctl.engine.records import Device, Event, Pool, Request
from mmctl.tui import events, feed, overview, schedule
from mmctl.tui.heat import FIELDS, KEEP, MOST_A_COLUMN, HeatHistory, Level, Rows, resample
from mmctl.tui.lines import plain
from mmctl.tui.model import Model
from mmctl.tui.snapshot import full_in_s
from mmctl.tui.ui import Ui


def test_snapshot_holds_the_newest_of_everything(burst) -> None:
    assert burst.nodes == ("a17",)
    assert [view.record.device for view in burst.devices] == ["gpu0", "gpu1", "npu0"]
    assert burst.devices[0].record.ts_ns == burst.newest_ns
    assert burst.state == "closed" and burst.mode == "enforce"
    assert burst.requests.completed == 79 and burst.requests.queued == 0
    assert [event.what for event in burst.recoveries[0].events] == [
        "trip", "respond", "state", "verify", "half_open", "close",
    ]  # fmt: skip


def test_a_snapshot_never_changes_afterwards() -> None:
    model = Model()
    records = list(scenes.burst(20))
    for record in records[:100]:
        model.add(record)
    before = model.snapshot()
    copy = msgspec.json.encode(msgspec.to_builtins(before))
    for record in records[100:]:
        model.add(record)
    model.snapshot()
    assert msgspec.json.encode(msgspec.to_builtins(before)) == copy


def test_absent_readings_are_gaps_not_zeros() -> None:
    model = Model()
    for second, ratio in enumerate([0.5, None, 0.7]):
        model.add(Device(ts_ns=second * 10**9, device="gpu0", kind="gpu", sm_ratio=ratio))
    assert model.snapshot().devices[0].sm_ratio == (0.5, None, 0.7)


def test_repeated_readings_do_not_enter_the_trend() -> None:
    model = Model()
    model.add(Device(ts_ns=0, device="gpu0", kind="gpu", sm_ratio=0.2))
    model.add(Device(ts_ns=1, device="gpu0", kind="gpu", sm_ratio=0.9, repeated=True))
    assert model.snapshot().devices[0].sm_ratio == (0.2,)


def test_devices_are_in_the_order_of_their_numbers() -> None:
    model = Model()
    for index in (10, 2, 0):
        model.add(Device(ts_ns=0, device=f"gpu{index}", kind="gpu"))
    assert [v.record.device for v in model.snapshot().devices] == ["gpu0", "gpu2", "gpu10"]


def test_the_worst_state_of_any_device_is_the_nodes() -> None:
    model = Model()
    for device, state in (("gpu0", "closed"), ("gpu1", "half_open"), ("gpu2", "open")):
        model.add(Event(ts_ns=0, device=device, what="state", state=state))
    assert model.snapshot().state == "open"


def test_an_observed_trip_starts_no_recovery() -> None:
    model = Model()
    model.add(Event(ts_ns=0, device="gpu0", what="trip", mode="observe"))
    assert model.snapshot().recoveries == ()


def test_a_flood_of_events_and_requests_keeps_memory_bounded() -> None:
    from mmctl.engine.records import Request
    from mmctl.tui.model import EVENTS_KEEP, REQUESTS_KEEP

    model = Model()
    for i in range(EVENTS_KEEP + 500):
        model.add(Event(ts_ns=i, what="noise"))
        model.add(Request(ts_ns=i, id=str(i), state="queued"))
    snapshot = model.snapshot()
    assert len(snapshot.events) == EVENTS_KEEP and snapshot.events[-1].ts_ns == EVENTS_KEEP + 499
    assert snapshot.requests.queued == REQUESTS_KEEP


def filling(second: int, allocated: int) -> Pool:
    return Pool(
        ts_ns=second * 10**9, device="gpu0", reserved_bytes=allocated, allocated_bytes=allocated,
        free_bytes=0, largest_free_bytes=0, releasable_bytes=0, capacity_bytes=1000,
        fragmentation_ratio=0.0,
    )  # fmt: skip


def test_time_to_full_is_a_line_through_the_last_seconds() -> None:
    model = Model()
    for second in range(10):
        model.add(filling(second, 100 + 20 * second))
    (pool,) = model.snapshot().pools
    assert pool.allocated_bytes_per_s == pytest.approx(20)
    assert full_in_s(pool) == pytest.approx((1000 - 280) / 20)


def test_a_pool_that_does_not_fill_has_no_time_to_full() -> None:
    model = Model()
    for second in range(10):
        model.add(filling(second, 500))
    assert full_in_s(model.snapshot().pools[0]) is None


def cells(*rows: tuple[float, ...]) -> list[float]:
    """Rows of the fields that are given, the others zero."""
    return [value for row in rows for value in (*row, *[0.0] * (FIELDS - len(row)))]


def test_resampling_shares_bytes_and_weighs_conflict_by_them() -> None:
    have = cells((1.0, 30), (0.0, 0, 10))
    merged = resample(have, Rows(0, 10, 2), Rows(0, 20, 1))
    assert merged == pytest.approx(cells((0.75, 30, 10)))
    split = resample(merged, Rows(0, 20, 1), Rows(0, 5, 4))
    assert split[::FIELDS] == pytest.approx([0.75] * 4)
    assert sum(split[1::FIELDS]) == pytest.approx(30)
    assert sum(split[2::FIELDS]) == pytest.approx(10)


def test_resampling_drops_what_lies_outside() -> None:
    have = cells((0.5, 8))
    assert sum(resample(have, Rows(0, 10, 1), Rows(100, 10, 3))) == 0
    assert resample(have, Rows(0, 10, 1), Rows(5, 5, 1))[1] == pytest.approx(4)


def test_a_level_means_over_its_columns_and_feeds_the_coarser_one() -> None:
    coarse = Level(100)
    fine = Level(10, coarse)
    rows = Rows(0, 10, 1)
    for ts_ns, vision in ((0, 10), (5, 30), (10, 50), (100, 70), (110, 90)):
        fine.add(ts_ns, rows, cells((1.0, vision)), (vision, 0, 0, 0))
    assert [c.vision_bytes for c in fine.columns()] == [20, 50, 70, 90]
    assert [c.start_ns for c in coarse.columns()] == [0, 100]
    assert coarse.columns()[0].vision_bytes == 35


def test_a_pool_that_grows_inside_a_column_keeps_what_was_seen() -> None:
    level = Level(100)
    level.add(0, Rows(0, 10, 1), cells((1.0, 10)), (10, 0, 0, 0))
    level.add(1, Rows(0, 10, 2), cells((0.0, 10), ()), (10, 0, 0, 0))
    (column,) = level.columns()
    assert column.rows == Rows(0, 10, 2)
    assert column.values()[:2] == pytest.approx([0.5, 10])


def test_levels_are_bounded() -> None:
    level = Level(1)
    for ts_ns in range(3 * KEEP):
        level.add(ts_ns, Rows(0, 1, 0), (), (0, 0, 0, 0))
    assert len(level.columns()) == KEEP + 1


def test_queues_tell_how_long_requests_waited(burst) -> None:
    vision, text = burst.queues
    assert (vision.modality, text.modality) == ("vision", "text")
    assert {round(wait, 3) for wait in vision.waits_s + text.waits_s} == {0.2}
    assert vision.in_work + text.in_work == 1
    assert dict(burst.stages)["cross_attn_fusion"] == (0.04,) * 27


def test_holders_of_a_region_are_the_live_blocks_that_reach_into_it() -> None:
    from mmctl.engine.records import Memory
    from mmctl.tui.snapshot import Region

    def block(action: str, address: int, ts_ns: int, modality: str = "text") -> Memory:
        return Memory(ts_ns=ts_ns, node="a", device="gpu0", action=action, address=address,
                      size_bytes=10, modality=modality)  # fmt: skip

    model = Model()
    region = Region("a", "gpu0", 100, 120)
    assert model.snapshot(region).holders is None  # nobody has told of blocks
    for record in (block("alloc", 95, 1), block("alloc", 110, 2), block("alloc", 112, 3, "vision"),
                   block("alloc", 120, 4), block("free", 110, 5)):  # fmt: skip
        model.add(record)
    held = {h.modality: (h.blocks, h.bytes, h.oldest_ns) for h in model.snapshot(region).holders}
    assert held == {"text": (1, 10, 1), "vision": (1, 10, 3)}


def test_a_column_keeps_three_digits_whatever_the_size_of_its_rows() -> None:
    for row_bytes in (2**21, 20 * 2**20, 2**31):
        level = Level(100)
        vision, text, free = 0.31 * row_bytes, 4096.0, 0.2 * row_bytes
        told = [0.123, vision, text, 0.0, free, free / 3, 3600.0 * vision, 7.0, free // 4096]
        level.add(0, Rows(0, row_bytes, 1), told, (vision, text, 0, free))
        assert level.columns()[0].values() == pytest.approx(told, rel=1e-2)


def test_a_row_that_claims_more_than_any_memory_draws_as_full() -> None:
    level = Level(100)
    level.add(0, Rows(0, 1, 1), [1e300, 2.0**62, *[0.0] * 4, *[float("nan")] * 3], (0, 0, 0, 0))
    values = level.columns()[0].values()
    assert values[0] > 1 and values[1] > 1 and values[7] != values[7]


def test_a_pool_that_tells_faster_than_is_drawn_has_few_of_its_moments_folded() -> None:
    often, seldom = HeatHistory(60 * 10**9), HeatHistory(60 * 10**9)
    for tick in range(2_000):
        record = scenes.pool(tick / 1e3, scenes.START_NS + tick * 10**6)
        often.add(record)
        if tick % 25 == 0:
            seldom.add(record)
    assert often.levels[1]._count < 25 and often.levels[0]._count <= MOST_A_COLUMN
    for fine, coarse in zip(often.frozen(), seldom.frozen(), strict=True):
        for one, other in zip(fine.columns, coarse.columns, strict=True):
            assert one.packed == other.packed  # the rows of the same moments
            assert one.vision_bytes == pytest.approx(other.vision_bytes, rel=0.05)


def test_records_wait_while_a_key_is_answered_but_not_for_ever(monkeypatch) -> None:
    monkeypatch.setattr(feed, "REST_S", 30.0)
    stop, snapshots = threading.Event(), []
    folded = threading.Semaphore(0)

    def flood():
        while not stop.is_set():
            yield Device(ts_ns=1, device="gpu0", kind="gpu")
            folded.release()

    reader = feed.Feed(flood(), Model, stop, snapshots.append, lambda _: None)
    reader.start()
    try:
        for _ in range(100):
            assert folded.acquire(timeout=10.0)
        reader.rest()
        while folded.acquire(timeout=0.2):
            pass
        reader.rest()  # at once again: no more than there was
        reader.go_on()
        assert folded.acquire(timeout=10.0)
        reader.rest()  # keys that come fast do not stop the records
        for _ in range(100):
            assert folded.acquire(timeout=10.0)
        monkeypatch.setattr(feed, "REST_S", 0.01)
        monkeypatch.setattr(feed, "EVERY_S", 0.0)
        reader.rest()  # answered by nobody
        for _ in range(100):
            assert folded.acquire(timeout=10.0)
    finally:
        assert reader.close(5.0)


def request(second: float, state: str, **more: object) -> Request:
    return Request(ts_ns=int(second * 1e9), id="r1", state=state, text_tokens=8, **more)


@pytest.mark.parametrize(
    ("records", "waits"),
    [
        ([request(0, "queued"), request(2, "admitted"), request(5, "completed")], (2.0,)),
        ([request(0, "queued"), request(5, "completed", queue_wait_s=1.5)], (1.5,)),
        ([request(0, "queued"), request(5, "completed", stages={"queue_wait_s": 0.5})], (0.5,)),
        ([request(5, "completed", queue_wait_s=1.5)], (1.5,)),
        ([request(0, "queued"), request(2, "admitted", queue_wait_s=1.0),
          request(5, "completed", queue_wait_s=1.0)], (1.0,)),
        ([request(0, "queued"), request(5, "completed")], ()),  # queued for how long is not told
        ([request(0, "queued"), request(5, "cancelled")], ()),
    ],
)  # fmt: skip
def test_a_wait_is_what_is_told_or_the_time_until_admission(records, waits) -> None:
    model = Model()
    for record in records:
        model.add(record)
    (queue,) = (queue for queue in model.snapshot().queues if queue.modality == "text")
    assert queue.waits_s == waits


def test_whether_requests_are_in_work_is_absent_where_no_admission_is_told() -> None:
    model = Model()
    model.add(request(0, "queued"))
    snapshot = model.snapshot()
    assert snapshot.requests.admitted is None and snapshot.queues[1].in_work is None
    assert "requests open 1" in "".join(map(plain, overview.serving(snapshot, Ui(), 80)))
    assert "depth counts those in work" in plain(schedule.queues(snapshot, Ui(), 80)[-1])
    model.add(request(1, "admitted"))
    snapshot = model.snapshot()
    assert (snapshot.requests.queued, snapshot.requests.admitted) == (0, 1)
    assert snapshot.queues[1].in_work == 1


def test_a_night_of_readings_pushes_no_trip_off_the_list() -> None:
    model = Model()
    model.add(Event(ts_ns=0, what="trip", device="gpu0"))
    for second in range(5_000):
        model.add(Event(ts_ns=second * 10**9, what="entropy", device="gpu0"))
    model.add(Event(ts_ns=5_000 * 10**9, what="fault"))
    snapshot = model.snapshot()
    assert [event.what for event in events.shown_events(snapshot, Ui())] == ["fault", "trip"]
    assert len(events.shown_events(snapshot, Ui(filter="entropy"))) == 100
    assert snapshot.events[0].what == "trip" and snapshot.events[-1].what == "fault"
