"""The guard itself: a server whose every request is seen, placed, treated and passed on."""

from __future__ import annotations

import asyncio
import itertools
import platform
import signal
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeAlias

import aiohttp
import msgspec
from aiohttp import web

from mmctl.engine import profiles
from mmctl.engine.breaker.machine import Command
from mmctl.engine.errors import MmctlError
from mmctl.engine.records import AnyRecord, Event, Request
from mmctl.guard import own
from mmctl.guard.admission import Admission, Ticket
from mmctl.guard.backends import Backend
from mmctl.guard.health import Health
from mmctl.guard.pressure import Pressure
from mmctl.guard.refusal import Refusal
from mmctl.guard.relay import (
    DiedError,
    GoneError,
    Meter,
    NotSentError,
    ask,
    asked_headers,
    end_with_error,
    plain,
    relay,
    timeout,
)  # fmt: skip
from mmctl.guard.seeing import Seen, look
from mmctl.guard.tallies import Sample, Tallies, guard_records, serving_record, tenant_of
from mmctl.guard.tokens import Predictor, of_model
from mmctl.guard.treatment import Plan, Quarantine, cap_output, plan, shrink_images
from mmctl.guard.watch import Watch

Body: TypeAlias = bytes | AsyncIterator[bytes] | None

SEEN_PATHS = frozenset(
    {"/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings"}
)
ROUTE_HEADER = "X-Mmctl-Route"
_LOOK_APART_BYTES = 256 << 10  # a larger body is read in a thread
_TICK_S = 0.1
_TICKS_PER_PRESSURE, _TICKS_PER_READING = 2, 10
_PREDICTORS_MOST = 100


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """What the command line adds to the profile.

    ``folder`` is the model's own (config.json, tokenizer.json); ``drill`` names responses that
    are in force from the start, whatever the rules say.
    """

    folder: Path | None = None
    drill: frozenset[str] = frozenset()
    golden: Path | None = None
    record: Path | None = None
    socket: Path | None = None
    profile_name: str = "default"


