"""Request spans: a file of OTLP JSON, a receiver on loopback, what is no request."""

from __future__ import annotations

import http.client
import json
import threading
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from mmctl.engine import profiles
from mmctl.engine.errors import MmctlError
from mmctl.engine.records import Request
from mmctl.engine.sources import files, otlp
from mmctl.engine.sources.smi import Origin

SECOND = 10**9


def span(number: int, **more: Any) -> dict[str, Any]:
    return {
        "traceId": f"{number:032x}", "spanId": f"{number:016x}", "kind": 2, "name": "llm_request",
        "startTimeUnixNano": str(1_700_000_000 * SECOND),
        "endTimeUnixNano": str(1_700_000_002 * SECOND),
        "attributes": [
            {"key": "gen_ai.usage.input_tokens", "value": {"intValue": "1200"}},
            {"key": "gen_ai.usage.output_tokens", "value": {"intValue": 80}},
            {"key": "gen_ai.latency.time_to_first_token", "value": {"doubleValue": 0.4}},
        ],
        **more,
    }  # fmt: skip


def export(*spans: dict[str, Any]) -> dict[str, Any]:
    return {"resourceSpans": [{"resource": {}, "scopeSpans": [{"spans": list(spans)}]}]}


def test_requests_of_a_file() -> None:
    failed = span(2, status={"code": "STATUS_CODE_ERROR"}, kind="SPAN_KIND_SERVER")
    inner = span(3, parentSpanId="1", kind=1, attributes=[])
    text = json.dumps(export(span(1), failed, inner), indent=1)
    first, second = files.read(text, "spans.json", 0)
    assert isinstance(first, Request) and isinstance(second, Request)
    assert (first.text_tokens, first.output_tokens, first.state) == (1200, 80, "completed")
    assert first.stages == {"e2e_s": 2.0, "ttft_s": 0.4} and first.arrival_s == 1_700_000_000
    assert second.state == "failed"
    lines = "\n".join(json.dumps(export(span(n))) for n in range(3))
    assert len(files.read(lines, "spans.jsonl", 0)) == 3


@pytest.mark.parametrize(
    "text", ['{"resourceSpans": 3}', '{"resourceSpans": [{"scopeSpans": [{"spans": [{}]}]}]}',
             '{"resourceSpans": []}', '{"resourceSpans": [[[[[['],
)  # fmt: skip
def test_what_is_no_export_is_refused(text: str) -> None:
    with pytest.raises(MmctlError):
        otlp.spans(text, Origin("x", "n", 0))


def post(port: int, body: bytes, kind: str = "application/json") -> int:
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=5)) as connection:
        connection.request("POST", "/v1/traces", body, {"Content-Type": kind})
        return connection.getresponse().status


def test_a_receiver_on_loopback(tmp_path: Path) -> None:
    import socket

    with closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    stop = threading.Event()
    records = otlp.source(str(port), profiles.load("default").profile, stop)
    got: list[Any] = []
    thread = threading.Thread(target=lambda: got.extend([next(records), next(records)]))
    thread.start()
    import time

    for _ in range(200):
        try:
            assert post(port, json.dumps(export(span(1), span(2))).encode()) == 200
            break
        except ConnectionRefusedError:
            time.sleep(0.02)
    assert post(port, b"nonsense") == 400
    assert post(port, b"{}", "application/x-protobuf") == 415
    thread.join(timeout=10)
    stop.set()
    records.close()  # type: ignore[attr-defined]
    assert [record.id for record in got] == [f"{n:016x}" for n in (1, 2)]


def test_kernel_logs_are_events(data: Path) -> None:
    text = (data / "kernel_logs/k01_aer_surprise_down_then_xid79.txt").read_text()
    events = files.read(text, "k01", 10**18)
    assert any(event.what == "xid79" for event in events)  # type: ignore[union-attr]
    clean = files.read((data / "kernel_logs/k22_kmsg_raw_clean_gpud.log").read_text(), "k22", 0)
    assert [event.state for event in clean] == ["clean"]  # type: ignore[union-attr]
