"""The guard itself: what it is made of, the server in front, the clock behind."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import signal
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import aiohttp
import msgspec
from aiohttp import web

from mmctl.engine import profiles
from mmctl.engine.breaker.state import Command
from mmctl.engine.errors import MmctlError
from mmctl.engine.records import AnyRecord, Device, Event, Serving
from mmctl.guard import own
from mmctl.guard.admission import Admission, Ticket
from mmctl.guard.backends import Backend
from mmctl.guard.health import Health
from mmctl.guard.inputs import Inputs, of_devices
from mmctl.guard.journal import Journal
from mmctl.guard.passage import Passage
from mmctl.guard.pressure import Pressure
from mmctl.guard.refusal import Refusal
from mmctl.guard.seeing import Seen
from mmctl.guard.tallies import Tallies, serving_record
from mmctl.guard.tokens import Predictor, of_model
from mmctl.guard.treatment import Quarantine, plan
from mmctl.guard.watch import Watch

_TICK_S = 0.1
_TICKS_PER_PRESSURE, _TICKS_PER_READING = 2, 10
_IDLE_S = 75.0  # a client's connection without a whole request on it
_SWITCH_S = 0.0005  # how long the breaker's thread may keep the server from running
_LINGER_S = 2.0  # how long the rest of a refused body is read, so that the answer is seen
_PREDICTORS_MOST = 100

T = TypeVar("T")


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """What the command line adds to the profile.

    ``memory_bytes`` of a backend's devices tell its capacity where the profile does not.
    ``folder`` is the model's own (config.json, tokenizer.json); ``drill`` names responses that
    are in force from the start, whatever the rules say.
    """

    folder: Path | None = None
    drill: frozenset[str] = frozenset()
    golden: Path | None = None
    record: Path | None = None
    rotate_bytes: int | None = None
    keep: int = 1
    socket: Path | None = None
    sources: tuple[str, ...] = ()
    memory_bytes: int = 0
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
        self.settings, self.mode, self.enforce = profile.guard, mode, mode == "enforce"
        self.options = options = options or Options()
        self.backends = backends
        self.watch = Watch(
            _for_backends(profile), mode, self._command, say, name=options.profile_name,
            record=options.record, rotate_bytes=options.rotate_bytes, keep=options.keep,
            socket=options.socket,
        )  # fmt: skip
        for backend in backends:
            backend.capacity_tokens = self.settings.capacity_tokens
            backend.responses = options.drill
            if self.enforce and self.watch.held(backend.name):
                backend.share = 0.0
        self.admission = Admission(self.settings, profile.schedule, backends, self.enforce)
        self.tallies = Tallies(backends)
        self.journal = Journal(self.watch, mode, backends, self.admission, self.tallies)
        self.quarantine = Quarantine(self.settings)
        self.predictors: dict[str, Predictor] = {}
        self.health = Health(
            profile, self.enforce, backends, self.journal.urgent, self._changed, options.golden,
            say,
        )  # fmt: skip
        self._inputs: Inputs | None = None
        if options.sources:
            self._inputs = Inputs(options.sources, profile, backends, self._input, say)
        self.pool = ThreadPoolExecutor(2, thread_name_prefix="mmctl-images")
        self._pressure = Pressure(self.settings.rules)
        self._numbers = itertools.count(1)

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
            self._handle,
            handler_cancellation=True,
            auto_decompress=False,
            access_log=None,
            lingering_time=_LINGER_S,
            keepalive_timeout=_IDLE_S,
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
        if self._inputs is not None:
            self._inputs.start()
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
        if self._inputs is not None:
            await asyncio.to_thread(self._inputs.close)
        self.journal.flush()
        await asyncio.to_thread(self.watch.close)
        self.pool.shutdown(wait=False, cancel_futures=True)

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        answer = own.PATHS.get(request.path) if request.method in ("GET", "HEAD") else None
        if request.path == "/v1/models" and request.method == "GET" and len(self.backends) > 1:
            answer = own.models
        try:
            if answer is not None:
                return await answer(self)
            return await Passage(self, request, next(self._numbers)).run()
        except Refusal as refusal:
            return refusal.response()

    def predictor(self, model: str) -> Predictor:
        """The predictor of a model; beyond so many, unknown models share one."""
        found = self.predictors.get(model)
        if found is None:
            if len(self.predictors) >= _PREDICTORS_MOST:
                return self.predictors.setdefault("", Predictor())
            folder = self.options.folder
            listed = any(model in backend.models for backend in self.backends)
            if folder is None and listed and (Path(model) / "config.json").is_file():
                folder = Path(model)  # as a backend of ours names it, never as a client does
            found = self.predictors[model] = of_model(model, self.settings.families, folder)
        return found

    def foresee(self, ticket: Ticket, seen: Seen) -> None:
        """Predict what a request will take, and what it would with smaller images."""
        settings = self.settings
        if not any(backend.has(ticket.model) for backend in self.backends):
            ticket.model = ""  # a backend will say that there is no such model
        predictor = self.predictor(seen.model)
        ticket.tokens = predictor.predict(seen)
        ticket.output_tokens = seen.output_tokens or settings.output_tokens
        answers = seen.answers * ticket.output_tokens
        ticket.cost_tokens = ticket.least_cost_tokens = ticket.tokens.prompt + answers
        ticket.peak_bytes = predictor.peak_bytes(seen, ticket.tokens, answers)
        small = any("shrink_images" in backend.responses for backend in self.backends)
        if seen.images and (small or any(b.capacity_tokens for b in self.backends)):
            ticket.plan = plan(seen, ticket.tokens, predictor, settings)
            ticket.least_cost_tokens = ticket.plan.tokens.prompt + answers

    def _input(self, record: AnyRecord) -> None:
        """From the sources' thread: the breaker takes it, routing and pressure may need it."""
        self.watch.put([record])
        if isinstance(record, (Device, Serving)):
            self._soon(self._reading, record)

    def _reading(self, record: Device | Serving) -> None:
        for backend in self.backends:
            if isinstance(record, Serving):
                if record.instance == backend.name:
                    backend.page = record
            elif (busiest := of_devices(backend, record)) is not None:
                self.admission.router.update(busiest)

    def _command(self, command: Command) -> None:
        """From the breaker's thread into the server's."""
        self._soon(self.health.carry_out, command)

    def _soon(self, function: Callable[[T], None], value: T) -> None:
        """From another thread into the server's; a server that has ended hears of nothing."""
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(function, value)

    def _changed(self, backend: Backend) -> None:
        """A backend came, went or got another share."""
        if backend.down is not None and not backend.mourned:
            self._mourn(backend)
        backend.mourned = backend.down is not None
        if self.options.memory_bytes and backend.models and not backend.capacity_tokens:
            known = self.predictor(backend.models[0]).capacity_tokens(self.options.memory_bytes)
            backend.capacity_tokens = known or 0
        self._respond(backend)
        self.admission.give_up(self.admission.none_left)
        self.admission.pump()

    def _mourn(self, backend: Backend) -> None:
        """The images that were in work when a backend died are remembered."""
        requests, backend.suspects = backend.suspects, []
        for ticket, _ in self.journal.in_work(backend):
            seen = ticket.seen
            requests.append([image.digest for image in seen.images] if seen else [])
        digests = {digest for request in requests for digest in request}
        for digest in self.quarantine.death(digests, len(requests)):
            self.journal.add(
                Event(
                    ts_ns=time.time_ns(), node=backend.name, what="quarantine",
                    device=backend.name, mode=self.mode,
                    message=f"image {digest} was in work when {backend.name} died",
                    evidence={"digest": digest, "for_s": self.settings.quarantine_s},
                )
            )  # fmt: skip

    def _respond(self, backend: Backend) -> None:
        """Put together what is in force for a backend."""
        asked = self._pressure.responses(backend.name)
        backend.responses = self.options.drill | asked | backend.ordered

    async def _tick(self) -> None:
        """Pressure, readings, and what has gathered for the breaker, ten times a second."""
        for number in itertools.count():
            await asyncio.sleep(_TICK_S)
            if number % _TICKS_PER_PRESSURE == 0:
                self._feel()
                self.admission.pump()
            if number % _TICKS_PER_READING == 0:
                for backend in self.backends:
                    backend.draw_again()
                self.journal.read(self.predictors, self.health.asking())
                self.health.keep_goldens()
            self.journal.flush()

    def _feel(self) -> None:
        """The pressure on each backend now."""
        now_ns = time.time_ns()
        for backend in self.backends:
            reading = serving_record(backend, [], self.journal.waits_s(backend), None, now_ns)
            if (page := backend.own_page(now_ns)) is not None and page.kv_ratio is not None:
                reading = msgspec.structs.replace(reading, kv_ratio=page.kv_ratio)
            for rule, holds, why in self._pressure.step(backend.name, reading):
                self.journal.add(
                    Event(
                        ts_ns=now_ns, node=backend.name, what="pressure", device=backend.name,
                        rule=rule, mode=self.mode, state="on" if holds else "off", message=why,
                        evidence={"responses": sorted(self._pressure.responses(backend.name))},
                    )
                )  # fmt: skip
            self._respond(backend)


def _for_backends(profile: profiles.Profile) -> profiles.Profile:
    """The profile for a breaker over backends: a dead one is out, open or not, so all may be
    open at once; what the guard calls a rebuild is a restart by somebody else; canaries are
    asked one by one of a server that may be slow."""
    settings, guard = profile.breaker, profile.guard
    settings = msgspec.structs.replace(
        settings, max_open_ratio=1.0, rebuild_deadline_s=guard.restart_s,
        verify_deadline_s=max(settings.verify_deadline_s, guard.verify_s),
    )  # fmt: skip
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
        had = await guard.start(host, port)
        # The server must answer while other threads compute; what is there by now stays.
        sys.setswitchinterval(_SWITCH_S)
        gc.collect()
        gc.freeze()
        ready(had)
        await ending.wait()
        stopping = loop.create_task(guard.stop())
        hurry = loop.create_task(at_once.wait())
        await asyncio.wait({stopping, hurry}, return_when=asyncio.FIRST_COMPLETED)
        hurry.cancel()
        if not stopping.done():
            guard.watch.close()

    asyncio.run(serve())
    return ended_by[0] if ended_by else None
