"""What becomes of requests under pressure, and who goes first."""

from __future__ import annotations

import asyncio
import base64
import io
import time
from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp
import msgspec
import pytest
from aiohttp import web

from tests.integration.guard.parts import Engine, completion
from tests.integration.guard.test_safety import CHAT, chat, data_url

Image = pytest.importorskip("PIL.Image", reason="images are scaled by Pillow (extra 'guard')")
Guarded = Callable[..., Awaitable[str]]
SHRINK = frozenset({"shrink_images"})


def picture(width: int, height: int, kind: str = "JPEG", **more: Any) -> str:
    out = io.BytesIO()
    Image.effect_noise((width, height), 60).convert("RGB").save(out, kind, **more)
    return data_url(out.getvalue(), kind.lower())


def images_of(body: bytes) -> list[Any]:
    """The images of a request as they arrived."""
    document = msgspec.json.decode(body)
    parts = document["messages"][0]["content"]
    urls = [part["image_url"]["url"] for part in parts if part["type"] == "image_url"]
    return [Image.open(io.BytesIO(base64.b64decode(url.partition(",")[2]))) for url in urls]


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
async def test_images_shrink_to_the_budget(
    engine: Engine, guarded: Guarded, client: aiohttp.ClientSession, kind: str
) -> None:
    """784 pixels are a token where nothing of the model is known."""
    url = await guarded([engine.url], "enforce", SHRINK, image_tokens=200)
    async with client.post(url + CHAT, data=chat(picture(640, 480, kind), seed=7)) as answer:
        assert answer.status == 200
        receipt = answer.headers["X-Mmctl-Route"]
    body = engine.seen[0][2]
    (arrived,) = images_of(body)
    assert arrived.format == kind
    assert 150 < arrived.width * arrived.height / 784 <= 200
    assert arrived.width / arrived.height == pytest.approx(640 / 480, rel=0.02)
    assert msgspec.json.decode(body)["seed"] == 7  # nothing else has changed
    assert "image_tokens=392>" in receipt


async def test_floor_and_orientation_are_kept(
    engine: Engine, guarded: Guarded, client: aiohttp.ClientSession
) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    url = await guarded([engine.url], "enforce", SHRINK, image_tokens=1, quality_floor=0.5,
                        least_side=10)  # fmt: skip
    async with client.post(url + CHAT, data=chat(picture(400, 200, exif=exif))) as answer:
        assert answer.status == 200
    (arrived,) = images_of(engine.seen[0][2])
    assert arrived.getexif()[0x0112] == 6
    assert 200 <= arrived.width <= 206  # half of its side and no less, though over the budget
    whole = await guarded([engine.url], "enforce", SHRINK, image_tokens=1, least_side=500)
    sent = chat(picture(400, 300))
    async with client.post(whole + CHAT, data=sent) as answer:
        assert answer.status == 200
    assert engine.seen[1][2] == sent


async def test_observing_says_what_it_would_do(
    engine: Engine, guarded: Guarded, client: aiohttp.ClientSession, clean_home: Any
) -> None:
    url = await guarded([engine.url], "observe", SHRINK | {"cap_output"}, image_tokens=100)
    sent = chat(picture(640, 480), max_tokens=4000)
    async with client.post(url + CHAT, data=sent) as answer:
        assert "X-Mmctl-Route" not in answer.headers
    assert engine.seen[0][2] == sent
    await asyncio.sleep(0.4)
    lines = (clean_home / "state/mmctl/breaker/audit.ndjson").read_bytes().splitlines()
    said = {e["what"]: e for e in map(msgspec.json.decode, lines)}
    assert said["shrink"]["mode"] == said["cap"]["mode"] == "observe"
    assert said["shrink"]["evidence"]["before_tokens"] == 392
    assert (
        said["cap"]["evidence"] | {"asked_tokens": 4000, "limit_tokens": 512}
        == (said["cap"]["evidence"])
    )


@pytest.mark.parametrize(
    ("path", "asked", "limited"),
    [
        (CHAT, {"max_tokens": 900}, {"max_tokens": 64}),
        (CHAT, {"max_completion_tokens": 900}, {"max_completion_tokens": 64}),
        (CHAT, {}, {"max_tokens": 64}),
        (CHAT, {"max_tokens": 10}, {"max_tokens": 10}),
        ("/v1/completions", {"prompt": "x"}, {"prompt": "x", "max_tokens": 64}),
        ("/v1/responses", {"input": "x"}, {"input": "x", "max_output_tokens": 64}),
        ("/v1/embeddings", {"input": "x"}, {"input": "x"}),
    ],
)
async def test_outputs_are_capped(
    engine: Engine, guarded: Guarded, client: aiohttp.ClientSession, path: str,
    asked: dict[str, Any], limited: dict[str, Any],
) -> None:  # fmt: skip
    url = await guarded([engine.url], "enforce", frozenset({"cap_output"}), output_tokens=64)
    async with client.post(url + path, json={"model": "tiny", **asked}) as answer:
        assert answer.status == 200
    assert msgspec.json.decode(engine.seen[0][2]) == {"model": "tiny", **limited}


