"""Columns of other people's tables as records, so that the breaker can be tried on them.

A CSV (or any table with a header line), by ``--map 'column=field,…'``: ``ts=column`` names the
time, ``temp=temperature_c`` a signal, ``free_mb=free_bytes*1MiB`` one with a unit. Columns that
already bear a signal's name need no map.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from datetime import datetime, timezone
from itertools import chain, islice
from typing import Any, NamedTuple

import msgspec

from mmctl.engine import records, units
from mmctl.engine.errors import MmctlError, UsageError, suggestion
from mmctl.engine.records import AnyRecord, Device, Event, Pool, Request, Serving
from mmctl.engine.rules.signals import SIGNALS

# Columns of ``nvidia-smi --query-gpu=… --format=csv`` without their units, and what one unit of a
# bare number is worth.
QUERY_GPU: dict[str, tuple[str, float]] = {
    "utilization.gpu": ("sm_ratio", 0.01), "utilization.memory": ("bandwidth_ratio", 0.01),
    "memory.total": ("device.total_bytes", 2**20), "memory.used": ("device.used_bytes", 2**20),
    "temperature.gpu": ("temperature_c", 1.0), "power.draw": ("power_w", 1.0),
    "clocks_event_reasons.active": ("throttle", 1.0),
    "clocks_throttle_reasons.active": ("throttle", 1.0),
}  # fmt: skip
TIMES = ("ts", "ts_ns", "timestamp", "time", "datetime", "date")
LABELS = ("device", "node", "instance", "kind")
MAX_LINE = 1 << 20


class Column(NamedTuple):
    """A column, the signal that it gives, and what one unit of it is worth."""

    name: str
    signal: str
    scale: float = 1.0


class Map(msgspec.Struct, frozen=True):
    """How a table becomes records; ``labels`` are columns that name a device, node, …"""

    ts: str | None = None
    ts_scale: float | None = None
    columns: tuple[Column, ...] = ()
    labels: dict[str, str] = {}


def parse_map(text: str) -> Map:
    """``--map`` as typed; UsageError with a suggestion for what is no signal."""
    ts, ts_scale = None, None
    columns: list[Column] = []
    labels: dict[str, str] = {}
    for item in filter(None, (part.strip() for part in text.split(","))):
        left, equals, right = (word.strip() for word in item.partition("="))
        if not equals or not left or not right:
            raise UsageError(f"--map: '{item}' is not of the form column=field")
        field, _, unit = (word.strip() for word in right.partition("*"))
        if left == "ts":
            ts, ts_scale = field, _scale(unit) if unit else None
        elif field in ("ts", "ts_ns"):
            ts, ts_scale = left, 1e-9 if field == "ts_ns" else _scale(unit) if unit else None
        elif field in LABELS:
            labels[field] = left
        elif field in SIGNALS:
            columns.append(Column(left, field, _scale(unit) if unit else 1.0))
        else:
            hint = suggestion(field, SIGNALS) or "; mmctl breaker rules --signals lists all"
            raise UsageError(f"--map: no signal '{field}'{hint}")
    return Map(ts, ts_scale, tuple(columns), labels)


def _scale(text: str) -> float:
    for kind in ("bytes", "seconds", "ratio"):
        try:
            return units.parse(text, kind)
        except ValueError:
            continue
    raise UsageError(f"--map: '{text}' is no number or unit such as 1MiB, 1ms or 1%")


def is_csv(text: str) -> bool:
    """Whether a file that begins with ``text`` is a table with a column of times."""
    head = text.splitlines()[0] if text.strip() else ""
    names = [name.strip().strip('"') for name in re.split(r"[,;\t]", head)]
    lowered = [name.lower() for name in names]
    return len(names) > 1 and any(name in TIMES for name in lowered)


def lines_of(path: str) -> Iterator[str]:
    """The lines of a text; MmctlError for one that is too long to be one."""
    with open(path, encoding="utf-8-sig", errors="replace", newline="") as file:
        for number, line in enumerate(file, 1):
            if len(line) > MAX_LINE:
                raise MmctlError(f"{path}, line {number}: longer than {MAX_LINE} characters")
            yield line


def read_table(path: str, mapping: Map) -> Iterator[AnyRecord]:
    """The records of a table's rows; MmctlError names the line that cannot be read."""
    lines = lines_of(path)
    early = list(islice(lines, 1))
    if not early:
        raise MmctlError(f"{path} is empty")
    delimiter = max(",;\t", key=early[0].count)
    rows = csv.reader(chain(early, lines), delimiter=delimiter)
    names = [name.strip() for name in next(rows)]
    mapping = _complete(mapping, names, path)
    make = _maker(mapping, names)
    ts_place = names.index(mapping.ts or "")
    moment = clock(mapping.ts_scale)
    for number, row in enumerate(rows, 2):
        if not row or all(not cell.strip() for cell in row):
            continue
        if len(row) < len(names):
            raise MmctlError(f"{path}, line {number}: {len(row)} of {len(names)} columns")
        try:
            ts_ns = moment(row[ts_place])
        except ValueError:
            raise MmctlError(f"{path}, line {number}: no time: '{row[ts_place][:40]}'") from None
        yield from make(ts_ns, row)


