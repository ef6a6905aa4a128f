"""Records in, a frozen picture of what the screen shows out. No terminal, no clock, no thread.

One thread owns a ``Model`` and folds records into it; everybody else reads the ``Snapshot``
that it makes, in which nothing changes any more.
"""

from __future__ import annotations

import heapq
from collections import deque
from typing import Any, NamedTuple

import msgspec

from mmctl.engine.records import (
    AnyRecord,
    Device,
    Event,
    Link,
    Memory,
    Pool,
    Record,
    Recording,
    Request,
    Serving,
    Span,
)
from mmctl.engine.streams import time_ns
from mmctl.tui.heat import HeatHistory
from mmctl.tui.lines import natural
from mmctl.tui.snapshot import (
    READINGS,
    STATES,
    DeviceView,
    Holder,
    PoolView,
    Queue,
    Recovery,
    Region,
    Requests,
    ServingView,
    Snapshot,
    StateSpan,
    Trend,
    unread,
)

TREND_STEP_NS = 1_000_000_000
TREND_KEEP = 60
EVENTS_KEEP = 1_000  # three megabytes of evidence
READINGS_KEEP = 100  # of those that are measurements: a night of them pushes no trip off the list
PLACEMENTS_KEEP = 500
SPANS_KEEP = 4_000
BANDS_KEEP = 2_000
REQUESTS_KEEP = 512
WAITS_KEEP = 256
BLOCKS_KEEP = 20_000

# What belongs to a recovery from its trip to its close.
RECOVERY = {
    "trip", "respond", "rebuild", "verify", "half_open", "close", "state", "isolate", "order",
    "fault", "oom",
}  # fmt: skip

# What tells of a placement, and why.
ROUTES = {"route", "placement"}
PLACEMENTS = ROUTES | {"rebalance", "migrate", "split"}

Key = tuple[str, str]  # node, device (or instance)
PoolKey = tuple[str, str, str]  # node, device, pool


class _Trend:
    """Means over whole seconds; a second without a value is a gap."""

    def __init__(self) -> None:
        self._values: deque[float | None] = deque(maxlen=TREND_KEEP)
        self._second, self._sum, self._count = -1, 0.0, 0

    def add(self, ts_ns: int, value: float | None) -> None:
        second = ts_ns // TREND_STEP_NS
        if second > self._second:
            if self._second >= 0:
                self._values.append(self._mean())
                gap = min(second - self._second - 1, TREND_KEEP)
                self._values.extend([None] * gap)
            self._second, self._sum, self._count = second, 0.0, 0
        if value is not None:
            self._sum += value
            self._count += 1

    def _mean(self) -> float | None:
        return self._sum / self._count if self._count else None

    def frozen(self) -> Trend:
        return (*self._values, self._mean()) if self._second >= 0 else ()


class _DeviceState:
    def __init__(self) -> None:
        self.record: Device | None = None
        self.period_ns = 0
        self.sm, self.bandwidth = _Trend(), _Trend()


class _ServingState:
    def __init__(self) -> None:
        self.record: Serving | None = None
        self.period_ns = 0
        self.kv, self.waiting = _Trend(), _Trend()


class _PoolState:
    def __init__(self, window_ns: int) -> None:
        self.record: Pool | None = None
        self.tried: Pool | None = None
        self.period_ns = 0
        self.heat = HeatHistory(window_ns)
        self.allocated = _Trend()


class _Block(NamedTuple):
    size_bytes: int
    modality: str
    since_ns: int


class _Pending(msgspec.Struct):
    state: str
    since_ns: int
    modality: str


