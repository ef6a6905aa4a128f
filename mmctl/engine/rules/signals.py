"""What a rule may name: every signal, the record it comes from, and whose it is.

A signal is a field of a record under its own name (``temperature_c``), qualified where two
records share a field (``device.free_bytes``, ``pool.free_bytes``), of the node's host
(``host.used_bytes``) or of one modality (``vision.ttft_p99_s``). A few are derived here, each
with its definition.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from operator import attrgetter
from typing import Any, Literal, NamedTuple, TypeAlias

import msgspec

from mmctl.engine import records

Value: TypeAlias = float | str | bool | tuple[str, ...] | None
Holds: TypeAlias = Literal["number", "text", "texts", "truth"]
Scope: TypeAlias = Literal["device", "instance", "node"]


class Signal(NamedTuple):
    """A named input of rules: ``kind`` is the series of records it is read from, ``holds`` what
    its values are."""

    name: str
    kind: str
    about: str
    holds: Holds

    @property
    def scope(self) -> Scope:
        """Whose it is: a device's, a serving instance's or the node's."""
        return KINDS[self.kind].scope


class Kind(NamedTuple):
    """A series of records of one subject.

    ``local`` series need an agent, a hook or a snapshot; the others live on a driver library
    and a metrics page alone.
    """

    record: type
    scope: Scope
    local: bool
    about: str


KINDS: dict[str, Kind] = {
    "pool": Kind(records.Pool, "device", True, "the device's memory pool"),
    "device": Kind(records.Device, "device", False, "the device itself"),
    "memory": Kind(records.Memory, "device", True, "an event of the device's allocator"),
    "serving": Kind(records.Serving, "instance", False, "the serving engine's metrics page"),
    "vision": Kind(records.Serving, "instance", False, "the metrics page, image requests"),
    "text": Kind(records.Serving, "instance", False, "the metrics page, text requests"),
    "host": Kind(records.Host, "node", False, "the node's memory, pressure and load"),
    "cpu": Kind(records.Device, "node", False, "the node's processors as one device"),
    "request": Kind(records.Request, "node", False, "a request that completed"),
    "event": Kind(records.Event, "device", False, "an event of the node or device"),
}

_SKIPPED = {"ts_ns", "node", "absent", "processes", "heat", "evidence", "modalities", "stages"}
_SEVERITIES = ("failure", "warning", "step")
_ENDED = (None, "completed")


def _request_latency(record: records.Request) -> float | None:
    """Seconds from arrival to the end: the timing ``e2e_s``, else wait and stages together."""
    if record.state not in _ENDED or not record.stages:
        return None
    whole = record.stages.get("e2e_s")
    if whole is None:
        return (record.queue_wait_s or 0.0) + sum(record.stages.values())
    return whole


def _wait(record: records.Request) -> float | None:
    """Seconds in the queue; older recordings carry them among the stages."""
    wait_s = record.queue_wait_s
    return record.stages.get("queue_wait_s") if wait_s is None else wait_s


def _of_modality(images: bool) -> Callable[[records.Request], float | None]:
    def latency(record: records.Request) -> float | None:
        return _request_latency(record) if (record.images > 0) == images else None

    return latency


def _taken(record: records.Memory) -> float | None:
    return record.size_bytes if record.action in ("alloc", "segment_alloc", "map") else None


def _given_back(record: records.Memory) -> float | None:
    return record.size_bytes if record.action in ("segment_free", "unmap") else None


def _evidence(key: str, *whats: str) -> Callable[[records.Event], Value]:
    def value(record: records.Event) -> Value:
        found = record.evidence.get(key) if record.what in whats else None
        return found if isinstance(found, (int, float, str)) else None

    return value


