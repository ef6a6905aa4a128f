"""The scrub bar: where a recording stands, and where its events are."""

from __future__ import annotations

from mmctl.tui import text
from mmctl.tui.lines import Line
from mmctl.tui.playback import Progress
from mmctl.tui.snapshot import Snapshot
from mmctl.tui.ui import Ui

_EDGE = 12  # columns of the times at both ends, spaces included
_HEAD = 12  # columns of the state and speed before them


def bar(snapshot: Snapshot, ui: Ui, columns: int) -> Line:
    """``▶ 1x  14:13:20 ━━━┿━━●───┼─── 14:13:59``."""
    progress = ui.playback
    if progress is None:
        return ()
    g = ui.glyphs
    position = position_ns(snapshot, progress)
    at_end = position >= progress.ended_ns and not progress.playing
    told = "end" if at_end else "play" if progress.playing else "paused"
    mark = g.up if at_end else g.play if progress.playing else g.pause
    wide = track(columns)
    span = max(1, progress.ended_ns - progress.started_ns)
    here = min(wide - 1, int((position - progress.started_ns) / span * wide))
    cells = [g.rule] * wide
    for at_ns in progress.events_ns:
        cells[min(wide - 1, int((at_ns - progress.started_ns) / span * wide))] = g.event
    return (
        (f" {mark} {told:<4}", "accent_strong"), (f"{progress.speed:>4g}x ", ""),
        (f" {text.clock(progress.started_ns)}  ", "dim"),
        ("".join(cells[:here]), "accent"), (g.dot, "accent_strong"),
        ("".join(cells[here + 1 :]), "dim"), (f"  {text.clock(progress.ended_ns)} ", "dim"),
    )  # fmt: skip


def track(columns: int) -> int:
    """Columns of the bar itself."""
    return max(4, columns - _HEAD - 2 * _EDGE + 1)


def moment(progress: Progress, column: int, columns: int) -> int | None:
    """The time under a column of the bar's line; absent outside the track."""
    wide = track(columns)
    x = column - _HEAD - _EDGE + 1
    if not 0 <= x < wide:
        return None
    return progress.started_ns + (progress.ended_ns - progress.started_ns) * x // max(1, wide - 1)


def position_ns(snapshot: Snapshot, progress: Progress) -> int:
    """Where the recording stands: the newest record that was shown."""
    return snapshot.newest_ns if snapshot.newest_ns is not None else progress.started_ns
