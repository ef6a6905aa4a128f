"""What passes the guard is what was sent, byte for byte."""

from __future__ import annotations

import gzip
from collections.abc import Awaitable, Callable

import pytest
from aiohttp import web

from tests.integration.guard.parts import Engine, raw

Guarded = Callable[..., Awaitable[str]]

ASKED = (
    b"POST /v1/chat/completions?a=%2F%20b HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
    b"X-Twice: one\r\nX-Twice: two\r\nAuthorization: Bearer secret\r\n"
    b"Content-Type: application/json; charset=utf-8\r\n"
)


def head_and_body(answer: bytes) -> tuple[bytes, set[bytes], bytes]:
    """Status line, headers but the date and the framing, and the body without its chunks."""
    head, _, body = answer.partition(b"\r\n\r\n")
    status, *lines = head.split(b"\r\n")
    kept = {line for line in lines if not line.lower().startswith((b"date:", b"connection:"))}
    if b"Transfer-Encoding: chunked" in kept:
        whole = b""
        while body:
            size, _, body = body.partition(b"\r\n")
            whole, body = whole + body[: int(size, 16)], body[int(size, 16) + 2 :]
        body = whole
    return status, kept, body


@pytest.mark.parametrize("stream", [b"false", b"true"])
async def test_observed_is_direct(engine: Engine, guarded: Guarded, stream: bytes) -> None:
    body = b'{ "model":"tiny",\n "stream": %s, "messages":[{"role":"user","content":"\\u00e9"}]}'
    body = body.replace(b"%s", stream)
    request = ASKED + b"Content-Length: %d\r\n\r\n%s" % (len(body), body)
    direct = await raw(engine.url, request)
    through = await raw(await guarded([engine.url]), request)
    assert head_and_body(direct) == head_and_body(through)
    (path, headers, sent), (path_2, headers_2, sent_2) = engine.seen
    assert (path, sent) == (path_2, sent_2)
    assert {k: v for k, v in headers_2.items() if k != "Host"} == {
        k: v for k, v in headers.items() if k not in ("Host", "Connection")
    }


async def test_compressed_both_ways(engine: Engine, guarded: Guarded) -> None:
    packed = gzip.compress(b'{"model": "tiny"}')

    async def answer(request: web.Request, body: bytes) -> web.StreamResponse:
        return web.Response(body=body, headers={"Content-Encoding": "gzip", "ETag": '"x"'})

    engine.answer = answer
    request = (
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
        b"Content-Encoding: gzip\r\nContent-Length: %d\r\n\r\n%s" % (len(packed), packed)
    )
    through = await raw(await guarded([engine.url]), request)
    assert head_and_body(through)[2] == packed
    assert engine.seen[0][2] == packed


async def test_other_paths_and_methods_pass(engine: Engine, guarded: Guarded) -> None:
    async def answer(request: web.Request, body: bytes) -> web.StreamResponse:
        return web.Response(status=418, text=f"{request.method} {request.path} {len(body)}")

    engine.answer = answer
    url = await guarded([engine.url])
    body = b"x" * 3_000_000
    put = b"PUT /own/thing HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: %d\r\n\r\n"
    status, _, said = head_and_body(await raw(url, put % len(body) + body))
    assert (status, said) == (b"HTTP/1.1 418 I'm a Teapot", b"PUT /own/thing 3000000")
    assert engine.seen[0][1]["Content-Length"] == "3000000"
    head = b"HEAD /own HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
    status, headers, said = head_and_body(await raw(url, head))
    assert (b"Content-Length: 11" in headers, said) == (True, b"")
