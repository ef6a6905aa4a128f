"""The protocol between the process that gives a decode and the one that takes it.

Pre-copy, as virtual machines are moved: a KV cache only grows, so that all but its last rows are
copied while the decode runs. The taker then runs old steps again, and its logits are compared;
the last step before the freeze runs on both sides at the same time. What is left for the pause
is the answer to that step, one row, and the numbers of the sampler.

The giver keeps all it has until it is told that tokens came from the other side.
"""

from __future__ import annotations

import threading
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

import msgspec

from mmctl.engine.errors import MmctlError
from mmctl.engine.schedule.migration import engines
from mmctl.engine.schedule.migration.decode import Decode, l2
from mmctl.engine.schedule.migration.graph import Graph
from mmctl.engine.schedule.migration.state import Position
from mmctl.engine.schedule.migration.wire import LateError, LostError, Wire, arrays

if TYPE_CHECKING:
    from numpy import ndarray

CHUNK_ROWS = 128
TAIL_ROWS = 8  # what may be left to copy when the last step before the freeze begins
ROUNDS = 16
CHECKED = 3  # old steps that the taker runs again

Emit = Callable[[int, int], None]


class Held:
    """What a process holds beside the decode's position, whichever side it is on.

    ``fault`` is called before each phase (build, open, copy, check, pause, take) with its name
    and the weights that it may damage: a drill breaks the taker there.
    """

    engine: engines.Engine
    graph: Graph

    def __init__(
        self, name: str, threads: int, fault: Callable[[str, dict[str, ndarray]], None]
    ) -> None:
        self.name, self.threads, self.fault = name, threads, fault
        self.weights: dict[str, ndarray] = {}
        self.cross: list[ndarray] = []
        self.room = 0

    def build(self) -> None:
        """Rebuild the graph on this side's engine."""
        self.engine = engines.build(self.name, self.graph, self.weights, self.threads)

    def open(self, room: int, cross: list[ndarray]) -> None:
        """A cache for ``room`` tokens, and the vision tokens of the request."""
        self.engine.open(room, cross)
        self.room, self.cross = room, cross


class Terms(msgspec.Struct, frozen=True, kw_only=True):
    """What a migration must keep to; L2 errors are of the logits, absolute.

    ``after`` steps are made before the copy begins; the decode ends with token ``until``. The
    taker makes ``taker_steps`` and then waits, or all that are left. ``deadline_s`` bounds the
    pause, ``patience_s`` every answer outside it. While it is copied, the decode rests for
    ``pace_s`` after each step.
    """

    after: int
    until: int
    taker_steps: int | None = None
    l2_tolerance: float
    deadline_s: float
    patience_s: float
    pace_s: float = 0.0


class Given(msgspec.Struct, frozen=True, kw_only=True):
    """How a handover went, on the giver's side.

    ``phase`` tells where it failed, and ``why``; both are None after success. ``frozen_ns`` is
    None when the decode was never stopped; ``resumed_ns`` when it went on here. Times are of the
    monotonic clock, which processes share.
    """

    phase: str | None = None
    why: str | None = None
    index: int
    past: int
    l2_error: float | None = None
    relative_l2_error: float | None = None
    checked_steps: int = 0
    copied_bytes: int = 0
    copied_rows: int = 0
    copy_s: float | None = None
    paused_bytes: int | None = None
    frozen_ns: int | None = None
    resumed_ns: int | None = None