class Guard:
    """Backends behind one address; ``start`` listens, ``stop`` ends what is in work."""

    def __init__(
        self,
        profile: profiles.Profile,
        mode: profiles.Mode,
        backends: list[Backend],
        options: Options | None = None,
        say: Callable[[str], None] = lambda message: None,
    ) -> None:
        self.profile, self.settings, self.mode = profile, profile.guard, mode
        self.options = options or Options()
        self.enforce = mode == "enforce"
        self.backends = backends
        for backend in backends:
            backend.capacity_tokens = self.settings.capacity_tokens
            backend.responses = self.options.drill
        self.admission = Admission(self.settings, profile.schedule, backends, self.enforce)
        self.tallies = Tallies(backends)
        self.quarantine = Quarantine(self.settings)
        self.pressure = Pressure(self.settings.rules)
        self.predictors: dict[str, Predictor] = {}
        self.watch = Watch(
            _for_backends(profile), mode, self._command, say, name=self.options.profile_name,
            record=self.options.record, socket=self.options.socket,
        )  # fmt: skip
        self.health = Health(
            profile, self.enforce, backends, self._urgent, self._changed, self.options.golden,
            say,
        )  # fmt: skip
        self._pool = ThreadPoolExecutor(2, thread_name_prefix="mmctl-images")
        self.node = platform.node()
        self._numbers = itertools.count(1)
        self._outbox: list[AnyRecord] = []
        self._work: dict[int, tuple[Ticket, Meter]] = {}  # placed, by the ticket's number
        self._tokens_before: dict[str, int] = {}
        self._finished_events: dict[str, int] = {}

    async def start(self, host: str, port: int) -> int:
        """Listen; the port that was had. Raises MmctlError where none was."""
        settings = self.settings
        self._loop = asyncio.get_running_loop()
        self.session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=settings.keepalive_s),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=settings.connect_s),
            auto_decompress=False, cookie_jar=aiohttp.DummyCookieJar(), trust_env=False,
        )  # fmt: skip
        server = web.Server(
            self._handle, handler_cancellation=True, auto_decompress=False, access_log=None
        )
        self._runner = web.ServerRunner(server, shutdown_timeout=settings.drain_s)
        await self._runner.setup()
        site = web.TCPSite(self._runner, host, port, backlog=1024)
        try:
            await site.start()
        except OSError as error:
            await self._runner.cleanup()
            await self.session.close()
            raise MmctlError(
                f"cannot listen on {host}:{port}: {error.strerror}; choose another --listen"
            ) from None
        self.watch.start()
        self.health.start(self.session)
        self._ticking = self._loop.create_task(self._tick())
        return int(self._runner.addresses[0][1])

    async def stop(self) -> None:
        """Take no more requests, let those in work end for a while, close everything."""
        await self._runner.cleanup()
        self._ticking.cancel()
        await asyncio.gather(self._ticking, return_exceptions=True)
        await self.health.stop()
        await self.session.close()
        self._flush()
        await asyncio.to_thread(self.watch.close)
        self._pool.shutdown(wait=False, cancel_futures=True)

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        answer = own.PATHS.get(request.path) if request.method in ("GET", "HEAD") else None
        if request.path == "/v1/models" and request.method == "GET" and len(self.backends) > 1:
            answer = own.models
        try:
            if answer is not None:
                return await answer(self)
            return await self._pass(request)
        except Refusal as refusal:
            return refusal.response()

    async def _pass(self, request: web.BaseRequest) -> web.StreamResponse:
        """One request from its arrival to its end, counted whatever becomes of it."""
        ticket = Ticket(
            next(self._numbers), tenant_of(request.headers, self.settings.tenant_header)
        )
        meter = Meter()
        state = "failed"
        try:
            async with timeout(self.settings.deadline_s):
                response = await self._through(request, ticket, meter)
            state = "failed" if response.status >= 500 else "completed"
            return response
        except asyncio.TimeoutError:
            said = f"no whole answer within {self.settings.deadline_s:g} s"
            refusal = Refusal(504, "deadline", said)
            if meter.response is None:
                raise refusal from None
            await end_with_error(request, meter.response, meter, refusal)
            return meter.response
        except Refusal as refusal:
            if refusal.ours:
                state = "refused"
                self._treated("reject", ticket, refusal.message, reason=refusal.code)
            raise
        except GoneError as error:
            state = "cancelled"
            raise ConnectionResetError(str(error)) from None
        except (asyncio.CancelledError, ConnectionError):
            state = "cancelled"
            raise
        finally:
            self._ended(ticket, meter, state)

    async def _through(
        self, request: web.BaseRequest, ticket: Ticket, meter: Meter
    ) -> web.StreamResponse:
        if request.headers.get("Expect", "").lower() == "100-continue":
            await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        body = await self._body(request)
        if isinstance(body, bytes) and request.path in SEEN_PATHS:
            ticket.see(await self._look(request, ticket, body))
        self._tell_state(ticket, "queued")
        if ticket.seen is not None:
            self._foresee(ticket)
        headers = asked_headers(request)
        while True:
            backend = await self._enter(ticket)
            try:
                body = await self._treat(ticket, backend, body, request.path)
                self._work[ticket.id] = (ticket, meter)
                self._tell_state(ticket, "admitted")
                upstream = await ask(self.session, backend.url, request, headers, body)
            except NotSentError as error:
                ticket.tried.add(backend.name)
                self.admission.leave(ticket)
                self.health.unreachable(backend, str(error), error.refused)
                if refusal := self.admission.none_left(ticket):
                    raise refusal from None
                continue
            except DiedError as error:
                raise self._died(ticket, backend, str(error)) from None
            try:
                more = {ROUTE_HEADER: _receipt(ticket)} if self.enforce else {}
                response = await relay(request, upstream, meter, more, self.settings.stall_s)
            except DiedError as error:
                refusal = self._died(ticket, backend, str(error))
                if meter.response is None:
                    raise refusal from None
                meter.status = refusal.status
                return meter.response
            finally:
                if not upstream.closed:
                    upstream.close()
            self.health.answered(backend)
            return response

    async def _enter(self, ticket: Ticket) -> Backend:
        before = time.monotonic()
        backend = await self.admission.enter(ticket)
        if ticket.waited:
            waited = time.monotonic() - before
            self._treated(
                "defer", ticket, f"waited {waited:.3f} s: {ticket.blocked}",
                reason=ticket.blocked, wait_s=waited,
            )  # fmt: skip
        return backend

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
        if declared <= most or self.enforce:
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
            except (web.RequestPayloadError, aiohttp.ClientPayloadError) as error:
                raise Refusal(400, "body_broken", str(error)) from None
            if self.enforce:
                raise _too_large(size, most)
        return _rest(parts, request)

    async def _look(self, request: web.BaseRequest, ticket: Ticket, body: bytes) -> Seen | None:
        """What the body holds; None where that cannot be seen and the mode lets it pass."""
        try:
            if coding := request.headers.get("Content-Encoding"):
                said = f"a body encoded as {coding} cannot be seen: send it as it is"
                raise Refusal(415, "body_encoded", said)
            if len(body) < _LOOK_APART_BYTES:
                seen = look(body, self.settings.image_pixels)
            else:
                seen = await self._loop.run_in_executor(
                    self._pool, look, body, self.settings.image_pixels
                )
            problem = next((i.problem for i in seen.images if i.problem is not None), None)
            refusal = problem or self.quarantine.refusal(seen.images)
            if refusal is not None:
                raise refusal
        except Refusal as refusal:
            if self.enforce:
                raise
            self._treated("reject", ticket, refusal.message, reason=refusal.code)
            return None
        return seen

    def _foresee(self, ticket: Ticket) -> None:
        """Predict what the request will take, and what it would with smaller images."""
        seen, settings = ticket.seen, self.settings
        assert seen is not None
        if not any(backend.has(ticket.model) for backend in self.backends):
            ticket.model = ""  # a backend will say that there is no such model
        predictor = self._predictor(seen.model)
        ticket.tokens = predictor.predict(seen)
        ticket.output_tokens = seen.output_tokens or settings.output_tokens
        answers = seen.answers * ticket.output_tokens
        ticket.cost_tokens = ticket.least_cost_tokens = ticket.tokens.prompt + answers
        small = any("shrink_images" in backend.responses for backend in self.backends)
        if seen.images and (small or settings.capacity_tokens):
            ticket.plan = plan(seen, ticket.tokens, predictor, settings)
            ticket.least_cost_tokens = ticket.plan.tokens.prompt + answers

    def _predictor(self, model: str) -> Predictor:
        found = self.predictors.get(model)
        if found is None:
            if len(self.predictors) >= _PREDICTORS_MOST:
                model = ""
            listed = any(model in backend.models for backend in self.backends)
            folder = self.options.folder
            if folder is None and listed and (Path(model) / "config.json").is_file():
                folder = Path(model)  # as a backend of ours names it, never as a client does
            found = of_model(model, self.settings.families, folder)
            self.predictors[model] = found
        return found

    async def _treat(self, ticket: Ticket, backend: Backend, body: Body, path: str) -> Body:
        """The body as it goes to ``backend``; in observe mode only what would be done is said."""
        seen = ticket.seen
        if seen is None or not (ticket.shrink or backend.responses):
            return body
        changed = False
        if ticket.shrink and seen.images and (small := ticket.plan or self._plan(ticket)):
            changed = await self._shrink(ticket, small)
        if "cap_output" in backend.responses and not path.endswith("/embeddings"):
            most = self.settings.output_tokens
            document = seen.document if self.enforce else dict(seen.document)
            before = cap_output(document, path, most)
            if before is not None:
                changed, ticket.capped = True, True
                self._treated(
                    "cap", ticket, f"output limited to {most} tokens",
                    asked_tokens=before or None, limit_tokens=most,
                )  # fmt: skip
        return msgspec.json.encode(seen.document) if changed and self.enforce else body

    def _plan(self, ticket: Ticket) -> Plan | None:
        seen = ticket.seen
        if seen is None:
            return None
        return plan(seen, ticket.tokens, self._predictor(seen.model), self.settings)

    async def _shrink(self, ticket: Ticket, small: Plan) -> bool:
        seen, settings = ticket.seen, self.settings
        assert seen is not None
        if not small.changes:
            return False
        before = ticket.tokens.vision
        self._treated(
            "shrink", ticket, f"images from {before} to {small.tokens.vision} tokens",
            before_tokens=before, after_tokens=small.tokens.vision, over_budget=small.over,
            sizes=[[image.size, round(s, 3)] for image, s in zip(seen.images, small.scales,
                                                                 strict=True)],
        )  # fmt: skip
        ticket.shrunk = (before, small.tokens.vision)
        if not self.enforce:
            return False
        await shrink_images(seen, small.scales, self._pool, settings.image_pixels)
        for image, scale in zip(seen.images, small.scales, strict=True):
            if image.size is not None and scale < 1:
                image.size = image.size.scaled(scale)
        ticket.tokens = small.tokens
        return True

    def _died(self, ticket: Ticket, backend: Backend, why: str) -> Refusal:
        if ticket.seen is not None:
            backend.suspects.update(image.digest for image in ticket.seen.images)
        self.health.died(backend)
        said = f"{backend.name} broke off the request: {why}"
        return Refusal(502, "backend_died", said, ours=False)

    def _ended(self, ticket: Ticket, meter: Meter, state: str) -> None:
        """Give back what the request held, and count it."""
        backend = ticket.backend.name if ticket.backend is not None else None
        self.admission.leave(ticket)
        self._work.pop(ticket.id, None)
        now, seen = time.monotonic(), ticket.seen
        counts = {
            "requests": 1, state: 1, "shrunk": int(ticket.shrunk is not None),
            "capped": int(ticket.capped), "deferred": int(ticket.waited),
            "images": ticket.images, "vision_tokens": ticket.tokens.vision,
            "text_tokens": ticket.tokens.text, "output_tokens": meter.completion_tokens or 0,
        }  # fmt: skip
        self.tallies.add(ticket, backend, **counts)
        if backend is not None:
            events = self._finished_events.get(backend, 0)
            self._finished_events[backend] = events + meter.events
        if state == "completed" and seen is not None and backend is not None:
            self._learn(ticket, meter, backend, now)
        self._outbox.append(self._request(ticket, meter, state, backend, now))

    def _learn(self, ticket: Ticket, meter: Meter, backend: str, now: float) -> None:
        seen = ticket.seen
        assert seen is not None
        if meter.status == 200 and meter.prompt_tokens:
            self._predictor(seen.model).learn(seen, ticket.tokens, meter.prompt_tokens)
        ttft = itl = None
        if meter.streamed and meter.first_s is not None:
            ttft = meter.first_s - ticket.arrived_s
            if meter.events > 2:
                itl = (now - meter.first_s) / (meter.events - 1)
        vision = ticket.images > 0
        self.tallies.sample(backend, Sample(now, vision, now - ticket.arrived_s, ttft, itl))

    def _request(
        self, ticket: Ticket, meter: Meter, state: str, backend: str | None, now: float
    ) -> Request:
        stages, wait_s = {"e2e_s": now - ticket.arrived_s}, None
        if ticket.placed_s is not None:
            wait_s = ticket.placed_s - ticket.arrived_s
            if meter.first_s is not None and meter.streamed:
                stages["ttft_s"] = meter.first_s - ticket.arrived_s
        return Request(
            ts_ns=time.time_ns(), node=self.node, id=f"r{ticket.id}", images=ticket.images,
            vision_tokens=ticket.tokens.vision, text_tokens=ticket.tokens.text,
            output_tokens=meter.completion_tokens or 0, state=state, instance=backend,
            tenant=ticket.tenant, queue_wait_s=wait_s, stages=stages,
        )  # fmt: skip

    def _tell_state(self, ticket: Ticket, state: str) -> None:
        """A request's steps, for whoever looks at single requests."""
        if not self.watch.wanted:
            return
        backend = ticket.backend.name if ticket.backend is not None else None
        self._outbox.append(
            Request(
                ts_ns=time.time_ns(), node=self.node, id=f"r{ticket.id}", state=state,
                images=ticket.images, vision_tokens=ticket.tokens.vision,
                text_tokens=ticket.tokens.text, output_tokens=ticket.output_tokens,
                instance=backend, tenant=ticket.tenant,
            )
        )  # fmt: skip
        if state == "admitted" and len(self.backends) > 1 and ticket.decision is not None:
            self._outbox.append(
                Event(
                    ts_ns=time.time_ns(), node=backend or "", what="route", device=backend,
                    mode=self.mode, message=_receipt(ticket),
                    evidence=msgspec.to_builtins(ticket.decision),
                )
            )  # fmt: skip

    def _treated(self, what: str, ticket: Ticket, message: str, **evidence: Any) -> None:
        """A line of the audit log: what was, or would be, done to a request."""
        backend = ticket.backend.name if ticket.backend is not None else None
        self._outbox.append(
            Event(
                ts_ns=time.time_ns(), node=backend or "", what=what, device=backend,
                mode=self.mode, message=message,
                evidence={
                    "request": f"r{ticket.id}", "tenant": ticket.tenant, "queue": ticket.queue,
                    **evidence,
                },
            )
        )  # fmt: skip

    def _urgent(self, event: Event) -> None:
        """An event that the breaker is to hear of now."""
        self._outbox.append(event)
        self._flush()

    def _flush(self) -> None:
        if self._outbox:
            records, self._outbox = self._outbox, []
            self.watch.put(records)

    def _command(self, command: Command) -> None:
        """From the breaker's thread into the server's."""
        self._loop.call_soon_threadsafe(self.health.carry_out, command)

    def _changed(self, backend: Backend) -> None:
        """A backend came, went or got another share."""
        if backend.down is not None and not backend.mourned:
            self._mourn(backend)
        backend.mourned = backend.down is not None
        self._respond(backend)
        self.admission.give_up(self.admission.none_left)
        self.admission.pump()

    def _mourn(self, backend: Backend) -> None:
        """The images that were in work when a backend died are remembered."""
        digests = set(backend.suspects)
        for ticket, _ in self._work.values():
            if ticket.backend is backend and ticket.seen is not None:
                digests.update(image.digest for image in ticket.seen.images)
        backend.suspects.clear()
        for digest in self.quarantine.death(digests):
            self._outbox.append(
                Event(
                    ts_ns=time.time_ns(), node=backend.name, what="quarantine",
                    device=backend.name, mode=self.mode,
                    message=f"image {digest} was in work when {backend.name} died",
                    evidence={"digest": digest, "for_s": self.settings.quarantine_s},
                )
            )  # fmt: skip

    def _respond(self, backend: Backend) -> None:
        """Put together what is in force for a backend."""
        asked = self.pressure.responses(backend.name)
        responses = self.options.drill | asked | backend.ordered
        if responses != backend.responses:
            backend.responses = responses
            self.admission.pump()

    async def _tick(self) -> None:
        """Readings, pressure, and what has gathered for the breaker, ten times a second."""
        for number in itertools.count():
            await asyncio.sleep(_TICK_S)
            if number % _TICKS_PER_PRESSURE == 0:
                self._feel()
            if number % _TICKS_PER_READING == 0:
                self._read()
                self.health.keep_goldens()
                self.admission.pump()
            self._flush()

    def _waits_s(self, backend: Backend, now: float) -> list[float]:
        """How long requests wait for a backend, here or for their first token there."""
        waits = [now - ticket.arrived_s for ticket in self.admission.backlog(backend)]
        for ticket, meter in self._work.values():
            if ticket.backend is backend and meter.first_s is None and _streams(ticket):
                waits.append(now - (ticket.placed_s or now))
        return waits

    def _feel(self) -> None:
        """The pressure on each backend now."""
        now, now_ns = time.monotonic(), time.time_ns()
        for backend in self.backends:
            waits = self._waits_s(backend, now)
            reading = serving_record(backend, [], waits, None, now_ns)
            for rule, holds, why in self.pressure.step(backend.name, reading):
                self._outbox.append(
                    Event(
                        ts_ns=now_ns, node=backend.name, what="pressure", device=backend.name,
                        rule=rule, mode=self.mode, state="on" if holds else "off", message=why,
                        evidence={"responses": sorted(self.pressure.responses(backend.name))},
                    )
                )  # fmt: skip
            self._respond(backend)

    def _read(self) -> None:
        """One reading of every backend, and the counts so far."""
        now, now_ns = time.monotonic(), time.time_ns()
        for backend in self.backends:
            name = backend.name
            mine = [(t, m) for t, m in self._work.values() if t.backend is backend]
            tokens = self._finished_events.get(name, 0) + sum(m.events for _, m in mine)
            rate = (tokens - self._tokens_before.get(name, tokens)) / (_TICK_S * _TICKS_PER_READING)
            self._tokens_before[name] = tokens
            seen_all = all(_streams(ticket) for ticket, _ in mine)
            samples = self.tallies.recent(name)
            waits = self._waits_s(backend, now)
            self._outbox.append(
                serving_record(backend, samples, waits, max(0.0, rate) if seen_all else None,
                               now_ns)
            )  # fmt: skip
        errors = {
            backend.name: found.error_ratio
            for backend in self.backends
            for model in backend.models[:1]
            if (found := self.predictors.get(model)) is not None
        }
        self._outbox += guard_records(self.tallies, self.backends, errors, self.node, now_ns)


