"""Placing without a server: affinity that guards agree on, lanes, shares."""

from __future__ import annotations

import pytest

pytest.importorskip("aiohttp", reason="the guard needs the extra 'guard'")

from mmctl.engine import profiles
from mmctl.guard.admission import Admission, Ticket
from mmctl.guard.backends import Backend, parse
from mmctl.guard.seeing import Image, Seen
from mmctl.guard.tokens import Tokens

PROFILE = profiles.load("default").profile
URLS = [f"http://10.0.0.{number}:8000" for number in range(1, 6)]


def admission(count: int = 5, enforce: bool = True) -> Admission:
    return Admission(PROFILE.guard, PROFILE.schedule, parse(URLS[:count]), enforce)


def ticket(number: int, pair: str = "", images: int = 0, turns: int = 0) -> Ticket:
    made = Ticket(number, "t")
    pictures = [Image(part={}, digest=str(n)) for n in range(images)]
    made.see(Seen(document={}, stream=True, pair=pair, images=pictures, turns=turns))
    made.tokens = Tokens(1000 * images, 100)
    return made


async def test_guards_agree_without_sharing_anything() -> None:
    one, other = admission(), admission()
    homes = set()
    for number in range(40):
        asked = [ticket(number, pair=f"talk-{number}", turns=1) for _ in range(2)]
        places = [await one.enter(asked[0]), await other.enter(asked[1])]
        assert places[0].name == places[1].name
        homes.add(places[0].name)
        one.leave(asked[0])
        other.leave(asked[1])
    assert len(homes) == 5
    # A backend less moves only what was there.
    fewer = admission(4)
    for number in range(40):
        asked = [ticket(number, pair=f"talk-{number}", turns=1) for _ in range(2)]
        before, after = await one.enter(asked[0]), await fewer.enter(asked[1])
        assert before.name == after.name or before.name == "10.0.0.5:8000"
        one.leave(asked[0])
        fewer.leave(asked[1])


async def test_images_leave_a_backend_to_text() -> None:
    placing = admission(2)
    first = ticket(1)
    await placing.enter(first)
    placing.leave(first)
    images = [ticket(2 + number, pair=f"i{number}", images=1) for number in range(6)]
    places = {(await placing.enter(image)).name for image in images}
    assert len(places) == 1
    texts = [ticket(20 + number) for number in range(6)]
    assert {(await placing.enter(text)).name for text in texts}.isdisjoint(places)


async def test_a_share_is_kept_exactly() -> None:
    placing = admission(2)
    half: Backend = placing.backends["10.0.0.2:8000"]
    half.share = 0.2
    counts = dict.fromkeys(placing.backends, 0)
    for number in range(100):
        asked = ticket(number)
        counts[(await placing.enter(asked)).name] += 1
        placing.leave(asked)
    assert counts["10.0.0.2:8000"] == 20
    half.share = 0.0
    asked = ticket(200)
    assert (await placing.enter(asked)).name == "10.0.0.1:8000"


async def test_shares_hold_nothing_that_nobody_else_can_take() -> None:
    placing = admission(3)
    whole, *halves = placing.backends.values()
    for half in halves:
        half.share = 0.2
    whole.down = "connection refused"
    for number in range(20):
        asked = ticket(number)
        assert await placing.enter(asked) in halves
        assert not asked.waited
        placing.leave(asked)
    whole.down, whole.models = None, ("other",)  # it takes all, of another model
    for half in halves:
        half.models = ("tiny",)
    asked = ticket(30)
    asked.model = "tiny"
    assert await placing.enter(asked) in halves
    assert not asked.waited


async def test_everything_is_given_back() -> None:
    placing = admission(3)
    asked = [ticket(number, images=number % 4 == 0) for number in range(50)]
    for one in asked:
        one.cost_tokens = 100
        await placing.enter(one)
    for one in asked:
        placing.leave(one)
        placing.leave(one)  # twice changes nothing
    for backend in placing.backends.values():
        assert (backend.in_flight, backend.images, backend.cost_tokens) == (0, 0, 0)
