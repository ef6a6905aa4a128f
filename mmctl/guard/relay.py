"""One request to one backend and its answer back: bytes as they are, streams event by event."""

from __future__ import annotations

import asyncio
import re
import sys
import time
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
from aiohttp import web
from multidict import CIMultiDict
from yarl import URL

from mmctl.guard.backends import problem
from mmctl.guard.refusal import Refusal

if sys.version_info >= (3, 11):
    from asyncio import timeout as timeout
else:
    from async_timeout import timeout as timeout

# Of one connection, not of the message (RFC 9110, 7.6.1); the length follows from the body.
HOP_BY_HOP = frozenset(
    {
        "connection", "keep-alive", "proxy-authenticate", "proxy-connection", "te", "trailer",
        "transfer-encoding", "upgrade",
    }
)  # fmt: skip
_NOT_ASKED = HOP_BY_HOP | {"host", "expect", "content-length"}
_READ_WHOLE_BYTES = 1 << 20
_EVENT_MOST_BYTES = 1 << 20
_AUTOMATIC = ("Accept", "Accept-Encoding", "User-Agent", "Content-Type")

DIED = "the backend went away before its answer was complete; it is not known how far it got"

_FIRST_TOKEN = re.compile(rb'"(?:content|text|delta|reasoning_content)"\s*:\s*"[^"]')
_PROMPT = re.compile(rb'"(?:prompt|input)_tokens"\s*:\s*(\d{1,12})')
_COMPLETION = re.compile(rb'"(?:completion|output)_tokens"\s*:\s*(\d{1,12})')


class NotSentError(Exception):
    """Nothing of the request has reached the backend: another one may be asked.

    ``refused`` says that nobody listens there, not only that it took too long.
    """

    def __init__(self, message: str, refused: bool) -> None:
        super().__init__(message)
        self.refused = refused


class DiedError(Exception):
    """The backend went away, or broke the protocol, after something may have reached it."""


class GoneError(Exception):
    """The client does not read its answer any more."""


class Meter:
    """What an answer tells while it passes: its first token, its tokens, the usage it states.

    Times are of ``time.monotonic``; ``prompt_tokens`` and ``completion_tokens`` are what the
    backend says in ``usage``, absent where it does not.
    """

    __slots__ = (
        "broken", "completion_tokens", "events", "first_s", "prompt_tokens", "response", "status",
        "streamed",
    )  # fmt: skip

    def __init__(self) -> None:
        self.status: int | None = None
        self.response: web.StreamResponse | None = None  # once something has gone to the client
        self.streamed = False
        self.broken = False  # the backend went away in the middle of it
        self.events = 0
        self.first_s: float | None = None
        self.prompt_tokens: int | None = None
        self.completion_tokens: int | None = None

    def event(self, data: bytes) -> None:
        """Take whole events of a stream."""
        self.events += data.count(b"data:")
        if self.first_s is None and _FIRST_TOKEN.search(data):
            self.first_s = time.monotonic()
        if b'"usage"' in data:
            self.usage(data)

    def usage(self, data: bytes) -> None:
        """Take the ``usage`` of a body, or of the end of one."""
        at = data.rfind(b'"usage"')
        if at < 0:
            return
        if prompt := _PROMPT.search(data, at):
            self.prompt_tokens = int(prompt[1])
        if completion := _COMPLETION.search(data, at):
            self.completion_tokens = int(completion[1])


def asked_headers(request: web.BaseRequest) -> CIMultiDict[str]:
    """The headers of a request as they go on to a backend."""
    headers: CIMultiDict[str] = CIMultiDict()
    named = request.headers.get("Connection", "").lower()
    for name, value in request.headers.items():
        lower = name.lower()
        if lower not in _NOT_ASKED and (not named or lower not in named):
            headers.add(name, value)
    return headers


def answered_headers(upstream: aiohttp.ClientResponse) -> CIMultiDict[str]:
    """The headers of an answer as they go on to the client."""
    headers: CIMultiDict[str] = CIMultiDict()
    for name, value in upstream.headers.items():
        if name.lower() not in HOP_BY_HOP:
            headers.add(name, value)
    return headers


