"""Backends that die: every request is answered, none is sent twice, none is used unverified."""

from __future__ import annotations

import asyncio
import gc
import signal
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
from aiohttp import web

from mmctl.engine.breaker.state import Command
from tests.integration.guard.parts import Engine, Killable
from tests.integration.guard.test_safety import CHAT, chat, data_url, png, running

Guarded = Callable[..., Awaitable[str]]
UNUSED = "http://127.0.0.1:9"  # discard: nobody listens there


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[list[Killable]]:
    made = [Killable(tmp_path / f"{name}.log") for name in ("a", "b")]
    for one in made:
        one.start()
    yield made
    for one in made:
        one.kill()


async def status(client: aiohttp.ClientSession, url: str) -> dict[str, Any]:
    async with client.get(url + "/mmctl/status") as answer:
        found: dict[str, Any] = await answer.json()
    return found


async def until(
    client: aiohttp.ClientSession, url: str, number: int, *states: str, within_s: float = 30
) -> dict[str, Any]:
    """Wait until a backend is in one of ``states``, and at rest."""
    end = time.monotonic() + within_s
    while time.monotonic() < end:
        backend: dict[str, Any] = (await status(client, url))["backends"][number]
        if backend["state"] in states:
            return backend
        await asyncio.sleep(0.05)
    raise AssertionError(f"never {states}: {backend}")


async def known(client: aiohttp.ClientSession, url: str, closed: bool = True) -> None:
    """Wait until goldens are recorded and, ``closed``, the breaker has judged every backend."""
    for _ in range(400):
        found = await status(client, url)
        judged = not closed or all(b["state"] == "closed" for b in found["backends"])
        if found["goldens"] and judged:
            return
        await asyncio.sleep(0.05)
    raise AssertionError(found)


def request(number: int) -> bytes:
    """One of a mixture: streams and answers at once, one in five with an image."""
    words = {"type": "text", "text": f"number-{number}"}
    content: list[Any] = [words]
    if number % 5 == 0:
        content.insert(0, {"type": "image_url", "image_url": {"url": data_url(png(64, 64))}})
    asked = {"model": "tiny", "stream": number % 2 == 0, "max_tokens": 8}
    return msgspec.json.encode({**asked, "messages": [{"role": "user", "content": content}]})


async def test_one_of_two_is_killed_under_load(
    pair: list[Killable], guarded: Guarded, client: aiohttp.ClientSession
) -> None:
    url = await guarded([one.url for one in pair], "enforce", deadline_s=20, requests=16,
                        probe_s=0.1)  # fmt: skip
    await known(client, url)

    async def one(number: int) -> str:
        await asyncio.sleep(number % 40 / 40)
        began = time.monotonic()
        async with client.post(url + CHAT, data=request(number)) as answer:
            body = await answer.read()
        assert time.monotonic() - began < 21
        if answer.status == 200 and b"w9" in body:
            return "whole"
        error = body.rpartition(b"data: ")[2] if answer.status == 200 else body
        return str(msgspec.json.decode(error)["error"]["code"])

    asked = [asyncio.create_task(one(number)) for number in range(200)]
    await asyncio.sleep(0.5)
    pair[1].kill()
    outcomes = Counter(await asyncio.gather(*asked))
    received = Counter(line for one_ in pair for line in one_.received())
    assert set(outcomes) <= {"whole", "backend_died"}
    assert max(received.values()) == 1  # nothing was sent twice
    assert outcomes["whole"] >= 200 - 16  # only what was in work there was lost
    assert outcomes["backend_died"] >= 1
    assert await running(url) == [0] * 5
    # It is asked canaries before it is used, and it is used again.
    backend = await until(client, url, 1, "open")
    assert not backend["takes"]
    before = len(pair[1].received())
    pair[1].start()
    seen: set[str] = set()
    for number in range(1000, 1400):
        backend = (await status(client, url))["backends"][1]
        seen.add(backend["state"])
        if backend["state"] in ("open", "verifying"):
            assert len(pair[1].received()) == before
        if backend["state"] == "closed":
            break
        async with client.post(url + CHAT, data=request(number)) as answer:
            assert answer.status == 200
    assert {"half_open", "closed"} <= seen
    assert len(pair[1].received()) > before
    whats: list[str] = []
    while "close" not in whats:  # the breaker's thread tells a moment after it has decided
        whats = [event["what"] for event in (await status(client, url))["events"]]
    assert whats.index("backend_down") < whats.index("verify") < whats.index("half_open")
    assert whats.index("half_open") < whats.index("close")


