"""The dashboard as a person uses it: every key, the mouse, sizes, sources that misbehave."""

from __future__ import annotations

import re
import threading
import time
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import scenes
from textual.command import CommandList

from mmctl.engine import profiles, recording
from mmctl.engine.errors import MmctlError, UsageError
from mmctl.engine.records import Device, Event, encode
from mmctl.tui import SCREENS, events, keys
from mmctl.tui.app import KEYS, Top
from mmctl.tui.dialogs import Confirm
from mmctl.tui.feed import Feed
from mmctl.tui.model import Model
from mmctl.tui.once import screen_text
from mmctl.tui.orders import Order, Orders
from mmctl.tui.playback import Playback
from mmctl.tui.ui import Ui
from mmctl.tui.view import views


@asynccontextmanager
async def shown(snapshot, size=(120, 40), **more):
    app = Top(Ui(now_ns=snapshot.newest_ns or 0, live=False, sources=("made",)),
              clock=lambda: snapshot.newest_ns or 0, **more)  # fmt: skip
    async with app.run_test(size=size) as pilot:
        app.post_message(Top.Fresh(snapshot))
        await pilot.pause()
        yield app, pilot


@pytest.fixture(scope="module")
def everything():
    """A screen with something to move over on every page."""
    model = Model()
    for record in [*scenes.burst(40, gpus=12), *scenes.links(), *scenes.placements(),
                   *scenes.spans()]:  # fmt: skip
        model.add(record)
    return model.snapshot()


@pytest.fixture(scope="module")
def twice():
    """The same with a second pool and a second recovery, so that there are two to pick from."""
    model = Model()
    for record in [*scenes.burst(40, gpus=12), *scenes.links(), *scenes.placements(),
                   *scenes.spans()]:  # fmt: skip
        model.add(record)
    ends = model.snapshot().newest_ns
    model.add(scenes.pool(40.0, ends, "gpu1"))
    for at in range(2):  # a second device that was tripped, so that there are two to pick from
        model.add(Event(ts_ns=ends + at, node="a17", device="gpu1", what="trip", mode="enforce",
                        state="open"))  # fmt: skip
    return model.snapshot()


async def press(pilot, *names: str) -> None:
    for name in names:
        await pilot.press(name)
    await pilot.pause()


async def test_number_keys_and_tab_go_through_the_screens(burst) -> None:
    async with shown(burst) as (app, pilot):
        for number, name in enumerate(SCREENS, 1):
            await press(pilot, str(number))
            assert app.ui.screen == name
            assert app.query_one(f"#{name}").display
        await press(pilot, "tab")
        assert app.ui.screen == next(iter(SCREENS))
        await press(pilot, "shift+tab")
        assert app.ui.screen == list(SCREENS)[-1]


async def test_space_holds_the_picture_and_shows_the_newest_when_it_goes_on(burst) -> None:
    from scenes import snapshot_of

    async with shown(burst) as (app, pilot):
        await press(pilot, "space")
        later = snapshot_of(41.0)
        app.post_message(Top.Fresh(later))
        await pilot.pause()
        assert app.snapshot is burst and "PAUSED" in screen_text(app)
        await press(pilot, "f")
        assert app.snapshot is later and "PAUSED" not in screen_text(app)


async def test_filter_narrows_and_escape_clears(burst) -> None:
    async with shown(burst) as (app, pilot):
        await press(pilot, "slash", *"npu")
        assert app.ui.filter == "npu"
        assert "gpu1" not in screen_text(app) and "npu0" in screen_text(app)
        await press(pilot, "enter", "1")
        assert app.ui.filter == "npu" and app.ui.screen == "overview"
        await press(pilot, "escape")
        assert app.ui.filter == "" and "gpu1" in screen_text(app)


async def test_keys_typed_into_the_filter_do_nothing_else(burst) -> None:
    async with shown(burst) as (app, pilot):
        await press(pilot, "slash", "q", "2", "m")
        assert app.is_running and app.ui.screen == "overview" and app.ui.filter == "q2m"


