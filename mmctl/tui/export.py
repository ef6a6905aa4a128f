"""The files that the dashboard writes."""

from __future__ import annotations

import time
from pathlib import Path

from mmctl.tui.snapshot import Snapshot


def name(what: str, suffix: str, snapshot: Snapshot, now_ns: int) -> Path:
    """A new file's name in the current folder: ``mmctl-a17-events-20260101-140211.ndjson``."""
    moment = time.strftime("%Y%m%d-%H%M%S", time.localtime(now_ns // 10**9))
    node = snapshot.nodes[0] if snapshot.nodes else ""
    safe = "".join(c if c.isalnum() or c in "-_." else "_" for c in node)
    stem = "-".join(part for part in ("mmctl", safe, what, moment) if part)
    path = Path(stem + suffix)
    number = 2
    while path.exists():
        path = Path(f"{stem}-{number}{suffix}")
        number += 1
    return path
