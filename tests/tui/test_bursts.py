"""Many keys at once: key repeat, a paste, a hand that is faster than the screen."""

from __future__ import annotations

import random

import pytest
import scenes
from test_app import default_orders, ordered, press, shown
from textual import events
from textual.pilot import Pilot

from mmctl.tui import SCREENS
from mmctl.tui.app import KEYS, Top
from mmctl.tui.model import Model
from mmctl.tui.once import screen_text
from mmctl.tui.orders import Order

LEAVES = {"q", "ctrl+q", "ctrl+c"}
COMMANDS = [key for entry in KEYS for key in entry.keys.split(",") if key not in LEAVES]
ANSWERS = ["y", "n", "x", "enter", "escape"]
SMALL = (60, 15)
NAMED = {"space": " ", "slash": "/", "comma": ",", "full_stop": ".", "colon": ":"}


def burst_of(app: Top, *names: str) -> None:
    """All keys before the first is answered, as a terminal hands on a paste."""
    for name in names:
        app.post_message(events.Key(name, NAMED.get(name, name if len(name) == 1 else None)))


async def answered(app: Top, pilot: Pilot[int]) -> None:
    """Until no key waits any more."""
    for _ in range(2):
        await pilot.pause()
        while not app._message_queue.empty():
            await pilot.pause(0.01)


@pytest.fixture(scope="module")
def scene():
    model = Model()
    for record in [*scenes.burst(30), *scenes.links(), *scenes.placements(), *scenes.spans()]:
        model.add(record)
    return model.snapshot()


@pytest.fixture(autouse=True)
def apart(tmp_path, monkeypatch, clean_home) -> None:
    monkeypatch.chdir(tmp_path)  # s, e and r write where one stands


OPENED = {"help": "question_mark", "question": "T", "profiles": "P", "palette": "colon",
          "filter": "slash"}  # fmt: skip


@pytest.mark.parametrize("opens", OPENED.values(), ids=OPENED)
async def test_a_burst_into_whatever_is_open_leaves_the_screen_alive(scene, opens) -> None:
    async with shown(scene, size=SMALL, orders=default_orders()) as (app, pilot):
        for screen in SCREENS:
            app.action_go(screen)
            for keys in (["x", "y", "z", "w"], ["enter"] * 4, [opens] * 4):
                burst_of(app, opens, *keys)
                await pilot.pause()
                burst_of(app, *["escape"] * 3)
                await answered(app, pilot)
                assert app.is_running and app.error is None
                assert len(app.screen_stack) == 1


async def test_a_thousand_keys_in_bursts(scene) -> None:
    pick = random.Random(1)
    keys = pick.choices([*COMMANDS, *ANSWERS * 4, *OPENED.values()], k=1_000)
    async with shown(scene, size=SMALL, orders=default_orders()) as (app, pilot):
        while keys:
            size = pick.choice((1, 2, 7, 40))
            burst_of(app, *keys[:size])
            del keys[:size]
            if pick.random() < 0.5:
                await answered(app, pilot)
        await answered(app, pilot)
        assert app.is_running and app.error is None
        burst_of(app, *["escape"] * 3, "2")
        await answered(app, pilot)
        assert app.ui.screen == "heatmap" and len(app.screen_stack) == 1


@pytest.mark.parametrize("seed", range(2))
async def test_a_burst_does_what_the_same_keys_do_one_by_one(scene, seed: int) -> None:
    """Whatever is opened and closed on the way, nothing gets lost or lands elsewhere."""
    pick = random.Random(seed)
    calm = [key for key in COMMANDS if key not in ("colon", "ctrl+p", "s", "e", "r")]
    keys = pick.choices([*calm, *ANSWERS * 2, *[key for key in OPENED.values() if key != "colon"]],
                        k=60)  # fmt: skip
    ends = []
    for at_once in (True, False):
        orders, given = default_orders(), []
        orders.put = given.append
        async with shown(scene, orders=orders) as (app, pilot):
            if at_once:
                burst_of(app, *keys)
            else:
                await press(pilot, *keys)
            await answered(app, pilot)
            chosen = {name: getattr(app.ui, name) for name in ("screen", "filter", "paused")}
            ends.append((chosen, app.theme, given, ordered(orders), len(app.screen_stack)))
    assert ends[0] == ends[1]


async def test_a_question_is_answered_by_the_next_key_however_fast_it_comes(scene) -> None:
    orders, given = default_orders(), []
    orders.put = given.append
    async with shown(scene, orders=orders) as (app, pilot):
        burst_of(app, "T", "H", "y", "y")  # H answers no, the rest are keys of the screen
        await answered(app, pilot)
        assert given == [] and "nothing was done" in screen_text(app)
        burst_of(app, "j", "T", "y", "y")
        await answered(app, pilot)
        assert given == [Order("trip", "a17", "gpu1")]


async def test_what_is_typed_at_once_stands_in_the_filter(scene) -> None:
    async with shown(scene) as (app, pilot):
        burst_of(app, "slash", *"npu", "enter", "3")
        await answered(app, pilot)
        assert (app.ui.filter, app.ui.screen) == ("npu", "events")
        burst_of(app, "slash", *"gpu", "escape", "1")
        await answered(app, pilot)
        assert (app.ui.filter, app.ui.screen) == ("", "overview")


async def test_what_is_typed_at_once_stands_in_the_palette(scene) -> None:
    async with shown(scene) as (app, pilot):
        burst_of(app, "colon", *"theme", "space", *"light")
        await answered(app, pilot)
        assert app.focused.value == "theme light"


async def test_two_clicks_close_a_dialog_once(scene) -> None:
    async with shown(scene) as (app, pilot):
        await press(pilot, "question_mark")
        dialog = app.screen
        for _ in range(3):
            dialog.on_click()
        await answered(app, pilot)
        assert app.is_running and len(app.screen_stack) == 1