async def test_cursor_on_the_overview_tells_of_its_device(burst) -> None:
    async with shown(burst) as (app, pilot):
        await press(pilot, "down", "j", "j", "j")
        assert app.ui.device == 2
        assert "npu-smi gives no utilisation" in screen_text(app)
        await press(pilot, "k", "home")
        assert app.ui.device == 0


async def test_cursor_on_the_events_shows_their_evidence(burst) -> None:
    async with shown(burst) as (app, pilot):
        await press(pilot, "3", "end", "up", "up")
        assert app.ui.event == len(burst.events) - 3
        assert "need 24 MiB, largest 12 MiB" in screen_text(app)
        assert "fragmentation_ratio" in screen_text(app)
        await press(pilot, "pagedown", "pageup", "home")
        assert app.ui.event == 0


async def test_the_cursor_stays_on_its_event_when_others_come(burst) -> None:
    from scenes import model_of

    model = model_of(40.0)
    before = model.snapshot()
    async with shown(before) as (app, pilot):
        await press(pilot, "3", "down", "down")
        chosen = events.shown_events(before, app.ui)[app.ui.event]
        model.add(Event(ts_ns=before.newest_ns, what="fault", message="one more"))
        app.post_message(Top.Fresh(model.snapshot()))
        await pilot.pause()
        assert events.shown_events(app.snapshot, app.ui)[app.ui.event] is chosen
        await press(pilot, "home")
        assert "one more" in screen_text(app)


async def test_heatmap_cursor_layers_time_and_zoom(burst) -> None:
    async with shown(burst) as (app, pilot):
        await press(pilot, "2", "down")
        assert app.ui.cell is not None
        await press(pilot, "left", "h", "l", "up")
        assert app.ui.cell[0] == 1 and "region 0x7f10_" in screen_text(app)
        for layer in ("modality", "free", "age", "pages", "conflict"):
            await press(pilot, "m")
            assert app.ui.layer == layer and f"layer {layer}" in screen_text(app)
        await press(pilot, "plus")
        assert app.ui.level == 0 and "100 ms a column" in screen_text(app)
        await press(pilot, "minus", "minus", "minus", "minus", "minus")
        assert app.ui.level == 3
        await press(pilot, "plus", "plus", "down", "z", "z")
        low, high = app.ui.rows
        assert high - low < 40 * 20 * 2**20 / 2
        await press(pilot, "x", "x", "x")
        assert app.ui.rows is None
        await press(pilot, "escape")
        assert app.ui.cell is None


async def test_brackets_choose_the_pool() -> None:
    model = Model()
    for second in range(3):
        for device in ("gpu0", "gpu1"):
            model.add(scenes.pool(second, scenes.START_NS + second * 10**9, device))
    async with shown(model.snapshot()) as (app, pilot):
        await press(pilot, "2", "right_square_bracket")
        assert screen_text(app).splitlines()[1].startswith(" gpu1")
        await press(pilot, "left_square_bracket")
        assert screen_text(app).splitlines()[1].startswith(" gpu0")


async def test_themes_turn(burst) -> None:
    async with shown(burst) as (app, pilot):
        seen = {app.theme}
        for _ in range(3):
            await press(pilot, "t")
            seen.add(app.theme)
        assert seen == {"calm", "light", "contrast", "sixteen"}


@pytest.mark.parametrize("screen", SCREENS)
async def test_help_names_every_key_of_the_screen_and_any_key_closes_it(burst, screen) -> None:
    own = views()[screen].keys
    for orders in (None, default_orders()):
        async with shown(burst, size=(130, 60), orders=orders) as (app, pilot):
            app.action_go(screen)
            await press(pilot, "question_mark")
            told = screen_text(app)
            for key in KEYS:
                line = f"{key.shown({}):<12} {key.about}"
                here = key in own or (key in keys.GENERAL and (orders is not None or not key.acts))
                assert (line in told) is here, key.name
            await press(pilot, "q")
            assert app.is_running and len(app.screen_stack) == 1


