"""The reader of a watch and the breaker keep their own paces."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from mmctl.cli.breaker import outlet
from mmctl.cli.breaker.lines import line
from mmctl.cli.breaker.outlet import Outlet
from mmctl.engine.records import AnyRecord, Event, Host


def hosts(count: int) -> list[AnyRecord]:
    return [Host(ts_ns=n, node="n") for n in range(count)]


def a_trip(ts_ns: int) -> Event:
    return Event(ts_ns=ts_ns, node="n", what="trip")


@pytest.mark.parametrize(("mode", "word"), [("observe", "would trip"), ("enforce", "trip")])
def test_a_trip_that_is_only_said_is_told_from_one_that_acts(mode, word) -> None:
    """In the dashboard's own words."""
    trip = Event(ts_ns=1, node="n", what="trip", mode=mode)
    assert line(trip).split("  ")[1].startswith(word)


class Slow:
    """A reader that takes nothing before ``go`` is set."""

    def __init__(self) -> None:
        self.seen: list[int] = []
        self.go = threading.Event()

    def write(self, record: AnyRecord) -> None:
        self.go.wait()
        self.seen.append(record.ts_ns)  # type: ignore[union-attr]


@pytest.fixture(autouse=True)
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outlet, "WAITING", 10)


def never() -> None:
    raise AssertionError("nothing failed")


def test_live_records_beyond_those_that_wait_are_lost_and_counted_but_no_event(
    capsys: pytest.CaptureFixture[str],
) -> None:
    reader = Slow()
    with Outlet(reader.write, waits=False, failed=never) as out:
        for record in hosts(50):
            out.put(record)
        out.put(a_trip(50))
        reader.go.set()
    assert reader.seen == [*range(len(reader.seen) - 1), 50]
    assert len(reader.seen) - 1 + out.lost == 50 and 10 <= len(reader.seen) - 1 <= 11
    assert f"{out.lost} records are not written" in capsys.readouterr().err


def test_what_can_wait_loses_nothing() -> None:
    reader = Slow()
    threading.Timer(0.2, reader.go.set).start()
    with Outlet(reader.write, waits=True, failed=never) as out:
        for record in hosts(50):
            out.put(record)
    assert reader.seen == list(range(50)) and out.lost == 0


@pytest.mark.parametrize("waits", [False, True])
def test_a_reader_that_has_gone_ends_the_watch(waits: bool) -> None:
    stop = threading.Event()

    def write(_: AnyRecord) -> None:
        raise BrokenPipeError

    def run(out: Outlet) -> None:
        for record in hosts(10_000):
            out.put(record)
            stop.wait(0.001)

    with pytest.raises(BrokenPipeError), Outlet(write, waits, stop.set) as out:
        run(out)
    assert stop.is_set()


def test_a_decision_is_told_of_by_its_target_a_rank_by_its_device() -> None:
    decided = Event(ts_ns=0, node="n", what="trip", device="cpu0", evidence={"group": "demo:calm"})
    assert line(decided).split()[1:3] == ["trip", "demo:calm"]
    late = Event(ts_ns=0, node="n", what="imbalance", device="gpu1", evidence={"group": "tp"})
    assert line(late).split()[1:3] == ["imbalance", "gpu1"]


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_told_to_end_it_leaves_a_reader_that_hangs(
    error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outlet, "_PATIENCE_S", 0.05)
    reader = Slow()

    def interrupted(put: Callable[[AnyRecord], None]) -> None:
        put(a_trip(0))
        raise error

    with pytest.raises(error), Outlet(reader.write, waits=False, failed=never) as out:
        interrupted(out.put)
    assert reader.seen == []
    reader.go.set()
