"""Where a request goes now: the perception weight of live device records, affinity, queues.

weight = (1 - compute use) (1 - bandwidth use) max(0.1, 1 / (hops to the encoder + 1)). It is 0
when a device is busy in full, and alike on idle ones: what was sent there and not yet answered
decides then. The same function serves ``mmctl schedule route`` and a gateway.
"""

from __future__ import annotations

from collections.abc import Container
from typing import Literal

import msgspec

from mmctl.engine.errors import MmctlError
from mmctl.engine.records import AnyRecord, Device, Link

STALE_NS = 5_000_000_000
IDLE_RATIO = 0.85  # a device idle at least this much runs ready work at once (P0)
LEAST_WEIGHT = 0.02  # of a device busy in full, so that it stays in order behind the others
TOKENS_UNIT = 4096  # outstanding tokens that halve a device's attraction
AFFINITY_FACTOR = 4.0  # a pair leaves the device with its KV cache when another is this much better
PAIRS_MOST = 100_000


class Ask(msgspec.Struct, kw_only=True):
    """A request to place; ``pair`` names the image and text, or session, whose KV cache stays.

    ``home`` is the device that a pair belongs on while nothing else is known: several routers
    that agree on it need not share what they remember. ``state`` completed or failed gives back
    what the request of this id held.
    """

    id: str | int
    images: int = 0
    vision_tokens: int = 0
    text_tokens: int = 0
    output_tokens: int = 0
    pair: str | int | None = None
    home: str | None = None
    state: str | None = None


class Decision(msgspec.Struct, kw_only=True):
    """Where a request goes, and why: the weight and score of the device against the next one's.

    ``priority`` P0 runs at once, P1 waits in the device's own queue.
    """

    id: str | int
    device: str
    encoder: str | None
    queue: Literal["vision", "stream"]
    priority: Literal["P0", "P1"]
    reason: Literal["affinity", "weight", "outstanding"]
    weight: float
    score: float
    next_best: str | None
    next_best_score: float | None
    stale: bool


class _Seat:
    """A device as routing sees it; ``weight`` is None while nothing recent is known of it."""

    __slots__ = ("encodes", "hops", "idle", "known_ns", "name", "outstanding", "weight")

    def __init__(self, name: str) -> None:
        self.name = name
        self.weight = 0.5
        self.idle = False
        self.hops = 0
        self.encodes = True
        self.known_ns: int | None = None
        self.outstanding = 0


class Router:
    """Places requests by the latest device records; ``update`` may run in another thread.

    ``encoders`` are the devices that encode images; all do unless some are named.
    """

    def __init__(self, devices: tuple[str, ...] = (), encoders: tuple[str, ...] = ()) -> None:
        self._encoders = encoders
        self._hops: dict[tuple[str, str], int] = {}
        self._seats: dict[str, _Seat] = {}
        self._order: tuple[_Seat, ...] = ()
        self._newest_ns = 0
        self._held: dict[str | int, tuple[_Seat, int]] = {}
        self._pairs: dict[str | int, _Seat] = {}
        for name in devices:
            self._seat(name)

    @property
    def devices(self) -> int:
        """How many devices have been seen."""
        return len(self._order)

    def _seat(self, name: str) -> _Seat:
        seat = self._seats.get(name)
        if seat is None:
            seat = self._seats[name] = _Seat(name)
            seat.encodes = not self._encoders or name in self._encoders
            self._order = tuple(self._seats.values())
        return seat

    def update(self, record: AnyRecord) -> None:
        """Take a device's reading or a link's hops into account; other records are nothing."""
        if isinstance(record, Link):
            if record.hops is not None:
                self._hops[record.a, record.b] = self._hops[record.b, record.a] = record.hops
            return
        if not isinstance(record, Device) or (record.kind == "cpu" and self._order):
            return
        seat = self._seat(record.device)
        seat.known_ns = record.ts_ns
        self._newest_ns = max(self._newest_ns, record.ts_ns)
        busy = record.sm_ratio if record.sm_ratio is not None else 0.5
        bandwidth = record.bandwidth_ratio if record.bandwidth_ratio is not None else 0.0
        near = min(
            (self._hops.get((record.device, e), 0 if e == record.device else 1)
             for e in self._encoders),
            default=0,
        )  # fmt: skip
        seat.hops = near
        seat.idle = 1.0 - busy >= IDLE_RATIO
        seat.weight = (1.0 - busy) * (1.0 - bandwidth) * max(0.1, 1.0 / (near + 1))

    def release(self, id: str | int) -> None:
        """The request of this id is over: what it held no longer counts."""
        if held := self._held.pop(id, None):
            held[0].outstanding -= held[1]

    def decide(self, ask: Ask, among: Container[str] | None = None) -> Decision:
        """The device for a request, of those named ``among`` or of all.

        Raises MmctlError while no device is known.
        """
        if not self._order:
            raise MmctlError("no device is known yet: name some, or a source that gives records")
        tokens = ask.text_tokens + ask.vision_tokens + ask.output_tokens
        oldest = self._newest_ns - STALE_NS
        best: _Seat | None = None
        second: _Seat | None = None
        best_score = second_score = -1.0
        for seat in self._order:
            if among is not None and seat.name not in among:
                continue
            weight = seat.weight
            if seat.known_ns is not None and seat.known_ns < oldest:
                weight = 0.1 * weight
            if weight < LEAST_WEIGHT:
                weight = LEAST_WEIGHT
            score = weight * TOKENS_UNIT / (TOKENS_UNIT + seat.outstanding)
            if score > best_score or (score == best_score and seat.name == ask.home):
                second, second_score = best, best_score
                best, best_score = seat, score
            elif score > second_score:
                second, second_score = seat, score
        if best is None:
            raise MmctlError("none of the devices asked for is known")
        chosen, reason = best, "weight" if second is None or best.weight != second.weight else ""
        score = best_score
        kept = None
        if ask.pair is not None:
            kept = self._pairs.get(ask.pair) or self._seats.get(ask.home or "")
        if kept is not None and (among is None or kept.name in among):
            here = max(kept.weight, LEAST_WEIGHT) * TOKENS_UNIT / (TOKENS_UNIT + kept.outstanding)
            if here * AFFINITY_FACTOR >= best_score:
                if kept is not best:
                    second, second_score = best, best_score
                chosen, score, reason = kept, here, "affinity"
        encoder = self._encoder(chosen) if ask.images > 0 else None
        if ask.pair is not None:
            if len(self._pairs) >= PAIRS_MOST:
                self._pairs.pop(next(iter(self._pairs)))
            self._pairs[ask.pair] = chosen
        self.release(ask.id)
        chosen.outstanding += tokens
        self._held[ask.id] = (chosen, tokens)
        return Decision(
            id=ask.id,
            device=chosen.name,
            encoder=encoder.name if encoder else None,
            queue="vision" if ask.images > 0 else "stream",
            priority="P0" if chosen.idle else "P1",
            reason=reason or "outstanding",  # type: ignore[arg-type]
            weight=chosen.weight,
            score=score,
            next_best=second.name if second else None,
            next_best_score=second_score if second else None,
            stale=chosen.known_ns is None or chosen.known_ns < oldest,
        )

    def _encoder(self, near: _Seat) -> _Seat:
        """The encoder of a request: its own device where that encodes, else the least loaded."""
        if near.encodes:
            return near
        return max(
            (seat for seat in self._order if seat.encodes),
            key=lambda seat: seat.weight * TOKENS_UNIT / (TOKENS_UNIT + seat.outstanding),
            default=near,
        )
