"""The exporter: every source read by a thread of its own, the last readings on an HTTP page."""

from __future__ import annotations

import http.server
import socket
import threading
import time
from collections.abc import Sequence
from typing import Any

import msgspec

from mmctl.engine.errors import MmctlError, NoSourceError
from mmctl.engine.export.metrics import SourceHealth, State, exposition
from mmctl.engine.profiles import Profile
from mmctl.engine.records import AnyRecord, Event
from mmctl.engine.sources import open_sources

_CONTENT = "application/openmetrics-text; version=1.0.0; charset=utf-8"
_RETRY_S = 1.0


class _Source:
    """One source and what is known of it."""

    def __init__(self, uri: str) -> None:
        self.uri = uri
        self.last: float | None = None
        self.message: str | None = "no reading yet"
        self.ended = False


class Exporter:
    """Reads sources and answers scrapes; a source that ends or fails is tried again."""

    def __init__(self, uris: Sequence[str], profile: Profile, stop: threading.Event) -> None:
        self.profile, self.stop = profile, stop
        self.state = State()
        self.sources = [_Source(uri) for uri in uris]
        interval_s = profile.sampling.interval_s
        self.max_age_s = max(5 * interval_s, interval_s + 2 * profile.sources.timeout_s)
        # An unknown scheme is said now, not by a thread of its own.
        for uri in uris:
            open_sources([uri], profile, stop)

    def bind(self, host: str, port: int) -> http.server.ThreadingHTTPServer:
        """Listen; raises MmctlError when the address is not to be had."""
        exporter = self

        class Handler(_Handler):
            owner = exporter

        class Server(http.server.ThreadingHTTPServer):
            daemon_threads = True
            address_family = socket.AF_INET6 if ":" in host else socket.AF_INET

        try:
            return Server((host, port), Handler)
        except OSError as error:
            raise MmctlError(
                f"cannot listen on {host}:{port}: {error.strerror}; choose another --listen"
            ) from None

    def run(self, server: http.server.ThreadingHTTPServer, limit_s: float | None) -> None:
        """Serve until ``stop`` is set or ``limit_s`` has passed."""
        for source in self.sources:
            threading.Thread(target=self._read, args=(source,), daemon=True).start()
        serving = threading.Thread(target=server.serve_forever, daemon=True)
        serving.start()
        end = None if limit_s is None else time.monotonic() + limit_s
        try:
            while not self.stop.wait(0.1) and (end is None or time.monotonic() < end):
                pass
        finally:
            self.stop.set()
            server.shutdown()
            server.server_close()

    def _read(self, source: _Source) -> None:
        while not self.stop.is_set():
            try:
                for record in open_sources([source.uri], self.profile, self.stop):
                    if isinstance(record, Event) and record.what == "source":
                        source.message = record.message if record.state == "down" else None
                        continue
                    self.state.take(record)
                    source.last, source.message = time.monotonic(), None
                source.message = source.message or "it has ended"
            except NoSourceError as error:
                source.message = str(error)
            except MmctlError as error:
                source.message = str(error)
            self.stop.wait(_RETRY_S)

    def health(self) -> list[SourceHealth]:
        """How each source is now: up is a record lately and no failure since."""
        now = time.monotonic()
        found = []
        for source in self.sources:
            age_s = None if source.last is None else now - source.last
            fresh = age_s is not None and age_s <= self.max_age_s and source.message is None
            why = source.message
            if not fresh and why is None:
                why = f"its last record came {age_s:.1f} s ago"
            found.append(SourceHealth(source.uri, fresh, age_s, why))
        return found

    def fresh(self) -> list[AnyRecord]:
        """The readings that are not stale."""
        return self.state.fresh(time.time_ns(), self.max_age_s)

    def page(self) -> bytes:
        """The metrics page of this moment, as OpenMetrics text."""
        return exposition(self.state, self.health(), time.time_ns(), self.max_age_s)


class _Handler(http.server.BaseHTTPRequestHandler):
    owner: Exporter
    protocol_version = "HTTP/1.1"
    timeout = 10

    def do_GET(self) -> None:
        path = self.path.split("?", 1)[0]
        if path == "/metrics":
            self._answer(200, self.owner.page(), _CONTENT)
        elif path == "/health":
            health = self.owner.health()
            status = 200 if all(source.up for source in health) else 503
            document = {
                "schema": 1,
                "status": "ok" if status == 200 else "stale",
                "sources": [source._asdict() for source in health],
            }
            self._answer(status, msgspec.json.encode(document), "application/json")
        elif path == "/live":
            self._answer(200, b"alive\n", "text/plain")
        elif path == "/":
            self._answer(200, b"mmctl: /metrics /health /live\n", "text/plain")
        else:
            self._answer(404, b"not here: /metrics /health /live\n", "text/plain")

    def _answer(self, status: int, body: bytes, kind: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *arguments: Any) -> None:
        pass
