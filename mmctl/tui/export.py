"""What is written from the screen: a picture of it, and the data under the cursor."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path

from mmctl.engine.errors import MmctlError
from mmctl.engine.records import AnyRecord, encode
from mmctl.tui import events, overview, recovery
from mmctl.tui.model import Snapshot
from mmctl.tui.ui import Ui


def under_cursor(snapshot: Snapshot, ui: Ui) -> list[AnyRecord]:
    """The records that the screen's cursor stands on."""
    if ui.screen == "overview":
        devices = overview.shown_devices(snapshot, ui)
        if not devices:
            return []
        device = devices[min(ui.device, len(devices) - 1)].record
        key = (device.node, device.device)
        pools = [p.record for p in snapshot.pools if (p.record.node, p.record.device) == key]
        return [device, *pools]
    if ui.screen == "heatmap":
        pool = overview.pool_of(snapshot, ui)
        return [pool.record] if pool else []
    if ui.screen == "events":
        found = events.shown_events(snapshot, ui)
        return [found[min(ui.event, len(found) - 1)]] if found else []
    chosen = recovery.chosen(snapshot, ui)
    return list(chosen.events) if chosen else []


def name(what: str, suffix: str, node: str, now_ns: int) -> Path:
    """A new file's name in the current folder: ``mmctl-a17-events-20260101-140211.ndjson``."""
    moment = time.strftime("%Y%m%d-%H%M%S", time.localtime(now_ns // 10**9))
    safe = "".join(c if c.isalnum() or c in "-_." else "_" for c in node)
    stem = "-".join(part for part in ("mmctl", safe, what, moment) if part)
    path = Path(stem + suffix)
    number = 2
    while path.exists():
        path = Path(f"{stem}-{number}{suffix}")
        number += 1
    return path


def write_records(path: Path, records: Iterable[AnyRecord]) -> None:
    """Records as NDJSON, in one step."""
    write(path, b"".join(encode(record) + b"\n" for record in records))


def write(path: Path, content: bytes) -> None:
    """A whole file or none; MmctlError when it cannot be written."""
    try:
        descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=".mmctl-")
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
        os.replace(temporary, path)
    except OSError as error:
        raise MmctlError(f"cannot write {path}: {error.strerror}") from None
