"""What the person at the screen has chosen: frozen, replaced whole, read by every panel."""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec

from mmctl.tui.lines import UNICODE, Glyphs
from mmctl.tui.playback import Progress
from mmctl.tui.snapshot import PoolView, Snapshot

LAYERS = ("conflict", "modality", "free", "age", "pages")
Layer = Literal["conflict", "modality", "free", "age", "pages"]
Choices: TypeAlias = dict[str, object]  # fields of Ui


class Ui(msgspec.Struct, frozen=True):
    """Choices and surroundings of one picture."""

    now_ns: int = 0
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