class Model:
    """Folds records into what the screen shows; ``snapshot`` freezes it."""

    def __init__(self, heat_window_s: float = 60.0, mode: str | None = None) -> None:
        self._window_ns = int(heat_window_s * 1e9)
        self._mode = mode
        self._profile: str | None = None
        self._records = 0
        self._newest_ns: int | None = None
        self._oldest_ns: int | None = None
        self._nodes: dict[str, None] = {}
        self._devices: dict[Key, _DeviceState] = {}
        self._serving: dict[Key, _ServingState] = {}
        self._pools: dict[PoolKey, _PoolState] = {}
        self._states: dict[Key, StateSpan] = {}
        self._bands: deque[StateSpan] = deque(maxlen=BANDS_KEEP)
        self._events: deque[Event] = deque(maxlen=EVENTS_KEEP)
        self._readings: deque[Event] = deque(maxlen=READINGS_KEEP)
        self._placements: deque[Event] = deque(maxlen=PLACEMENTS_KEEP)
        self._recoveries: dict[Key, list[Event]] = {}
        self._links: dict[tuple[str, str, str], Link] = {}
        self._spans: deque[Span] = deque(maxlen=SPANS_KEEP)
        self._pending: dict[tuple[str, str], _Pending] = {}
        self._waits = {name: deque[float](maxlen=WAITS_KEEP) for name in ("vision", "text")}
        self._stages: dict[str, deque[float]] = {}
        self._completed = self._failed = 0
        self._saw_request = self._tells_admission = False
        self._blocks: dict[Key, dict[int, _Block]] = {}
        self._notice: str | None = None
        self._down: dict[str, tuple[str, str, int]] = {}
        self._frozen: dict[str, tuple[Any, ...]] = {}

    def add(self, record: AnyRecord) -> None:
        """Fold one record in. Records of other kinds than a screen shows only count."""
        if isinstance(record, Recording):
            if record.node:
                self._nodes[record.node] = None
            return
        self._records += 1
        if self._newest_ns is None or record.ts_ns > self._newest_ns:
            self._newest_ns = record.ts_ns
        if self._oldest_ns is None:
            self._oldest_ns = record.ts_ns
        if record.node:
            self._nodes[record.node] = None
        if isinstance(record, Device):
            self._device(record)
        elif isinstance(record, Pool):
            self._pool(record)
        elif isinstance(record, Serving):
            self._serve(record)
        elif isinstance(record, Request):
            self._request(record)
        elif isinstance(record, Event):
            self._event(record)
        elif isinstance(record, Link):
            self._links[record.node, record.a, record.b] = record
            self._frozen.pop("links", None)
        elif isinstance(record, Span):
            self._spans.append(record)
            self._frozen.pop("spans", None)
        elif isinstance(record, Memory):
            self._memory(record)

    def _device(self, record: Device) -> None:
        state = self._devices.setdefault((record.node, record.device), _DeviceState())
        state.period_ns = _period(state.record, record)
        state.record = record
        if not record.repeated:
            state.sm.add(record.ts_ns, record.sm_ratio)
            state.bandwidth.add(record.ts_ns, record.bandwidth_ratio)

    def _serve(self, record: Serving) -> None:
        state = self._serving.setdefault((record.node, record.instance), _ServingState())
        if unread(record) != (state.record is not None and unread(state.record)):
            self._event(_read_again(record))
        state.period_ns = _period(state.record, record)
        state.record = record
        state.kv.add(record.ts_ns, record.kv_ratio)
        state.waiting.add(record.ts_ns, record.waiting)

    def _pool(self, record: Pool) -> None:
        key = (record.node, record.device, record.pool)
        state = self._pools.get(key)
        if state is None:
            state = self._pools[key] = _PoolState(self._window_ns)
        state.period_ns = _period(state.record, record)
        state.record = record
        state.tried = record if record.fits is not None else state.tried
        state.heat.add(record)
        state.allocated.add(record.ts_ns, record.allocated_bytes)

    def _memory(self, record: Memory) -> None:
        blocks = self._blocks.setdefault((record.node, record.device), {})
        if record.action == "alloc":
            blocks[record.address] = _Block(record.size_bytes, record.modality, record.ts_ns)
            if len(blocks) > BLOCKS_KEEP:  # a source that tells of no free
                del blocks[next(iter(blocks))]
        elif record.action == "free":
            blocks.pop(record.address, None)

    def _holders(self, region: Region | None) -> tuple[Holder, ...] | None:
        blocks = self._blocks.get((region.node, region.device)) if region else None
        if region is None or blocks is None:
            return None
        found: dict[str, list[_Block]] = {}
        for address, block in blocks.items():
            if address < region.end and address + block.size_bytes > region.start:
                found.setdefault(block.modality, []).append(block)
        return tuple(
            Holder(modality, len(held), sum(block.size_bytes for block in held),
                   min(block.since_ns for block in held))
            for modality, held in sorted(found.items())
        )  # fmt: skip

    def _request(self, record: Request) -> None:
        self._saw_request = True
        key = (record.node, record.id)
        before = self._pending.pop(key, None)
        modality = "vision" if record.images or record.vision_tokens else "text"
        waited = self._waited_s(record, before)
        if waited is not None:
            self._waits[modality].append(waited)
        for stage, seconds in record.stages.items():
            self._stages.setdefault(stage, deque(maxlen=WAITS_KEEP)).append(seconds)
        if record.state in ("completed", "failed"):
            self._completed += record.state == "completed"
            self._failed += record.state == "failed"
        elif record.state not in (None, "refused", "cancelled"):
            since = before.since_ns if before and before.state == record.state else record.ts_ns
            self._tells_admission |= record.state != "queued"
            self._pending[key] = _Pending(record.state, since, modality)
            if len(self._pending) > REQUESTS_KEEP:  # a source that never completes any
                del self._pending[next(iter(self._pending))]

    def _waited_s(self, record: Request, before: _Pending | None) -> float | None:
        """The wait of a request that leaves its queue, as it is told, or from its admission.

        One that goes from its queue to its end may have been worked on for any part of it.
        """
        left_queue = before is None or before.state == "queued"
        if not left_queue or record.state in (None, "queued", "refused", "cancelled"):
            return None
        if record.queue_wait_s is not None:
            return record.queue_wait_s
        if record.state in ("completed", "failed"):
            return record.stages.get("queue_wait_s")
        return (record.ts_ns - before.since_ns) / 1e9 if before is not None else None

    def _event(self, record: Event) -> None:
        if record.what in PLACEMENTS:
            self._placements.append(record)
            self._frozen.pop("placements", None)
            if record.what in ROUTES:  # one a request: they would push every trip off the list
                return
        (self._readings if record.what in READINGS else self._events).append(record)
        self._frozen.pop("events", None)
        if record.what in ("breaker", "mode", "reload") and record.mode is not None:
            self._mode = record.mode
        if record.what == "reload":
            refused = record.state == "refused"
            self._profile = self._profile if refused else record.evidence.get("profile")
            self._notice = record.message if refused else None
        if record.what == "notice":
            self._notice = record.message
        if record.what == "source":
            uri = str(record.evidence.get("uri", ""))
            if record.state == "down":
                self._down[uri] = (uri, record.message or "", record.ts_ns)
            else:
                self._down.pop(uri, None)
        if record.device is None:
            return
        key = (record.node, record.device)
        known = self._states.get(key)
        before = known.state if known else None
        if record.state in STATES:
            span = StateSpan(record.ts_ns, record.node, record.device, record.state)
            if before != record.state:
                self._states[key] = span
                self._bands.append(span)
                self._frozen.pop("bands", None)
        begins = record.what == "trip" and record.mode != "observe"
        if begins and before in (None, "closed", "unknown"):
            self._recoveries[key] = [record]
        elif key in self._recoveries and record.mode != "observe" and record.what in RECOVERY:
            events = self._recoveries[key]
            events.append(record)
            del events[1:-100]
        self._frozen.pop("recoveries", None)

    def snapshot(self, region: Region | None = None) -> Snapshot:
        """The picture as of now; what did not change since the last one is shared with it.

        ``region`` is the one whose holders are wanted.
        """
        frozen = self._frozen
        if "events" not in frozen:
            frozen["events"] = tuple(heapq.merge(self._events, self._readings, key=time_ns))
        if "placements" not in frozen:
            frozen["placements"] = tuple(self._placements)
        if "bands" not in frozen:
            frozen["bands"] = tuple(self._bands)
        if "links" not in frozen:
            frozen["links"] = tuple(self._links.values())
        if "spans" not in frozen:
            frozen["spans"] = tuple(self._spans)
        if "recoveries" not in frozen:
            frozen["recoveries"] = tuple(
                Recovery(node, device, tuple(events))
                for (node, device), events in self._recoveries.items()
            )
        return Snapshot(
            records=self._records,
            newest_ns=self._newest_ns,
            oldest_ns=self._oldest_ns,
            nodes=tuple(self._nodes),
            mode=self._mode,
            profile=self._profile,
            states=tuple(self._states.values()),
            devices=tuple(
                DeviceView(
                    state.record, state.sm.frozen(), state.bandwidth.frozen(), state.period_ns
                )
                for _, state in sorted(self._devices.items(), key=_natural)
                if state.record is not None
            ),
            serving=tuple(
                ServingView(
                    state.record, state.kv.frozen(), state.waiting.frozen(), state.period_ns
                )
                for _, state in sorted(self._serving.items())
                if state.record is not None
            ),
            pools=tuple(
                PoolView(
                    state.record,
                    state.heat.frozen(),
                    _slope(state.allocated.frozen()),
                    state.period_ns,
                    state.tried,
                )
                for _, state in sorted(self._pools.items(), key=_natural)
                if state.record is not None
            ),
            requests=self._requests(),
            region=region,
            holders=self._holders(region),
            notice=self._notice,
            queues=self._queues(),
            stages=tuple((stage, tuple(times)) for stage, times in self._stages.items()),
            down=tuple(self._down.values()),
            **frozen,
        )

    def _requests(self) -> Requests | None:
        if not self._saw_request:
            return None
        queued = sum(pending.state == "queued" for pending in self._pending.values())
        in_work = len(self._pending) - queued if self._tells_admission else None
        return Requests(queued, in_work, self._completed, self._failed)

    def _queues(self) -> tuple[Queue, ...]:
        if not self._saw_request:
            return ()
        found = []
        for modality, waits in self._waits.items():
            ours = [p for p in self._pending.values() if p.modality == modality]
            waiting = [p.since_ns for p in ours if p.state == "queued"]
            found.append(
                Queue(modality, len(waiting),
                      len(ours) - len(waiting) if self._tells_admission else None,
                      min(waiting, default=None), tuple(waits))
            )  # fmt: skip
        return tuple(found)


def _read_again(record: Serving) -> Event:
    """What a page that has gone, or is back, says by its records alone, as a source's event."""
    gone = unread(record)
    return Event(
        ts_ns=record.ts_ns, node=record.node, what="source", state="down" if gone else "up",
        message=next(iter(record.absent.values())) if gone else None,
        evidence={"uri": record.instance},
    )  # fmt: skip


def _period(before: Record | None, record: Record) -> int:
    return max(0, record.ts_ns - before.ts_ns) if before is not None else 0


def _natural(item: tuple[tuple[str, ...], Any]) -> tuple[tuple[int | str, ...], ...]:
    """gpu2 before gpu10."""
    return tuple(natural(name) for name in item[0])


def _slope(trend: Trend) -> float | None:
    """Least-squares slope per second over the last ten values; absent with fewer than five."""
    points = [(i, value) for i, value in enumerate(trend[-10:]) if value is not None]
    if len(points) < 5:
        return None
    n = len(points)
    mean_x = sum(x for x, _ in points) / n
    mean_y = sum(y for _, y in points) / n
    spread = sum((x - mean_x) ** 2 for x, _ in points)
    return sum((x - mean_x) * (y - mean_y) for x, y in points) / spread
