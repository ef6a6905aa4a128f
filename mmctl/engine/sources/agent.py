"""``agent:PATH``: the records of a serving process, over the socket of its agent."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import closing

from mmctl.engine.errors import NoSourceError
from mmctl.engine.profiles import Profile
from mmctl.engine.records import AnyRecord, decode


def source(path: str, profile: Profile, stop: threading.Event) -> Iterator[AnyRecord]:
    """Records as the agent publishes them, until ``stop`` is set; NoSourceError where no server
    is there, or is there no more."""
    yield from records(connect(path), stop)
    if not stop.is_set():
        raise NoSourceError(f"the server behind {path} has gone")


def connect(path: str, wait_s: float = 0.0) -> socket.socket:
    """A subscribed connection to the agent at ``path``, which may take ``wait_s`` to appear."""
    deadline = time.monotonic() + wait_s
    while True:
        client = socket.socket(socket.AF_UNIX)
        try:
            client.connect(path)
            client.sendall(b'{"action":"subscribe"}\n')
            return client
        except OSError as error:
            client.close()
            if time.monotonic() >= deadline:
                raise NoSourceError(f"no agent listens on {path}: {error.strerror}") from None
            time.sleep(0.02)


def records(client: socket.socket, stop: threading.Event) -> Iterator[AnyRecord]:
    """Records of a subscribed connection; looks at ``stop`` every 100 ms, then closes it."""
    with closing(client):
        client.settimeout(0.1)
        rest = b""
        while not stop.is_set():
            try:
                chunk = client.recv(1 << 16)
            except TimeoutError:
                continue
            except ConnectionResetError:
                return
            if not chunk:
                return
            *lines, rest = (rest + chunk).split(b"\n")
            for line in lines:
                yield decode(line)
