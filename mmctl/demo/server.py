"""The demo's serving engine: queues, batches of images, prefill and decode, one step at a time.

A step executes the plan made at the end of the step before: at most one chunk of prefill, a few
decodes in rotation, and a batch of images of one resolution. Everything is counted in steps, and
storage is dropped explicitly at the end of a step, so one seed gives one sequence of allocations.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator
from random import Random
from typing import NamedTuple

import torch

from mmctl.agent.tracker import labelled, on_host
from mmctl.demo.plan import Tape, Tapes, encode_batch
from mmctl.demo.scenarios import Arrival, Setup
from mmctl.engine.model import LIGHT_MERGE, CrossCache, KvCache, VisionLanguageModel, in_float32
from mmctl.engine.responses.offload import Offloaded
from mmctl.engine.responses.quantize import Quantized, dequantize

PREFILL_TOKENS = 256
DECODES_PER_STEP = 3
BATCH_IMAGES = 8
BATCH_WAIT_STEPS = 6

Kept = torch.Tensor | Quantized | Offloaded
"""Storage of a session as it is now: on the device, quantised there, or on the host."""


class Session:
    """A request from arrival to release, with all the storage that it holds."""

    def __init__(self, number: int, arrival: Arrival, step: int, seed: int) -> None:
        self.id = f"r{number}"
        self.arrival, self.arrived_step, self.seed = arrival, step, seed
        self.waiting_steps = 0
        self.prefilled = self.produced = 0
        self.last_token = 0
        self.cache: KvCache | None = None
        self.vision: list[Kept] | None = None
        self.offloaded: dict[str, list[Offloaded]] = {}
        self.admitted = False
        self.light = False  # encoded by the light vision branch
        self.arrived_s = time.monotonic()
        self.begun_s: float | None = None
        self.first_s: float | None = None

    @property
    def size(self) -> tuple[int, int, int, int]:
        """Images, vision tokens, text tokens and output tokens."""
        arrival = self.arrival
        return len(arrival.images), self.vision_tokens, arrival.text_tokens, arrival.output_tokens

    @property
    def vision_tokens(self) -> int:
        """Vision tokens of all its images, encoded or not."""
        patch = 14 * (LIGHT_MERGE if self.light else 1)
        return sum((side // patch) ** 2 for side in self.arrival.images)

    @property
    def encoded(self) -> bool:
        """True when no image of it waits for the encoder."""
        return not self.arrival.images or self.vision is not None

    @property
    def paused(self) -> bool:
        """True while storage of it is on the host."""
        return bool(self.offloaded)

    @property
    def done(self) -> bool:
        """True when it has its output; it may still be resident."""
        return self.produced >= self.arrival.output_tokens

    def images(self) -> list[torch.Tensor]:
        """Its pixels, made from its seed, in host memory."""
        random = torch.Generator().manual_seed(self.seed)
        return [torch.rand(3, side, side, generator=random) for side in self.arrival.images]

    def prompt(self, start: int, count: int) -> torch.Tensor:
        """``count`` token ids of its prompt from ``start`` on, in host memory."""
        random = Random(self.seed)
        ids = [random.randrange(256) for _ in range(self.arrival.text_tokens)]
        return torch.tensor(ids[start : start + count])


class Plan(NamedTuple):
    """What the next step does: a session to prefill, sessions to decode, a batch to encode."""

    prefill: Session | None
    decodes: tuple[Session, ...]
    batch: tuple[Session, ...]


class Server:
    """State of the engine. ``fits`` decides whether a plan would fit the pool now."""

    def __init__(
        self,
        model: VisionLanguageModel,
        setup: Setup,
        seed: int,
        fits: Callable[[Plan], bool],
    ) -> None:
        self.model, self.setup, self.seed = model, setup, seed
        self.tapes = Tapes(model.config)
        self.fits = fits
        self.random = Random(seed)
        self.step_number = 0
        self.arrived = self.completed = 0
        self.generated_tokens = 0
        self.waiting: list[Session] = []  # images wait for the encoder
        self.active: list[Session] = []  # prefill or decode
        self.resident: list[Session] = []  # output done, storage kept
        self.forgotten: list[object] = []  # what the leak keeps
        self.rotation = 0
        self.holding = False  # no new request is begun
        self.capped = False  # a batch is cut to what fits
        self.light = False  # images go through the light vision branch
        self.newest: Session | None = None  # of those encoded
        self.share = 1.0  # of the requests that wait, this share may begin
        self.planned = Plan(None, (), ())

    @property
    def sessions(self) -> list[Session]:
        """Every session that is in the server, oldest first within each queue."""
        return [*self.resident, *self.active, *self.waiting]

    @property
    def stalled(self) -> bool:
        """True when the scheduler has stopped though nothing says so."""
        at = self.setup.stalls_at
        return at is not None and self.step_number >= at

    def take_over(self, old: Server, unfinished: Iterable[Session]) -> None:
        """Go on from ``old``, whose worker is gone: its counts and its unfinished requests, which
        begin again; held and capped until traffic is admitted."""
        self.random, self.step_number = old.random, old.step_number
        self.arrived, self.completed = old.arrived, old.completed
        self.generated_tokens = old.generated_tokens
        self.holding, self.capped, self.share = True, True, old.share
        for session in unfinished:
            (self.waiting if session.arrival.images else self.active).append(session)
        self.plan()

    def arrive(self) -> list[Session]:
        """The requests of this step, queued."""
        new = []
        arrivals = self.setup.arrivals(self.step_number, self.random, self.setup.image_every)
        for arrival in arrivals:
            seed = self.seed * 100_003 + self.arrived
            session = Session(self.arrived, arrival, self.step_number, seed)
            self.arrived += 1
            session.admitted = self.share >= 1 or self._admitted_by_share()
            (self.waiting if arrival.images else self.active).append(session)
            new.append(session)
        return new

    def _admitted_by_share(self) -> bool:
        """Every n-th request, so that the share holds exactly and without chance."""
        return math.floor(self.arrived * self.share) > math.floor((self.arrived - 1) * self.share)

    def admit(self, share: float) -> None:
        """Let this share of the requests begin, and plan again: what was planned before is not
        executed against the new word."""
        self.holding, self.share = False, share
        for number, session in enumerate(self.sessions):
            session.admitted = int((number + 1) * share) > int(number * share)
        self.plan()

    def execute(self) -> list[Session]:
        """Run the plan; the sessions that got their whole output come back.

        Raises torch.OutOfMemoryError when the pool refuses.
        """
        finished: list[Session] = []
        if not self.stalled:
            plan = self.planned
            if plan.prefill is not None:
                self._prefill(plan.prefill)
            for session in plan.decodes:
                self._decode(session)
            if plan.batch:
                self._encode(plan.batch)
            finished = self._finish()
        self._release()
        self.step_number += 1
        return finished

    def plan(self) -> Plan:
        """Decide what the next step does; with ``capped`` the batch is what fits of it."""
        plan = Plan(self._next_prefill(), self._next_decodes(), self._due())
        if self.capped:
            while plan.batch and not self.fits(plan):
                plan = plan._replace(batch=plan.batch[:-1])
        self.planned = plan
        return plan

    def outlook(self) -> Plan:
        """The plan with the batch that will be due next, though it still waits for images."""
        if self.planned.batch or self.holding:
            return self.planned
        plan = self.planned._replace(batch=self._oldest_group())
        return self.least(plan) if self.capped else plan

    @staticmethod
    def least(plan: Plan) -> Plan:
        """The plan with as small a batch as can be."""
        return plan._replace(batch=plan.batch[:1])

    def tapes_of(self, plan: Plan) -> Iterator[tuple[Session, Tape]]:
        """The tapes of a plan in the order in which it is executed."""
        # A session whose storage went to the host since the plan was made will not run.
        if plan.prefill is not None and not plan.prefill.paused:
            session = plan.prefill
            new = min(PREFILL_TOKENS, session.arrival.text_tokens - session.prefilled)
            yield session, self._text_tape(session, new)
        for session in plan.decodes:
            if not session.paused:
                yield session, self._text_tape(session, 1)
        if plan.batch:
            counts = tuple(len(session.arrival.images) for session in plan.batch)
            yield plan.batch[0], self.encode_tape(plan.batch[0].arrival.images[0], counts)

    def encode_tape(self, side: int, counts: tuple[int, ...]) -> Tape:
        """The tape of a batch in the vision branch that is in force."""
        return self.tapes.encode(side, counts, self.light)

    def _text_tape(self, session: Session, new: int) -> Tape:
        cache = session.cache
        past = cache.length if cache else 0
        capacity = cache.capacity if cache else 0
        return self.tapes.decode(new, past, capacity, session.vision_tokens)

    def existing(self, session: Session, slot: int) -> torch.Tensor | None:
        """The tensor of ``session`` that a negative slot of a tape stands for."""
        layer, which = divmod(-1 - slot, 2)
        if session.cache is None or layer >= len(session.cache.keys):
            return None
        return (session.cache.values if which else session.cache.keys)[layer]

    def _may_begin(self, session: Session) -> bool:
        return session.admitted and not self.holding

    def _next_prefill(self) -> Session | None:
        for session in self.active:
            unfinished = session.prefilled < session.arrival.text_tokens
            begun = session.prefilled > 0 or self._may_begin(session)
            if unfinished and begun and session.encoded and not session.paused:
                return session
        return None

    def _next_decodes(self) -> tuple[Session, ...]:
        ready = [
            session
            for session in self.active
            if session.prefilled >= session.arrival.text_tokens and not session.paused
        ]
        if not ready:
            return ()
        start = self.rotation % len(ready)
        self.rotation += DECODES_PER_STEP
        turned = ready[start:] + ready[:start]
        return tuple(turned[:DECODES_PER_STEP])

    def _groups(self) -> Iterator[tuple[Session, ...]]:
        """Waiting sessions that may begin, by resolution, the longest waiting first."""
        sides: dict[int, list[Session]] = {}
        for session in self.waiting:
            if self._may_begin(session):
                sides.setdefault(session.arrival.images[0], []).append(session)
        for group in sides.values():
            batch: list[Session] = []
            images = 0
            for session in group:
                images += len(session.arrival.images)
                if batch and images > BATCH_IMAGES:
                    break
                batch.append(session)
            yield tuple(batch)

    def _oldest_group(self) -> tuple[Session, ...]:
        groups = list(self._groups())
        return max(groups, key=lambda group: group[0].waiting_steps) if groups else ()

    def _due(self) -> tuple[Session, ...]:
        """The batch of images to encode next: full, or waiting for long enough."""
        for session in self.waiting:
            session.waiting_steps += 1
        for group in self._groups():
            images = sum(len(session.arrival.images) for session in group)
            if images >= BATCH_IMAGES or group[0].waiting_steps > BATCH_WAIT_STEPS:
                return group
        return ()

    def _prefill(self, session: Session) -> None:
        count = min(PREFILL_TOKENS, session.arrival.text_tokens - session.prefilled)
        session.begun_s = session.begun_s or time.monotonic()
        with on_host():
            ids = session.prompt(session.prefilled, count)
        session.last_token = self._run(session, ids)
        session.prefilled += count

    def _decode(self, session: Session) -> None:
        with on_host():
            ids = torch.tensor([session.last_token])
        session.last_token = self._run(session, ids)
        session.produced += 1
        session.first_s = session.first_s or time.monotonic()
        self.generated_tokens += 1

    def _run(self, session: Session, ids: torch.Tensor) -> int:
        with labelled("text", session.id):
            if session.cache is None:
                session.cache = KvCache(self.model.config, self.model.head.weight.device)
            device_ids = ids.to(session.cache.device)
            logits = self.model.decode(device_ids, session.cache, self._cross(session))
            return int(logits.argmax())

    def _cross(self, session: Session) -> CrossCache | None:
        kept = session.vision
        if kept is None:
            return None
        return lambda layer: in_float32([on_device(kept[layer])])(0)

    def _encode(self, batch: tuple[Session, ...]) -> None:
        counts = tuple(len(session.arrival.images) for session in batch)
        with on_host():
            pixels = [image for session in batch for image in session.images()]
        tokens, pairs = encode_batch(self.model, pixels, counts, [s.id for s in batch], self.light)
        self.newest = batch[0]
        for session, kept in zip(batch, pairs, strict=True):
            session.begun_s = session.begun_s or time.monotonic()
            session.vision, session.light = list(kept), self.light
            self.waiting.remove(session)
            self.active.append(session)
        if self.setup.leaks:
            self.forgotten.append((tokens, pairs))

    def _finish(self) -> list[Session]:
        finished = [session for session in self.active if session.done]
        for session in finished:
            self.active.remove(session)
            self.resident.append(session)
        self.completed += len(finished)
        return finished

    def _release(self) -> None:
        """Drop what nobody waits for; the only place where a session's storage goes."""
        for session in [s for s in self.resident if self.step_number >= s.arrival.until_step]:
            self.resident.remove(session)
            for kept in session.offloaded.values():
                for tensor in kept:
                    tensor.discard()
            session.offloaded.clear()
            session.cache = session.vision = None


def on_device(kept: Kept) -> torch.Tensor:
    """The tensor to compute with; a quantised one is restored for the moment."""
    if isinstance(kept, Quantized):
        return dequantize(kept)
    assert isinstance(kept, torch.Tensor), "an offloaded session is never run"
    return kept