class _Copy(threading.Thread):
    """Copies rows and has old steps run again while the decode goes on."""

    def __init__(self, decode: Decode, held: Held, wire: Wire, terms: Terms) -> None:
        super().__init__(daemon=True)
        self.decode, self.held, self.wire, self.terms = decode, held, wire, terms
        self.rows = self.bytes = self.checked = 0
        self.error = (0.0, 0.0)
        self.phase = "copy"
        self.failure: str | None = None
        self.seconds = 0.0

    def run(self) -> None:
        began = time.monotonic()
        try:
            self._open()
            self._catch_up()
            self.phase = "check"
            self._check()
            self.phase = "copy"
            self._catch_up()
        except MmctlError as error:
            self.failure = str(error)
        self.seconds = time.monotonic() - began

    def _open(self) -> None:
        cross = self.held.cross
        shapes = [(one.dtype.str, one.shape) for one in cross]
        head = {"kind": "open", "room": self.held.room, "cross": shapes}
        self.wire.send(head, *cross, timeout_s=self.terms.patience_s)
        answer(self.wire, "opened", self.terms.patience_s)

    def _catch_up(self) -> None:
        """Copy until few rows are left; a decode faster than the copy is not chased for ever."""
        for _ in range(ROUNDS):
            end = self.decode.position.past
            for start in range(self.rows, end, CHUNK_ROWS):
                stop = min(start + CHUNK_ROWS, end)
                self.bytes += send_rows(self.wire, self.decode, start, stop, self.terms.patience_s)
                self.rows = stop
            if self.decode.position.past - self.rows <= TAIL_ROWS:
                return

    def _check(self) -> None:
        held = [one for one in self.decode.recent if one[0] <= self.rows]
        for past, token, logits in held[-CHECKED:]:
            self.wire.send({"kind": "step", "past": past, "token": token})
            _, body = answer(self.wire, "logits", self.terms.patience_s)
            found = arrays(body, [("<f4", logits.shape)])[0]
            self.judge(l2(found, logits))

    def judge(self, error: tuple[float, float]) -> None:
        self.checked += 1
        self.error = max(self.error, error)
        if not error[0] <= self.terms.l2_tolerance:
            raise MmctlError(
                f"the other side computes something else: an L2 error of {error[0]:.3g} in the "
                f"logits, where {self.terms.l2_tolerance:.3g} is allowed"
            )


def prepare(wire: Wire, held: Held, patience_s: float) -> float:
    """Have the other side rebuild the graph; the seconds it took. MmctlError when it does not."""
    began = time.monotonic()
    tensors = [(name, one.dtype.str, one.shape) for name, one in held.weights.items()]
    wire.send(
        {"kind": "build", "graph": msgspec.to_builtins(held.graph), "weights": tensors},
        *held.weights.values(), timeout_s=patience_s,
    )  # fmt: skip
    answer(wire, "built", patience_s)
    return time.monotonic() - began


def give(decode: Decode, held: Held, wire: Wire, terms: Terms, emit: Emit) -> Given:
    """Hand ``decode`` over while it runs; a failure leaves it here, at the same token."""
    made_before = min(decode.position.index + terms.after, terms.until)
    while decode.position.index < made_before:
        emit(decode.position.index, decode.step())
    copy = _Copy(decode, held, wire, terms)
    copy.start()
    while copy.is_alive() and decode.position.index < terms.until:
        emit(decode.position.index, decode.step())
        copy.join(terms.pace_s)
    copy.join(terms.patience_s if decode.position.index < terms.until else 0)
    if copy.is_alive() or decode.position.index >= terms.until:
        return _given(decode, copy, phase=copy.phase, why="the decode ended before the copy")
    if copy.failure:
        return _given(decode, copy, phase=copy.phase, why=copy.failure)
    frozen_ns = None
    try:
        at = decode.position
        send_rows(wire, decode, copy.rows, at.past, terms.deadline_s)
        head = {"kind": "step", "past": at.past, "token": at.token, "last": True}
        wire.send(head, timeout_s=terms.deadline_s)
        emit(at.index, decode.step())  # both sides compute this step at the same time
        frozen_ns = time.monotonic_ns()
        logits = decode.recent[-1][2]
        _, body = answer(wire, "logits", terms.deadline_s)
        copy.judge(l2(arrays(body, [("<f4", logits.shape)])[0], logits))
    except MmctlError as error:
        resumed_ns = time.monotonic_ns()
        return _given(
            decode, copy, phase="pause", why=str(error), frozen_ns=frozen_ns,
            resumed_ns=resumed_ns if frozen_ns else None,
        )  # fmt: skip
    row = decode.engine.read(at.past, at.past + 1)
    until = terms.until
    if terms.taker_steps is not None:
        until = min(until, decode.position.index + terms.taker_steps)
    position = msgspec.to_builtins(decode.position)
    head = {"kind": "take", "position": position, "until": until, "row": row.shape}
    sent = len(msgspec.json.encode(head)) + row.nbytes
    why = None
    try:
        wire.send(head, *row, timeout_s=terms.deadline_s)
    except MmctlError as error:
        why = str(error)  # how far it came is not known here: whoever sees both sides decides
    return _given(decode, copy, why=why, frozen_ns=frozen_ns, paused_bytes=sent)


