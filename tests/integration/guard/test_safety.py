"""Whatever is sent, the guard answers with an HTTP error or the backend's answer, and goes on."""

from __future__ import annotations

import asyncio
import base64
import io
import struct
import zlib
from collections.abc import Awaitable, Callable

import aiohttp
import msgspec
import pytest
from aiohttp import web
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.integration.guard.parts import Engine, raw

Guarded = Callable[..., Awaitable[str]]
CHAT = "/v1/chat/completions"


def chat(url: str, **more: object) -> bytes:
    part = {"type": "image_url", "image_url": {"url": url}}
    return msgspec.json.encode(
        {"model": "tiny", "messages": [{"role": "user", "content": [part]}], **more}
    )


def png(width: int, height: int, claimed: tuple[int, int] | None = None) -> bytes:
    """A grey image; ``claimed`` writes another size into its head."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        check = zlib.crc32(kind + data)
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", check)

    wide, tall = claimed or (width, height)
    head = struct.pack(">IIBBBBB", wide, tall, 8, 0, 0, 0, 0)
    rows = zlib.compress(b"".join(b"\0" + bytes(width) for _ in range(height)))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


def data_url(data: bytes, kind: str = "png") -> str:
    return f"data:image/{kind};base64," + base64.b64encode(data).decode()


async def running(url: str) -> list[int]:
    """How many requests the guard believes to be in each backend, and in the queue."""
    async with aiohttp.ClientSession() as session, session.get(url + "/mmctl/status") as answer:
        document = await answer.json()
    return [*(one["running"] for one in document["backends"]), *document["queues"].values()]


BROKEN = {
    "no json": (b"{", 400, "body_unreadable"),
    "no object": (b"[]", 400, "body_unreadable"),
    "not utf-8": (b'{"model": "\xff\xfe"}', 400, "body_unreadable"),
    "deep": (b"[" * 200_000, 400, "body_unreadable"),
    "bad base64": (chat("data:image/png;base64,@@@@"), 400, "image_unreadable"),
    "empty image": (chat("data:image/png;base64,"), 400, "image_unreadable"),
    "cut image": (chat(data_url(png(8, 8)[:18])), 400, "image_unreadable"),
    "bomb": (chat(data_url(png(8, 8, (60_000, 60_000)))), 413, "image_too_large"),
    "50 MB": (chat("data:image/png;base64," + "A" * (67 << 20)), 413, "body_too_large"),
}


@pytest.mark.parametrize("name", BROKEN)
async def test_broken_is_said_and_never_sent(
    engine: Engine, guarded: Guarded, client: aiohttp.ClientSession, name: str
) -> None:
    body, status, reason = BROKEN[name]
    url = await guarded([engine.url], "enforce")
    async with client.post(url + CHAT, data=body) as answer:
        said = await answer.json()
        assert (answer.status, said["error"]["code"]) == (status, reason)
        assert answer.headers["X-Mmctl-Reason"] == reason
    assert engine.seen == []
    assert await running(url) == [0, 0, 0, 0]


@pytest.mark.parametrize("name", BROKEN)
async def test_observing_lets_it_pass_as_it_is(
    engine: Engine, guarded: Guarded, client: aiohttp.ClientSession, name: str
) -> None:
    async def answer(request: web.Request, body: bytes) -> web.StreamResponse:
        return web.Response(status=400, text=str(len(body)))

    engine.answer = answer
    body = BROKEN[name][0]
    url = await guarded([engine.url], "observe")
    async with client.post(url + CHAT, data=body) as response:
        assert (response.status, await response.text()) == (400, str(len(body)))
    assert [seen for _, _, seen in engine.seen] == [body]


SHAPES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(
        st.sampled_from(["role", "content", "type", "image_url", "url", "text", "input_audio"]),
        inner, max_size=4,
    ), max_leaves=12,
)  # fmt: skip


@settings(max_examples=60, deadline=None,
          suppress_health_check=[HealthCheck.function_scoped_fixture])  # fmt: skip
@given(st.dictionaries(
    st.sampled_from(["model", "messages", "input", "prompt", "max_tokens", "stream", "n", "tools"]),
    SHAPES, max_size=5,
))  # fmt: skip
def test_any_shape_of_json_is_seen_without_a_crash(document: dict[str, object]) -> None:
    from mmctl.guard.seeing import look
    from mmctl.guard.tokens import Predictor

    seen = look(msgspec.json.encode(document), 10**6)
    assert Predictor().predict(seen).prompt >= 0
    assert seen.modality in ("vision", "text", "other")


NONSENSE = {
    "no http": b"hello\r\n\r\n",
    "chunk size": b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\n"
    b"Transfer-Encoding: chunked\r\n\r\nzz\r\nnot a chunk\r\n0\r\n\r\n",
    "two lengths": b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n"
    b"Content-Length: 3\r\n\r\n{}x",
    "negative": b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n",
    "header": b"POST / HTTP/1.1\r\nHost: x\r\n" + b"A" * 100_000 + b"\r\n\r\n",
}


@pytest.mark.parametrize("name", NONSENSE)
@pytest.mark.parametrize("mode", ["observe", "enforce"])
async def test_nonsense_on_the_wire(
    engine: Engine, guarded: Guarded, client: aiohttp.ClientSession, name: str, mode: str
) -> None:
    url = await guarded([engine.url], mode)
    answer = await raw(url, NONSENSE[name])
    assert answer.startswith((b"HTTP/1.1 400", b"HTTP/1.0 400")), answer[:80]
    async with client.post(url + CHAT, data=b'{"model": "tiny"}') as response:
        assert response.status == 200  # the next one is served
    assert await running(url) == [0, 0, 0, 0]


async def test_half_a_body_then_silence(engine: Engine, guarded: Guarded) -> None:
    url = await guarded([engine.url], "enforce", read_s=0.3)
    request = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
    answer = await raw(url, request + b'Content-Length: 100\r\n\r\n{"model"')
    assert answer.startswith(b"HTTP/1.1 408")
    assert engine.seen == []


async def test_half_closed_and_gone(engine: Engine, guarded: Guarded) -> None:
    """A client that closes its side, before or after its request, leaves no slot behind."""
    url = await guarded([engine.url], "enforce")
    host, _, port = url.removeprefix("http://").partition(":")
    whole = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n{}"
    for sent in (b"", whole[:30], whole[:-1], whole):
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(sent)
        writer.write_eof()
        await asyncio.wait_for(reader.read(), 5)
        writer.close()
    await asyncio.sleep(0.1)
    assert await running(url) == [0, 0, 0, 0]


async def test_slow_reader_is_let_go(engine: Engine, guarded: Guarded) -> None:
    async def endless(request: web.Request, body: bytes) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        while True:
            await response.write(b"data: " + b"x" * 65_536 + b"\n\n")

    engine.answer = endless
    url = await guarded([engine.url], "enforce", stall_s=0.4)
    host, _, port = url.removeprefix("http://").partition(":")
    _, writer = await asyncio.open_connection(host, int(port))
    writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n{}")
    for _ in range(100):  # never reads
        await asyncio.sleep(0.05)
        if engine.gone:
            break
    assert engine.gone == [CHAT]
    assert await running(url) == [0, 0, 0, 0]
    writer.close()


async def test_client_that_leaves_cancels_upstream(
    engine: Engine, guarded: Guarded, client: aiohttp.ClientSession
) -> None:
    async def slow(request: web.Request, body: bytes) -> web.StreamResponse:
        await asyncio.sleep(30)
        return web.Response()

    engine.answer = slow
    url = await guarded([engine.url], "enforce", requests=1)
    timeout = aiohttp.ClientTimeout(total=0.3)
    for _ in range(2):  # one in work, one in the queue behind another
        with pytest.raises(asyncio.TimeoutError):
            async with client.post(url + CHAT, data=b"{}", timeout=timeout):
                pass
    waiting = [
        asyncio.create_task(client.post(url + CHAT, data=b"{}").__aenter__()) for _ in range(2)
    ]
    await asyncio.sleep(0.3)
    assert sum(await running(url)) == 2
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    for _ in range(40):
        await asyncio.sleep(0.05)
        if len(engine.gone) == 3:
            break
    assert len(engine.gone) == 3
    assert await running(url) == [0, 0, 0, 0]


async def test_remote_images_are_never_fetched(
    engine: Engine, guarded: Guarded, client: aiohttp.ClientSession
) -> None:
    asked: list[str] = []

    async def trap(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.append("fetched")
        writer.close()

    server = await asyncio.start_server(trap, "127.0.0.1", 0)
    remote = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/cat.png"
    url = await guarded([engine.url], "enforce", image_tokens=10)
    for where in (remote, "file:///etc/passwd", "gopher://x/", ""):
        async with client.post(url + CHAT, data=chat(where)) as answer:
            assert answer.status == 200
    assert (asked, len(engine.seen)) == ([], 4)
    server.close()


async def test_no_prompt_and_no_key_is_written(
    engine: Engine, guarded: Guarded, client: aiohttp.ClientSession, clean_home: object
) -> None:
    from pathlib import Path

    from mmctl.guard.treatment import RESPONSES

    picture = io.BytesIO()
    pytest.importorskip("PIL.Image").new("RGB", (512, 512), "red").save(picture, "JPEG")
    url = await guarded([engine.url], "enforce", drill=RESPONSES - {"limit_admission"})
    body = chat(data_url(picture.getvalue(), "jpeg"), user="SECRET-USER", prompt="SECRET-PROMPT")
    async with client.post(
        url + CHAT, data=body, headers={"Authorization": "Bearer SECRET-KEY"}
    ) as answer:
        assert answer.status == 200
    await asyncio.sleep(1.2)
    written = b"".join(path.read_bytes() for path in Path(str(clean_home)).rglob("*.ndjson"))
    assert b'"what":"cap"' in written
    assert b"SECRET" not in written
    assert base64.b64encode(picture.getvalue())[:40] not in written
