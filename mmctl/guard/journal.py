"""What the guard writes down: requests, what was done to them, readings of the backends.

Records gather here and go to the breaker's thread in batches. No prompt, no image and no key is
ever among them: an image is its hash and size, a tenant a name or a hash.
"""

from __future__ import annotations

import platform
import time
from typing import Any

import msgspec

from mmctl.engine.profiles import Mode
from mmctl.engine.records import AnyRecord, Event, Request
from mmctl.guard.admission import Admission, Ticket
from mmctl.guard.backends import Backend
from mmctl.guard.relay import Meter, plain
from mmctl.guard.tallies import Tallies, guard_records, serving_record
from mmctl.guard.tokens import Predictor
from mmctl.guard.watch import Watch

_TOLD_PER_SECOND = 25  # completed requests of a backend, for its latency rules


class Journal:
    """Writes records; ``work`` are the requests that are with a backend, by their number."""

    def __init__(
        self, watch: Watch, mode: Mode, backends: list[Backend], admission: Admission,
        tallies: Tallies,
    ) -> None:  # fmt: skip
        self.watch, self.mode, self.backends = watch, mode, backends
        self.admission, self.tallies = admission, tallies
        self.node = platform.node()
        self.work: dict[int, tuple[Ticket, Meter]] = {}
        self._outbox: list[AnyRecord] = []
        self._ended_tokens: dict[str, int] = {}
        self._tokens_before: dict[str, tuple[float, int]] = {}

    def add(self, record: AnyRecord) -> None:
        """Keep ``record`` for the next ``flush``."""
        self._outbox.append(record)

    def urgent(self, event: Event) -> None:
        """An event that the breaker is to hear of now."""
        self._outbox.append(event)
        self.flush()

    def flush(self) -> None:
        """Hand what was kept to the breaker's thread."""
        if self._outbox:
            records, self._outbox = self._outbox, []
            self.watch.put(records)

    def treated(
        self, what: str, ticket: Ticket, backend: Backend | None, message: str, **evidence: Any
    ) -> None:
        """A line of the audit log: what was, or would be, done to a request."""
        name = backend.name if backend is not None else None
        self._outbox.append(
            Event(
                ts_ns=time.time_ns(), node=name or self.node, what=what, device=name,
                mode=self.mode, message=message,
                evidence={
                    "request": f"r{ticket.id}", "tenant": ticket.tenant, "queue": ticket.queue,
                    **evidence,
                },
            )
        )  # fmt: skip

    def step(self, ticket: Ticket, state: str) -> None:
        """A request is queued or admitted, for whoever looks at single requests."""
        if not self.watch.wanted:
            return
        self._outbox.append(self._request(ticket, state, ticket.output_tokens))
        backend, decision = ticket.backend, ticket.decision
        if state == "admitted" and len(self.backends) > 1 and backend is not None:
            self._outbox.append(
                Event(
                    ts_ns=time.time_ns(), node=backend.name, what="route", device=backend.name,
                    mode=self.mode, message=receipt(ticket),
                    evidence=msgspec.to_builtins(decision),
                )
            )  # fmt: skip

    def ended(self, ticket: Ticket, backend: Backend | None, meter: Meter, state: str) -> None:
        """A request is over: counted for its backend and tenant, and told."""
        output_tokens = meter.completion_tokens or 0
        counts = {
            "requests": 1, state: 1, "shrunk": int(ticket.shrunk is not None),
            "capped": int(ticket.capped), "deferred": int(ticket.waited),
            "images": ticket.images, "vision_tokens": ticket.tokens.vision,
            "text_tokens": ticket.tokens.text, "output_tokens": output_tokens,
        }  # fmt: skip
        name = backend.name if backend is not None else None
        self.tallies.add(ticket.tenant, name, **counts)
        if name is not None:
            self._ended_tokens[name] = self._ended_tokens.get(name, 0) + meter.events
        if backend is not None and state == "completed" and not self._needed(backend):
            return
        stages = {"e2e_s": time.monotonic() - ticket.arrived_s}
        if meter.first_s is not None and meter.streamed:
            stages["ttft_s"] = meter.first_s - ticket.arrived_s
        record = self._request(ticket, state, output_tokens)
        self._outbox.append(msgspec.structs.replace(record, instance=name, stages=stages))

    def _needed(self, backend: Backend) -> bool:
        """Whether one more completed request is told: to readers all of them, to the rules no
        more than they can use, because their windows keep every sample for ten minutes."""
        if self.watch.wanted or backend.share < 1:
            return True
        second = int(time.monotonic())
        if backend.told_second != second:
            backend.told_second, backend.told = second, 0
        backend.told += 1
        return backend.told <= _TOLD_PER_SECOND

    def _request(self, ticket: Ticket, state: str, output_tokens: int) -> Request:
        wait_s = None if ticket.placed_s is None else ticket.placed_s - ticket.arrived_s
        return Request(
            ts_ns=time.time_ns(), node=self.node, id=f"r{ticket.id}", state=state,
            images=ticket.images, vision_tokens=ticket.tokens.vision,
            text_tokens=ticket.tokens.text, output_tokens=output_tokens,
            instance=ticket.backend.name if ticket.backend is not None else None,
            tenant=ticket.tenant, queue_wait_s=wait_s, peak_bytes=ticket.peak_bytes,
        )  # fmt: skip

    def in_work(self, backend: Backend) -> list[tuple[Ticket, Meter]]:
        """The requests that are with a backend now."""
        return [pair for pair in self.work.values() if pair[0].backend is backend]

    def waits_s(self, backend: Backend) -> list[float]:
        """How long requests wait for a backend, here or for their first token there."""
        now = time.monotonic()
        waits = [now - ticket.arrived_s for ticket in self.admission.backlog(backend)]
        for ticket, meter in self.in_work(backend):
            if meter.first_s is None and ticket.streams:
                waits.append(now - (ticket.placed_s or now))
        return waits

    def read(self, predictors: dict[str, Predictor], asked: set[str]) -> None:
        """One reading of every backend, and the counts so far.

        Tokens are not seen of answers that are not streamed, nor while canaries are ``asked``.
        """
        now, now_ns = time.monotonic(), time.time_ns()
        for backend in self.backends:
            name, mine = backend.name, self.in_work(backend)
            tokens = self._ended_tokens.get(name, 0) + sum(meter.events for _, meter in mine)
            before_s, before = self._tokens_before.get(name, (now, tokens))
            self._tokens_before[name] = (now, tokens)
            rate = None
            seen = name not in asked and all(ticket.streams for ticket, _ in mine)
            if now > before_s and seen:
                rate = max(0.0, (tokens - before) / (now - before_s))
            if backend.own_page(now_ns) is not None:
                continue  # the engine tells more of itself
            samples = self.tallies.recent(name)
            self.add(serving_record(backend, samples, self.waits_s(backend), rate, now_ns))
        errors = {
            backend.name: max(found.errors.values(), default=None)
            for backend in self.backends
            for model in backend.models[:1]
            if (found := predictors.get(model)) is not None
        }
        self._outbox += guard_records(self.tallies, self.backends, errors, self.node, now_ns)


def receipt(ticket: Ticket) -> str:
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
