"""Who goes where, and when: queues by modality, budgets, slots, shares, affinity.

A request waits in the queue of its kind and is due a fixed time after it came, 30 ms for a text
stream, 200 ms for images: the earliest due goes first, so that what waits grows more urgent.
Whoever cannot be placed lets others pass. Images gather on as few backends as have room, and
leave at least one to text while there is any, until they have waited too long.
"""

from __future__ import annotations

import asyncio
import hashlib
import heapq
import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from itertools import islice

from mmctl.engine import profiles
from mmctl.engine.schedule.route import Ask, Decision, Router
from mmctl.guard.backends import Backend, held_back
from mmctl.guard.refusal import Refusal
from mmctl.guard.relay import timeout
from mmctl.guard.seeing import Seen
from mmctl.guard.tokens import Tokens
from mmctl.guard.treatment import Plan

QUEUES = ("stream", "vision", "default")
_LOOKED_AT = 32  # of each queue, when a slot is free: the rest comes after them anyway
_AGED_FACTOR = 10  # images that wait so many deadlines may go where text is
_TEXT_LATELY_S = 2.0


class Ticket:
    """A request on its way through the guard.

    ``tokens`` and ``output_tokens`` are predicted or capped; ``cost_tokens`` is what it takes
    of a backend's capacity, ``least_cost_tokens`` what it takes with its images made smaller.
    """

    __slots__ = (
        "arrived_s", "backend", "blocked", "capped", "cost_tokens", "decision", "draws", "due_s",
        "id", "images", "least_cost_tokens", "model", "output_tokens", "peak_bytes", "placed",
        "placed_s",
        "plan", "queue", "seen", "shrink", "shrunk", "tenant", "tokens", "tried", "waited",
    )  # fmt: skip

    def __init__(self, number: int, tenant: str) -> None:
        self.id, self.tenant = number, tenant
        self.seen: Seen | None = None
        self.model, self.queue, self.images = "", "default", 0
        self.plan: Plan | None = None
        self.shrunk: tuple[int, int] | None = None  # vision tokens before and after
        self.capped = False
        self.tokens = Tokens(0, 0)
        self.output_tokens = 0
        self.peak_bytes: int | None = None
        self.cost_tokens = self.least_cost_tokens = 0
        self.shrink = False  # its images are to be made smaller
        self.arrived_s = self.due_s = time.monotonic()
        self.placed_s: float | None = None
        self.backend: Backend | None = None
        self.decision: Decision | None = None
        self.placed: asyncio.Future[Backend] | None = None
        self.tried: set[str] = set()
        self.draws: dict[str, tuple[int, bool]] = {}
        self.blocked = ""  # why it could not be placed when last tried
        self.waited = False

    @property
    def streams(self) -> bool:
        """Whether its tokens are seen as they come."""
        return self.seen is not None and self.seen.stream

    def see(self, seen: Seen | None) -> None:
        """What the request holds, once it has been read."""
        self.seen = seen
        if seen is not None:
            self.model, self.queue = seen.model, seen.queue
            self.images = len(seen.images) + seen.videos


