"""What the screen says of sources that start, end, go away and come back."""

from __future__ import annotations

import msgspec
import pytest
import scenes
from test_app import fed, until

from mmctl.engine.records import Event, Serving
from mmctl.tui import frame, overview, recovery, text
from mmctl.tui.lines import plain
from mmctl.tui.model import Model
from mmctl.tui.once import screen_text
from mmctl.tui.snapshot import Snapshot
from mmctl.tui.ui import Ui, gone, starting, state

SECOND = 10**9
PAGE = "http://127.0.0.1:8000/metrics"


def told(lines) -> str:
    return "\n".join(map(plain, lines))


def header(snapshot: Snapshot, ui: Ui) -> str:
    return plain(frame.title(snapshot, ui, 160))


def source(state: str, uri: str, ts_ns: int) -> Event:
    return Event(ts_ns=ts_ns, what="source", state=state, evidence={"uri": uri},
                 message="the server has gone" if state == "down" else None)  # fmt: skip


def model_of(seconds: float = 20) -> Model:
    model = Model()
    for record in scenes.burst(seconds):
        model.add(record)
    return model


def test_a_target_whose_source_has_gone_is_unknown_until_it_is_back() -> None:
    model = model_of()
    at = model.snapshot().newest_ns
    ui = Ui(now_ns=at + 2 * SECOND, sources=("agent:/run/vlm",))
    assert "CLOSED" in header(model.snapshot(), ui)
    model.add(source("down", "agent:/run/vlm", at + SECOND))
    lost = model.snapshot()
    assert state(lost, ui) == "unknown"
    assert "SOURCE LOST" in header(lost, ui) and "UNKNOWN was closed" in header(lost, ui)
    assert "no reading for 2.4 s" in told(overview.serving(lost, ui, 100))
    room = told(overview.headroom(lost, ui, 100))
    assert "no record of this pool" in room and "last dry run" in room
    assert text.word(lost.events[-1]) == "source lost"
    model.add(source("up", "agent:/run/vlm", at + 2 * SECOND))
    back = model.snapshot()
    assert "CLOSED" in header(back, ui) and "LOST" not in header(back, ui)
    assert text.word(back.events[-1]) == "source back"


def test_of_two_sources_the_one_that_is_read_keeps_its_state() -> None:
    model = model_of()
    at = model.snapshot().newest_ns
    ui = Ui(now_ns=at + 3 * SECOND, sources=("nvml:", PAGE))
    model.add(source("down", PAGE, at))
    model.add(scenes.pool(23, at + 3 * SECOND))
    snapshot = model.snapshot()
    assert not gone(snapshot, ui, "a17", "gpu0") and gone(snapshot, ui, "a17", ":8000")
    assert "CLOSED" in header(snapshot, ui) and "LOST" not in header(snapshot, ui)


def test_a_page_that_answers_no_more_is_an_event_and_is_back_with_the_next_reading() -> None:
    model = Model()
    read = Serving(ts_ns=SECOND, engine="vllm", instance="127.0.0.1:8000", running=3)
    lost = Serving(ts_ns=2 * SECOND, engine="vllm", instance="127.0.0.1:8000",
                   absent={"running": "127.0.0.1:8000 does not answer"})  # fmt: skip
    ui = Ui(now_ns=3 * SECOND, sources=(PAGE,))
    for record in (read, lost, lost):
        model.add(record)
    snapshot = model.snapshot()
    assert [(e.what, e.state) for e in snapshot.events] == [("source", "down")]
    assert "SOURCE LOST" in header(snapshot, ui) and gone(snapshot, ui, "", "127.0.0.1:8000")
    assert "does not answer" in told(overview.serving(snapshot, ui, 100))
    model.add(msgspec.structs.replace(read, ts_ns=3 * SECOND))
    snapshot = model.snapshot()
    assert snapshot.events[-1].state == "up" and not snapshot.down


async def test_a_live_source_that_ended_says_of_what() -> None:
    def ends(stop):
        yield from scenes.burst(3)
        yield Event(ts_ns=scenes.START_NS + 3 * SECOND, node="a17", device="gpu0", what="oom")

    async with fed(ends) as (app, pilot):
        await until(pilot, lambda: "made ended: out of memory" in screen_text(app))
        shown = screen_text(app)
        assert "ENDED" in shown and "UNKNOWN" in shown and "END OF RECORDS" not in shown
        assert "no reading for" in shown


def test_a_demo_that_loads_is_said_to_start_and_its_clock_goes() -> None:
    ui = Ui(now_ns=104 * SECOND, started_ns=100 * SECOND, sources=("demo:burst",))
    assert "demo:burst is starting: 4 s" in told(overview.devices(Snapshot(), ui, 100))
    later = msgspec.structs.replace(ui, now_ns=107 * SECOND)
    assert header(Snapshot(), ui) != header(Snapshot(), later)
    assert starting(model_of(1).snapshot(), ui) is None


def test_the_dry_run_that_tripped_stays_until_the_next_one() -> None:
    model = Model()
    tried = scenes.pool(20, SECOND)  # one that does not fit
    assert not tried.fits.fits
    model.add(tried)
    model.add(msgspec.structs.replace(tried, ts_ns=3 * SECOND, fits=None, headroom_bytes=None))
    shown = told(overview.headroom(model.snapshot(), Ui(live=False), 100))
    assert "does not fit needs 24.0 MiB" in shown and "2.0 s ago" in shown
    assert "-12.0 MiB" in shown


@pytest.mark.parametrize(("count", "words"), [(1, "1 would-be trip,"), (2, "2 would-be trips,")])
def test_trips_that_would_have_been_are_counted(count: int, words: str) -> None:
    model = Model()
    for number in range(count):
        model.add(Event(ts_ns=number, what="trip", device="gpu0", mode="observe", state="closed"))
    lines = recovery._none(model.snapshot(), 200)
    assert words in told(lines)


def test_an_empty_list_is_a_dash() -> None:
    assert text.value("respond", []) == "–"
