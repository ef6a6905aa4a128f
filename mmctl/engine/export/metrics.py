"""The one table of metrics: record fields → OpenMetrics. The exporter, the dashboard, the alert
rules and the autoscaling manifest are all made from it.

A metric is ``mmctl_`` + record type + field, so it has the field's name and unit. A field that is
absent gives no sample: a gap in a graph, never a zero.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Literal, NamedTuple

from mmctl import __version__
from mmctl.engine.records import AnyRecord, Device, Event, Guard, Host, Pool, Serving


class Metric(NamedTuple):
    """One metric: the record's field it comes from, its kind, and what it says."""

    record: type
    field: str
    kind: Literal["gauge", "counter", "info"]
    help: str

    @property
    def name(self) -> str:
        """The metric's name in an exposition, with the ending that its kind asks for."""
        end = {"counter": "_total", "info": "_info"}.get(self.kind, "")
        word = "" if self.kind == "info" else f"_{self.field}"
        return f"mmctl_{self.record.__name__.lower()}{word}{end}"


LABELS: dict[type, tuple[str, ...]] = {
    Device: ("node", "device", "kind"),
    Host: ("node",),
    Serving: ("node", "engine", "instance"),
    Pool: ("node", "device", "pool"),
    Guard: ("node", "instance", "tenant"),
}
"""What tells the series of a record type apart."""

INFO: dict[type, tuple[str, ...]] = {
    Device: ("uuid", "pci", "model", "group", "parent", "torch_index"),
    Serving: ("model",),
}
"""What is said once of a subject, on its ``_info`` metric."""

_QUANTILES = tuple(
    (f"{signal}_{share}_s", f"{words}, {share}, over the last interval")
    for signal, words in (
        ("ttft", "Time to the first token"), ("itl", "Time between tokens"),
        ("e2e", "Time from arrival to the last token"),
    )
    for share in ("p50", "p95", "p99")
)  # fmt: skip