class Admission:
    """Places tickets on backends; ``enforce`` False places at once and holds nothing back."""

    def __init__(
        self,
        settings: profiles.Guard,
        schedule: profiles.Schedule,
        backends: Iterable[Backend],
        enforce: bool,
    ) -> None:
        self.settings, self.enforce = settings, enforce
        self.backends = {backend.name: backend for backend in backends}
        self.router = Router(tuple(self.backends))
        self.deadlines_s = {
            "stream": schedule.stream_deadline_s, "vision": schedule.vision_deadline_s,
            "default": settings.default_deadline_s,
        }  # fmt: skip
        self.waiting: dict[str, deque[Ticket]] = {name: deque() for name in QUEUES}
        self._text_s = -math.inf
        self._admitted = 0.0  # of the share, while admission is limited

    @property
    def depth(self) -> int:
        """How many tickets wait, in all queues."""
        return sum(map(len, self.waiting.values()))

    def backlog(self, backend: Backend) -> list[Ticket]:
        """The tickets that wait and could go to ``backend``."""
        return [
            ticket for queue in self.waiting.values() for ticket in queue
            if backend.has(ticket.model)
        ]  # fmt: skip

    async def enter(self, ticket: Ticket) -> Backend:
        """The backend for a ticket, once there is room in one; ``leave`` must follow.

        Raises Refusal when none takes traffic, none will ever have the room, admission is
        limited, the queue is full, or the wait is over.
        """
        ticket.due_s = ticket.arrived_s + self.deadlines_s[ticket.queue]
        if not ticket.images:
            self._text_s = time.monotonic()
        self._check(ticket)
        backend = self._place(ticket)
        if backend is not None:
            return backend
        if not self.enforce:
            raise Refusal(503, "no_backend", "no backend can be reached", 1.0)
        if self.depth >= self.settings.queue:
            said = f"{self.depth} requests wait already"
            raise Refusal(429, "queue_full", said, self.settings.wait_s / 2)
        ticket.placed, ticket.waited = asyncio.get_running_loop().create_future(), True
        self.waiting[ticket.queue].append(ticket)
        try:
            async with timeout(self.settings.wait_s):
                return await ticket.placed
        except asyncio.TimeoutError:
            raise self._over(ticket) from None

    def leave(self, ticket: Ticket) -> None:
        """The ticket waits or works no more; others may go in."""
        if ticket.backend is not None:
            backend, ticket.backend = ticket.backend, None
            backend.in_flight -= 1
            backend.images -= bool(ticket.images)
            backend.cost_tokens -= ticket.cost_tokens
            self.router.release(ticket.id)
        elif ticket.placed is not None and ticket in self.waiting[ticket.queue]:
            self.waiting[ticket.queue].remove(ticket)
        ticket.placed = None
        self.pump()

    def pump(self) -> None:
        """Place what waits, the earliest due first, until nothing more can be placed."""
        if not self.depth or not any(self._room(b) for b in self.backends.values()):
            return
        for ticket in list(self._in_order()):
            if ticket.placed is None or ticket.placed.done():
                continue
            backend = self._place(ticket)
            if backend is not None:
                self.waiting[ticket.queue].remove(ticket)
                ticket.placed.set_result(backend)
                if not any(self._room(b) for b in self.backends.values()):
                    return

    def give_up(self, why: Callable[[Ticket], Refusal | None]) -> None:
        """End the wait of every ticket for which there is a reason now."""
        for queue in self.waiting.values():
            for ticket in list(queue):
                refusal = why(ticket)
                if refusal is not None and ticket.placed and not ticket.placed.done():
                    queue.remove(ticket)
                    ticket.placed.set_exception(refusal)

    def none_left(self, ticket: Ticket) -> Refusal | None:
        """The refusal of a ticket that no backend can take now or soon."""
        able = [b for b in self.backends.values() if b.has(ticket.model)]
        untried = [b for b in able if b.name not in ticket.tried]
        if not untried:
            return Refusal(503, "no_backend", "no backend can be reached", self.settings.probe_s)
        if not any(backend.takes for backend in untried):
            states = ", ".join(f"{b.name}: {b.why_not}" for b in untried)
            return Refusal(503, "no_backend", f"no backend takes traffic ({states})", 5.0)
        return None

    def _check(self, ticket: Ticket) -> None:
        """What is refused before it waits."""
        if not self.enforce:
            return
        if refusal := self.none_left(ticket):
            raise refusal
        takers = [b for b in self.backends.values() if b.takes and b.has(ticket.model)]
        most = max((b.capacity_tokens or math.inf) for b in takers)
        if ticket.least_cost_tokens > most:
            raise Refusal(
                413, "over_capacity",
                f"the request may take {ticket.least_cost_tokens} tokens, and no backend holds "
                f"more than {most:.0f}",
            )  # fmt: skip
        if ticket.tried or not all("limit_admission" in b.responses for b in takers):
            return
        self._admitted += self.settings.admission_share
        if self._admitted < 1:
            said = "admission is limited until the backends have caught up"
            raise Refusal(429, "admission_limited", said, 5.0)
        self._admitted -= 1

    def _over(self, ticket: Ticket) -> Refusal:
        code = {"deferred": "images_deferred", "capacity": "no_room"}.get(
            ticket.blocked, "queue_wait"
        )
        said = f"no backend had room within {self.settings.wait_s:g} s ({ticket.blocked})"
        return Refusal(503, code, said, self.settings.wait_s / 2)

    def _in_order(self) -> Iterator[Ticket]:
        heads = (islice(queue, _LOOKED_AT) for queue in self.waiting.values())
        return heapq.merge(*heads, key=lambda ticket: ticket.due_s)

    def _room(self, backend: Backend) -> bool:
        return backend.takes and backend.in_flight < self.settings.requests

    def _place(self, ticket: Ticket) -> Backend | None:
        """Put the ticket on the best backend that takes it now."""
        able = [b for b in self.backends.values() if self._takes(b, ticket)]
        if not able:
            return None
        if trials := [backend for backend in able if backend.share < 1]:
            able = trials  # what was drawn for a share goes there: it is to be tried
        elif len(self.backends) > 1:
            able = self._lanes(able, ticket)
            if not able:
                ticket.blocked = "lanes"
                return None
        decision = self._decide(able, ticket)
        backend = self.backends[decision.device]
        full = self.enforce and not self._fits(backend, ticket.cost_tokens)
        ticket.shrink = full or "shrink_images" in backend.responses
        if full:
            ticket.cost_tokens = ticket.least_cost_tokens
        ticket.backend, ticket.decision, ticket.placed_s = backend, decision, time.monotonic()
        backend.in_flight += 1
        backend.images += bool(ticket.images)
        backend.cost_tokens += ticket.cost_tokens
        return backend

    def _takes(self, backend: Backend, ticket: Ticket) -> bool:
        """Whether a backend may have the ticket now; else why not is in ``ticket.blocked``."""
        if backend.name in ticket.tried or not backend.has(ticket.model):
            return False
        if backend.down is not None:
            ticket.blocked = "down"
            return False
        if not self.enforce:
            return True
        if not self._drawn(backend, ticket):
            ticket.blocked = "share"
            return False
        settings = self.settings
        budget = settings.requests
        if ticket.queue == "default":
            budget = max(1, settings.requests - settings.images)
        if backend.in_flight >= budget:
            ticket.blocked = "slots"
            return False
        if ticket.images:
            if "defer_images" in backend.responses and backend.in_flight:
                ticket.blocked = "deferred"
                return False
            if backend.images >= settings.images:
                ticket.blocked = "images"
                return False
        if not self._fits(backend, ticket.least_cost_tokens):
            ticket.blocked = "capacity"
            return False
        return True

    @staticmethod
    def _fits(backend: Backend, cost_tokens: int) -> bool:
        capacity = backend.capacity_tokens
        return not capacity or backend.cost_tokens + cost_tokens <= capacity

    def _drawn(self, backend: Backend, ticket: Ticket) -> bool:
        """Whether a backend that takes a share takes this one: every n-th, drawn once each; any
        while no other takes all."""
        if backend.share <= 0:
            return False
        able = [b for b in self.backends.values() if b.has(ticket.model)]
        if not held_back(backend, [b for b in able if b.name not in ticket.tried]):
            return True
        epoch, drawn = ticket.draws.get(backend.name, (-1, False))
        if epoch != backend.epoch:
            backend.drawn += backend.share
            drawn = backend.drawn >= 1
            backend.drawn -= drawn
            ticket.draws[backend.name] = (backend.epoch, drawn)
        return drawn

    def _lanes(self, able: list[Backend], ticket: Ticket) -> list[Backend]:
        """Text goes where no image is; images go where images are, or to one lane more."""
        if not ticket.images:
            return [backend for backend in able if not backend.images] or able
        now = time.monotonic()
        takers = [b for b in self.backends.values() if b.takes]
        busy = [backend for backend in takers if backend.images]
        aged = now - ticket.arrived_s > _AGED_FACTOR * self.deadlines_s["vision"]
        alone = now - self._text_s > _TEXT_LATELY_S
        if aged or alone or len(busy) + 1 < len(takers) or not busy or not self.enforce:
            return able
        return [backend for backend in able if backend.images]

    def _decide(self, able: list[Backend], ticket: Ticket) -> Decision:
        seen = ticket.seen
        pair = home = None
        if seen is not None and seen.pair and len(self.backends) > 1:
            home = self._home(seen.pair)
            pair = seen.pair if seen.images or seen.turns else None
        ask = Ask(
            id=ticket.id, images=ticket.images, vision_tokens=ticket.tokens.vision,
            text_tokens=ticket.tokens.text, output_tokens=ticket.output_tokens, pair=pair,
            home=home,
        )  # fmt: skip
        return self.router.decide(ask, {backend.name for backend in able})

    def _home(self, pair: str) -> str:
        """Where a conversation belongs, by rendezvous hashing: every guard finds the same."""
        return max(
            self.backends,
            key=lambda name: hashlib.blake2b(f"{pair} {name}".encode(), digest_size=8).digest(),
        )
