"""Backends that die and come back: found out, kept out, verified, let in by a share.

The breaker decides; this carries its commands out. A backend is down as soon as its address
refuses a connection, a request's or one of those that are tried every ``probe``, or as another
process answers there. Being slow is not being down. Traffic returns only when the breaker says so,
after its canaries were answered as before. When only observing, a backend that answers again is
used again.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp

from mmctl.engine.breaker.state import Command
from mmctl.engine.profiles import Profile
from mmctl.engine.records import Event
from mmctl.guard.backends import Backend, Listing, listed, problem
from mmctl.guard.canaries import Canaries
from mmctl.guard.identity import Identity
from mmctl.guard.relay import timeout
from mmctl.guard.treatment import AS_ASKED, RESPONSES

_PROBE_TIMEOUT_S = 5.0
_FAILURES_MOST = 5  # requests in a row that a backend breaks off, though it can be reached
_UNDECIDED_S = 10.0  # then a backend that no rule has opened returns unverified
_GOLDENS_RETRY_S = 30.0
_KNOCKS_PER_LOOK = 10  # a connection is tried so often before the server itself is asked
_PAGE_MOST_BYTES = 4 << 20

Tell = Callable[[Event], None]


class Health:
    """What is known of every backend's life; ``tell`` takes events for the breaker."""

    def __init__(
        self, profile: Profile, enforce: bool, backends: list[Backend], tell: Tell,
        changed: Callable[[Backend], None], golden: Path | None, say: Callable[[str], None],
    ) -> None:  # fmt: skip
        self.settings, self.enforce = profile.guard, enforce
        self.backends = {backend.name: backend for backend in backends}
        self._tell, self._changed, self._say = tell, changed, say
        self.canaries = Canaries(profile.recovery, self.backends, golden, say)
        self._recorded_s: dict[str, float] = {}
        self._commanded_s: dict[str, float] = {}
        self._identities = {backend.name: Identity() for backend in backends}
        self._tasks: dict[tuple[str, str], asyncio.Task[None]] = {}
        self._running: set[asyncio.Task[None]] = set()  # those that were replaced too
        self._ended = False
        self.session: aiohttp.ClientSession | None = None

    def asking(self) -> set[str]:
        """The backends that are asked canaries now."""
        return {name for name, kind in self._tasks if kind in ("goldens", "recover")}

    def start(self, session: aiohttp.ClientSession) -> None:
        """Meet every backend."""
        self.session = session
        for backend in self.backends.values():
            self._task(backend, "meet", self._meet(backend))

    async def stop(self) -> None:
        """End what is under way, and wait until it has ended; nothing begins any more, whatever
        the breaker, which ends later, may still order."""
        self._ended = True
        self.canaries.end()
        for task in self._running:
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)

    def _task(self, backend: Backend, kind: str, work: Any) -> None:
        """Run ``work``, in place of what of its kind is under way for the backend."""
        if self._ended:
            work.close()
            return
        key = (backend.name, kind)
        old = self._tasks.pop(key, None)
        if old is not None:
            old.cancel()
        task = asyncio.get_running_loop().create_task(work)
        self._tasks[key] = task
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        task.add_done_callback(
            lambda done: self._tasks.pop(key, None) if self._tasks.get(key) is done else None
        )

    async def _meet(self, backend: Backend) -> None:
        """At the start: wait until it is there. What has never answered has not died."""
        while True:
            found = await self._models(backend)
            before = backend.down
            backend.down = found if isinstance(found, str) else None
            if isinstance(found, Listing):
                backend.models = found.models
                if backend.share <= 0:
                    held = "is held, as the guard before left it: mmctl breaker status"
                    self._say(f"{backend.name} {held}")
                self._changed(backend)
                self._task(backend, "attend", self._attend(backend))
                return
            if before is None and backend.down is not None:
                self._say(f"{backend.name} is not there yet: {backend.down}")
                self._changed(backend)
            await asyncio.sleep(self.settings.probe_s)

    async def _attend(self, backend: Backend) -> None:
        """From then on: find out that it died, or was replaced, between two requests."""
        for number in itertools.count():
            if number % _KNOCKS_PER_LOOK == 0 or await self._refuses(backend):
                self._suspect(backend)
            await asyncio.sleep(self.settings.probe_s)

    async def _refuses(self, backend: Backend) -> bool:
        """Whether nobody listens at its address; a server that only takes long is there."""
        if backend.down is not None:
            return False  # that is known
        try:
            async with timeout(self.settings.connect_s):
                _, writer = await asyncio.open_connection(backend.url.host, backend.url.port)
        except asyncio.TimeoutError:
            return False
        except OSError:
            return True
        writer.close()
        return False

    async def _models(self, backend: Backend) -> Listing | str | None:
        """Its models; why it cannot be reached; None where it only takes too long."""
        assert self.session is not None
        try:
            async with self.session.get(
                backend.url.joinpath("v1/models"),
                timeout=aiohttp.ClientTimeout(total=_PROBE_TIMEOUT_S),
            ) as answer:
                return listed(await answer.read())
        except asyncio.TimeoutError:
            return None
        except (aiohttp.ClientError, OSError) as error:
            return problem(error)

    def unreachable(self, backend: Backend, why: str, refused: bool) -> None:
        """A connection could not be made."""
        if refused:
            self.down(backend, why)
        else:
            self._suspect(backend)

    def died(self, backend: Backend) -> None:
        """A request was broken off: the backend may have died, or the connection was stale."""
        backend.failures += 1
        self._suspect(backend)

    def answered(self, backend: Backend) -> None:
        """A whole answer came."""
        if backend.failures:
            backend.failures = 0
            backend.suspects.clear()

    def _suspect(self, backend: Backend) -> None:
        if backend.down is None and (backend.name, "look") not in self._tasks:
            self._task(backend, "look", self._look(backend))

    async def _look(self, backend: Backend) -> None:
        """Ask it whether it is there, and the same process as before."""
        found = await self._models(backend)
        if isinstance(found, str):
            self.down(backend, found)
        elif isinstance(found, Listing) and await self._replaced(backend, found):
            self.down(backend, "another process answers at its address: it was restarted")
        elif backend.failures >= _FAILURES_MOST:
            self.down(backend, f"it broke off {backend.failures} requests in a row")

    async def _replaced(self, backend: Backend, found: Listing) -> bool:
        """Whether another process answers; the models that it has now are taken down."""
        identity, now_s = self._identities[backend.name], time.monotonic()
        if found.models and found.models != backend.models:
            backend.models = found.models
        page = await self._page(backend)
        other = identity.listed(found, now_s)
        return identity.page(page, now_s) or other

    async def _page(self, backend: Backend) -> bytes:
        """Its metrics page, or what is wanted of a long one; empty where it has none."""
        assert self.session is not None
        try:
            async with self.session.get(
                backend.url.joinpath("metrics"),
                timeout=aiohttp.ClientTimeout(total=_PROBE_TIMEOUT_S),
            ) as answer:
                page = b""
                while answer.status == 200 and len(page) < _PAGE_MOST_BYTES:
                    if not (piece := await answer.content.readany()):
                        break
                    page += piece
                return page
        except (aiohttp.ClientError, OSError, asyncio.TimeoutError):
            return b""

    def down(self, backend: Backend, why: str) -> None:
        """No traffic for it from now on; the breaker hears of it at once."""
        if backend.down is not None or (backend.name, "meet") in self._tasks:
            return
        backend.down, backend.failures = why, 0
        self._identities[backend.name] = Identity()
        self._changed(backend)
        self._tell(self._event(backend, "backend_down", "failure", why))
        self._task(backend, "return", self._return(backend))

    async def _return(self, backend: Backend) -> None:
        """Without a breaker that acts, a backend returns once it answers."""
        since = time.monotonic()
        while True:
            await asyncio.sleep(self.settings.probe_s)
            if self.enforce and (
                self._commanded_s.get(backend.name, 0.0) >= since
                or time.monotonic() - since < _UNDECIDED_S
            ):
                continue
            found = await self._models(backend)
            if isinstance(found, Listing):
                self._up(backend, found.models)
                backend.down = None
                self._changed(backend)
                return

    def _up(self, backend: Backend, models: tuple[str, ...]) -> None:
        backend.models = models or backend.models
        self._tell(self._event(backend, "backend_up", "step", "it answers again"))

    def carry_out(self, command: Command) -> None:
        """Do what the breaker asks; its answer becomes an event of the stream."""
        backend = self.backends.get(command.device)
        if backend is None:
            return
        self._commanded_s[backend.name] = time.monotonic()
        if command.action == "respond":
            self._respond(backend, command)
        elif command.action == "admit":
            self._admit(backend, float(command.args.get("share", 1.0)))
        elif command.action == "rebuild":
            self._task(backend, "recover", self._rebuild(backend, command))
        elif command.action == "verify":
            self._task(backend, "recover", self._verify(backend, command))

    def _respond(self, backend: Backend, command: Command) -> None:
        """Hold its traffic; what can be done to requests is done once it is let in again."""
        asked = [str(name) for name in command.args.get("order", ())]
        done = [AS_ASKED.get(name, name) for name in asked]
        backend.ordered = frozenset(done) & RESPONSES
        backend.share = 0.0
        self._changed(backend)
        steps = [{"response": "hold_admission"}, *({"response": n} for n in backend.ordered)]
        self._answer(backend, command, {"steps": steps}, 0, "its traffic is held")

    def _admit(self, backend: Backend, share: float) -> None:
        if share > 0:
            backend.down = None
            self._stop(backend, "return")
        if share >= 1:
            backend.ordered = frozenset()
        backend.share = share
        self._changed(backend)

    def _stop(self, backend: Backend, kind: str) -> None:
        task = self._tasks.pop((backend.name, kind), None)
        if task is not None:
            task.cancel()

    async def _rebuild(self, backend: Backend, command: Command) -> None:
        """The guard starts no server: it waits until somebody has, and says so."""
        begun = time.monotonic_ns()
        while True:
            found = await self._models(backend)
            if isinstance(found, Listing):
                break
            await asyncio.sleep(self.settings.probe_s)
        self._up(backend, found.models)
        took_ns = time.monotonic_ns() - begun
        self._answer(backend, command, {"ok": True}, took_ns, "it answers again")

    async def _verify(self, backend: Backend, command: Command) -> None:
        begun = time.monotonic_ns()
        evidence = await self.canaries.check(backend)
        self._answer(backend, command, evidence, time.monotonic_ns() - begun)

    def keep_goldens(self) -> None:
        """Have goldens of every model recorded while a backend with it is healthy."""
        if not self.enforce:
            return
        for backend in self.backends.values():
            model = backend.models[0] if backend.models else ""
            lately = time.monotonic() - self._recorded_s.get(model, -_GOLDENS_RETRY_S)
            if not model or model in self.canaries.known or lately < _GOLDENS_RETRY_S:
                continue
            if backend.takes and backend.share >= 1:
                self._recorded_s[model] = time.monotonic()
                self._task(backend, "goldens", self.canaries.learn(backend, model))

    def _answer(
        self, backend: Backend, command: Command, evidence: dict[str, Any], took_ns: int,
        message: str | None = None,
    ) -> None:  # fmt: skip
        self._tell(
            Event(
                ts_ns=time.time_ns(), node=backend.name, what=command.action,
                device=backend.name, message=message,
                evidence={"id": command.id, **evidence}, took_ns=took_ns,
            )
        )  # fmt: skip

    @staticmethod
    def _event(backend: Backend, what: str, state: str, message: str) -> Event:
        return Event(
            ts_ns=time.time_ns(), node=backend.name, what=what, device=backend.name,
            state=state, message=message,
        )  # fmt: skip