METRICS: tuple[Metric, ...] = (
    Metric(Device, "", "info", "A device: its UUID, bus, model, group and torch's ordinal"),
    Metric(Device, "sm_ratio", "gauge", "Share of time in which multiprocessors were busy"),
    Metric(Device, "bandwidth_ratio", "gauge", "Share of the memory bandwidth in use"),
    Metric(Device, "occupancy_ratio", "gauge", "Share of the possible warps that were resident"),
    Metric(Device, "total_bytes", "gauge", "Memory of the device"),
    Metric(Device, "used_bytes", "gauge", "Memory in use, without what the driver reserves"),
    Metric(Device, "reserved_bytes", "gauge", "Memory that the driver reserves"),
    Metric(Device, "free_bytes", "gauge", "Memory free for allocation"),
    Metric(Device, "temperature_c", "gauge", "Temperature of the chip"),
    Metric(Device, "memory_temperature_c", "gauge", "Temperature of the memory"),
    Metric(Device, "power_w", "gauge", "Power, averaged by the device"),
    Metric(Device, "power_instant_w", "gauge", "Power at this moment"),
    Metric(Device, "power_limit_w", "gauge", "Power limit in force"),
    Metric(Device, "energy_j", "counter", "Energy since the driver was loaded"),
    Metric(Device, "sm_clock_hz", "gauge", "Clock of the multiprocessors"),
    Metric(Device, "memory_clock_hz", "gauge", "Clock of the memory"),
    Metric(Device, "pcie_rx_bytes_per_s", "gauge", "Bytes per second received over PCIe"),
    Metric(Device, "pcie_tx_bytes_per_s", "gauge", "Bytes per second sent over PCIe"),
    Metric(Device, "nvlink_rx_bytes_per_s", "gauge", "Bytes per second received over NVLink"),
    Metric(Device, "nvlink_tx_bytes_per_s", "gauge", "Bytes per second sent over NVLink"),
    Metric(Device, "nvlink_errors", "counter", "NVLink errors since the driver was loaded"),
    Metric(Device, "ecc_corrected", "counter", "Corrected memory errors since then"),
    Metric(Device, "ecc_uncorrected", "counter", "Uncorrected memory errors since then"),
    Metric(Device, "remap_pending", "gauge", "1 when a row remap waits for a reset"),
    Metric(Device, "throttled", "gauge", "1 when clocks are held down for a reason label"),
    Metric(Host, "total_bytes", "gauge", "Memory of the host"),
    Metric(Host, "available_bytes", "gauge", "Memory of the host that can be had without swapping"),
    Metric(Host, "swap_used_bytes", "gauge", "Swap in use"),
    Metric(Host, "load_factor", "gauge", "Load average of a minute per processor"),
    Metric(Host, "cpu_pressure_ratio", "gauge", "Share of 10 s in which a task waited for a CPU"),
    Metric(Host, "memory_pressure_ratio", "gauge", "Share of 10 s in which a task waited for it"),
    Metric(Host, "memory_full_pressure_ratio", "gauge", "Share of 10 s in which all waited for it"),
    Metric(Host, "io_pressure_ratio", "gauge", "Share of 10 s in which a task waited for a disk"),
    Metric(Host, "tcp_retransmits_per_s", "gauge", "TCP segments sent again per second"),
    Metric(Host, "tcp_time_wait", "gauge", "Sockets in TIME_WAIT"),
    Metric(Serving, "", "info", "A serving engine and its model"),
    Metric(Serving, "running", "gauge", "Requests being worked on"),
    Metric(Serving, "waiting", "gauge", "Requests that wait"),
    Metric(Serving, "kv_ratio", "gauge", "Share of the KV cache in use"),
    Metric(Serving, "queue_wait_s", "gauge", "Mean wait of a request in the queue, last interval"),
    *(Metric(Serving, field, "gauge", text) for field, text in _QUANTILES),
    Metric(Serving, "generation_tokens_per_s", "gauge", "Tokens generated per second"),
    Metric(Serving, "prompt_tokens_per_s", "gauge", "Prompt tokens per second"),
    Metric(Serving, "preemptions", "counter", "Requests put back since the engine started"),
    Metric(Pool, "reserved_bytes", "gauge", "Memory that the allocator holds"),
    Metric(Pool, "allocated_bytes", "gauge", "Memory in live tensors"),
    Metric(Pool, "free_bytes", "gauge", "Memory the allocator holds and nobody uses"),
    Metric(Pool, "largest_free_bytes", "gauge", "Largest usable free block"),
    Metric(Pool, "releasable_bytes", "gauge", "Memory the allocator could give back"),
    Metric(Pool, "headroom_bytes", "gauge", "What the next batch would leave free"),
    Metric(Pool, "fragmentation_ratio", "gauge", "1 − largest usable free block / free bytes"),
    Metric(Pool, "conflict_ratio", "gauge", "How vision and text interleave with nothing free"),
    Metric(Pool, "vision_bytes", "gauge", "Live memory of vision tensors"),
    Metric(Pool, "text_bytes", "gauge", "Live memory of text tensors"),
    Metric(Pool, "vision_stranded_bytes", "gauge", "Free memory that vision blocks make unusable"),
    Metric(Pool, "text_stranded_bytes", "gauge", "Free memory that text blocks make unusable"),
    Metric(Pool, "fits", "gauge", "1 when a dry run of the next batch fits"),
    Metric(Pool, "heat_conflict_ratio", "gauge", "Conflict of one row of the address space"),
    Metric(Guard, "requests", "counter", "Requests that came to the guard"),
    Metric(Guard, "completed", "counter", "Requests with a whole answer from a backend"),
    Metric(Guard, "failed", "counter", "Requests whose backend failed them"),
    Metric(Guard, "refused", "counter", "Requests that the guard answered with an error"),
    Metric(Guard, "cancelled", "counter", "Requests whose client went away"),
    Metric(Guard, "shrunk", "counter", "Requests with images made smaller"),
    Metric(Guard, "capped", "counter", "Requests with a lower limit of output"),
    Metric(Guard, "deferred", "counter", "Requests that waited for room"),
    Metric(Guard, "images", "counter", "Images that came to the guard"),
    Metric(Guard, "vision_tokens", "counter", "Prompt tokens of images, predicted"),
    Metric(Guard, "text_tokens", "counter", "Prompt tokens of text, predicted"),
    Metric(Guard, "output_tokens", "counter", "Tokens of answers, as backends state them"),
    Metric(Guard, "running", "gauge", "Requests in work"),
    Metric(Guard, "share", "gauge", "Share of the traffic that a backend may have"),
    Metric(Guard, "headroom_tokens", "gauge", "Tokens that a backend has left, predicted"),
    Metric(Guard, "prompt_error", "gauge", "Relative error of predicted prompt tokens"),
)  # fmt: skip

SOURCE_UP = "mmctl_source_up"
SOURCE_AGE = "mmctl_source_age_s"
EVENTS = "mmctl_events_total"


