"""Canaries: what a healthy backend answers to them, and whether one that returned still does.

The questions are asked in threads, which the end of the guard does not wait for.
"""

from __future__ import annotations

import asyncio
import hashlib
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from mmctl.engine.breaker.store import folder
from mmctl.engine.errors import MmctlError
from mmctl.engine.profiles import Recovery
from mmctl.engine.recovery.canaries import Image
from mmctl.engine.recovery.goldens import Answer, Ask, Goldens
from mmctl.guard.backends import Backend

_CANARY_TIMEOUT_S = 30.0

T = TypeVar("T")


class Canaries:
    """Goldens by model, recorded where none are kept; ``known`` are those of this run.

    ``golden`` is the file that was named for them.
    """

    def __init__(
        self, settings: Recovery, backends: dict[str, Backend], golden: Path | None,
        say: Callable[[str], None],
    ) -> None:  # fmt: skip
        self._settings, self._backends, self._say = settings, backends, say
        self._golden_file = golden
        self._ending = threading.Event()
        self.known: dict[str, Goldens] = {}
        self.problem: str | None = None

    def end(self) -> None:
        """Ask nothing more."""
        self._ending.set()

    async def check(self, backend: Backend) -> dict[str, Any]:
        """The verdict on a backend's answers, with its checks, or why there is none."""
        return await _apart(lambda: self._check(backend))

    async def learn(self, backend: Backend, model: str) -> None:
        """Have the goldens of a model, from a healthy backend where no file has them."""
        try:
            await _apart(lambda: self._record(backend, model))
        except MmctlError as error:
            if str(error) != self.problem:
                self.problem = str(error)
                self._say(f"a restarted {backend.name} could not be verified: {error}")

    def _check(self, backend: Backend) -> dict[str, Any]:
        """In a thread: the canaries' answers against goldens, or against a healthy peer's."""
        from mmctl.engine.recovery import asks, goldens
        from mmctl.engine.recovery.verify import compare

        model = backend.models[0] if backend.models else ""
        try:
            known = self.known.get(model) or self._saved(model) or self._of_peer(backend, model)
            if known is None:
                return {"refused": "no goldens, and no healthy backend with the same model"}
            ask = self._until_end(asks.endpoint(str(backend.url), model or None, _CANARY_TIMEOUT_S))
            verdict = compare(known, goldens.observe(ask), self._settings)
        except MmctlError as error:
            return {"refused": str(error)}
        found: dict[str, Any] = msgspec.to_builtins(verdict)
        return found

    def _until_end(self, ask: Ask) -> Ask:
        """``ask``, which no longer asks once the guard ends."""

        def asked(image: Image, question: str) -> Answer:
            if self._ending.is_set():
                raise MmctlError("the guard has ended")
            return ask(image, question)

        return asked

    def _of_peer(self, backend: Backend, model: str) -> Goldens | None:
        for peer in self._backends.values():
            if peer is not backend and peer.takes and peer.share >= 1 and model in peer.models:
                return self._record(peer, model)
        return None

    def _record(self, backend: Backend, model: str) -> Goldens:
        """In a thread: goldens from the file that was named, else recorded now and saved."""
        from mmctl.engine.recovery import asks, goldens

        named = self._golden_file
        if named is not None and named.exists():
            known = goldens.load(named)
        else:
            ask = self._until_end(asks.endpoint(str(backend.url), model, _CANARY_TIMEOUT_S))
            known = goldens.record(ask, str(backend.url), self._settings)
            file = named or _file(model)
            file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            goldens.save(known, file)
            self._say(f"goldens of {model}: {known.runs} runs of {backend.name}, in {file}")
        self.problem = None
        self.known[model] = known
        return known

    def _saved(self, model: str) -> Goldens | None:
        """The goldens of the run before: for what was out already when this one began."""
        from mmctl.engine.recovery import goldens

        file = self._golden_file or _file(model)
        return goldens.load(file) if file.exists() else None


async def _apart(work: Callable[[], T]) -> T:
    """Do ``work`` in a thread that the end of the guard does not wait for."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def settle(result: T | None, error: BaseException | None) -> None:
        if done.done():
            return
        if error is not None:
            done.set_exception(error)
        else:
            done.set_result(result)  # type: ignore[arg-type]

    def run() -> None:
        result, problem = None, None
        try:
            result = work()
        except BaseException as error:
            problem = error
        if not loop.is_closed():
            loop.call_soon_threadsafe(settle, result, problem)

    threading.Thread(target=run, name="mmctl-canaries", daemon=True).start()
    return await done


def _file(model: str) -> Path:
    """Where the goldens of a model are kept between runs."""
    name = hashlib.blake2b(model.encode(), digest_size=8).hexdigest()
    return folder().parent / "guard" / f"goldens-{name}.json"
