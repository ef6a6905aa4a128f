"""A process that runs a decode, gives it and takes it: ``python -m … FD ENGINE THREADS FAULT``.

Orders come over the socket ``FD``, one at a time; tokens and answers go back over it. Whatever
an order needs of the other process goes over a socket of their own, sent with ``join``.
"""

from __future__ import annotations

import socket
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from mmctl.engine.errors import MmctlError, quiet_interrupt
from mmctl.engine.schedule.migration import decode as running
from mmctl.engine.schedule.migration import faults, handover, state
from mmctl.engine.schedule.migration.decode import Begin, Decode
from mmctl.engine.schedule.migration.wire import LostError, Wire

_STRANGER_BYTES = 2 << 30  # what a decode from a file may ask for, beside eight times its size


class _Worker:
    def __init__(self, control: Wire, held: handover.Held) -> None:
        self.control, self.held = control, held
        self.decode: Decode | None = None
        self.logits: Any = None
        self.peer: Wire | None = None

    def serve(self) -> None:
        orders: dict[str, Callable[..., None]] = {
            "begin": self.begin, "load": self.load, "join": self.join, "prepare": self.prepare,
            "build": self.build, "run": self.run, "give": self.give, "take": self.take,
            "save": self.save,
        }  # fmt: skip
        while True:
            order, _ = self.control.receive()
            try:
                orders[order.pop("do")](**order)
            except Exception as error:  # where the watcher has gone, telling it fails as well
                first = (str(error).strip().split("\n")[0] or type(error).__name__)[:300]
                self.say("failed", why=first)

    def say(self, kind: str, **more: Any) -> None:
        self.control.send({"kind": kind, **more})

    def emit(self, index: int, token: int) -> None:
        self.say("token", index=index, token=token, ns=time.monotonic_ns())

    def join(self) -> None:
        """The other process, at the end of a socket that follows the order."""
        _, descriptors, _, _ = socket.recv_fds(self.control.end, 1, 1)
        if self.peer is not None:
            self.peer.close()
        self.peer = Wire(socket.socket(fileno=descriptors[0]))
        self.say("joined")

    def begin(self, demo: dict[str, Any], until: int) -> None:
        """The demo's decode up to token ``until``, run once through without being moved."""
        frozen = running.first(msgspec.convert(demo, Begin))
        self._set(frozen, frozen.position.past + until)
        assert self.decode is not None
        tokens = [self.decode.position.token]
        while self.decode.position.index < until:
            tokens.append(self.decode.step())
        self.decode = Decode(self.held.engine, frozen.position)
        self.emit(0, frozen.position.token)
        self.say("begun", reference=tokens, **self._sizes(frozen))

    def load(self, path: str, more: int, l2_tolerance: float) -> None:
        """A decode from a file, with room for ``more`` tokens, after its last step is checked."""
        file = Path(path)
        frozen = state.load(file)
        faults.limit_memory(_STRANGER_BYTES + 8 * file.stat().st_size)
        self._set(frozen, frozen.position.past + more)
        assert frozen.position.last is not None
        past, token = frozen.position.last
        logits, _ = self.held.engine.step(token, past)
        error, relative = running.l2(logits, frozen.logits)
        if not error <= l2_tolerance:
            raise MmctlError(
                f"this engine computes something else than {path} tells of its last step: an L2 "
                f"error of {error:.3g} in the logits, where {l2_tolerance:.3g} is allowed"
            )
        self.say(
            "loaded", index=frozen.position.index, l2_error=error, relative_l2_error=relative,
            **self._sizes(frozen),
        )  # fmt: skip

    def _set(self, frozen: state.Frozen, room: int) -> None:
        self.held.graph, self.held.weights = frozen.graph, frozen.weights
        self.held.build()
        self.held.open(room, frozen.cross)
        self.held.engine.write(0, frozen.cache)
        self.decode, self.logits = Decode(self.held.engine, frozen.position), frozen.logits

    def _sizes(self, frozen: state.Frozen) -> dict[str, int]:
        return {
            "past": frozen.position.past, "nodes": len(frozen.graph.nodes),
            "weights_bytes": sum(one.nbytes for one in frozen.weights.values()),
            "vision_tokens": frozen.cross[0].shape[1] if frozen.cross else 0,
        }  # fmt: skip

    def prepare(self, patience_s: float) -> None:
        """Have the other process build the graph."""
        assert self.peer is not None
        self.say("prepared", seconds=handover.prepare(self.peer, self.held, patience_s))

    def build(self) -> None:
        """Build the graph that the other process sends."""
        assert self.peer is not None
        handover.build(self.held, self.peer)

    def run(self, until: int) -> None:
        """Make tokens up to ``until``."""
        assert self.decode is not None
        while self.decode.position.index < until:
            self.emit(self.decode.position.index, self.decode.step())
        self.say("done", index=self.decode.position.index)

    def give(self, terms: dict[str, Any]) -> None:
        """Hand the decode over. Where that fails it goes on here at once; else it is kept until
        the order ``release``, or goes on behind the tokens that came with ``resume``."""
        assert self.peer is not None and self.decode is not None
        on = msgspec.convert(terms, handover.Terms)
        given = handover.give(self.decode, self.held, self.peer, on, self.emit)
        self.say("given", given=msgspec.to_builtins(given))
        if given.phase is None:
            order, _ = self.control.receive()
            if order["do"] == "release":
                self.decode = None
                return
            for token in order["tokens"]:
                self.decode.step(told=token)
            self.say("resumed", ns=time.monotonic_ns())
        self.peer.close()
        self.peer = None
        self.run(on.until)

    def take(self) -> None:
        """Serve the giver; the decode that it hands over goes on here."""
        assert self.peer is not None
        self.decode = None
        taken = handover.take(self.held, self.peer)
        if taken is None:
            self.say("abandoned")
            return
        self.decode, until = taken
        self.say("took", ns=time.monotonic_ns())
        for made in range(until - self.decode.position.index):
            self.emit(self.decode.position.index, self.decode.step())
            if made == 1:
                self.held.fault("token", {})
        self.say("done", index=self.decode.position.index)

    def save(self, path: str) -> None:
        """Freeze the decode into a file."""
        assert self.decode is not None and self.decode.recent
        at = self.decode.position
        frozen = state.Frozen(
            graph=self.held.graph, weights=self.held.weights, position=at,
            cache=self.held.engine.read(0, at.past), cross=self.held.cross,
            logits=self.decode.recent[-1][2],
        )  # fmt: skip
        self.say("saved", bytes=state.save(frozen, Path(path)))


def main() -> None:
    """Serve one decode over the socket that the watcher left open."""
    descriptor, engine, threads, fault = sys.argv[1:]
    control = Wire(socket.socket(fileno=int(descriptor)))
    held = handover.Held(engine, int(threads), faults.injected(fault))
    with suppress(LostError):  # the watcher has gone: so does its worker
        _Worker(control, held).serve()


if __name__ == "__main__":
    with quiet_interrupt():
        main()