def _complete(mapping: Map, names: list[str], path: str) -> Map:
    """Check the map against the header; columns that bear a signal's name map themselves."""
    ts = mapping.ts or next((name for name in names if name.lower() in TIMES), None)
    wanted = [*(column.name for column in mapping.columns), *mapping.labels.values()]
    for name in [*wanted, *([ts] if ts else [])]:
        if name not in names:
            raise UsageError(f"{path} has no column '{name}'{suggestion(name, names)}")
    if ts is None:
        raise UsageError(f"{path}: which column is the time? --map 'ts=COLUMN,…'")
    columns = mapping.columns
    if not columns:
        columns = tuple(Column(name, name) for name in names if name in SIGNALS and name != ts)
    queried = {name: name.partition(" [")[0].lower() for name in names}
    if not columns and (known := {k: q for k, q in queried.items() if q in QUERY_GPU}):
        columns = tuple(Column(name, *QUERY_GPU[query]) for name, query in known.items())
        if "index" in names and not mapping.labels:
            mapping = Map(labels={"device": "index"})
    if not columns:
        raise UsageError(
            f"{path}: no column bears a signal's name; --map 'COLUMN=field,…' says what is what "
            "(mmctl breaker rules --signals)"
        )
    labels = {name: name for name in LABELS if name in names} | mapping.labels
    return Map(ts, mapping.ts_scale, columns, labels)


def clock(scale: float | None) -> Callable[[str], int]:
    """Text of a time → nanoseconds. Without a unit a number is read by its size."""

    def moment(text: str) -> int:
        text = text.strip()
        try:
            number = float(text)
        except ValueError:
            return _date(text)
        if number != number or abs(number) == float("inf"):
            raise ValueError(text)
        if scale is not None:
            return round(number * scale * 1e9)
        for least, factor in ((1e17, 1), (1e14, 10**3), (1e11, 10**6)):
            if number >= least:
                return round(number) * factor if factor == 1 else round(number * factor)
        return round(number * 1e9)

    return moment


def _date(text: str) -> int:
    text = text.replace("/", "-").removesuffix("Z")
    found = datetime.fromisoformat(re.sub(r"(\.\d{6})\d+", r"\1", text))
    if found.tzinfo is None:
        found = found.replace(tzinfo=timezone.utc)
    return round(found.timestamp() * 1e9)


Maker = Callable[[int, list[str]], Iterable[AnyRecord]]
_ABSENT = {"", "na", "n/a", "nan", "null", "none", "-", "[n/a]", "[not supported]"}


def _maker(mapping: Map, names: list[str]) -> Maker:
    """Cells of a row → one record per kind of record that the map names."""
    groups: dict[str, list[tuple[int, Column, str]]] = {}
    for column in mapping.columns:
        kind = SIGNALS[column.signal].kind
        field = column.signal.rpartition(".")[2]
        groups.setdefault(kind, []).append((names.index(column.name), column, field))
    labels = {name: names.index(column) for name, column in mapping.labels.items()}

    def make(ts_ns: int, row: list[str]) -> Iterator[AnyRecord]:
        label = {name: row[place].strip() for name, place in labels.items()}
        for kind, places in groups.items():
            values = {field: _value(row[place], column) for place, column, field in places}
            yield _record(kind, ts_ns, values, label)

    return make


def _value(cell: str, column: Column) -> Any:
    cell = cell.strip()
    if column.signal.endswith("throttle"):
        return _throttle(cell)
    if cell.lower() in _ABSENT:
        return None
    try:
        if cell.endswith("%"):
            return float(cell[:-1]) / 100
        return float(cell) * column.scale
    except ValueError:
        pass
    found = re.fullmatch(r"([-+\d.eE]+)\s*([A-Za-zµ]+)", cell)
    if found:
        try:
            return _scale(cell)
        except UsageError:
            try:
                return float(found[1]) * column.scale  # such as '65 C': the map says the unit
            except ValueError:
                pass
    return cell


