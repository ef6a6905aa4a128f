"""The nouns that flow between sources, analysis, decision and screen.

One JSON object per line, tagged by ``type``. ``ts_ns`` is nanoseconds since the epoch.
``None`` means absent, never zero; ``absent`` maps a field's name to the reason.
"""

from collections.abc import Iterable
from typing import Any, Literal, TypeAlias, get_args

import msgspec

from mmctl.engine.errors import MmctlError

SCHEMA = 1

Modality: TypeAlias = Literal["vision", "text", "other"]
Basis: TypeAlias = Literal["measured", "modelled", "published"]
DeviceKind: TypeAlias = Literal["gpu", "npu", "cpu"]
MemoryAction: TypeAlias = Literal[
    "alloc", "free", "segment_alloc", "segment_free", "map", "unmap", "oom"
]


DEVICE_KINDS: tuple[DeviceKind, ...] = get_args(DeviceKind)
"""Kinds of devices in the order they are shown in."""


class Record(msgspec.Struct, frozen=True, kw_only=True, tag_field="type"):
    """What every record has: when, and on which node."""

    ts_ns: int
    node: str = ""


class Recording(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="recording"):
    """The first line of every recording."""

    schema: int = SCHEMA
    node: str
    started_ns: int
    profile: str
    mmctl: str


class Process(msgspec.Struct, frozen=True, kw_only=True):
    """A process that holds memory of a device.

    ``non_torch_bytes`` is what it holds beside the pool of its allocator: context, NCCL, graphs.
    """

    pid: int
    name: str | None = None
    used_bytes: int | None = None
    non_torch_bytes: int | None = None
    container: str | None = None


THROTTLE: dict[int, str] = {
    0x2: "applications_clocks_setting", 0x4: "sw_power_cap", 0x8: "hw_slowdown",
    0x10: "sync_boost", 0x20: "sw_thermal_slowdown", 0x40: "hw_thermal_slowdown",
    0x80: "hw_power_brake", 0x100: "display_clock_setting", 0x200: "board_limit",
    0x400: "reliability",
}  # fmt: skip
"""Words of ``Device.throttle`` by their bits of nvmlClocksEventReasons; bit 0, idle, is none."""


class Device(Record, frozen=True, kw_only=True, tag="device"):
    """One reading of one device.

    ``used_bytes`` leaves out what the driver keeps for itself, ``reserved_bytes``. The ratios
    come from hardware ``counters`` where the device has them, else from utilisation windows;
    ``repeated`` says that those windows are longer than the interval and had not moved on.
    A MIG device names its ``parent``. Error counts run since the driver was loaded.
    ``value`` is a reading that has no field of its own.
    """

    device: str
    uuid: str | None = None
    pci: str | None = None
    nvml_index: int | None = None
    torch_index: int | None = None
    kind: DeviceKind
    model: str | None = None
    group: str | None = None
    parent: str | None = None
    sm_ratio: float | None = None
    bandwidth_ratio: float | None = None
    occupancy_ratio: float | None = None
    counters: Literal["gpm", "dcgm", "utilization"] | None = None
    total_bytes: int | None = None
    used_bytes: int | None = None
    reserved_bytes: int | None = None
    free_bytes: int | None = None
    unified: bool | None = None
    temperature_c: float | None = None
    memory_temperature_c: float | None = None
    power_w: float | None = None
    power_instant_w: float | None = None
    power_limit_w: float | None = None
    energy_j: float | None = None
    sm_clock_hz: float | None = None
    memory_clock_hz: float | None = None
    throttle: tuple[str, ...] | None = None
    pcie_rx_bytes_per_s: float | None = None
    pcie_tx_bytes_per_s: float | None = None
    nvlink_rx_bytes_per_s: float | None = None
    nvlink_tx_bytes_per_s: float | None = None
    nvlink_errors: int | None = None
    fabric: str | None = None
    ecc_corrected: int | None = None
    ecc_uncorrected: int | None = None
    remap_pending: bool | None = None
    xid: int | None = None
    recovery_action: str | None = None
    health: str | None = None
    repeated: bool | None = None
    value: float | None = None
    processes: tuple[Process, ...] | None = None
    absent: dict[str, str] = {}


class Host(Record, frozen=True, kw_only=True, tag="host"):
    """One reading of a node's own kernel: pressure, memory of the host, network.

    A pressure is the share of the last 10 s in which some (or all: ``full``) tasks waited;
    ``load_factor`` is the load average of a minute per processor.
    """

    total_bytes: int | None = None
    available_bytes: int | None = None
    swap_used_bytes: int | None = None
    load_factor: float | None = None
    cpu_pressure_ratio: float | None = None
    memory_pressure_ratio: float | None = None
    memory_full_pressure_ratio: float | None = None
    io_pressure_ratio: float | None = None
    numa_free_bytes: tuple[int, ...] | None = None
    tcp_retransmits_per_s: float | None = None
    tcp_time_wait: int | None = None
    absent: dict[str, str] = {}


