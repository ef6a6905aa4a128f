"""Pictures of every screen, compared with the ones that a person has looked at.

After a wanted change: ``pytest tests/tui/test_pictures.py --snapshot-update``, then look at
what changed before it is committed.
"""

from __future__ import annotations

import msgspec
import pytest
import scenes

from mmctl.engine import profiles
from mmctl.engine.records import Device, Event
from mmctl.tui import SCREENS
from mmctl.tui.app import Top
from mmctl.tui.lines import ASCII
from mmctl.tui.model import Model
from mmctl.tui.orders import Orders
from mmctl.tui.playback import Progress
from mmctl.tui.snapshot import Snapshot
from mmctl.tui.ui import Ui

WIDE, MIDDLE, NARROW = (160, 50), (100, 30), (80, 24)


def picture(snap_compare, snapshot: Snapshot, size, press=(), theme="calm", orders=None, bar=False,
            **choices):  # fmt: skip
    """Compare the screen of ``snapshot`` after ``press``, at a clock that stands still.

    Only with ``bar`` the keys at the bottom are in it: a new key or screen changes that one.
    """
    now = (snapshot.newest_ns or 0) + 100_000_000
    ui = Ui(now_ns=now, sources=("demo:burst",), cost=(0.08, 48 << 20), **choices)
    app = Top(ui, clock=lambda: now, theme_name=theme, orders=orders)

    async def before(pilot) -> None:
        app.query_one("#keys").display = bar
        app.post_message(Top.Fresh(snapshot))
        await pilot.pause()
        for key in press:
            await pilot.press(key)
        for _ in range(4):
            await pilot.pause()

    assert snap_compare(app, terminal_size=size, run_before=before)


@pytest.fixture(scope="module")
def everything() -> Snapshot:
    """The burst, and beside it what schedule and traces show."""
    model = Model()
    for record in [*scenes.burst(40), *scenes.links(), *scenes.placements(), *scenes.spans(),
                   *scenes.sharing()]:  # fmt: skip
        model.add(record)
    return model.snapshot()


@pytest.fixture(scope="module")
def fleet() -> Snapshot:
    """The burst with what a scheduler has in flight."""
    model = Model()
    for record in [*scenes.burst(40), *scenes.links(), *scenes.placements(), *scenes.flight()]:
        model.add(record)
    return model.snapshot()


@pytest.mark.parametrize("size", [WIDE, MIDDLE, NARROW], ids=["wide", "middle", "narrow"])
def test_what_is_in_flight(snap_compare, fleet: Snapshot, size) -> None:
    picture(snap_compare, fleet, size, screen="schedule", press=["down"])


@pytest.mark.parametrize("size", [WIDE, NARROW], ids=["wide", "narrow"])
@pytest.mark.parametrize("screen", SCREENS)
def test_screen(snap_compare, everything: Snapshot, screen: str, size) -> None:
    picture(snap_compare, everything, size, screen=screen)


@pytest.mark.parametrize("screen", ["overview", "heatmap"])
def test_screen_of_middle_size(snap_compare, everything: Snapshot, screen: str) -> None:
    picture(snap_compare, everything, MIDDLE, screen=screen)


@pytest.mark.parametrize("screen", SCREENS)
@pytest.mark.parametrize("size", [WIDE, NARROW], ids=["wide", "narrow"])
def test_empty(snap_compare, screen: str, size) -> None:
    picture(snap_compare, Snapshot(), size, screen=screen)


@pytest.mark.parametrize("screen", SCREENS)
def test_lost_source_on_every_screen(snap_compare, everything: Snapshot, screen: str) -> None:
    picture(snap_compare, lost(everything), MIDDLE, screen=screen)


def lost(snapshot: Snapshot) -> Snapshot:
    """Twelve seconds after the engine's page was last read."""
    assert snapshot.newest_ns is not None
    since = snapshot.newest_ns - 12 * 10**9
    down = (("http://127.0.0.1:8000/metrics", "connection refused", since),)
    return msgspec.structs.replace(snapshot, down=down)


@pytest.mark.parametrize("screen", ["overview", "events", "recovery", "schedule", "traces"])
@pytest.mark.parametrize("theme", ["light", "contrast", "sixteen"])
def test_theme_of_every_screen(snap_compare, everything: Snapshot, theme: str, screen) -> None:
    picture(snap_compare, everything, MIDDLE, screen=screen, theme=theme)