@pytest.mark.parametrize("screen", SCREENS)
async def test_a_screen_does_what_its_help_says_and_nothing_else(twice, screen) -> None:
    """Each key of any screen: on those that name it, it moves something; elsewhere nothing."""
    own = {key.name for key in views()[screen].keys}
    start = {"event": 3, "placement": 1, "device": 3, "lane": 2, "recovery": 0, "scroll": 1,
             "trace_zoom": 2, "trace_back": 1, "cell": (3, 12), "level": 1}  # fmt: skip
    async with shown(twice, size=(120, 50)) as (app, pilot):
        app.action_go(screen)
        await pilot.pause()
        for key in KEYS:
            if key in keys.GENERAL:
                continue
            app._choose(**start)
            rows = app.view.drawn.rows if screen == "heatmap" else None
            zoomed = (rows.base_address, rows.base_address + 8 * rows.row_bytes) if rows else None
            app._choose(rows=zoomed)
            await pilot.pause()
            before = app.ui
            await press(pilot, key.keys.split(",")[0])
            assert (app.ui != before) is (key.name in own), key.name


async def test_palette_runs_a_command_by_its_name(burst) -> None:
    async with shown(burst) as (app, pilot):
        await press(pilot, "ctrl+p")
        assert len(app.screen_stack) == 2
        await press(pilot, "escape", "colon")
        assert len(app.screen_stack) == 2
        await press(pilot, *"screen events")
        await pilot.pause(0.5)
        await press(pilot, "enter")
        await pilot.pause(0.2)
        assert app.ui.screen == "events"


async def test_quit_and_interrupt_have_their_exit_codes(burst) -> None:
    for name, code in (("q", 0), ("ctrl+q", 0), ("ctrl+c", 130)):
        async with shown(burst) as (app, pilot):
            await press(pilot, name)
        assert app.return_value == code


async def test_mouse_picks_devices_cells_and_events(burst) -> None:
    async with shown(burst) as (app, pilot):
        await pilot.click("#devices", offset=(10, 3))
        assert app.ui.device == 1
        await press(pilot, "2")
        await pilot.click("#heat", offset=(60, 7))
        await pilot.pause()
        width = app.query_one("#heat").size.width
        assert app.ui.cell == (width - 1 - 60, 7)
        await press(pilot, "3")
        await pilot.click("#list", offset=(10, 3))
        assert app.ui.event == 2


async def test_actions_ask_and_only_y_means_yes(burst) -> None:
    orders = default_orders()
    given = []
    orders.put = given.append
    async with shown(burst, orders=orders) as (app, pilot):
        await press(pilot, "T")
        assert "Trip a17 gpu0?" in screen_text(app)
        await press(pilot, "n")
        assert given == [] and "nothing was done" in screen_text(app)
        await press(pilot, "j", "H", "y")
        await press(pilot, "R", "y")
        await press(pilot, "V", "y")
        assert given == [Order(action, "a17", "gpu1") for action in ("hold", "reset", "verify")]
        await press(pilot, "M", "y")
        assert ordered(orders) == [("mode", "off")]  # after enforce
        assert "mode off was ordered" in screen_text(app)


async def test_another_profile_is_picked_and_asked_about(burst) -> None:
    orders = default_orders()
    async with shown(burst, orders=orders) as (app, pilot):
        await press(pilot, "P")
        assert "now default" in screen_text(app) and "paper" in screen_text(app)
        await press(pilot, "escape")
        assert len(app.screen_stack) == 1
        await press(pilot, "P", "home", "j", "k", *["j"] * position("paper"), "enter")
        text = screen_text(app)
        assert "Profile paper, mode observe?" in text and "removed" in text
        await press(pilot, "n")
        assert ordered(orders) == []
        await press(pilot, "P", "home", *["down"] * position("paper"), "enter", "y")
        assert ordered(orders) == [("profile", "paper")]


def position(name: str) -> int:
    return list(profiles.available()).index(name)


async def test_the_palette_changes_mode_and_profile(burst) -> None:
    orders = default_orders()
    async with shown(burst, orders=orders) as (app, pilot):
        for words in ("mode enforce", "profile cpu"):
            await press(pilot, "colon", *("space" if c == " " else c for c in words))
            await until(pilot, lambda: best_command(app) == words)  # noqa: B023
            await press(pilot, "enter")
            await until(pilot, lambda: isinstance(app.screen, Confirm))
            await press(pilot, "y")
        assert ordered(orders) == [("mode", "enforce"), ("profile", "cpu")]


