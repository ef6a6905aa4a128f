"""``http://HOST:PORT/metrics`` — a Prometheus page of a serving engine or a device exporter."""

from __future__ import annotations

import http.client
import time
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

from mmctl.engine.errors import MmctlError, NoSourceError, UsageError
from mmctl.engine.profiles import Profile
from mmctl.engine.records import AnyRecord
from mmctl.engine.sources import device_exporters, engines
from mmctl.engine.sources.exposition import Reader
from mmctl.engine.sources.host import node_name
from mmctl.engine.sources.serving import Instances

_MAX_BYTES = 64 << 20
_SERVING_NAMES = engines.wanted()


def canonical(name: str) -> str | None:
    """The name of a metric that some table knows, in that table's spelling."""
    return name if name in _SERVING_NAMES else device_exporters.canonical(name)


class Page:
    """Readings of one page: what its samples say now, and since the reading before."""

    def __init__(self, base: str, node: str) -> None:
        self.base, self.node = base, node
        self.reader = Reader(canonical, lower=True)
        self.instances = Instances(base, node)

    def records(self, text: str, ts_ns: int) -> list[AnyRecord]:
        """Serving and device records. Raises MmctlError when the page has none."""
        samples = self.reader.read(text)
        records: list[AnyRecord] = [*self.instances.records(samples, ts_ns)]
        records += device_exporters.devices(samples, self.node, ts_ns)
        if not records:
            raise MmctlError(nothing_known(self.base, text))
        return records


def nothing_known(base: str, text: str) -> str:
    """What to say of a page without a metric that is known."""
    names = [line.split()[2] for line in text.splitlines() if line.startswith("# TYPE ")
             and len(line.split()) > 2]  # fmt: skip
    if not names:
        return f"{base} gives no metrics; is the engine's metrics option on?"
    shown = ", ".join(names[:3])
    return f"{base} has no metric of a known engine or exporter, but {shown} …"


class Client:
    """GET over one kept connection, with a time-out and a cap on what is read."""

    def __init__(self, url: str, timeout_s: float) -> None:
        try:
            parts = urlsplit(url)
        except ValueError as error:
            raise UsageError(f"'{url}' is no URL: {error}") from None
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise UsageError(f"'{url}' is no URL such as http://127.0.0.1:8000/metrics")
        try:
            self.port = parts.port
        except ValueError:
            raise UsageError(f"'{url}' has no usable port") from None
        self.host, self.secure, self.timeout_s = parts.hostname, parts.scheme == "https", timeout_s
        self.path = (parts.path or "/metrics") + (f"?{parts.query}" if parts.query else "")
        self.base = f"{parts.hostname}:{self.port or (443 if self.secure else 80)}"
        self.connection: http.client.HTTPConnection | None = None

    def get(self, path: str, body: bytes | None = None) -> tuple[int, bytes]:
        """Status and body. Raises OSError or http.client.HTTPException when there is no answer."""
        for attempt in (0, 1):
            fresh = self.connection is None
            if self.connection is None:
                kind = http.client.HTTPSConnection if self.secure else http.client.HTTPConnection
                self.connection = kind(self.host, self.port, timeout=self.timeout_s)
            try:
                headers = {"Accept": "text/plain;version=0.0.4", "User-Agent": "mmctl"}
                if body is not None:
                    headers["Content-Type"] = "application/x-www-form-urlencoded"
                self.connection.request("POST" if body is not None else "GET", path, body, headers)
                answer = self.connection.getresponse()
                content = self._read(answer)
                if answer.will_close:
                    self.close()
                return answer.status, content
            except (OSError, http.client.HTTPException):
                self.close()
                if fresh or attempt:
                    raise
        raise AssertionError("unreachable: the second attempt returns or raises")

    def _read(self, answer: http.client.HTTPResponse) -> bytes:
        """The body, within the cap and within twice the time-out however slowly it comes."""
        deadline = time.monotonic() + 2 * self.timeout_s
        expected = answer.length
        parts: list[bytes] = []
        size = 0
        while expected is None or size < expected:
            chunk = answer.read1(1 << 20)
            if not chunk:
                break
            parts.append(chunk)
            size += len(chunk)
            if size > _MAX_BYTES:
                raise http.client.HTTPException(f"the page is larger than {_MAX_BYTES >> 20} MiB")
            if time.monotonic() > deadline:
                raise TimeoutError(f"the page is not complete after {2 * self.timeout_s:g} s")
        if expected is not None and size < expected:
            raise http.client.IncompleteRead(b"", expected - size)
        # The whole body is here: ending the answer lets the connection be used again. (Not by
        # read(): before Python 3.11.7 read1 did not count what it had given.)
        answer.close()
        return b"".join(parts)

    def close(self) -> None:
        """Drop the connection; the next request opens another."""
        if self.connection is not None:
            self.connection.close()
            self.connection = None


def readings(url: str, profile: Profile) -> Iterator[list[AnyRecord]]:
    """One reading of the page each time. An engine that has been seen and whose page fails gives
    records of absence with the reason; one never seen raises NoSourceError."""
    client = Client(url, profile.sources.timeout_s)
    page = Page(client.base, node_name())
    path = client.path
    try:
        while True:
            ts_ns = time.time_ns()
            try:
                status, content = client.get(path)
                if status == 200 and content[:1] in (b"[", b"{"):
                    # TensorRT-LLM's own server has JSON here and the text one folder down.
                    path = "/prometheus/metrics"
                    status, content = client.get(path)
                reason = _reason(client, path, status)
                if reason is None:
                    yield page.records(content.decode("utf-8", "replace"), ts_ns)
                    continue
            except (OSError, http.client.HTTPException) as error:
                reason = f"{client.base} does not answer: {in_words(error)}"
            except MmctlError as error:
                reason = str(error)
            silent: list[AnyRecord] = [*page.instances.silent(reason, ts_ns)]
            if not silent:
                raise NoSourceError(reason)
            yield silent
    finally:
        client.close()


def _reason(client: Client, path: str, status: int) -> str | None:
    """Why an answer is no page; whether the engine itself is alive is asked and said."""
    if status == 200:
        return None
    said = f"{client.base}{path} answers HTTP {status}"
    if status in (301, 302, 307, 308):
        return f"{said}: it has moved; give its new address"
    if status in (401, 403):
        return f"{said}: it needs credentials"
    try:
        health, _ = client.get("/health")
    except (OSError, http.client.HTTPException):
        health = 0
    serves = "; its /health says 200, so the engine serves" if health == 200 else ""
    hint = "; is its metrics option on?" if status == 404 else ""
    return f"{said}{serves}{hint}"


def in_words(error: Exception) -> str:
    """Why there was no answer, as an operator would say it."""
    if isinstance(error, TimeoutError):
        return "it took too long"
    if isinstance(error, ConnectionRefusedError):
        return "nothing listens there"
    text: Any = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return str(text)