def test_picking_a_profile(snap_compare, everything: Snapshot, monkeypatch) -> None:
    known = [("calm-node", "what a quiet node needs"), ("default", "Rules fit for real telemetry")]
    monkeypatch.setattr(Top, "_profiles", lambda _: known)
    picture(snap_compare, everything, NARROW, press=["P"], orders=Orders(profiles.load("default")))


@pytest.mark.parametrize("theme", ["light", "contrast", "sixteen"])
def test_theme(snap_compare, everything: Snapshot, theme: str) -> None:
    picture(snap_compare, everything, MIDDLE, screen="heatmap", theme=theme, cell=(4, 12))


@pytest.mark.parametrize("layer", ["modality", "free", "age", "pages"])
def test_layer(snap_compare, everything: Snapshot, layer: str) -> None:
    picture(snap_compare, everything, MIDDLE, screen="heatmap", layer=layer, cell=(4, 12))


def test_ascii(snap_compare, everything: Snapshot) -> None:
    picture(snap_compare, everything, MIDDLE, screen="overview", glyphs=ASCII)


def test_bar_of_keys(snap_compare, everything: Snapshot) -> None:
    picture(snap_compare, everything, WIDE, screen="heatmap", bar=True)


def test_loading(snap_compare) -> None:
    picture(snap_compare, Snapshot(), MIDDLE)


def test_lost_source(snap_compare, everything: Snapshot) -> None:
    picture(snap_compare, lost(everything), NARROW)


def test_a_recording_plays(snap_compare, everything: Snapshot) -> None:
    moments = tuple(scenes.START_NS + int(at * 1e9) for at, _ in scenes.decisions())
    progress = Progress(scenes.START_NS, everything.newest_ns + 20 * 10**9, moments, True, 4.0)
    picture(snap_compare, everything, NARROW, screen="events", playback=progress, live=False)


def test_failed_recovery(snap_compare) -> None:
    model = Model()
    for record in scenes.burst(26):
        model.add(record)
    failed = Event(
        ts_ns=scenes.START_NS + 27 * 10**9, node="a17", device="gpu0", what="verify",
        mode="enforce", took_ns=10**9,
        evidence={"verdict": "failed", "checks": [
            {"name": "red_circle", "value": "blue", "golden": "red", "tolerance": "exact",
             "passed": False},
            {"name": "image embedding cosine", "value": None, "golden": 1.0, "passed": None},
        ]},
    )  # fmt: skip
    again = Event(
        ts_ns=scenes.START_NS + 27 * 10**9, node="a17", device="gpu0", what="state", state="open",
        mode="enforce", evidence={"reason": "verification failed", "deadline_s": 5.0},
    )  # fmt: skip
    for record in (failed, again):
        model.add(record)
    picture(snap_compare, model.snapshot(), MIDDLE, screen="recovery")


def test_eight_devices_with_faults(snap_compare) -> None:
    model = Model()
    at = scenes.START_NS
    for second in range(12):
        at = scenes.START_NS + second * 10**9
        for index in range(7):
            model.add(scenes.gpu(second, at, index))
    lost = dict.fromkeys(("sm_ratio", "bandwidth_ratio", "power_w"), "GPU is lost")
    model.add(Device(ts_ns=at, node="a17", device="gpu7", kind="gpu", model="H100 80GB", xid=79,
                     throttle=("hw_slowdown",), absent=lost))  # fmt: skip
    model.add(Event(ts_ns=at, node="a17", device="gpu7", what="fault", message="Xid 79: GPU has"
                    " fallen off the bus"))  # fmt: skip
    picture(snap_compare, model.snapshot(), (120, 30), press=["end"])


def test_help(snap_compare, everything: Snapshot) -> None:
    picture(snap_compare, everything, (130, 40), press=["question_mark"])


def test_question_before_an_action(snap_compare, everything: Snapshot) -> None:
    picture(snap_compare, everything, NARROW, press=["T"], orders=Orders(profiles.load("default")))


def test_too_small(snap_compare, everything: Snapshot) -> None:
    picture(snap_compare, everything, (40, 8))


def test_the_readme_shows_the_dashboard_as_it_is() -> None:
    """After a wanted change: ``python tests/tui/dashboard.py``, and look at it."""
    import re

    import dashboard

    def drawn(svg: str) -> str:
        return re.sub(r"terminal-\d+", "terminal", svg)  # a name made from the picture's own hash

    assert drawn(dashboard.svg()) == drawn(dashboard.PICTURE.read_text())
