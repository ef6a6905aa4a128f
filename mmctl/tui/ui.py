"""What the person at the screen has chosen: frozen, replaced whole, read by every panel."""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec

from mmctl.engine.records import Serving
from mmctl.tui.lines import UNICODE, Glyphs
from mmctl.tui.playback import Progress
from mmctl.tui.snapshot import (
    STATES,
    DeviceView,
    PoolView,
    ServingView,
    Snapshot,
    silent_ns,
    unread,
)

LAYERS = ("conflict", "modality", "free", "age", "pages")
Layer = Literal["conflict", "modality", "free", "age", "pages"]
Choices: TypeAlias = dict[str, object]  # fields of Ui


class Ui(msgspec.Struct, frozen=True):
    """Choices and surroundings of one picture."""

    now_ns: int = 0
    started_ns: int = 0  # when the screen was opened
    live: bool = True  # the records are of now: their age means something
    sources: tuple[str, ...] = ()
    profile: str = "default"
    mode: str = "observe"
    paused: bool = False
    playback: Progress | None = None  # a recording that can be entered anywhere
    recording: str | None = None  # the file that is being written
    ended: str | None = None  # why no record comes any more
    notice: str | None = None  # what the last key did, until the next one
    screen: str = "overview"
    filter: str = ""
    device: int = 0  # cursor among the devices
    pool: int = 0
    layer: Layer = "conflict"
    level: int = 1  # which width of column
    cell: tuple[int, int] | None = None  # cursor in the heatmap: columns from the right, row
    rows: tuple[int, int] | None = None  # zoomed addresses: from, to
    event: int = 0  # cursor among the events, newest is 0
    recovery: int = 0
    scroll: int = 0  # of the evidence, or of the checks
    placement: int = 0  # cursor among the placements, newest is 0
    lane: int = 0  # cursor among the streams
    trace_zoom: int = 0
    trace_back: int = 0  # quarters of the shown time before the newest
    vision_deadline_s: float = 0.2
    stream_deadline_s: float = 0.03
    cost: tuple[float, int] | None = None  # own share of a core, own bytes
    glyphs: Glyphs = UNICODE


def now_ns(snapshot: Snapshot, ui: Ui) -> int | None:
    """The moment that ages are counted from: the clock, or a recording's newest record."""
    return ui.now_ns if ui.live else snapshot.newest_ns


LOST_NS = 1_000_000_000  # a source that others stand in for may take so long to be seen again


def all_lost(snapshot: Snapshot, ui: Ui) -> bool:
    """Whether every source is lost; a page may go by its address alone."""
    lost = [uri for uri, _, _ in snapshot.down if uri]
    return bool(ui.sources) and all(any(uri in source for uri in lost) for source in ui.sources)


def gone(snapshot: Snapshot, ui: Ui, node: str, device: str) -> bool:
    """Whether what is shown of a device or an engine is no longer read: its source has gone."""
    if ui.live and ui.ended is not None:
        return True
    if not snapshot.down:
        return False
    if all_lost(snapshot, ui):
        return True
    since = max(since for _, _, since in snapshot.down)
    times = [view.record.ts_ns for view in snapshot.devices
             if (view.record.node, view.record.device) == (node, device)]  # fmt: skip
    times += [view.record.ts_ns for view in snapshot.pools
              if (view.record.node, view.record.device) == (node, device)]  # fmt: skip
    times += [0 if unread(view.record) else view.record.ts_ns for view in snapshot.serving
              if (view.record.node, view.record.instance) == (node, device)]  # fmt: skip
    if not times:
        return False
    return max(times) <= since and (now_ns(snapshot, ui) or 0) - since > LOST_NS


def state(snapshot: Snapshot, ui: Ui) -> str | None:
    """The worst state of any device; unknown is that of one whose source has gone."""
    known = {
        "unknown" if gone(snapshot, ui, span.node, span.device) else span.state
        for span in snapshot.states
    }
    return next((state for state in STATES if state in known), None)


def unheard_ns(view: DeviceView | ServingView | PoolView, snapshot: Snapshot, ui: Ui) -> int | None:
    """How long nothing was heard of it, once that is longer than it should be."""
    now = now_ns(snapshot, ui)
    record = view.record
    name = record.instance if isinstance(record, Serving) else record.device
    if gone(snapshot, ui, record.node, name):
        return max(0, (now or 0) - record.ts_ns)
    return silent_ns(view, now)


def starting(snapshot: Snapshot, ui: Ui) -> str | None:
    """The demo that still loads its model, and for how long it has; None once it has begun."""
    begun = snapshot.devices or snapshot.pools or ui.ended is not None or not ui.live
    demo = next((uri for uri in ui.sources if uri.partition(":")[0] == "demo"), None)
    if demo is None or begun or not ui.started_ns:
        return None
    return f"{demo} is starting: {max(0, ui.now_ns - ui.started_ns) // 10**9} s so far"


def nothing_came(snapshot: Snapshot, ui: Ui) -> bool:
    """Whether there is no record, and none to wait for: an end, or a recording without any."""
    progress = ui.playback
    bare = progress is not None and progress.ended_ns <= progress.started_ns
    return not snapshot.records and (ui.ended is not None or bare)


def pool_of(snapshot: Snapshot, ui: Ui) -> PoolView | None:
    """The pool that was picked."""
    return snapshot.pools[min(ui.pool, len(snapshot.pools) - 1)] if snapshot.pools else None


def clamp(value: int, count: int) -> int:
    """``value`` among ``count`` places; 0 where there are none."""
    return max(0, min(value, count - 1))
