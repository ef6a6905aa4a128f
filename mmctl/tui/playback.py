"""A recording under control: play, pause, step, speed, and entering it anywhere.

The screen calls the controls, the feed's thread reads ``records``; a condition is all they share.
"""

from __future__ import annotations

import heapq
import threading
import time
from collections.abc import Generator, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import msgspec

from mmctl.engine import recording
from mmctl.engine.recording import Index
from mmctl.engine.records import AnyRecord, Event, Pool, Recording
from mmctl.engine.streams import time_ns

SPEEDS = (0.1, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 64.0)
GAP_S = 2.0  # a silence in the recording is cut to this
_LOOK_S = 0.1
_PASSED_OVER = {"breaker", "clear"}  # events that no jump stops at


class Rewind(NamedTuple):
    """Forget everything and fold these in at once: what the screen shows at another moment.

    To be used up before the next record is asked for.
    """

    records: Iterator[AnyRecord]


class Progress(msgspec.Struct, frozen=True):
    """Where a playback stands; ``events_ns`` are the moments worth a jump."""

    started_ns: int
    ended_ns: int
    events_ns: tuple[int, ...]
    playing: bool
    speed: float


class _Together(NamedTuple):
    """Several indexed recordings as one."""

    parts: tuple[Index, ...]
    heads: tuple[Recording, ...]
    started_ns: int
    ended_ns: int
    events: tuple[Event, ...]

    def read_from(self, ts_ns: int) -> Iterator[AnyRecord]:
        """Records of all from a little before ``ts_ns`` on, in order of time."""
        return heapq.merge(*(part.read_from(ts_ns) for part in self.parts), key=time_ns)


def _together(parts: Sequence[Index]) -> _Together:
    return _Together(
        tuple(parts),
        tuple(part.head for part in parts if part.head is not None),
        min(part.started_ns for part in parts),
        max(part.ended_ns for part in parts),
        tuple(heapq.merge(*(part.events for part in parts), key=time_ns)),
    )


class Playback:
    """Plays recordings, of several nodes perhaps, merged by time.

    They are indexed when ``records`` is first asked for one. Controls may be called from any
    thread.
    """

    def __init__(self, paths: Sequence[Path], stop: threading.Event, window_s: float) -> None:
        self._paths, self._stop = paths, stop
        self._index: _Together | None = None
        self._window_ns = int(window_s * 1e9)
        self._changed = threading.Condition()
        self._playing, self._speed = True, 1.0
        self._target: int | None = None  # where to go
        self._until = 0  # while paused, play on up to here
        self._moments: tuple[int, ...] = ()

    def progress(self) -> Progress | None:
        """Where it stands, frozen; absent until the recording has been looked over."""
        with self._changed:
            if self._index is None:
                return None
            return Progress(
                self._index.started_ns, self._index.ended_ns, self._moments,
                self._playing, self._speed,
            )  # fmt: skip

    def toggle(self) -> None:
        """Pause, or go on."""
        with self._changed:
            self._playing = not self._playing
            self._changed.notify_all()

    def faster(self, steps: int) -> None:
        """Next higher or lower speed."""
        with self._changed:
            at = SPEEDS.index(self._speed) + steps
            self._speed = SPEEDS[max(0, min(at, len(SPEEDS) - 1))]
            self._changed.notify_all()

    def seek(self, ts_ns: int) -> None:
        """Go to a moment."""
        with self._changed:
            self._target = ts_ns
            self._changed.notify_all()

    def step(self, position_ns: int, by_ns: int) -> None:
        """Pause, and move by so much: forwards by playing it, backwards by going there."""
        with self._changed:
            self._playing = False
            if by_ns > 0:
                self._until = position_ns + by_ns
            else:
                self._target = position_ns + by_ns
            self._changed.notify_all()

    def jump(self, position_ns: int, forwards: bool) -> bool:
        """Go to the next event, or the one before; whether there is one."""
        if forwards:
            found = next((at for at in self._moments if at > position_ns), None)
        else:
            found = next((at for at in reversed(self._moments) if at < position_ns), None)
        if found is not None:
            self.seek(found)
        return found is not None

    def records(self) -> Iterator[AnyRecord | Rewind]:
        """Records at their own pace, or a Rewind; waits at the end, ends when stopped."""
        index = _together([recording.index(path) for path in self._paths])
        with self._changed:
            self._index = index
            self._moments = tuple(e.ts_ns for e in index.events if e.what not in _PASSED_OVER)
        position = index.started_ns
        records = index.read_from(position)
        while not self._stop.is_set():
            target = yield from self._play(records, position)
            if target is None:
                return
            target = max(index.started_ns, min(target, index.ended_ns))
            records = index.read_from(target - self._window_ns)
            after: list[AnyRecord] = []
            yield Rewind(self._before(index, target, records, after))
            position, records = target, chain(after, records)

    def _play(
        self, records: Iterator[AnyRecord], position: int
    ) -> Generator[AnyRecord, None, int | None]:
        """Play until somewhere else is wanted: its moment is returned; None when stopped."""
        anchor_wall, anchor_ns, speed = time.monotonic(), position, self._speed
        for record in records:
            ts_ns = time_ns(record)
            with self._changed:
                while True:
                    if self._stop.is_set():
                        return None
                    if self._target is not None:
                        return self._take()
                    if ts_ns <= self._until:
                        anchor_wall, anchor_ns = time.monotonic(), ts_ns
                        break
                    now = time.monotonic()
                    if not self._playing:
                        anchor_wall, anchor_ns = now, position
                        self._changed.wait(_LOOK_S)
                        continue
                    if speed != self._speed:
                        anchor_wall, anchor_ns, speed = now, position, self._speed
                    wait_s = anchor_wall + (ts_ns - anchor_ns) / 1e9 / speed - now
                    if wait_s <= 0:
                        break
                    if wait_s > GAP_S:
                        anchor_wall -= wait_s - GAP_S
                        continue
                    self._changed.wait(min(wait_s, _LOOK_S))
            position = max(position, ts_ns)
            yield record
        with self._changed:
            self._playing = False
            while self._target is None:
                if self._stop.is_set():
                    return None
                self._changed.wait(_LOOK_S)
            return self._take()

    def _take(self) -> int | None:
        target, self._target, self._until = self._target, None, 0
        return target

    def _before(
        self, index: _Together, target: int, records: Iterator[AnyRecord], after: list[AnyRecord]
    ) -> Iterator[AnyRecord]:
        """What the screen needs to know at ``target``; the first record later goes to ``after``.

        Events from the beginning, so that states are right; everything else from a window
        before, pools thinned to what a column of the heatmap can show.
        """
        begin = target - self._window_ns
        yield from index.heads
        yield from (event for event in index.events if event.ts_ns < begin)
        step_ns = max(1, self._window_ns // 120)
        taken: dict[tuple[str, str, str], int] = {}
        for record in records:
            if isinstance(record, Recording) or record.ts_ns < begin:
                continue
            if record.ts_ns > target:
                after.append(record)
                return
            if isinstance(record, Pool):
                key, column = (record.node, record.device, record.pool), record.ts_ns // step_ns
                if taken.get(key) == column:
                    continue
                taken[key] = column
            yield record