class Latencies(msgspec.Struct, frozen=True, kw_only=True):
    """Latency quantiles of one modality, in seconds."""

    ttft_p50_s: float | None = None
    ttft_p95_s: float | None = None
    ttft_p99_s: float | None = None
    itl_p50_s: float | None = None
    itl_p95_s: float | None = None
    itl_p99_s: float | None = None
    e2e_p50_s: float | None = None
    e2e_p95_s: float | None = None
    e2e_p99_s: float | None = None
    queue_wait_s: float | None = None


def latency_quantiles(requests: Iterable[Any]) -> dict[str, Any]:
    """``ttft_p50_s`` … ``e2e_p99_s`` over the ``ttft_s``, ``itl_s`` and ``e2e_s`` of requests;
    None where none of them has one."""
    requests = list(requests)
    found: dict[str, float | None] = {}
    for name in ("ttft", "itl", "e2e"):
        values = sorted(v for one in requests if (v := getattr(one, f"{name}_s")) is not None)
        for percent in (50, 95, 99):
            at = min(len(values) - 1, len(values) * percent // 100)
            found[f"{name}_p{percent}_s"] = values[at] if values else None
    return found


class Serving(Record, frozen=True, kw_only=True, tag="serving"):
    """One reading of a serving engine."""

    engine: str
    instance: str
    model: str | None = None
    running: int | None = None
    waiting: int | None = None
    kv_ratio: float | None = None
    queue_wait_s: float | None = None
    ttft_p50_s: float | None = None
    ttft_p95_s: float | None = None
    ttft_p99_s: float | None = None
    itl_p50_s: float | None = None
    itl_p95_s: float | None = None
    itl_p99_s: float | None = None
    e2e_p50_s: float | None = None
    e2e_p95_s: float | None = None
    e2e_p99_s: float | None = None
    modalities: dict[str, Latencies] = {}
    generation_tokens_per_s: float | None = None
    prompt_tokens_per_s: float | None = None
    preemptions: int | None = None
    vision_tokens: int | None = None
    text_tokens: int | None = None
    absent: dict[str, str] = {}


class Memory(Record, frozen=True, kw_only=True, tag="memory"):
    """One event of an allocator; ``stream`` and ``references`` where they are known."""

    device: str
    action: MemoryAction
    address: int
    size_bytes: int
    stream: int | None = None
    modality: Modality = "other"
    references: int | None = None


class Fits(msgspec.Struct, frozen=True, kw_only=True):
    """Dry run of the next batch on a copy of the pool.

    ``need_bytes`` is the first allocation that failed, ``cause`` one of the causes of an
    out-of-memory error; both are absent where the batch fits.
    """

    fits: bool
    allocations: int
    peak_bytes: int
    need_bytes: int | None = None
    cause: str | None = None
    batch: str | None = None


class Heat(msgspec.Struct, frozen=True, kw_only=True):
    """A sparse column of the heatmap: one moment, rows by address.

    ``cells[i]`` belongs to row ``rows[i]``; a row spans ``row_bytes`` from ``base_address``.
    A cell is ``(conflict_ratio, vision_bytes, text_bytes, other_bytes, free_bytes,
    usable_free_bytes)``. Where they are known, ``age_s[i]`` is the mean age of the bytes held
    there, absent where none are, and ``pages[i]`` its 4 KiB pages: ``(used, partial, free)``.
    """

    base_address: int
    row_bytes: int
    row_count: int
    rows: tuple[int, ...]
    cells: tuple[tuple[float, int, int, int, int, int], ...]
    age_s: tuple[float | None, ...] | None = None
    pages: tuple[tuple[int, int, int], ...] | None = None


class Pool(Record, frozen=True, kw_only=True, tag="pool"):
    """State of a device's memory pool."""

    device: str
    pool: str = "default"
    reserved_bytes: int
    allocated_bytes: int
    free_bytes: int
    largest_free_bytes: int
    releasable_bytes: int
    capacity_bytes: int | None = None
    device_free_bytes: int | None = None
    fragmentation_ratio: float
    vision_bytes: int = 0
    text_bytes: int = 0
    other_bytes: int = 0
    vision_stranded_bytes: int | None = None
    text_stranded_bytes: int | None = None
    conflict_ratio: float | None = None
    fits: Fits | None = None
    headroom_bytes: int | None = None
    vision_tokens: int | None = None
    text_tokens: int | None = None
    heat: Heat | None = None
    basis: Basis = "measured"


class Request(Record, frozen=True, kw_only=True, tag="request"):
    """A unit of work; stage timings in seconds, keyed by stage; ``queue_wait_s`` before the first.

    ``instance`` serves it and ``tenant`` has sent it, where a gateway knows them; ``peak_bytes``
    is what it may come to take of the device, modelled from the model's configuration. Older
    recordings carry the wait among ``stages``.
    """

    id: str
    images: int = 0
    vision_tokens: int = 0
    text_tokens: int = 0
    output_tokens: int = 0
    arrival_s: float | None = None
    state: str | None = None
    queue_wait_s: float | None = None
    instance: str | None = None
    tenant: str | None = None
    peak_bytes: int | None = None
    stages: dict[str, float] = {}


class Guard(Record, frozen=True, kw_only=True, tag="guard"):
    """What a gateway has done by now for one backend (``instance``) or one ``tenant``.

    Counts run since it began: ``refused`` got an error of the gateway's own, ``failed`` none
    that was whole from a backend. Tokens are predicted for prompts and stated by backends for
    outputs. ``prompt_error`` is the mean relative error of the latest predictions against
    ``usage``, of the modality where it is greatest.
    """

    instance: str | None = None
    tenant: str | None = None
    requests: int = 0
    completed: int = 0
    failed: int = 0
    refused: int = 0
    cancelled: int = 0
    shrunk: int = 0
    capped: int = 0
    deferred: int = 0
    images: int = 0
    vision_tokens: int = 0
    text_tokens: int = 0
    output_tokens: int = 0
    running: int | None = None
    share: float | None = None
    headroom_tokens: int | None = None
    prompt_error: float | None = None
    absent: dict[str, str] = {}


class Span(Record, frozen=True, kw_only=True, tag="span"):
    """Work on a timeline; ``ts_ns`` is its start.

    A ``batch`` is a micro-batch of one ``stage`` on a device (``stream`` is the stage too): it is
    in flight for ``duration_ns``, with so many ``requests``, ``images`` or ``tokens``.
    """

    device: str
    stream: str
    name: str
    kind: Literal["kernel", "copy", "collective", "npu_op", "scheduling", "host", "batch"]
    duration_ns: int
    modality: Modality | None = None
    stage: str | None = None
    requests: int | None = None
    images: int | None = None
    tokens: int | None = None
    op_id: int | None = None
    pid: int | None = None
    sched_delay_ns: int | None = None


class Access(Record, frozen=True, kw_only=True, tag="access"):
    """One memory access of a kernel."""

    token_id: int | None = None
    pc: int | None = None
    address: int
    size_bytes: int
    kind: Literal["load", "store"]
    stream: str | None = None
    head: int | None = None
    layer: int | None = None


class Link(Record, frozen=True, kw_only=True, tag="link"):
    """How two devices are joined.

    ``used_bytes_per_s`` is what went from ``a`` to ``b`` since the reading before: a route in use.
    """

    a: str
    b: str
    link_class: str = msgspec.field(name="class")
    hops: int | None = None
    crosses_numa: bool | None = None
    latency_us: float | None = None
    bandwidth_bytes_per_s: float | None = None
    used_bytes_per_s: float | None = None
    basis: Basis = "measured"
    absent: dict[str, str] = {}


class Event(Record, frozen=True, kw_only=True, tag="event"):
    """Something happened: a trip, a response, a verdict, a fault.

    ``evidence`` holds what caused it: each input with its value, threshold, age and basis.
    """

    what: str
    device: str | None = None
    rule: str | None = None
    mode: Literal["off", "observe", "enforce"] | None = None
    state: str | None = None
    message: str | None = None
    evidence: dict[str, Any] = {}
    took_ns: int | None = None


AnyRecord: TypeAlias = (
    Recording
    | Device
    | Host
    | Serving
    | Memory
    | Pool
    | Request
    | Guard
    | Span
    | Access
    | Link
    | Event
)

_encoder = msgspec.json.Encoder()
_decoder: msgspec.json.Decoder[AnyRecord] = msgspec.json.Decoder(AnyRecord)


def encode(record: AnyRecord) -> bytes:
    """One JSON object in one line, without the line's end."""
    return _encoder.encode(record)


def decode(line: bytes | str) -> AnyRecord:
    """The record in one line; unknown fields are ignored.

    Raises MmctlError for a line that is no record.
    """
    try:
        return _decoder.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise MmctlError(f"not a record: {error}") from None