async def ask(
    session: aiohttp.ClientSession,
    base: URL,
    request: web.BaseRequest,
    headers: CIMultiDict[str],
    body: bytes | AsyncIterator[bytes] | None,
) -> aiohttp.ClientResponse:
    """Send a request once and wait for the head of its answer.

    Raises NotSentError when no connection could be made, DiedError when it broke later.
    """
    path = base.raw_path.rstrip("/") + request.rel_url.raw_path_qs
    url = URL.build(
        scheme=base.scheme, authority=base.raw_authority, encoded=True
    ).join(URL(path, encoded=True))  # fmt: skip
    try:
        return await session.request(
            request.method, url, headers=headers, data=body, allow_redirects=False,
            skip_auto_headers=_AUTOMATIC,
        )  # fmt: skip
    except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
        late = isinstance(error, asyncio.TimeoutError)
        raise NotSentError(problem(error), refused=not late) from None
    except (aiohttp.ClientError, ConnectionError) as error:
        raise DiedError(f"{type(error).__name__}: {error}") from None


async def relay(
    request: web.BaseRequest,
    upstream: aiohttp.ClientResponse,
    meter: Meter,
    more: dict[str, str],
    stall_s: float,
) -> web.StreamResponse:
    """Pass an answer on; ``more`` are headers of our own, ``stall_s`` the longest wait for a
    client that does not read.

    A small body of known length is read whole, so that a backend that dies before its end can
    still be said in a status. Raises DiedError: where ``meter.response`` is absent an error may
    still be answered, else the answer has been ended, a stream with an event that says so.
    Raises GoneError for a client that has stopped reading.
    """
    meter.status = upstream.status
    headers = answered_headers(upstream)
    headers.update(more)
    meter.streamed = upstream.content_type == "text/event-stream"
    length = upstream.content_length
    small = length is not None and length <= _READ_WHOLE_BYTES
    if small and request.method != "HEAD" and not meter.streamed:
        return await _whole(upstream, meter, headers)
    response = web.StreamResponse(status=upstream.status, reason=upstream.reason, headers=headers)
    if length is None and request.method != "HEAD":
        response.headers.pop("Content-Length", None)
        if request.version >= (1, 1):
            response.enable_chunked_encoding()
    await response.prepare(request)
    meter.response = response
    try:
        pieces = _events(upstream) if meter.streamed else upstream.content.iter_any()
        async for piece in pieces:
            if meter.streamed:
                meter.event(piece)
            elif b'"usage"' in piece:
                meter.usage(piece)
            try:
                async with timeout(stall_s):
                    await response.write(piece)
            except asyncio.TimeoutError:
                if request.transport is not None:
                    request.transport.abort()
                said = f"the client has not read for {stall_s:g} s"
                raise GoneError(said) from None
    except (aiohttp.ClientError, ConnectionError) as error:
        if request.transport is None or request.transport.is_closing():
            raise  # it is the client that has gone
        said = f"{type(error).__name__}: {error}"
        await end_with_error(request, response, meter, Refusal(502, "backend_died", DIED))
        raise DiedError(said) from None
    await response.write_eof()
    return response


async def _whole(
    upstream: aiohttp.ClientResponse, meter: Meter, headers: CIMultiDict[str]
) -> web.Response:
    try:
        body = await upstream.read()
    except (aiohttp.ClientError, ConnectionError) as error:
        raise DiedError(f"{type(error).__name__}: {error}") from None
    meter.first_s = time.monotonic()
    meter.usage(body[-4096:])
    if meter.prompt_tokens is None:
        meter.usage(body)
    headers.pop("Content-Length", None)
    return web.Response(status=upstream.status, reason=upstream.reason, headers=headers, body=body)


async def _events(upstream: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    """The stream in pieces that end where an event ends, so that an error can follow any."""
    rest = b""
    async for chunk in upstream.content.iter_any():
        data = rest + chunk if rest else chunk
        end = max(data.rfind(b"\n\n") + 2, data.rfind(b"\r\n\r\n") + 4)
        if end < 4 and len(data) < _EVENT_MOST_BYTES:
            rest = data
            continue
        if end < 4:
            end = len(data)
        rest = data[end:]
        yield data[:end]
    if rest:
        yield rest


async def end_with_error(
    request: web.BaseRequest, response: web.StreamResponse, meter: Meter, refusal: Refusal
) -> None:
    """End an answer that has begun: a stream with an event that says why, any other by
    breaking the connection, so that half an answer is not taken for a whole one."""
    if meter.streamed:
        head = b"event: error\n" if request.path.endswith("/responses") else b""
        await response.write(head + b"data: " + refusal.document() + b"\n\n")
        await response.write_eof()
    elif request.transport is not None:
        request.transport.abort()


def plain(value: Any) -> str:
    """``value`` as a header may hold it: one line of visible ASCII."""
    return "".join(c if 32 <= ord(c) < 127 else "?" for c in str(value))
