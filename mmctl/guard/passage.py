"""One request on its way: its body read and seen, a place found, treated, passed on, counted."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, TypeAlias

import aiohttp
import msgspec
from aiohttp import web

from mmctl.guard.admission import Ticket
from mmctl.guard.backends import Backend
from mmctl.guard.journal import receipt
from mmctl.guard.refusal import Refusal
from mmctl.guard.relay import (
    DiedError,
    GoneError,
    Meter,
    NotSentError,
    ask,
    asked_headers,
    end_with_error,
    relay,
    timeout,
)  # fmt: skip
from mmctl.guard.seeing import Seen, look
from mmctl.guard.tallies import Sample, tenant_of
from mmctl.guard.treatment import cap_output, plan, shrink_images

if TYPE_CHECKING:
    from mmctl.guard.app import Guard

Body: TypeAlias = bytes | AsyncIterator[bytes] | None

SEEN_PATHS = frozenset(
    {"/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings"}
)
"""Requests whose bodies are seen; all others pass as they come."""

ROUTE_HEADER = "X-Mmctl-Route"
_LOOK_APART_BYTES = 256 << 10  # a larger body is read in a thread


class Passage:
    """A request; ``run`` gives its answer. What it holds is given back whatever happens."""

    __slots__ = ("guard", "meter", "request", "settings", "ticket")

    def __init__(self, guard: Guard, request: web.BaseRequest, number: int) -> None:
        self.guard, self.request, self.settings = guard, request, guard.settings
        self.ticket = Ticket(number, tenant_of(request.headers, self.settings.tenant_header))
        self.meter = Meter()

    async def run(self) -> web.StreamResponse:
        """The answer of a backend, or Refusal; within the deadline."""
        state, meter = "failed", self.meter
        try:
            async with timeout(self.settings.deadline_s):
                response = await self._through()
            if response.status < 500 and not meter.broken:
                state = "completed"
            return response
        except asyncio.TimeoutError:
            said = f"no whole answer within {self.settings.deadline_s:g} s"
            refusal = Refusal(504, "deadline", said)
            if meter.response is None:
                raise refusal from None
            await end_with_error(self.request, meter.response, meter, refusal)
            return meter.response
        except Refusal as refusal:
            if refusal.ours:
                state = "refused"
                self._treated("reject", refusal.message, reason=refusal.code)
            raise
        except GoneError as error:
            state = "cancelled"
            raise ConnectionResetError(str(error)) from None
        except (asyncio.CancelledError, ConnectionError):
            state = "cancelled"
            raise
        finally:
            self._end(state)

    def _end(self, state: str) -> None:
        guard, ticket = self.guard, self.ticket
        backend = ticket.backend
        guard.admission.leave(ticket)
        guard.journal.work.pop(ticket.id, None)
        if state == "completed" and backend is not None and ticket.seen is not None:
            self._learn(backend, ticket.seen)
        guard.journal.ended(ticket, backend, self.meter, state)

    async def _through(self) -> web.StreamResponse:
        request, ticket, guard = self.request, self.ticket, self.guard
        if request.headers.get("Expect", "").lower() == "100-continue":
            await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        body = await self._body()
        if isinstance(body, bytes) and request.path in SEEN_PATHS:
            ticket.see(await self._look(body))
        guard.journal.step(ticket, "queued")
        if ticket.seen is not None:
            guard.foresee(ticket, ticket.seen)
        headers = asked_headers(request)
        if body is not None and not isinstance(body, bytes) and request.content_length:
            headers["Content-Length"] = str(request.content_length)
        while True:
            backend = await guard.admission.enter(ticket)
            if ticket.waited:
                waited_s = time.monotonic() - ticket.arrived_s
                self._treated("defer", f"waited {waited_s:.3f} s", reason=ticket.blocked,
                              wait_s=waited_s)  # fmt: skip
            body = await self._treat(backend, body)
            guard.journal.work[ticket.id] = (ticket, self.meter)
            guard.journal.step(ticket, "admitted")
            try:
                upstream = await ask(guard.session, backend.url, request, headers, body)
            except NotSentError as error:
                ticket.tried.add(backend.name)
                guard.admission.leave(ticket)
                guard.health.unreachable(backend, str(error), error.refused)
                if refusal := guard.admission.none_left(ticket):
                    raise refusal from None
                continue
            except DiedError as error:
                raise self._died(backend, str(error)) from None
            return await self._answer(backend, upstream)

    async def _answer(
        self, backend: Backend, upstream: aiohttp.ClientResponse
    ) -> web.StreamResponse:
        more = {ROUTE_HEADER: receipt(self.ticket)} if self.guard.enforce else {}
        try:
            response = await relay(self.request, upstream, self.meter, more, self.settings.stall_s)
        except DiedError as error:
            refusal = self._died(backend, str(error))
            if self.meter.response is None:
                raise refusal from None
            self.meter.broken = True
            return self.meter.response
        finally:
            if not upstream.closed:
                upstream.close()
        self.guard.health.answered(backend)
        return response

    def _died(self, backend: Backend, why: str) -> Refusal:
        seen = self.ticket.seen
        backend.suspects.append([image.digest for image in seen.images] if seen else [])
        self.guard.health.died(backend)
        said = f"{backend.name} broke off the request: {why}"
        return Refusal(502, "backend_died", said, ours=False)

    async def _body(self) -> Body:
        """The body of a request that is to be seen, whole; of any other as a stream.

        One that is too large is a stream when only observing, else refused.
        """
        request, settings, enforce = self.request, self.settings, self.guard.enforce
        if not request.body_exists:
            return None
        if request.method != "POST" or request.path not in SEEN_PATHS:
            return request.content.iter_any()
        parts: list[bytes] = []
        size, most = 0, settings.body_bytes
        declared = request.content_length or 0
        if declared > most and enforce:
            raise _too_large(declared, most)
        if declared <= most:
            try:
                async with timeout(settings.read_s):
                    async for chunk in request.content.iter_any():
                        parts.append(chunk)
                        size += len(chunk)
                        if size > most:
                            break
                    else:
                        return parts[0] if len(parts) == 1 else b"".join(parts)
            except asyncio.TimeoutError:
                said = f"the body did not come within {settings.read_s:g} s"
                raise Refusal(408, "body_late", said) from None
            except (web.RequestPayloadError, aiohttp.ClientPayloadError) as error:
                raise Refusal(400, "body_broken", str(error)) from None
            if enforce:
                raise _too_large(size, most)
        return _rest(parts, request)

    async def _look(self, body: bytes) -> Seen | None:
        """What the body holds; None where that cannot be seen and the mode lets it pass."""
        guard, most_pixels = self.guard, self.settings.image_pixels
        try:
            if coding := self.request.headers.get("Content-Encoding"):
                said = f"a body encoded as {coding} cannot be seen: send it as it is"
                raise Refusal(415, "body_encoded", said)
            if len(body) < _LOOK_APART_BYTES:
                seen = look(body, most_pixels)
            else:
                loop = asyncio.get_running_loop()
                seen = await loop.run_in_executor(guard.pool, look, body, most_pixels)
            problem = next((i.problem for i in seen.images if i.problem is not None), None)
            refusal = problem or guard.quarantine.refusal(seen.images)
            if refusal is not None:
                raise refusal
        except Refusal as refusal:
            if guard.enforce:
                raise
            self._treated("reject", refusal.message, reason=refusal.code)
            return None
        return seen

    async def _treat(self, backend: Backend, body: Body) -> Body:
        """The body as it goes to ``backend``; in observe mode only what would be done is said."""
        ticket, seen = self.ticket, self.ticket.seen
        if seen is None or not (ticket.shrink or backend.responses):
            return body
        changed = ticket.shrink and await self._shrink(seen)
        if "cap_output" in backend.responses and not self.request.path.endswith("/embeddings"):
            changed = self._cap(seen) or changed
        return msgspec.json.encode(seen.document) if changed and self.guard.enforce else body

    def _cap(self, seen: Seen) -> bool:
        most = self.settings.output_tokens
        document = seen.document if self.guard.enforce else dict(seen.document)
        before = cap_output(document, self.request.path, most)
        if before is None:
            return False
        self.ticket.capped = True
        self._treated("cap", f"output limited to {most} tokens", asked_tokens=before or None,
                      limit_tokens=most)  # fmt: skip
        return True

    async def _shrink(self, seen: Seen) -> bool:
        guard, ticket, settings = self.guard, self.ticket, self.settings
        if not seen.images or ticket.shrunk is not None:
            return False
        small = ticket.plan or plan(seen, ticket.tokens, guard.predictor(seen.model), settings)
        if not small.changes:
            return False
        before = ticket.tokens.vision
        ticket.shrunk = (before, small.tokens.vision)
        self._treated(
            "shrink", f"images from {before} to {small.tokens.vision} tokens",
            before_tokens=before, after_tokens=small.tokens.vision, over_budget=small.over,
            images=[
                {"digest": image.digest, "size": image.size, "scale": round(scale, 3)}
                for image, scale in zip(seen.images, small.scales, strict=True)
            ],
        )  # fmt: skip
        if not guard.enforce:
            return False
        await shrink_images(seen, small.scales, guard.pool, settings.image_pixels)
        ticket.tokens = small.tokens
        return True

    def _learn(self, backend: Backend, seen: Seen) -> None:
        meter, ticket, now = self.meter, self.ticket, time.monotonic()
        self.guard.quarantine.answered(seen.images)
        if meter.status == 200 and meter.prompt_tokens:
            self.guard.predictor(seen.model).learn(seen, ticket.tokens, meter.prompt_tokens)
        ttft_s = itl_s = None
        if meter.streamed and meter.first_s is not None:
            ttft_s = meter.first_s - ticket.arrived_s
            if meter.events > 2:
                itl_s = (now - meter.first_s) / (meter.events - 1)
        sample = Sample(now, ticket.images > 0, now - ticket.arrived_s, ttft_s, itl_s)
        self.guard.tallies.sample(backend.name, sample)

    def _treated(self, what: str, message: str, **evidence: object) -> None:
        self.guard.journal.treated(what, self.ticket, self.ticket.backend, message, **evidence)


def _too_large(size: int, most: int) -> Refusal:
    return Refusal(413, "body_too_large", f"a body of {size} bytes; at most {most} are taken")


async def _rest(parts: list[bytes], request: web.BaseRequest) -> AsyncIterator[bytes]:
    """What has been read of a body, then the rest as it comes."""
    for part in parts:
        yield part
    parts.clear()
    async for chunk in request.content.iter_any():
        yield chunk