class State:
    """The last reading of every subject, what happened, and how each source is."""

    def __init__(self) -> None:
        self.readings: dict[tuple[str, ...], AnyRecord] = {}
        self.events: dict[tuple[str, str, str], int] = {}

    def take(self, record: AnyRecord) -> None:
        """Remember a record; an event is counted, a source's own state is not an event."""
        if isinstance(record, Event):
            if record.what != "source":
                kind = (record.what, record.rule or "", record.mode or "")
                self.events[kind] = self.events.get(kind, 0) + 1
        elif type(record) in LABELS:
            key = (type(record).__name__, *_labels(record).values())
            self.readings[key] = record

    def fresh(self, now_ns: int, max_age_s: float) -> list[AnyRecord]:
        """The readings that are not too old to be shown as the present."""
        oldest = now_ns - int(max_age_s * 1e9)
        return [
            record for record in list(self.readings.values())
            if getattr(record, "ts_ns", 0) >= oldest
        ]  # fmt: skip


class SourceHealth(NamedTuple):
    """How a source is: when its last record came, and what is wrong with it."""

    uri: str
    up: bool
    age_s: float | None
    message: str | None


def _labels(record: AnyRecord) -> dict[str, str]:
    """What tells a record's series apart; empty where it is of no such thing."""
    values = ((name, getattr(record, name)) for name in LABELS[type(record)])
    return {name: "" if value is None else str(value) for name, value in values}


Samples = Iterator[tuple[dict[str, str], float]]


def samples_of(metric: Metric, records: Iterable[AnyRecord]) -> Samples:
    """Label values and value of every sample of a metric; an absent value gives none."""
    for record in records:
        if type(record) is not metric.record:
            continue
        labels = _labels(record)
        if metric.kind == "info":
            more = {name: getattr(record, name) for name in INFO[metric.record]}
            yield labels | {k: str(v) for k, v in more.items() if v is not None}, 1.0
        elif metric.field == "throttled":
            for reason in getattr(record, "throttle", None) or ():
                yield labels | {"reason": reason}, 1.0
        elif metric.field == "fits":
            fits = getattr(record, "fits", None)
            if fits is not None:
                yield labels, float(fits.fits)
        elif metric.field == "heat_conflict_ratio":
            heat = getattr(record, "heat", None)
            for row, cell in zip(heat.rows, heat.cells, strict=False) if heat else ():
                yield labels | {"row": f"{row:03}"}, float(cell[0])
        else:
            value: Any = getattr(record, metric.field)
            if value is not None:
                yield labels, float(value)


def exposition(
    state: State, sources: Iterable[SourceHealth], now_ns: int, max_age_s: float
) -> bytes:
    """The OpenMetrics page of the state: what is stale is left out, and its source is down."""
    from prometheus_client import CollectorRegistry
    from prometheus_client.openmetrics.exposition import generate_latest

    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Page(state, list(sources), now_ns, max_age_s))
    page: bytes = generate_latest(registry)  # type: ignore[no-untyped-call]
    return page


class _Page:
    """A collector of prometheus_client over one moment of the state."""

    def __init__(
        self, state: State, sources: list[SourceHealth], now_ns: int, max_age_s: float
    ) -> None:
        self.state, self.sources = state, sources
        self.records = state.fresh(now_ns, max_age_s)

    def collect(self) -> Iterator[Any]:
        from prometheus_client.core import Metric as Family

        build = Family("mmctl_build", "The version of mmctl that gives this page", "info")
        build.add_sample("mmctl_build_info", {"version": __version__}, 1.0)
        yield build
        up = Family(SOURCE_UP, "1 when a source gave a record lately", "gauge")
        age = Family(SOURCE_AGE, "Seconds since a source gave its last record", "gauge")
        for source in self.sources:
            up.add_sample(SOURCE_UP, {"source": source.uri}, float(source.up))
            if source.age_s is not None:
                age.add_sample(SOURCE_AGE, {"source": source.uri}, source.age_s)
        yield up
        yield age
        events = Family(
            EVENTS.removesuffix("_total"), "Events since this exporter began", "counter"
        )
        for (what, rule, mode), count in sorted(self.state.events.items()):
            events.add_sample(EVENTS, {"what": what, "rule": rule, "mode": mode}, float(count))
        yield events
        for metric in METRICS:
            base = metric.name.removesuffix("_total").removesuffix("_info")
            family = Family(base, metric.help, metric.kind)
            for labels, value in samples_of(metric, self.records):
                family.add_sample(metric.name, labels, value)
            if family.samples:
                yield family
