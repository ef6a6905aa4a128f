"""Messages over a socket pair: a JSON head, and tensors as they lie in memory behind it."""

from __future__ import annotations

import socket
import struct
import time
from collections.abc import Sequence
from typing import Any

import msgspec

from mmctl.engine.errors import MmctlError

MESSAGE_MOST = 4 << 30
_LENGTHS = struct.Struct(">IQ")
_BUFFERS_AT_ONCE = 64  # below the kernel's limit for one call


class LostError(MmctlError):
    """The other side has gone or broken the protocol."""


class LateError(MmctlError):
    """The other side did not answer in time."""


class Wire:
    """One end of a connection between two processes that trust each other's lengths up to a cap."""

    def __init__(self, end: socket.socket) -> None:
        self.end = end

    def send(self, head: dict[str, Any], *buffers: Any, timeout_s: float | None = None) -> None:
        """Send a message; ``LateError`` when the other side does not take it in time."""
        views = [memoryview(one).cast("B") for one in buffers if memoryview(one).nbytes]
        encoded = msgspec.json.encode(head)
        lengths = _LENGTHS.pack(len(encoded), sum(view.nbytes for view in views))
        due = None if timeout_s is None else time.monotonic() + timeout_s
        waiting = [memoryview(lengths + encoded), *views]
        try:
            while waiting:
                self._until(due)
                sent = self.end.sendmsg(waiting[:_BUFFERS_AT_ONCE])
                while waiting and sent >= waiting[0].nbytes:
                    sent -= waiting.pop(0).nbytes
                if sent:
                    waiting[0] = waiting[0][sent:]
        except TimeoutError:
            raise LateError("the other side takes nothing") from None
        except OSError as error:
            raise LostError(f"the other side has gone ({error.strerror})") from None

    def receive(self, timeout_s: float | None = None) -> tuple[dict[str, Any], bytearray]:
        """The next message, its head and what lies behind it; ``LateError`` without one in time."""
        due = None if timeout_s is None else time.monotonic() + timeout_s
        head_size, body_size = _LENGTHS.unpack(self._exactly(_LENGTHS.size, due))
        if head_size + body_size > MESSAGE_MOST:
            raise LostError("the other side sends a message larger than any can be")
        try:
            head = msgspec.json.decode(self._exactly(head_size, due), type=dict[str, Any])
        except msgspec.DecodeError as error:
            raise LostError(f"the other side sends what is no message: {error}") from None
        return head, self._exactly(body_size, due)

    def close(self) -> None:
        """Close this end."""
        self.end.close()

    def _exactly(self, size: int, due: float | None) -> bytearray:
        data = bytearray(size)
        view, at = memoryview(data), 0
        try:
            while at < size:
                self._until(due)
                got = self.end.recv_into(view[at:])
                if not got:
                    raise LostError("the other side has gone")
                at += got
        except TimeoutError:
            raise LateError("the other side does not answer") from None
        except OSError as error:
            raise LostError(f"the other side has gone ({error.strerror})") from None
        return data

    def _until(self, due: float | None) -> None:
        self.end.settimeout(None if due is None else max(1e-6, due - time.monotonic()))


def arrays(body: bytearray, shapes: Sequence[tuple[str, Sequence[int]]]) -> list[Any]:
    """The tensors behind a message's head, in order, each told as dtype and shape."""
    import numpy as np

    found, at = [], 0
    for dtype, shape in shapes:
        count = int(np.prod(shape, dtype=np.int64))
        found.append(np.frombuffer(body, dtype, count, at).reshape(shape))
        at += found[-1].nbytes
    return found