def _given(decode: Decode, copy: _Copy, **more: Any) -> Given:
    at = decode.position
    return Given(
        index=at.index, past=at.past, checked_steps=copy.checked,
        l2_error=copy.error[0] if copy.checked else None,
        relative_l2_error=copy.error[1] if copy.checked else None,
        copied_bytes=copy.bytes, copied_rows=copy.rows, copy_s=copy.seconds, **more,
    )  # fmt: skip


def send_rows(wire: Wire, decode: Decode, start: int, stop: int, timeout_s: float) -> int:
    """Send rows ``start`` to ``stop`` of the cache with their checksum; the bytes sent."""
    if stop <= start:
        return 0
    rows = decode.engine.read(start, stop)
    head = {"kind": "rows", "start": start, "shape": rows.shape, "crc": _checksum(rows)}
    wire.send(head, *rows, timeout_s=timeout_s)
    return int(rows.nbytes)


def _checksum(rows: ndarray) -> int:
    crc = 0
    for one in rows:  # of one layer's keys or values: contiguous, however the whole lies
        crc = zlib.crc32(one, crc)
    return crc


def answer(wire: Wire, kind: str, timeout_s: float) -> tuple[dict[str, Any], bytearray]:
    """The other side's answer; MmctlError when it is a refusal or does not come."""
    head, body = wire.receive(timeout_s)
    if head.get("kind") == "failed":
        raise MmctlError(f"the other side failed: {head.get('why')}")
    if head.get("kind") != kind:
        raise LostError(f"the other side answered {head.get('kind')} for {kind}")
    return head, body


def build(held: Held, wire: Wire) -> None:
    """Rebuild the graph that the giver sends with ``prepare``."""
    with _telling(wire):
        head, body = wire.receive()
        tensors = arrays(body, [(dtype, shape) for _, dtype, shape in head["weights"]])
        names = [name for name, _, _ in head["weights"]]
        held.weights = dict(zip(names, tensors, strict=True))
        held.graph = msgspec.convert(head["graph"], Graph)
        held.fault("build", held.weights)
        held.build()
        wire.send({"kind": "built"})


def take(held: Held, wire: Wire) -> tuple[Decode, int] | None:
    """Serve the giver until it gives: the decode, and the index where it ends; None when the
    giver has gone or something failed, which the giver is then told."""
    with _telling(wire):
        while True:
            head, body = wire.receive()
            if (taken := _serve(held, wire, head, body)) is not None:
                return taken
    return None


@contextmanager
def _telling(wire: Wire) -> Iterator[None]:
    """What fails inside is told to the giver; that the giver has gone ends the block."""
    try:
        yield
    except LostError:
        return
    except Exception as error:
        said = str(error).strip().split("\n")[0] or type(error).__name__
        with suppress(LostError, LateError):
            wire.send({"kind": "failed", "why": said[:300]}, timeout_s=1)


def _serve(
    held: Held, wire: Wire, head: dict[str, Any], body: bytearray
) -> tuple[Decode, int] | None:
    kind = head["kind"]
    if kind == "open":
        held.fault("open", {})
        held.open(head["room"], [one.copy() for one in arrays(body, head["cross"])])
        wire.send({"kind": "opened"})
    elif kind == "rows":
        held.fault("copy", {})
        rows = arrays(body, [("<f4", head["shape"])])[0]
        if _checksum(rows) != head["crc"]:
            raise MmctlError("rows of the cache came damaged")
        held.engine.write(head["start"], rows)
    elif kind == "step":
        held.fault("pause" if head.get("last") else "check", {})
        logits, _ = held.engine.step(head["token"], head["past"])
        wire.send({"kind": "logits"}, logits)
    elif kind == "take":
        held.fault("take", {})
        position = msgspec.convert(head["position"], Position)
        held.engine.write(position.past - 1, arrays(body, [("<f4", head["row"])])[0])
        return Decode(held.engine, position), head["until"]
    else:
        raise MmctlError(f"the giver asks for '{kind}'")
    return None