def best_command(app: Top) -> str | None:
    found = app.screen.query_one(CommandList)
    return str(found.get_option_at_index(0).prompt).split("\n")[0] if found.option_count else None


def default_orders() -> Orders:
    return Orders(profiles.load("default"), "default")


def ordered(orders: Orders) -> list[tuple[str, str]]:
    """What waits for the breaker's thread."""
    waiting = orders.changes._waiting
    return [waiting.get() for _ in range(waiting.qsize())]


async def test_without_orders_nothing_can_act(burst) -> None:
    why = "--readonly was given: nothing here acts on a server"
    async with shown(burst, refuses=why) as (app, pilot):
        for name in "THRVMP":
            await press(pilot, name)
            assert len(app.screen_stack) == 1 and why in screen_text(app)
        titles = {command.title for command in app.get_system_commands(app.screen)}
        assert "theme light" in titles and not titles & {"mode off", "profile cpu"}


async def test_picture_and_data_are_written_where_one_stands(burst, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    async with shown(burst) as (app, pilot):
        await press(pilot, "s", "3", "end", "up", "up", "e")
        assert "wrote mmctl-a17-events-" in screen_text(app)
    assert len(list(tmp_path.glob("mmctl-a17-overview-*.svg"))) == 1
    (data,) = tmp_path.glob("mmctl-a17-events-*.ndjson")
    (event,) = recording.read(data, strict=True)
    assert isinstance(event, Event) and event.what == "trip"


async def test_a_folder_that_cannot_be_written_is_said(burst, tmp_path, monkeypatch) -> None:
    import os

    if os.geteuid() == 0:
        pytest.skip("root may write everywhere")
    tmp_path.chmod(0o500)
    monkeypatch.chdir(tmp_path)
    async with shown(burst) as (app, pilot):
        await press(pilot, "s")
        assert "cannot write" in screen_text(app)


@pytest.mark.parametrize("size", [(20, 3), (40, 10), (59, 15), (60, 15), (80, 24), (300, 90)])
async def test_every_size_is_drawn(burst, size) -> None:
    async with shown(burst, size=size) as (app, pilot):
        for name in SCREENS:
            app.action_go(name)
            await pilot.pause()
        small = size[0] < 60 or size[1] < 15
        assert ("60×15" in screen_text(app)) == small


async def test_resizing_between_small_and_large_repaints(burst) -> None:
    async with shown(burst, size=(120, 40)) as (app, pilot):
        for size in ((30, 5), (100, 30), (20, 3), (160, 50)):
            await pilot.resize_terminal(*size)
            await pilot.pause()
            await pilot.pause()
        assert "gpu1" in screen_text(app)


@pytest.mark.parametrize("name", SCREENS)
async def test_nothing_at_all_is_a_picture_too(name: str) -> None:
    from mmctl.tui.snapshot import Snapshot

    async with shown(Snapshot()) as (app, pilot):
        app.action_go(name)
        await press(pilot, "down", "left", "m", "plus", "z", "right_square_bracket", "e", "n")
        assert app.is_running and "waiting for records" in screen_text(app)


def test_keys_of_a_profile_are_checked() -> None:
    assert keys.moved(("quit=Q", "pause=f8,space"), KEYS) == {"quit": "Q", "pause": "f8,space"}
    with pytest.raises(UsageError, match="did you mean 'quit'"):
        keys.moved(("qiut=Q",), KEYS)
    with pytest.raises(UsageError, match="names no key"):
        keys.moved(("quit",), KEYS)


async def test_keys_of_a_profile_are_in_force(burst) -> None:
    async with shown(burst, keys={"quit": "Q"}) as (app, pilot):
        await press(pilot, "q")
        assert app.is_running
        await press(pilot, "Q")
    assert app.return_value == 0


def test_no_two_keys_do_different_things() -> None:
    every = [key for entry in KEYS for key in entry.keys.split(",")]
    assert len(every) == len(set(every))
    assert len({entry.name for entry in KEYS}) == len(KEYS)


@asynccontextmanager
async def fed(records, size=(120, 40), playback=None, stop=None, **more):
    """The dashboard over a source of its own, as the command runs it."""
    stop = stop or threading.Event()
    feeds = []

    def start(app: Top) -> Feed:
        feed = Feed(
            records(stop), Model, stop, fresh=lambda s: app.post_message(Top.Fresh(s)),
            ended=lambda error: app.post_message(Top.Ended(error)),
        )  # fmt: skip
        feeds.append(feed)
        feed.start()
        return feed

    app = Top(Ui(sources=("made",)), started=start, playback=playback, **more)
    async with app.run_test(size=size) as pilot:
        yield app, pilot
    assert feeds[0].close(5.0), "the source did not stop"


async def until(pilot, condition) -> None:
    for _ in range(200):
        if condition():
            return
        await pilot.pause(0.02)
    raise AssertionError("it never happened")


async def answers_keys(app: Top, pilot) -> None:
    before = app.ui.screen
    await pilot.press("tab")
    assert app.ui.screen != before


async def test_a_source_that_hangs_leaves_the_keys_alive() -> None:
    def hangs(stop):
        yield Device(ts_ns=time.time_ns(), node="a", device="gpu0", kind="gpu", sm_ratio=0.5)
        stop.wait()

    async with fed(hangs) as (app, pilot):
        await until(pilot, lambda: app.snapshot.records == 1)
        await answers_keys(app, pilot)


async def test_a_source_that_floods_leaves_the_keys_alive() -> None:
    def floods(stop):
        number = 0
        while not stop.is_set():
            for _ in range(100):
                number += 1
                yield Device(ts_ns=time.time_ns(), node="a", device=f"gpu{number % 8}", kind="gpu")
            stop.wait(0.01)

    async with fed(floods) as (app, pilot):
        await until(pilot, lambda: app.snapshot.records > 5_000)
        await answers_keys(app, pilot)


async def test_a_source_that_dies_ends_the_screen_with_its_last_words() -> None:
    def dies(stop):
        yield Event(ts_ns=1, what="fault", message="worker: killed by signal 9")
        raise MmctlError("the worker ended with code 137: Killed")

    async with fed(dies) as (app, pilot):
        await until(pilot, lambda: app.error is not None)
    assert app.return_value == 1 and "Killed" in str(app.error)


async def test_the_end_of_records_leaves_the_picture_standing() -> None:
    async with fed(lambda stop: iter(list(scenes.burst(3)))) as (app, pilot):
        await until(pilot, lambda: app.ui.ended is not None)
        await until(pilot, lambda: "made ended" in screen_text(app))
        await until(pilot, lambda: "gpu1" in screen_text(app))
        assert "END OF RECORDS" not in screen_text(app)
        await press(pilot, "T")
        assert "made ended: nobody is left to take an order" in screen_text(app)


async def test_a_lost_source_is_named_until_it_is_back() -> None:
    step = threading.Event()

    def comes_and_goes(stop):
        now = time.time_ns()
        evidence = {"uri": "http://127.0.0.1:8000/metrics"}
        yield Event(ts_ns=now, what="source", state="down", message="refused", evidence=evidence)
        while not step.is_set() and not stop.is_set():
            yield Device(ts_ns=time.time_ns(), node="a", device="gpu0", kind="gpu")
            stop.wait(0.05)
        yield Event(ts_ns=now, what="source", state="up", evidence=evidence)
        stop.wait()

    async with fed(comes_and_goes) as (app, pilot):
        await until(pilot, lambda: app.snapshot.records > 2)
        assert "lost http://127.0.0.1:8000/metrics" in screen_text(app)
        step.set()
        await until(pilot, lambda: not app.snapshot.down)
        await pilot.pause()
        assert "lost http" not in screen_text(app)


async def test_a_recording_is_steered_from_the_keys(tmp_path: Path) -> None:
    path = tmp_path / "burst.ndjson"
    path.write_bytes(b"".join(encode(record) + b"\n" for record in scenes.burst(40)))
    stop = threading.Event()
    playback = Playback([path], stop, 75.0)
    async with fed(lambda _: playback.records(), playback=playback, stop=stop) as (app, pilot):
        await until(pilot, lambda: app.ui.playback is not None)
        await press(pilot, "space")
        assert not app.ui.playback.playing and "‖ paused" in screen_text(app)
        await press(pilot, "greater_than_sign", "greater_than_sign", "less_than_sign")
        assert app.ui.playback.speed == 2.0
        await press(pilot, "n")
        await until(pilot, lambda: app.snapshot.events)
        await press(pilot, "n")
        await until(pilot, lambda: app.snapshot.events[-1].what == "trip")
        at = app.snapshot.newest_ns
        await press(pilot, "comma")
        await until(pilot, lambda: app.snapshot.newest_ns <= at - 10**9)
        await press(pilot, "full_stop")
        await press(pilot, "N")
        await until(pilot, lambda: app.snapshot.events[-1].ts_ns < at)
        await press(pilot, "n")
        await until(pilot, lambda: app.snapshot.newest_ns >= at)
        await press(pilot, "p")
        await until(pilot, lambda: app.snapshot.events[-1].ts_ns < at)
        bar = app.query_one("#scrub")
        await pilot.click("#scrub", offset=(bar.size.width - 14, 0))
        await until(pilot, lambda: app.snapshot.newest_ns > scenes.START_NS + 35 * 10**9)


async def test_recording_from_within_begins_and_ends_by_a_key(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)

    def ticks(stop):
        while not stop.wait(0.02):
            yield Device(ts_ns=time.time_ns(), node="a", device="gpu0", kind="gpu")

    async with fed(ticks) as (app, pilot):
        await until(pilot, lambda: app.snapshot.records > 2)
        await press(pilot, "r")
        assert "REC" in screen_text(app)
        before = app.snapshot.records
        await until(pilot, lambda: app.snapshot.records > before + 10)
        await press(pilot, "r")
        assert "recorded to mmctl-a-" in screen_text(app)
    (path,) = tmp_path.glob("*.ndjson.zst")
    kept = list(recording.read(path, strict=True))
    assert len(kept) > 5 and kept[0].node == "a"


def test_orders_reach_the_breaker_before_the_next_record() -> None:
    orders = Orders(profiles.load("default"), "default", "enforce")
    ticks = (scenes.pool(at, scenes.START_NS + at * 10**8) for at in range(4))
    decided = orders.decided(ticks, None, acts=False)
    seen = [next(decided) for _ in range(3)]
    orders.put(Order("hold", "a17", "gpu0"))
    seen += [next(decided) for _ in range(4)]
    orders.changes.switch("off")
    seen += list(decided)
    whats = [record.what for record in seen if isinstance(record, Event)]
    assert whats.index("order") < whats.index("isolate")
    assert [r.mode for r in seen if isinstance(r, Event) and r.what == "mode"] == ["off"]


async def test_a_mode_that_acts_on_nothing_takes_no_orders(burst) -> None:
    import msgspec

    async with shown(msgspec.structs.replace(burst, mode="observe"), orders=default_orders()) as (
        app,
        pilot,
    ):
        await press(pilot, "T")
        assert len(app.screen_stack) == 1 and "mode observe acts on nothing" in screen_text(app)


def test_a_second_screen_only_watches(clean_home) -> None:
    from mmctl.cli.top import _store

    first, told = _store(["host:"])
    assert told is None
    none, told = _store(["host:"])
    assert none is None and "this screen only watches" in told
    first.close()


async def test_a_full_disk_ends_the_recording_and_nothing_else() -> None:
    if not Path("/dev/full").exists():
        pytest.skip("this system has no /dev/full")

    def ticks(stop):
        while not stop.wait(0.02):
            yield Device(ts_ns=time.time_ns(), node="a", device="gpu0", kind="gpu")

    async with fed(ticks) as (app, pilot):
        await until(pilot, lambda: app.snapshot.records > 2)

        class Full:
            path = Path("night.ndjson")

            def __init__(self) -> None:
                self.file = open("/dev/full", "wb", buffering=0)  # noqa: SIM115

            def write(self, record) -> None:
                self.file.write(encode(record))

            def close(self) -> None:
                self.file.close()

        app._feed.record_to(Full())
        app._choose(recording="night.ndjson")
        await until(pilot, lambda: app.snapshot.notice is not None)
        assert "No space left" in app.snapshot.notice
        before = app.snapshot.records
        await until(pilot, lambda: app.snapshot.records > before + 3)
        assert app.ui.recording is None and "REC" not in screen_text(app)


async def test_the_picture_follows_the_check_under_the_cursor(burst) -> None:
    async with shown(burst) as (app, pilot):
        await press(pilot, "4")
        assert "Canary red_circle" in screen_text(app)
        await press(pilot, "down")
        assert "Canary digit_seven" in screen_text(app) and "▀" in screen_text(app)
        await press(pilot, "end")
        assert "▸ text BLEU-4" in screen_text(app) and "Canary" not in screen_text(app)
        await press(pilot, "home")
        assert "Canary red_circle" in screen_text(app)


MOVES = [
    # keys one after the other, each with what the choice then is
    ("1", "device", "j 1, down 2, k 1, up 0, pagedown 10, pageup 0, end 12, home 0"),
    ("3", "event", "j 1, down 2, k 1, up 0, pagedown 8, pageup 0, end 8, home 0"),
    ("3", "scroll", "l 3, right 6, h 3, left 0"),
    ("4", "scroll", "j 1, down 2, k 1, up 0, pagedown 3, pageup 0, end 3, home 0"),
    ("5", "placement", "j 1, down 2, k 1, up 0, pagedown 3, pageup 0, end 3, home 0"),
    ("6", "lane", "j 1, down 2, k 1, up 0, pagedown 5, pageup 0, end 5, home 0"),
    ("6", "trace_back", "left 0, plus 0, equals_sign 0, h 1, left 2, l 1, right 0, minus 0"),
    ("6", "trace_zoom", "plus 1, equals_sign 2, minus 1, escape 0"),
    ("2", "level", "plus 0, minus 1, minus 2, equals_sign 1"),
    ("2", "layer", "m modality, m free, m age, m pages, m conflict"),
]


@pytest.mark.parametrize(("screen", "field", "told"), MOVES)
async def test_every_movement(everything, screen: str, field: str, told: str) -> None:
    async with shown(everything) as (app, pilot):
        await press(pilot, screen)
        for step in told.split(", "):
            key, wanted = step.split(" ")
            await press(pilot, key)
            assert str(getattr(app.ui, field)) == wanted, step


async def test_the_cell_under_the_cursor_moves_by_every_key(everything) -> None:
    async with shown(everything) as (app, pilot):
        await press(pilot, "2", "down")
        (back, row), last = app.ui.cell, app.view.drawn.rows.row_count - 1
        for key, dx, dy in (("h", 1, 0), ("l", -1, 0), ("left", 1, 0), ("right", -1, 0),
                            ("k", 0, -1), ("j", 0, 1), ("up", 0, -1), ("down", 0, 1)):  # fmt: skip
            await press(pilot, key)
            back, row = back + dx, row + dy
            assert app.ui.cell == (back, row), key
        for key, wanted in (("end", last), ("pageup", last - 10), ("home", 0), ("pagedown", 10)):
            await press(pilot, key)
            assert app.ui.cell == (back, wanted), key
        await press(pilot, "z")
        zoomed = app.ui.rows
        await press(pilot, "x")
        assert zoomed is not None and app.ui.rows is None


def test_every_key_stands_in_a_test() -> None:
    """A key that no test presses may do nothing, and nobody would see it."""
    pressed = Path(__file__).read_text().replace("THRVMP", '"T", "H", "R", "V", "M", "P"')
    missing = [
        name
        for key in KEYS
        for name in key.keys.split(",")
        if not name.isdigit() and not re.search(rf'["\s]{re.escape(name)}(?:"| \w)', pressed)
    ]
    assert missing == []
