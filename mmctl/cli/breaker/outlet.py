"""What was decided, to whoever reads it, without the breaker waiting for them."""

from __future__ import annotations

import queue
import sys
import threading
import time
from collections.abc import Callable
from types import TracebackType

from mmctl.cli.app import note
from mmctl.engine.records import AnyRecord, Event

WAITING = 100_000
"""Records that may wait for a slow reader: seven seconds of the fastest sources."""
_PATIENCE_S = 1.0  # for a reader that hangs, once the watch was told to end


class Outlet:
    """Calls ``write`` with every record put, in order, in a thread of its own.

    A pager, a terminal stopped by Ctrl-S or a full pipe would otherwise hold the thread that
    trips. Where ``waits`` is false and WAITING records are behind, other records than events are
    lost, and counted; where it is true ``put`` waits, and nothing is lost. ``failed`` is called
    when ``write`` raises, which the next ``put`` or the end raises again.
    """

    def __init__(
        self, write: Callable[[AnyRecord], None], waits: bool, failed: Callable[[], None]
    ) -> None:
        self.waits, self.lost = waits, 0
        self._write, self._failed = write, failed
        self._error: BaseException | None = None
        self._queue: queue.SimpleQueue[AnyRecord | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="mmctl-outlet", daemon=True)
        self._thread.start()

    def put(self, record: AnyRecord) -> None:
        """Hand ``record`` over. Raises what ``write`` raised on an earlier one."""
        while self.waits and self._queue.qsize() >= WAITING and self._error is None:
            time.sleep(0.01)
        if self._error is not None:
            raise self._error
        if self._queue.qsize() < WAITING or isinstance(record, Event):
            self._queue.put(record)
        else:
            self.lost += 1

    def _run(self) -> None:
        told = 0
        try:
            while (record := self._queue.get()) is not None:
                self._write(record)
                if self.lost > told:
                    told = self.lost
                    note(f"the reader is too slow: {told} records are not written; events are")
        except BaseException as error:
            self._error = error
            self._failed()

    def __enter__(self) -> Outlet:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, _: BaseException | None, __: TracebackType | None
    ) -> None:
        """Write what waits; told to end, leave a reader that hangs behind."""
        self._queue.put(None)
        self._thread.join(_PATIENCE_S if kind else None)
        if kind is None and self._error is not None:
            raise self._error


def unbuffered(text: str) -> None:
    """Write to standard output past Python's buffer: its lock, held by a thread whose reader
    hangs, would not let the process end."""
    raw = getattr(getattr(sys.stdout, "buffer", None), "raw", None)
    if raw is None:  # not a file, as in tests
        sys.stdout.write(text)
        sys.stdout.flush()
        return
    left = memoryview(text.encode(sys.stdout.encoding, sys.stdout.errors or "strict"))
    while left:
        written = raw.write(left)
        if written is None:  # somebody made it non-blocking
            time.sleep(0.01)
        else:
            left = left[written:]