async def test_wrong_answers_keep_it_out(
    engine: Engine, guarded: Guarded, client: aiohttp.ClientSession
) -> None:
    """A server that comes back and answers its canaries otherwise gets no traffic."""
    other = Engine()
    await other.start()
    url = await guarded([engine.url, other.url], "enforce", probe_s=0.1)
    await known(client, url)
    await other.stop()
    for number in range(8):
        async with client.post(url + CHAT, data=request(number)) as answer:
            assert answer.status == 200
    await until(client, url, 1, "open")

    other.words = "quite other words"
    await other.start(other.port)
    for _ in range(400):
        events = (await status(client, url))["events"]
        verdicts = [e["evidence"].get("verdict") for e in events if e["what"] == "verify"]
        if verdicts:
            break
        await asyncio.sleep(0.05)
    assert verdicts[0] == "inconsistent"
    other.seen.clear()
    for number in range(20):
        async with client.post(url + CHAT, data=request(number)) as answer:
            assert answer.status == 200
    assert other.seen == []
    await other.stop()


@pytest.mark.parametrize("mode", ["observe", "enforce"])
async def test_what_was_not_sent_goes_to_another(
    engine: Engine, guarded: Guarded, client: aiohttp.ClientSession, mode: str
) -> None:
    url = await guarded([UNUSED, engine.url], mode)
    for number in range(6):
        async with client.post(url + CHAT, data=request(number)) as answer:
            assert answer.status == 200
    assert len(engine.seen) == 6
    alone = await guarded([UNUSED], mode)
    async with client.post(alone + CHAT, data=request(1)) as answer:
        assert (answer.status, (await answer.json())["error"]["code"]) == (503, "no_backend")
        assert int(answer.headers["Retry-After"]) >= 1
    async with client.get(alone + "/health") as answer:
        assert (answer.status, (await answer.json())["status"]) == (503, "down")
    async with client.get(alone + "/ready") as answer:
        assert answer.status == 503


@pytest.mark.parametrize("mode", ["observe", "enforce"])
async def test_death_in_mid_stream_ends_with_an_error_event(
    engine: Engine, guarded: Guarded, client: aiohttp.ClientSession, mode: str
) -> None:
    async def half(request: web.Request, body: bytes) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(b'data: {"choices": [{"delta": {"content": "one"}}]}\n\n')
        await response.write(b'data: {"choices": [{"del')
        await asyncio.sleep(0.1)
        assert request.transport is not None
        request.transport.abort()
        return response

    engine.answer = half
    url = await guarded([engine.url], mode)
    async with client.post(url + CHAT, data=request(2)) as answer:
        events = (await answer.read()).split(b"\n\n")
    assert b'"one"' in events[0]
    assert msgspec.json.decode(events[1].removeprefix(b"data: "))["error"]["code"] == "backend_died"
    assert events[2:] == [b""]
    assert await running(url) == [0, 0, 0, 0]


async def test_deadline(engine: Engine, guarded: Guarded, client: aiohttp.ClientSession) -> None:
    async def never(request: web.Request, body: bytes) -> web.StreamResponse:
        if b'stream": true' not in body and b'"stream":true' not in body:
            await asyncio.sleep(30)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(b"data: {}\n\n")
        await asyncio.sleep(30)
        return response

    engine.answer = never
    url = await guarded([engine.url], "enforce", deadline_s=0.5)
    async with client.post(url + CHAT, data=request(1)) as answer:
        assert (answer.status, (await answer.json())["error"]["code"]) == (504, "deadline")
    async with client.post(url + CHAT, data=request(2)) as answer:
        assert b'"deadline"' in await answer.read()
    await asyncio.sleep(0.1)
    assert (len(engine.gone), await running(url)) == (2, [0, 0, 0, 0])


