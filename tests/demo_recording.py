"""Make the recording that stands in for the demo where torch is not installed.

``python tests/demo_recording.py`` runs ``demo:burst`` under an enforcing breaker until it has
closed again and ten more seconds have passed.
"""

from __future__ import annotations

import threading
from pathlib import Path

import msgspec
import zstandard

from mmctl.engine import profiles, recording
from mmctl.engine.breaker.agent_socket import AgentSocket
from mmctl.engine.breaker.loop import run
from mmctl.engine.records import Event, encode
from mmctl.engine.sources import open_sources
from mmctl.engine.sources.demo import SHIPPED

AFTER_S = 10
NOTICE = (
    "a recording of a demo run under an enforcing breaker, made by the demo itself; "
    "pip install 'mmctl[torch]' runs it live"
)


def main() -> None:
    """Record, drop what belongs to this machine, compress as far as it goes."""
    profile, stop = profiles.load("default").profile, threading.Event()
    lines: list[bytes] = []
    records = open_sources(["demo:burst"], profile, stop)
    for record in run(records, profile, "enforce", AgentSocket()):
        if not lines:
            head = recording.header("demo", "default", record.ts_ns)
            notice = Event(ts_ns=record.ts_ns, node="demo", what="notice", message=NOTICE)
            lines += [encode(head), encode(notice)]
        change = {"node": "demo"}
        if isinstance(record, Event) and record.what == "agent":
            kept = {k: v for k, v in record.evidence.items() if k not in ("socket", "pid")}
            change["evidence"] = kept
        lines.append(encode(msgspec.structs.replace(record, **change)))
        if isinstance(record, Event) and record.what == "close":
            threading.Timer(AFTER_S, stop.set).start()
    SHIPPED.mkdir(exist_ok=True)
    path: Path = SHIPPED / "burst.ndjson.zst"
    content = b"\n".join(lines) + b"\n"
    path.write_bytes(zstandard.ZstdCompressor(level=19).compress(content))
    print(f"{len(lines)} records, {path.stat().st_size} bytes in {path.name}")


if __name__ == "__main__":
    main()
