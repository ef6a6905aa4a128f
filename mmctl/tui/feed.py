"""From a source's iterator to the screen: two threads, one lock, frozen snapshots out.

One thread folds records into the model as they come; the other posts a snapshot at most ten
times a second, so that a flood of records costs the screen no more than a trickle does.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator

from mmctl.engine.records import AnyRecord, Recording
from mmctl.tui.model import Model, Snapshot

FRAME_S = 0.1


class Feed:
    """Reads ``records`` until they end or ``stop`` is set.

    ``fresh`` gets each snapshot; ``ended`` gets the error that ended the records, or None.
    Both are called from the feed's threads.
    """

    def __init__(
        self,
        records: Iterable[AnyRecord],
        model: Model,
        stop: threading.Event,
        fresh: Callable[[Snapshot], object],
        ended: Callable[[BaseException | None], object],
    ) -> None:
        self._records, self._model, self._stop = records, model, stop
        self._fresh, self._ended = fresh, ended
        self._lock = threading.Lock()
        self._changed = threading.Event()
        self._over = threading.Event()
        self._threads = [
            threading.Thread(target=self._read, name="mmctl-source", daemon=True),
            threading.Thread(target=self._post, name="mmctl-frames", daemon=True),
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def close(self, timeout_s: float) -> bool:
        """Ask the source to stop and wait for it; whether it did in time."""
        self._stop.set()
        for thread in self._threads:
            thread.join(timeout_s)
        return not any(thread.is_alive() for thread in self._threads)

    def _read(self) -> None:
        error: BaseException | None = None
        try:
            for record in self._records:
                with self._lock:
                    self._model.add(record)
                self._changed.set()
                if self._stop.is_set():
                    break
        except Exception as problem:  # it belongs on the screen, not in a dead thread
            error = problem
        finally:
            close = getattr(self._records, "close", None)
            if close is not None:
                close()
            self._over.set()
            self._changed.set()
        if not self._stop.is_set():
            self._send()
            self._ended(error)

    def _post(self) -> None:
        while not (self._stop.is_set() or self._over.is_set()):
            if self._changed.wait(0.5):
                self._changed.clear()
                self._send()
                self._stop.wait(FRAME_S)

    def _send(self) -> None:
        with self._lock:
            snapshot = self._model.snapshot()
        self._fresh(snapshot)


def paced(records: Iterable[AnyRecord], stop: threading.Event) -> Iterator[AnyRecord]:
    """Recorded records at the pace at which they happened; a gap is cut to two seconds."""
    behind: int | None = None
    for record in records:
        ts_ns = record.started_ns if isinstance(record, Recording) else record.ts_ns
        if behind is not None:
            while (wait_s := (ts_ns + behind - time.monotonic_ns()) / 1e9) > 0:
                if wait_s > 2.0:
                    behind -= int((wait_s - 2.0) * 1e9)
                    continue
                if stop.wait(min(wait_s, 0.2)):
                    return
        if behind is None or isinstance(record, Recording):
            behind = time.monotonic_ns() - ts_ns
        yield record
