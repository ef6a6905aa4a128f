"""The breaker beside the guard: a thread takes records in, decides, and tells everybody.

Everything that is slow or waits for a disk happens here: the breaker's rules, the audit log,
the recording, the socket that ``mmctl top agent:PATH`` reads. The server hands over records in
batches and gets commands back.
"""

from __future__ import annotations

import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path

from mmctl.agent.channel import Channel
from mmctl.engine import folders, recording
from mmctl.engine.breaker.actuators import Actuators
from mmctl.engine.breaker.breaker import Breaker
from mmctl.engine.breaker.loop import run
from mmctl.engine.breaker.state import Command
from mmctl.engine.breaker.store import Store, append_audit
from mmctl.engine.errors import MmctlError
from mmctl.engine.export.metrics import SourceHealth, State, exposition
from mmctl.engine.profiles import Mode, Profile
from mmctl.engine.records import AnyRecord, Event, encode
from mmctl.guard.notes import Notes

# What the guard does to a request; each gets a line in the audit log.
TREATMENTS = frozenset({"shrink", "cap", "defer", "reject", "quarantine", "pressure"})
_BATCHES_MOST = 1000
_METRICS_AGE_S = 10.0


class Watch:
    """The breaker over the guard's records.

    ``act`` gets its commands, in this thread; ``say`` gets notes for the person who started it.
    """

    def __init__(
        self,
        profile: Profile,
        mode: Mode,
        act: Callable[[Command], None],
        say: Callable[[str], None],
        *,
        name: str = "default",
        node: str = "",
        record: Path | None = None,
        rotate_bytes: int | None = None,
        keep: int = 1,
        socket: Path | None = None,
    ) -> None:
        self.profile, self.mode, self._act, self._say = profile, mode, act, say
        self.breaker = Breaker(profile, mode)
        self.state = State()
        self.recent: deque[Event] = deque(maxlen=50)
        self.lost = 0
        self._queue: queue.SimpleQueue[list[AnyRecord] | None] = queue.SimpleQueue()
        self._stack = ExitStack()
        self._audit: list[bytes] = []
        self._notes = Notes(say)
        self._writer: recording.Rotating | None = None
        self._channel: Channel | None = None
        self._store: Store | None = None
        if record is not None:
            head = recording.header(node, name)
            self._writer = self._stack.enter_context(
                recording.Rotating(record, head, rotate_bytes, keep, say)
            )
        if socket is not None:
            self._channel = self._stack.enter_context(Channel(socket))
        if mode != "off":
            self._store = self._open_store()
        self._actuators = Actuators(profile, "observe" if mode == "off" else mode)
        self._stack.callback(self._actuators.close)
        self._thread = threading.Thread(target=self._work, name="mmctl-breaker", daemon=True)

    def _open_store(self) -> Store | None:
        try:
            store = Store()
        except MmctlError as error:
            self._say(f"{error}: this one keeps no state and takes no orders")
            return None
        self._stack.callback(store.close)
        store.take_up(self.breaker)
        self.breaker.recall(unseen=True)  # so that a backend that was out is out from the start
        return store

    def held(self, target: str) -> bool:
        """Whether the breaker, as it was left, gives a target no traffic."""
        machine = self.breaker.machines.get(target)
        return machine is not None and machine.state not in ("closed", "unknown")

    @property
    def wanted(self) -> bool:
        """Whether anybody looks at single requests: a recording, or a reader of the socket."""
        channel = self._channel
        return self._writer is not None or (channel is not None and channel.subscribed.is_set())

    def start(self) -> None:
        """Begin to decide."""
        self._thread.start()

    def put(self, records: list[AnyRecord]) -> None:
        """Hand records over; when the thread is far behind they are lost, and counted."""
        if self._queue.qsize() < _BATCHES_MOST:
            self._queue.put(records)
        else:
            self.lost += len(records)

    def close(self) -> None:
        """Decide about what has come, write it, end."""
        self._queue.put(None)
        self._thread.join(10)
        self._stack.close()

    def page(self, sources: Iterable[SourceHealth]) -> bytes:
        """The OpenMetrics page of the guard's own records."""
        return exposition(self.state, sources, time.time_ns(), _METRICS_AGE_S)

    def _records(self) -> Iterator[AnyRecord]:
        while (batch := self._queue.get()) is not None:
            yield from batch
            self._flush()

    def _work(self) -> None:
        store = self._store
        while True:
            decided = run(self._records(), self.profile, self.mode, self._act, self.breaker, store)
            try:
                for record in decided:
                    self._publish(record)
                return
            except OSError as error:  # a full disk ends the log, not the decisions
                self._say(f"the audit log has ended: {error.strerror}")
                store = None

    def _publish(self, record: AnyRecord) -> None:
        self.state.take(record)
        if self._writer is not None:
            try:
                self._writer.write(record)
            except (MmctlError, OSError) as error:
                self._say(f"the recording to {self._writer.path} has ended: {error}")
                self._writer = None
        if self._channel is not None:
            self._channel.publish(record)
        if not isinstance(record, Event):
            return
        self._notes.take(record)
        if record.what in TREATMENTS:
            if self.mode != "off":
                self._audit.append(encode(record))
        elif record.what not in ("breaker", "route"):
            self.recent.append(record)
            self._actuators.tell(record)

    def _flush(self) -> None:
        self._notes.due()
        if self._audit:
            lines, self._audit = self._audit, []
            append_audit(lines)


def socket_path() -> Path:
    """Where this process's records are read: ``$XDG_RUNTIME_DIR/mmctl/guard-PID.sock``."""
    folder = folders.runtime()
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    return folder / f"guard-{os.getpid()}.sock"
