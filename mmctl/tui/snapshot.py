"""The frozen picture: everything the screens show, as it was when the last record had come in."""

from __future__ import annotations

import msgspec

from mmctl.engine.records import Device, Event, Link, Pool, Serving, Span
from mmctl.tui.heat import Columns

# Worst first: the node's state is that of its worst device.
STATES = ("isolated", "open", "verifying", "half_open", "unknown", "closed")
READINGS = frozenset({"entropy"})  # measurements that come as events, every few seconds
Trend = tuple[float | None, ...]  # one value a second, oldest first; a gap is None


class DeviceView(msgspec.Struct, frozen=True):
    """The newest reading of a device and the trend behind it, one value a second."""

    record: Device
    sm_ratio: Trend
    bandwidth_ratio: Trend
    period_ns: int = 0  # between the last two readings


class ServingView(msgspec.Struct, frozen=True):
    """The newest reading of an engine and the trend behind it, one value a second."""

    record: Serving
    kv_ratio: Trend
    waiting: Trend
    period_ns: int = 0


class PoolView(msgspec.Struct, frozen=True):
    """The newest state of a pool, its heat over time, and how fast it fills.

    ``tried`` is the newest record with a dry run: one comes a step, in few of the records.
    """

    record: Pool
    heat: tuple[Columns, ...]
    allocated_bytes_per_s: float | None
    period_ns: int = 0
    tried: Pool | None = None


class StateSpan(msgspec.Struct, frozen=True):
    """From ``start_ns`` on, a device's breaker is in ``state``."""

    start_ns: int
    node: str
    device: str
    state: str


class Recovery(msgspec.Struct, frozen=True):
    """One recovery of a device: its events from the trip on, oldest first."""

    node: str
    device: str
    events: tuple[Event, ...]


class Requests(msgspec.Struct, frozen=True):
    """Requests by state, and how many have come through in all.

    ``admitted`` is absent where a source tells only of a request's begin and end: ``queued``
    then counts all between.
    """

    queued: int
    admitted: int | None
    completed: int
    failed: int


class Queue(msgspec.Struct, frozen=True):
    """Requests of one modality that wait, and how long the latest ones have waited.

    A request with images waits for vision, any other for text. ``in_work`` is absent as in
    ``Requests``, and ``depth`` then counts those in work, too.
    """

    modality: str
    depth: int
    in_work: int | None
    oldest_ns: int | None
    waits_s: tuple[float, ...]


class Region(msgspec.Struct, frozen=True):
    """Addresses of a device's pool, ``end`` excluded."""

    node: str
    device: str
    start: int
    end: int


class Holder(msgspec.Struct, frozen=True):
    """Live blocks of one modality that reach into a region."""

    modality: str
    blocks: int
    bytes: int
    oldest_ns: int


class Snapshot(msgspec.Struct, frozen=True):
    """Everything the screen shows, as it was when the last record had come in."""

    records: int = 0
    newest_ns: int | None = None
    oldest_ns: int | None = None
    nodes: tuple[str, ...] = ()
    mode: str | None = None
    profile: str | None = None  # the breaker's, once it was changed while it ran
    states: tuple[StateSpan, ...] = ()  # one per device: the state it is in
    bands: tuple[StateSpan, ...] = ()  # every change of state, oldest first
    devices: tuple[DeviceView, ...] = ()
    serving: tuple[ServingView, ...] = ()
    pools: tuple[PoolView, ...] = ()
    requests: Requests | None = None
    queues: tuple[Queue, ...] = ()
    stages: tuple[tuple[str, tuple[float, ...]], ...] = ()  # seconds of the latest requests
    region: Region | None = None  # what was asked for
    holders: tuple[Holder, ...] | None = None  # who holds it now; absent without memory records
    notice: str | None = None  # what a source says of itself: that it plays a recording
    down: tuple[tuple[str, str, int], ...] = ()  # sources that are lost: URI, reason, since
    events: tuple[Event, ...] = ()  # oldest first
    placements: tuple[Event, ...] = ()  # oldest first
    recoveries: tuple[Recovery, ...] = ()
    links: tuple[Link, ...] = ()
    spans: tuple[Span, ...] = ()

    @property
    def state(self) -> str | None:
        """The worst state of any device, absent where no breaker has spoken."""
        known = {span.state for span in self.states}
        return next((state for state in STATES if state in known), None)


STALE_NS = 5_000_000_000


def unread(record: Serving) -> bool:
    """Whether nothing at all could be read of an engine."""
    readings = (record.running, record.waiting, record.kv_ratio, record.generation_tokens_per_s)
    return bool(record.absent) and all(reading is None for reading in readings)


def silent_ns(view: DeviceView | ServingView | PoolView, newest_ns: int | None) -> int | None:
    """How long a source has said nothing of this, once that is longer than it should be.

    Readings may be as far apart as they are: three of their periods, five seconds at least.
    """
    age = (newest_ns or 0) - view.record.ts_ns
    return age if age > max(STALE_NS, 3 * view.period_ns) else None


def full_in_s(pool: PoolView) -> float | None:
    """Seconds until the pool's capacity is allocated at the rate of the last ten seconds.

    Absent where the capacity is unknown or the pool does not fill.
    """
    record, rate = pool.record, pool.allocated_bytes_per_s
    if record.capacity_bytes is None or rate is None or rate < 1:
        return None
    return max(0.0, (record.capacity_bytes - record.allocated_bytes) / rate)
