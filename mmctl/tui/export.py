"""What is under the cursor, and how it is written to a file."""

from __future__ import annotations

import time
from pathlib import Path

from mmctl.engine.records import AnyRecord
from mmctl.tui import events, overview, recovery, traces
from mmctl.tui.snapshot import Snapshot
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
    if ui.screen == "schedule":
        placed = snapshot.placements[::-1]
        return [placed[min(ui.placement, len(placed) - 1)]] if placed else []
    if ui.screen == "traces":
        streams = traces.lanes(snapshot, ui)
        return list(streams[min(ui.lane, len(streams) - 1)][1]) if streams else []
    chosen = recovery.chosen(snapshot, ui)
    return list(chosen.events) if chosen else []


def target(snapshot: Snapshot, ui: Ui) -> tuple[str, str] | None:
    """Node and device that the screen's cursor stands for."""
    if ui.screen == "recovery" and (chosen := recovery.chosen(snapshot, ui)) is not None:
        return chosen.node, chosen.device
    if ui.screen == "heatmap":
        pool = overview.pool_of(snapshot, ui)
        return (pool.record.node, pool.record.device) if pool else None
    devices = overview.shown_devices(snapshot, ui)
    if not devices:
        return None
    record = devices[min(ui.device, len(devices) - 1)].record
    return record.node, record.device


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
