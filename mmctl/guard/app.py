"""The guard itself: a server whose every request is seen, placed and passed on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import TypeAlias

import aiohttp
from aiohttp import web

from mmctl.engine import profiles
from mmctl.engine.errors import MmctlError
from mmctl.guard.backends import Backend
from mmctl.guard.refusal import Refusal
from mmctl.guard.relay import DiedError, Meter, NotSentError, ask, asked_headers, relay, timeout

Body: TypeAlias = bytes | AsyncIterator[bytes] | None

SEEN_PATHS = frozenset(
    {"/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings"}
)


class Guard:
    """Backends behind one address; ``serve`` runs until it is cancelled."""

    def __init__(
        self, profile: profiles.Profile, mode: profiles.Mode, backends: list[Backend]
    ) -> None:
        self.profile, self.settings, self.mode = profile, profile.guard, mode
        self.backends = backends
        self._turn = 0

    async def start(self, host: str, port: int) -> int:
        """Listen; the port that was had. Raises MmctlError where none was."""
        settings = self.settings
        self.session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=settings.keepalive_s),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=settings.connect_s),
            auto_decompress=False, cookie_jar=aiohttp.DummyCookieJar(), trust_env=False,
        )  # fmt: skip
        server = web.Server(
            self._handle, handler_cancellation=True, auto_decompress=False, access_log=None
        )
        self._runner = web.ServerRunner(server)
        await self._runner.setup()
        site = web.TCPSite(self._runner, host, port, backlog=1024)
        try:
            await site.start()
        except OSError as error:
            await self.stop()
            raise MmctlError(
                f"cannot listen on {host}:{port}: {error.strerror}; choose another --listen"
            ) from None
        address = self._runner.addresses[0]
        return int(address[1])

    async def stop(self) -> None:
        """Take no more requests, end those in work, close every connection."""
        await self._runner.cleanup()
        await self.session.close()

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        try:
            return await self._pass(request)
        except Refusal as refusal:
            return refusal.response()

    async def _pass(self, request: web.BaseRequest) -> web.StreamResponse:
        body = await self._body(request)
        headers = asked_headers(request)
        tried: list[str] = []
        while backend := self._next(tried):
            tried.append(backend.name)
            meter = Meter()
            try:
                upstream = await ask(self.session, backend.url, request, headers, body)
            except NotSentError:
                continue
            except DiedError as error:
                raise Refusal(502, "backend_died", str(error)) from None
            try:
                return await relay(request, upstream, meter, {}, self.settings.stall_s)
            except DiedError as error:
                raise Refusal(502, "backend_died", str(error)) from None
            finally:
                upstream.close() if not upstream.closed else None
        raise Refusal(503, "no_backend", "no backend can be reached", 1.0)

    def _next(self, tried: list[str]) -> Backend | None:
        self._turn += 1
        known = self.backends
        for offset in range(len(known)):
            backend = known[(self._turn + offset) % len(known)]
            if backend.name not in tried:
                return backend
        return None

    async def _body(self, request: web.BaseRequest) -> Body:
        """The body of a request that is to be seen, whole; of any other as a stream.

        One that is too large is a stream when only observing, else refused.
        """
        if not request.body_exists:
            return None
        if request.method != "POST" or request.path not in SEEN_PATHS:
            return request.content.iter_any()
        parts: list[bytes] = []
        size, most = 0, self.settings.body_bytes
        declared = request.content_length or 0
        if declared <= most or self.mode == "enforce":
            if declared > most:
                raise _too_large(declared, most)
            try:
                async with timeout(self.settings.read_s):
                    async for chunk in request.content.iter_any():
                        parts.append(chunk)
                        size += len(chunk)
                        if size > most:
                            break
                    else:
                        return parts[0] if len(parts) == 1 else b"".join(parts)
            except asyncio.TimeoutError:
                said = f"the body did not come within {self.settings.read_s:g} s"
                raise Refusal(408, "body_late", said) from None
            except web.RequestPayloadError as error:
                raise Refusal(400, "body_broken", str(error)) from None
            if self.mode == "enforce":
                raise _too_large(size, most)
        return _rest(parts, request)


def _too_large(size: int, most: int) -> Refusal:
    return Refusal(413, "body_too_large", f"a body of {size} bytes; at most {most} are taken")


async def _rest(parts: list[bytes], request: web.BaseRequest) -> AsyncIterator[bytes]:
    """What has been read of a body, then the rest as it comes."""
    for part in parts:
        yield part
    parts.clear()
    async for chunk in request.content.iter_any():
        yield chunk


def run(guard: Guard, host: str, port: int) -> None:
    """Serve until interrupted."""

    async def serve() -> None:
        await guard.start(host, port)
        try:
            await asyncio.Event().wait()
        finally:
            await guard.stop()

    asyncio.run(serve())
