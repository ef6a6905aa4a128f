"""The agent's socket: records out to every subscriber, commands in.

A client sends JSON lines. ``{"action": "subscribe"}`` asks for the records; any other line is
a command ``{"id": …, "action": …, "args": {…}}`` that the serving process takes from
``commands``. Answers are ``event`` records in the stream, so that a recording holds them.
"""

from __future__ import annotations

import contextlib
import os
import queue
import socket
import threading
import time
from pathlib import Path
from typing import Any

import msgspec

from mmctl.engine.errors import MmctlError
from mmctl.engine.records import AnyRecord, Event, encode

_BACKLOG_RECORDS = 100_000


class Command(msgspec.Struct, frozen=True):
    """What the breaker asks of the serving process."""

    action: str
    id: str = ""
    args: dict[str, Any] = {}


class Channel:
    """A listening unix socket that only its owner may open; use it as a context manager.

    Raises MmctlError where nothing can listen on ``path``.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._started_ns = time.time_ns()
        self.commands: queue.Queue[Command] = queue.Queue()
        self.subscribed = threading.Event()
        self._subscribers: list[queue.Queue[bytes | None]] = []
        self._greeting: Event | None = None
        self._lock = threading.Lock()
        path.unlink(missing_ok=True)
        self._server = socket.socket(socket.AF_UNIX)
        try:
            self._server.bind(str(path))
        except OSError as error:
            raise MmctlError(f"cannot listen on {path}: {error.strerror}") from None
        path.chmod(0o600)
        self._server.listen()
        threading.Thread(target=self._accept, daemon=True).start()

    def publish(self, record: AnyRecord) -> None:
        """Send ``record`` to every subscriber; one that is too slow loses its newest records."""
        line = encode(record) + b"\n"
        with self._lock:
            for subscriber in self._subscribers:
                with contextlib.suppress(queue.Full):
                    subscriber.put_nowait(line)

    def greet(self, greeting: Event) -> None:
        """Say who is here, now and first of all to everyone who subscribes later.

        The evidence gets ``pid`` and ``started_ns``, which together name this process.
        """
        who = {**greeting.evidence, "pid": os.getpid(), "started_ns": self._started_ns}
        self._greeting = msgspec.structs.replace(greeting, evidence=who)
        self.publish(self._greeting)

    def close(self, timeout_s: float = 2.0) -> None:
        """Send what is queued, then end every stream."""
        self._server.close()
        self.path.unlink(missing_ok=True)
        with self._lock:
            ending, self._subscribers = self._subscribers, []
        for subscriber in ending:
            with contextlib.suppress(queue.Full):
                subscriber.put_nowait(None)
        for thread in threading.enumerate():
            if thread.name == "mmctl-subscriber":
                thread.join(timeout_s)

    def __enter__(self) -> Channel:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._server.accept()
            except OSError:
                return  # closed
            threading.Thread(target=self._listen, args=(client,), daemon=True).start()

    def _listen(self, client: socket.socket) -> None:
        # A client may go while its records are still on the way.
        with contextlib.suppress(OSError), client, client.makefile("rb") as lines:
            for line in lines:
                try:
                    command = msgspec.json.decode(line, type=Command)
                except msgspec.DecodeError as error:
                    client.sendall(msgspec.json.encode({"error": str(error)}) + b"\n")
                    continue
                if command.action == "subscribe":
                    self._subscribe(client)
                else:
                    self.commands.put(command)

    def _subscribe(self, client: socket.socket) -> None:
        waiting: queue.Queue[bytes | None] = queue.Queue(_BACKLOG_RECORDS)
        with self._lock:
            if self._greeting is not None:
                told = msgspec.structs.replace(self._greeting, ts_ns=time.time_ns())
                waiting.put(encode(told) + b"\n")
            self._subscribers.append(waiting)
        self.subscribed.set()
        threading.Thread(
            target=self._send, args=(client, waiting), name="mmctl-subscriber", daemon=True
        ).start()

    def _send(self, client: socket.socket, waiting: queue.Queue[bytes | None]) -> None:
        with contextlib.suppress(OSError):  # the reader has gone: only its queue is dropped
            while (line := waiting.get()) is not None:
                client.sendall(line)
            client.shutdown(socket.SHUT_WR)
        with self._lock:
            if waiting in self._subscribers:
                self._subscribers.remove(waiting)