def _throttle(cell: str) -> tuple[str, ...] | None:
    """Words, or NVML's bits as a number."""
    with suppress(ValueError):
        bits = int(cell, 0)
        return tuple(name for bit, name in records.THROTTLE.items() if bits & bit)
    if cell.lower() == "none":
        return ()
    if cell.lower() in _ABSENT:
        return None
    return tuple(filter(None, re.split(r"[\s|;]+", cell)))


def _record(kind: str, ts_ns: int, values: dict[str, Any], label: dict[str, str]) -> AnyRecord:
    node = label.get("node", "")
    if kind in ("serving", "vision", "text"):
        modalities = {}
        if kind != "serving":
            modalities = {kind: records.Latencies(**values)}
            values = {}
        return Serving(
            ts_ns=ts_ns, node=node, engine="table", instance=label.get("instance", "table"),
            modalities=modalities, **_whole(Serving, values),
        )  # fmt: skip
    if kind == "request":
        return _request(ts_ns, node, values)
    if kind == "event":
        return _event(ts_ns, node, values)
    if kind == "host":
        return records.Host(ts_ns=ts_ns, node=node, **_whole(records.Host, values))
    if kind == "pool":
        return _pool(ts_ns, node, label.get("device", "gpu0"), values)
    device = label.get("device", "cpu0" if kind == "cpu" else "gpu0")
    if kind == "memory":
        return records.Memory(
            ts_ns=ts_ns, node=node, device=device, address=0,
            action="segment_free" if "released_bytes" in values else "alloc",
            size_bytes=int(next((v for v in values.values() if v is not None), 0)),
        )  # fmt: skip
    sort: Any = "cpu" if kind == "cpu" else label.get("kind", "gpu")
    return Device(
        ts_ns=ts_ns, node=node, device=device, kind=sort if sort in records.DEVICE_KINDS else "gpu",
        **_whole(Device, values),
    )  # fmt: skip


def _whole(struct: type, values: dict[str, Any]) -> dict[str, Any]:
    """Floats for integer fields as integers, so that a recording of them reads back."""
    kinds = {field.name: str(field.type) for field in msgspec.structs.fields(struct)}
    return {
        name: round(value)
        if isinstance(value, float) and "float" not in kinds.get(name, "float")
        else value
        for name, value in values.items()
    }


def _request(ts_ns: int, node: str, values: dict[str, Any]) -> Request:
    latency, wait = values.get("request_latency_s"), values.get("request_wait_s")
    stages = {"e2e_s": latency, "queue_wait_s": wait}
    return Request(
        ts_ns=ts_ns, node=node, id=str(ts_ns), state="completed",
        images=round(values.get("images") or 0),
        stages={name: value for name, value in stages.items() if value is not None},
    )  # fmt: skip


_EVENT_FIELDS = {
    "reclaim_ratio": ("reclaim", "recovered_ratio"), "collective_wait_s": ("imbalance", "wait_s"),
    "attention_entropy": ("entropy", "entropy_nats"),
    "attention_entropy_ratio": ("entropy", "entropy_ratio"),
    "attention_entropy_std": ("entropy", "entropy_std"),
}  # fmt: skip


def _event(ts_ns: int, node: str, values: dict[str, Any]) -> Event:
    known = {_EVENT_FIELDS[name]: value for name, value in values.items() if name in _EVENT_FIELDS}
    what = next((what for what, _ in known), "table")
    return Event(
        ts_ns=ts_ns,
        node=node,
        what=what,
        evidence={key: value for (_, key), value in known.items()},
    )


def _pool(ts_ns: int, node: str, device: str, values: dict[str, Any]) -> Pool:
    given = {name: value for name, value in _whole(Pool, values).items() if value is not None}
    fits = given.pop("fits", None)
    needed = {
        "reserved_bytes": 0, "allocated_bytes": 0, "free_bytes": 0, "largest_free_bytes": 0,
        "releasable_bytes": 0, "fragmentation_ratio": 0.0,
    }  # fmt: skip
    known = {name: value for name, value in given.items() if name in Pool.__struct_fields__}
    dry = None
    if fits is not None:
        dry = records.Fits(fits=bool(fits), allocations=0, peak_bytes=0)
    return Pool(ts_ns=ts_ns, node=node, device=device, fits=dry, **{**needed, **known})
