"""Request spans in OTLP JSON, from a file or sent to ``otlp:[HOST:]PORT`` → request records.

Names by OpenTelemetry's semantic conventions for generative AI, and by vLLM's own spans.
"""

from __future__ import annotations

import http.server
import queue
import threading
from collections.abc import Iterator
from typing import Any

import msgspec

from mmctl.engine.errors import MmctlError, NoSourceError, UsageError
from mmctl.engine.profiles import Profile
from mmctl.engine.records import AnyRecord, Request
from mmctl.engine.sources.host import node_name
from mmctl.engine.sources.smi import Origin

_MAX_BYTES = 16 << 20

_COUNTS: dict[str, tuple[str, ...]] = {
    "text_tokens": ("gen_ai.usage.input_tokens", "gen_ai.usage.prompt_tokens"),
    "output_tokens": ("gen_ai.usage.output_tokens", "gen_ai.usage.completion_tokens"),
    "vision_tokens": ("gen_ai.usage.input_image_tokens", "mmctl.vision_tokens"),
    "images": ("gen_ai.request.images", "mmctl.images"),
}
_STAGES: dict[str, tuple[str, ...]] = {
    "queue_s": ("gen_ai.latency.time_in_queue",),
    "ttft_s": ("gen_ai.latency.time_to_first_token", "gen_ai.server.time_to_first_token"),
    "vision_encode": ("gen_ai.latency.time_in_vision_encode",),
    "e2e_s": ("gen_ai.latency.e2e",),
}
_SERVER = (2, "SPAN_KIND_SERVER")
_FAILED = (2, "STATUS_CODE_ERROR")


def spans(text: str, origin: Origin) -> list[AnyRecord]:
    """The requests in a file of OTLP JSON: one document, or one a line."""
    records: list[AnyRecord] = []
    try:
        documents = [msgspec.json.decode(text.encode())]
    except msgspec.DecodeError:
        documents = []
        for number, line in enumerate(text.splitlines(), 1):
            if line.strip():
                try:
                    documents.append(msgspec.json.decode(line.encode()))
                except (msgspec.DecodeError, RecursionError) as error:
                    raise MmctlError(f"line {number} is not JSON: {error}") from None
    except RecursionError:
        raise MmctlError("JSON that is nested too deeply") from None
    for document in documents:
        records += requests(document, origin.node)
    if not records:
        raise MmctlError("no span of a request in it")
    return sorted(records, key=lambda record: getattr(record, "ts_ns", 0))


def requests(document: Any, node: str) -> list[Request]:
    """Request records of one export: spans of servers, of generative AI, or without a parent.

    Raises MmctlError when the document is no OTLP export of traces.
    """
    found = []
    try:
        for resource in document["resourceSpans"]:
            scopes = resource.get("scopeSpans") or resource.get("instrumentationLibrarySpans") or ()
            for scope in scopes:
                for span in scope.get("spans", ()):
                    record = _request(span, node)
                    if record is not None:
                        found.append(record)
    except (KeyError, TypeError, AttributeError, ValueError, OverflowError) as error:
        raise MmctlError(f"not an export of traces: {type(error).__name__} at {error}") from None
    return found


def _request(span: dict[str, Any], node: str) -> Request | None:
    attributes = {
        entry["key"]: _value(entry.get("value") or {}) for entry in span.get("attributes", ())
    }
    about_ai = any(key.startswith("gen_ai.") for key in attributes)
    if not (span.get("kind") in _SERVER or about_ai or not span.get("parentSpanId")):
        return None
    start_ns, end_ns = int(span["startTimeUnixNano"]), int(span["endTimeUnixNano"])
    if not 0 < start_ns <= end_ns < 1 << 63:
        return None
    stages = {"e2e_s": (end_ns - start_ns) / 1e9}
    for name, keys in _STAGES.items():
        for key in keys:
            value = attributes.get(key)
            if isinstance(value, (int, float)) and value >= 0:
                stages[name] = float(value)
                break
    counts: dict[str, Any] = {}
    for name, keys in _COUNTS.items():
        for key in keys:
            value = attributes.get(key)
            if isinstance(value, (int, float)) and 0 <= value < 1 << 53:
                counts[name] = int(value)
                break
    failed = (span.get("status") or {}).get("code") in _FAILED
    return Request(
        ts_ns=end_ns, node=node, id=str(span.get("spanId") or span.get("traceId") or ""),
        arrival_s=start_ns / 1e9, state="failed" if failed else "completed", stages=stages,
        **counts,
    )  # fmt: skip


def _value(value: dict[str, Any]) -> Any:
    if "intValue" in value:
        return int(value["intValue"])
    if "doubleValue" in value:
        return float(value["doubleValue"])
    return value.get("stringValue", value.get("boolValue"))


def source(rest: str, profile: Profile, stop: threading.Event) -> Iterator[AnyRecord]:
    """Requests sent to this address by OTLP/HTTP in JSON (``/v1/traces``), loopback by default.

    Raises UsageError for an address that is none, NoSourceError for one that is taken.
    """
    host, _, port = rest.rpartition(":")
    if not port.isdigit() or int(port) > 65535:
        raise UsageError(f"'otlp:{rest}' is no address such as otlp:4318")
    received: queue.Queue[Request] = queue.Queue(maxsize=65536)
    node = node_name()

    class Receiver(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        timeout = 10

        def do_POST(self) -> None:
            length = int(self.headers.get("Content-Length") or -1)
            kind = self.headers.get("Content-Type", "")
            if not 0 <= length <= _MAX_BYTES:
                self.close_connection = True
                self._answer(413, b"{}")
                return
            body = self.rfile.read(length)
            if "json" not in kind:
                self._answer(415, b'{"message": "send OTLP/HTTP as JSON"}')
                return
            try:
                for record in requests(msgspec.json.decode(body), node):
                    received.put(record, timeout=1)
            except (MmctlError, msgspec.DecodeError, RecursionError) as error:
                self._answer(400, msgspec.json.encode({"message": str(error)}))
            except queue.Full:
                self._answer(503, b'{"message": "nobody reads the requests"}')
            else:
                self._answer(200, b"{}")

        def _answer(self, status: int, body: bytes) -> None:
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *arguments: Any) -> None:
            pass

    try:
        server = http.server.ThreadingHTTPServer((host or "127.0.0.1", int(port)), Receiver)
    except OSError as error:
        raise NoSourceError(f"cannot listen on {rest}: {error.strerror}") from None
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, args=(0.1,), daemon=True).start()
    try:
        while not stop.is_set():
            try:
                yield received.get(timeout=0.1)
            except queue.Empty:
                continue
    finally:
        server.shutdown()
        server.server_close()