def _streams(ticket: Ticket) -> bool:
    return ticket.seen is not None and ticket.seen.stream


def _receipt(ticket: Ticket) -> str:
    """Where a request went, why, and what was done to it, in one line."""
    decision = ticket.decision
    if decision is None:
        return ""
    waited = (ticket.placed_s or ticket.arrived_s) - ticket.arrived_s
    said = f"{decision.device}; reason={decision.reason}; score={decision.score:.3g}"
    if decision.next_best is not None:
        said += f"; next={decision.next_best}:{decision.next_best_score or 0:.3g}"
    said += f"; queue={ticket.queue}; wait={waited:.3f}"
    if ticket.shrunk is not None:
        said += f"; image_tokens={ticket.shrunk[0]}>{ticket.shrunk[1]}"
    if ticket.capped:
        said += "; output=capped"
    return plain(said)


def _too_large(size: int, most: int) -> Refusal:
    return Refusal(413, "body_too_large", f"a body of {size} bytes; at most {most} are taken")


async def _rest(parts: list[bytes], request: web.BaseRequest) -> AsyncIterator[bytes]:
    """What has been read of a body, then the rest as it comes."""
    for part in parts:
        yield part
    parts.clear()
    async for chunk in request.content.iter_any():
        yield chunk


def _for_backends(profile: profiles.Profile) -> profiles.Profile:
    """The profile for a breaker over backends: a dead one is out, open or not, so all may be
    open at once; and what the guard calls a rebuild is a restart by somebody else."""
    settings = msgspec.structs.replace(
        profile.breaker, max_open_ratio=1.0, rebuild_deadline_s=profile.guard.restart_s
    )
    return msgspec.structs.replace(profile, breaker=settings)


def run(guard: Guard, host: str, port: int, ready: Callable[[int], None]) -> int | None:
    """Serve until SIGINT or SIGTERM, whose number comes back; ``ready`` gets the port.

    Requests in work may end, for as long as ``[guard] drain`` says; a second signal ends them.
    """
    ended_by: list[int] = []

    async def serve() -> None:
        loop = asyncio.get_running_loop()
        ending, at_once = asyncio.Event(), asyncio.Event()

        def end(number: int) -> None:
            (at_once if ended_by else ending).set()
            ended_by.append(number)

        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, end, number)
        ready(await guard.start(host, port))
        await ending.wait()
        stopping = loop.create_task(guard.stop())
        hurry = loop.create_task(at_once.wait())
        await asyncio.wait({stopping, hurry}, return_when=asyncio.FIRST_COMPLETED)
        hurry.cancel()
        if not stopping.done():
            guard.watch.close()

    asyncio.run(serve())
    return ended_by[0] if ended_by else None