_DERIVED: dict[str, tuple[str, str, Callable[[Any], Value]]] = {
    # name: (kind, definition, value)
    "size_bytes": ("memory", "bytes of an allocation", _taken),
    "released_bytes": ("memory", "bytes given back to the device (segment_free, unmap)",
                       _given_back),
    "fits": ("pool", "whether the dry run of the next batch fits",
             lambda r: None if r.fits is None else r.fits.fits),
    "need_bytes": ("pool", "the first allocation of the dry run that failed",
                   lambda r: None if r.fits is None else r.fits.need_bytes),
    "fits_cause": ("pool", "why the next batch does not fit",
                   lambda r: None if r.fits is None else r.fits.cause),
    "request_latency_s": ("request", "seconds from arrival to completion", _request_latency),
    "vision.request_latency_s": ("request", "the same, requests with images", _of_modality(True)),
    "text.request_latency_s": ("request", "the same, requests without images",
                               _of_modality(False)),
    "request_wait_s": ("request", "seconds in the queue",
                       lambda r: _wait(r) if r.state in _ENDED else None),
    "collective_wait_s": ("event", "longest wait in a collective (event 'imbalance')",
                          _evidence("wait_s", "imbalance")),
    "reclaim_ratio": ("event", "share recovered by a reclaim pass (event 'reclaim')",
                      _evidence("recovered_ratio", "reclaim")),
    "attention_entropy": ("event", "mean attention entropy in nats (event 'entropy')",
                          _evidence("entropy_nats", "entropy")),
    "attention_entropy_ratio": ("event", "the same over log length (event 'entropy')",
                                _evidence("entropy_ratio", "entropy")),
    "attention_entropy_std": ("event", "its deviation over heads (event 'entropy')",
                              _evidence("entropy_std", "entropy")),
    "fault": ("event", "class of what a log says (xid79, link_down …)",
              lambda r: r.what if r.state in _SEVERITIES else None),
    "fault_severity": ("event", "its severity: failure, warning or step",
                       lambda r: r.state if r.state in _SEVERITIES else None),
    "value": ("device", "the only series of a CSV mapped with 'column=value'",
              lambda r: getattr(r, "value", None)),
}  # fmt: skip

# Where several records have a field, the plain name means the first of these.
_ORDER = ("pool", "device", "memory", "serving", "request", "event")


# Of those derived here, the ones that are no numbers.
_DERIVED_HOLDS: dict[str, Holds] = {
    "fits": "truth", "fits_cause": "text", "fault": "text", "fault_severity": "text",
}  # fmt: skip


def _holds(annotation: Any) -> Holds:
    """What a field of a record holds, by its annotation."""
    text = str(annotation)
    if "tuple[str" in text:
        return "texts"
    if "bool" in text:
        return "truth"
    return "text" if "str" in text or "Literal" in text else "number"


def _scalar(annotation: Any) -> bool:
    text = str(annotation)
    return "Fits" not in text and "Heat" not in text and "dict" not in text


def _build() -> tuple[dict[str, Signal], dict[Signal, Callable[[Any], Value]]]:
    found: dict[str, Signal] = {}
    getters: dict[Signal, Callable[[Any], Value]] = {}

    def add(name: str, kind: str, about: str, getter: Callable[[Any], Value], holds: Holds) -> None:
        if name not in found:
            found[name] = signal = Signal(name, kind, about, holds)
            getters[signal] = getter

    for name, (kind, about, getter) in _DERIVED.items():
        add(name, kind, about, getter, _DERIVED_HOLDS.get(name, "number"))
    for kind in (*_ORDER, "host", "cpu"):
        about = KINDS[kind].about
        for field in msgspec.structs.fields(KINDS[kind].record):
            if field.name in _SKIPPED or not _scalar(field.type):
                continue
            getter, holds = attrgetter(field.name), _holds(field.type)
            if kind not in ("host", "cpu"):
                add(field.name, kind, about, getter, holds)
            add(f"{kind}.{field.name}", kind, about, getter, holds)
    for modality in ("vision", "text"):
        for field in msgspec.structs.fields(records.Latencies):
            name, about = f"{modality}.{field.name}", KINDS[modality].about
            add(name, modality, about, attrgetter(field.name), "number")
    return found, getters


SIGNALS, _GETTERS = _build()


def getter(signal: Signal) -> Callable[[Any], Value]:
    """How to read ``signal`` from a record of its kind; None is absent."""
    return _GETTERS[signal]


def scope_of(used: Iterable[Signal]) -> Scope:
    """Whose a rule over ``used`` is: of a device, of a serving instance, or of the node."""
    scopes = {signal.scope for signal in used}
    finest: tuple[Scope, ...] = ("device", "instance")
    return next((scope for scope in finest if scope in scopes), "node")