async def test_an_image_that_kills_is_kept_out(
    pair: list[Killable], guarded: Guarded, client: aiohttp.ClientSession
) -> None:
    killer = chat(data_url(png(40, 40)), max_tokens=4, user="linger")
    url = await guarded([pair[0].url], "enforce", probe_s=0.1)
    await known(client, url)
    asked = asyncio.create_task(client.post(url + CHAT, data=killer).__aenter__())
    while killer not in pair[0].received():
        await asyncio.sleep(0.01)
    pair[0].kill()
    assert (await asked).status == 502
    await until(client, url, 0, "open")
    pair[0].start()
    await until(client, url, 0, "half_open")
    async with client.post(url + CHAT, data=killer) as answer:
        assert (answer.status, (await answer.json())["error"]["code"]) == (422, "image_quarantined")
    async with client.post(url + CHAT, data=chat(data_url(png(41, 41)), max_tokens=4)) as answer:
        assert answer.status == 200
    assert pair[0].received().count(killer) == 1


async def test_a_death_between_requests_is_found(
    pair: list[Killable], guarded: Guarded, client: aiohttp.ClientSession
) -> None:
    """No request has to fail for it; a server that only stands still for a while is not dead."""
    url = await guarded([one.url for one in pair], "enforce", probe_s=0.1, connect_s=0.2)
    await known(client, url, closed=False)
    process = pair[0].process
    assert process is not None
    process.send_signal(signal.SIGSTOP)
    await asyncio.sleep(1.5)  # several probes, and one look
    still = (await status(client, url))["backends"][0]
    process.send_signal(signal.SIGCONT)
    assert (still["takes"], still["down"]) == (True, None)

    pair[1].kill()
    backend = await until(client, url, 1, "open")
    assert (backend["takes"], backend["down"]) == (False, "connection refused")
    pair[1].start()
    await until(client, url, 1, "half_open")
    events = (await status(client, url))["events"]
    assert [e["device"] for e in events if e["what"] == "backend_down"] == [backend["backend"]]
    assert any(e["what"] == "verify" and e["device"] == backend["backend"] for e in events)
    assert [one.received() for one in pair] == [[], []]


async def test_a_restart_between_requests_is_found(
    engine: Engine, guarded: Guarded, client: aiohttp.ClientSession
) -> None:
    """It answered whenever it was asked, and is another process: its canaries come first."""
    engine.started_s = 1000.0
    url = await guarded([engine.url], "enforce", probe_s=0.05)
    await known(client, url, closed=False)
    before = engine.canaries
    engine.started_s = 2000.0
    await until(client, url, 0, "half_open")
    assert engine.canaries > before
    (down,) = (e for e in (await status(client, url))["events"] if e["what"] == "backend_down")
    assert "restarted" in down["message"]


async def test_all_half_open_serve_without_waiting(
    pair: list[Killable], guarded: Guarded, client: aiohttp.ClientSession
) -> None:
    """A share spares requests only where another backend can have them."""
    url = await guarded([one.url for one in pair], "enforce", probe_s=0.1)
    await known(client, url, closed=False)
    for one in pair:
        one.kill()
    for number in (0, 1):
        await until(client, url, number, "open")
    for one in pair:
        one.start()
    for number in (0, 1):
        await until(client, url, number, "half_open")
    async with client.get(url + "/ready") as answer:
        assert answer.status == 200
    for number in range(4):
        async with client.post(url + CHAT, data=request(number)) as answer:
            assert (answer.status, "wait=0.0" in answer.headers["X-Mmctl-Route"]) == (200, True)


async def test_nothing_begins_once_it_has_ended(engine: Engine, guarded: Guarded) -> None:
    """The breaker ends after the session to the backends has: what it orders then is let be."""
    await guarded([engine.url], "enforce")
    guard = guarded.running[-1]  # type: ignore[attr-defined]
    problems: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, told: problems.append(told))
    await guard.stop()
    for action in ("rebuild", "verify", "respond", "admit"):
        guard._command(Command(id="late", device=guard.backends[0].name, action=action))
        await asyncio.sleep(0.1)
    guard.health.unreachable(guard.backends[0], "refused", True)
    await asyncio.sleep(0.1)
    gc.collect()  # a task that failed says so when it goes
    assert problems == []
