"""Tables of records for people: sizes, shares and times as they read them."""

from __future__ import annotations

from typing import Any

from mmctl.cli.render import to_table
from mmctl.engine import units
from mmctl.engine.records import AnyRecord, Device, Event, Host, Link, Pool, Serving


def tables(records: list[AnyRecord]) -> str:
    """One table per kind of record, sizes and shares as people read them."""
    parts = []
    for kind, columns in _TABLES.items():
        rows = [columns(record) for record in records if isinstance(record, kind)]
        if rows:
            parts.append(to_table(rows))
    events = [record for record in records if isinstance(record, Event)]
    if events:
        parts.append(
            "\n".join(f"{e.what} {e.state or ''} {e.message or ''}".strip() for e in events)
        )
    return "\n\n".join(parts)


_MAIN = ("used_bytes", "sm_ratio", "temperature_c", "power_w")


def _device_row(record: Any) -> dict[str, Any]:
    return {
        "device": record.device,
        "model": record.model,
        "sm": _percent(record.sm_ratio),
        "bandwidth": _percent(record.bandwidth_ratio),
        "used": units.show_bytes(record.used_bytes),
        "total": units.show_bytes(record.total_bytes),
        "temperature": None if record.temperature_c is None else f"{record.temperature_c:.0f} °C",
        "power": None if record.power_w is None else f"{record.power_w:.0f} W",
        "throttle": record.throttle or None,
        "why absent": next((record.absent[f] for f in _MAIN if f in record.absent), None),
    }


def _host_row(record: Any) -> dict[str, Any]:
    return {
        "host": record.node,
        "load": record.load_factor,
        "available": units.show_bytes(record.available_bytes),
        "cpu wait": _percent(record.cpu_pressure_ratio),
        "memory wait": _percent(record.memory_pressure_ratio),
        "io wait": _percent(record.io_pressure_ratio),
        "retransmits/s": record.tcp_retransmits_per_s,
        "time_wait": record.tcp_time_wait,
    }


def _serving_row(record: Any) -> dict[str, Any]:
    return {
        "engine": record.engine,
        "instance": record.instance,
        "running": record.running,
        "waiting": record.waiting,
        "kv": _percent(record.kv_ratio),
        "ttft p50": units.show_seconds(record.ttft_p50_s),
        "ttft p99": units.show_seconds(record.ttft_p99_s),
        "itl p50": units.show_seconds(record.itl_p50_s),
        "tokens/s": record.generation_tokens_per_s,
    }


def _pool_row(record: Any) -> dict[str, Any]:
    return {
        "device": record.device,
        "pool": record.pool,
        "reserved": units.show_bytes(record.reserved_bytes),
        "allocated": units.show_bytes(record.allocated_bytes),
        "largest free": units.show_bytes(record.largest_free_bytes),
        "fragmentation": _percent(record.fragmentation_ratio),
        "conflict": _percent(record.conflict_ratio),
    }


def _link_row(record: Any) -> dict[str, Any]:
    return {
        "a": record.a,
        "b": record.b,
        "class": record.link_class,
        "hops": record.hops,
        "crosses numa": record.crosses_numa,
    }


def _percent(ratio: float | None) -> str | None:
    return None if ratio is None else f"{100 * ratio:.0f} %"


_TABLES: dict[type, Any] = {
    Device: _device_row, Host: _host_row, Serving: _serving_row, Pool: _pool_row, Link: _link_row,
}  # fmt: skip