async def test_capacity_holds_back_shrinks_and_refuses(
    engine: Engine, guarded: Guarded, client: aiohttp.ClientSession
) -> None:
    release = asyncio.Event()

    async def held(request: web.Request, body: bytes) -> web.StreamResponse:
        await release.wait()
        return await completion(request, body)

    engine.answer = held
    url = await guarded([engine.url], "enforce", capacity_tokens=1400, image_tokens=100, wait_s=0.5)

    async def ask(body: bytes) -> tuple[int, str]:
        async with client.post(url + CHAT, data=body) as answer:
            document = await answer.json()
            return answer.status, document.get("error", {}).get("code", "")

    # 392 tokens of image and 500 of answer; the second fits only with its image made smaller.
    first = asyncio.create_task(ask(chat(picture(640, 480), max_tokens=500)))
    await asyncio.sleep(0.1)
    second = asyncio.create_task(ask(chat(picture(640, 480), max_tokens=300)))
    await asyncio.sleep(0.1)
    status, why = await ask(chat(picture(640, 480), max_tokens=300))
    assert (status, why in ("no_room", "images_deferred")) == (503, True)
    assert await ask(chat(picture(64, 64), max_tokens=3000)) == (413, "over_capacity")
    release.set()
    assert [(await task)[0] for task in (first, second)] == [200, 200]
    widths = [image.width for _, _, body in engine.seen for image in images_of(body)]
    assert (widths[0], widths[1] < 640, len(widths)) == (640, True, 2)


async def test_text_passes_images_that_wait(
    engine: Engine, guarded: Guarded, client: aiohttp.ClientSession
) -> None:
    """Two slots for images: eight of them wait, and no text waits behind them."""

    async def slow(request: web.Request, body: bytes) -> web.StreamResponse:
        if b"image_url" in body:
            await asyncio.sleep(0.3)
        return await completion(request, body)

    engine.answer = slow
    url = await guarded([engine.url], "enforce", images=2, requests=4)

    async def ask(body: bytes) -> float:
        began = time.monotonic()
        async with client.post(url + CHAT, data=body) as answer:
            assert answer.status == 200
            await answer.read()
        return time.monotonic() - began

    images = [asyncio.create_task(ask(chat(picture(64 + n, 64)))) for n in range(8)]
    await asyncio.sleep(0.1)
    order = [asyncio.create_task(ask(b'{"model": "tiny", "stream": true}')) for _ in range(8)]
    _, pending = await asyncio.wait([*images, *order], return_when=asyncio.ALL_COMPLETED)
    assert not pending
    reached = [b"image_url" in body for _, _, body in engine.seen]
    assert reached[:2] == [True, True]
    assert reached[2:10] == [False] * 8
    assert max(task.result() for task in images) > 1.0


async def test_admission_is_limited_by_share(
    engine: Engine, guarded: Guarded, client: aiohttp.ClientSession
) -> None:
    limit = frozenset({"limit_admission"})
    url = await guarded([engine.url], "enforce", limit, admission_share=0.25)
    statuses = []
    for _ in range(12):
        async with client.post(url + CHAT, data=b'{"model": "tiny"}') as answer:
            statuses.append(answer.status)
            if answer.status == 429:
                assert answer.headers["X-Mmctl-Reason"] == "admission_limited"
                assert answer.headers["Retry-After"] == "5"
    assert (statuses.count(200), statuses.count(429)) == (3, 9)


async def test_the_queue_is_bounded(
    engine: Engine, guarded: Guarded, client: aiohttp.ClientSession
) -> None:
    async def slow(request: web.Request, body: bytes) -> web.StreamResponse:
        await asyncio.sleep(0.5)
        return await completion(request, body)

    engine.answer = slow
    url = await guarded([engine.url], "enforce", requests=1, images=1, queue=2)

    async def ask() -> int:
        async with client.post(url + CHAT, data=b'{"stream": true}') as answer:
            await answer.read()
            return answer.status

    statuses = await asyncio.gather(*(ask() for _ in range(6)))
    assert sorted(statuses) == [200, 200, 200, 429, 429, 429]


async def test_tokens_pass_as_they_come(
    engine: Engine, guarded: Guarded, client: aiohttp.ClientSession
) -> None:
    """Each event reaches the client before the backend is allowed to send the next."""
    asked: asyncio.Queue[int] = asyncio.Queue()

    async def stepwise(request: web.Request, body: bytes) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for number in range(20):
            await response.write(b"data: %d\n\n" % number)
            assert await asyncio.wait_for(asked.get(), 10) == number
        return response

    engine.answer = stepwise
    for mode in ("observe", "enforce"):
        url = await guarded([engine.url], mode)
        async with client.post(url + CHAT, data=b'{"stream": true}') as answer:
            for number in range(20):
                assert await answer.content.readuntil(b"\n\n") == b"data: %d\n\n" % number
                asked.put_nowait(number)
