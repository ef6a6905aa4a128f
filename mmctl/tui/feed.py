"""From a source's iterator to the screen: two threads, one lock, frozen snapshots out.

One thread folds records into the model as they come; the other posts a snapshot at most ten
times a second, so that a flood of records costs the screen no more than a trickle does.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable

from mmctl.engine.recording import Writer
from mmctl.engine.records import AnyRecord, Event, Recording
from mmctl.tui.model import Model
from mmctl.tui.playback import Rewind
from mmctl.tui.snapshot import Region, Snapshot

FRAME_S = 0.1
REST_S = 0.08  # how long records wait while a key is answered
EVERY_S = 0.16  # and how long they then do not, however fast the keys come


class Feed:
    """Reads ``records`` until they end or ``stop`` is set; a Rewind begins a new ``model``.

    ``fresh`` gets each snapshot; ``ended`` gets the error that ended the records, or None.
    Both are called from the feed's threads.
    """

    def __init__(
        self,
        records: Iterable[AnyRecord | Rewind],
        model: Callable[[], Model],
        stop: threading.Event,
        fresh: Callable[[Snapshot], object],
        ended: Callable[[BaseException | None], object],
    ) -> None:
        self._records, self._new, self._stop = records, model, stop
        self._model = model()
        self._fresh, self._ended = fresh, ended
        self._region: Region | None = None
        self._writer: Writer | None = None
        self._write: Callable[[AnyRecord], object] | None = None
        self._lock = threading.Lock()
        self._changed = threading.Event()
        self._over = threading.Event()
        self._free = threading.Event()
        self._free.set()
        self._rested = 0.0
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

    def outlive(self, write: Callable[[AnyRecord], object]) -> None:
        """Hand what still comes to ``write`` until the records end: the screen has gone."""
        self._write = write
        while not self._over.wait(0.5):
            pass

    def rest(self) -> None:
        """Fold nothing for a moment: a key is answered, and threads of a process take turns."""
        now = time.monotonic()
        if now - self._rested > EVERY_S:
            self._rested = now
            self._free.clear()

    def go_on(self) -> None:
        """The key has been answered."""
        self._free.set()

    def _wait(self) -> None:
        if not self._free.wait(REST_S):
            self._free.set()

    def ask(self, region: Region | None) -> None:
        """Whose holders the next snapshots shall name."""
        if region != self._region:
            self._region = region
            self._changed.set()

    @property
    def records_to_file(self) -> bool:
        """Whether a file is being written: a full disk ends that, and nothing else."""
        return self._writer is not None

    def record_to(self, writer: Writer | None) -> None:
        """Write every record from now on; None closes the file."""
        with self._lock:
            if self._writer is not None:
                self._writer.close()
            self._writer = writer

    def _read(self) -> None:
        error: BaseException | None = None
        try:
            for record in self._records:
                self._wait()
                with self._lock:
                    if isinstance(record, Rewind):
                        self._model = self._new()
                        for earlier in record.records:
                            self._model.add(earlier)
                    else:
                        self._model.add(record)
                        self._keep(record)
                        self._hand_on(record)
                self._changed.set()
                if self._stop.is_set():
                    break
        except Exception as problem:  # it belongs on the screen, not in a dead thread
            error = problem
        finally:
            close = getattr(self._records, "close", None)
            if close is not None:
                close()
            self.record_to(None)
            self._over.set()
            self._changed.set()
        if not self._stop.is_set():
            self._send()
            self._ended(error)

    def _keep(self, record: AnyRecord) -> None:
        if self._writer is None or isinstance(record, Recording):
            return
        try:
            self._writer.write(record)
        except OSError as error:
            path, self._writer = self._writer.path, None
            told = f"the recording to {path} has ended: {error.strerror}"
            self._model.add(Event(ts_ns=record.ts_ns, what="notice", message=told))

    def _hand_on(self, record: AnyRecord) -> None:
        if self._write is not None:
            try:
                self._write(record)
            except OSError:  # nobody reads it; what the breaker does is not for the reader
                self._write = None

    def _post(self) -> None:
        while not (self._stop.is_set() or self._over.is_set()):
            if self._changed.wait(0.5):
                self._changed.clear()
                self._wait()
                self._send()
                self._stop.wait(FRAME_S)

    def _send(self) -> None:
        with self._lock:
            snapshot = self._model.snapshot(self._region)
        self._fresh(snapshot)
