"""``amd:`` and the JSON of ``rocm-smi`` and ``amd-smi`` → device records, and links from rocm-smi.

The keys are English phrases that change with the version; each field lists patterns for them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import msgspec

from mmctl.engine.errors import MmctlError
from mmctl.engine.profiles import Profile
from mmctl.engine.records import AnyRecord, Device, Link
from mmctl.engine.sources.check import Check
from mmctl.engine.sources.command import check_tool, readings_of
from mmctl.engine.sources.smi import Origin

_PATTERNS: dict[str, tuple[str, ...]] = {
    "uuid": (r"Unique ID$", r"asic\.asic_serial$", r"(?:^|\.)uuid$"),
    "pci": (r"PCI Bus$", r"(?:^|\.)bdf$"),
    "model": (r"Card [Ss]eries$", r"asic\.market_name$", r"board\.product_name$"),
    "sm_ratio": (r"GPU use \(%\)$", r"usage\.gfx_activity$"),
    "bandwidth_ratio": (r"GPU [Mm]emory [Rr]ead/[Ww]rite Activity \(%\)$", r"Memory Activity$",
                        r"GPU memory use \(%\)$", r"usage\.umc_activity$"),
    "total_bytes": (r"^VRAM Total Memory \(B\)$", r"mem_usage\.total_vram$", r"vram\.size$"),
    "used_bytes": (r"^VRAM Total Used Memory \(B\)$", r"mem_usage\.used_vram$"),
    "temperature_c": (r"Temperature \(Sensor junction\) \(C\)$", r"temperature\.hotspot$",
                      r"Temperature \(Sensor edge\) \(C\)$", r"temperature\.edge$"),
    "memory_temperature_c": (r"Temperature \(Sensor memory\) \(C\)$", r"temperature\.mem$"),
    "power_w": (r"(?:Current|Average) (?:Socket )?Graphics Package Power \(W\)$",
                r"power\.socket_power$", r"power\.current_socket_power$",
                r"power\.average_socket_power$"),
    "power_limit_w": (r"Max Graphics Package Power \(W\)$", r"limit\.max_power$"),
    "sm_clock_hz": (r"^sclk clock speed:$", r"clock\.gfx_0\.clk$"),
    "memory_clock_hz": (r"^mclk clock speed:$", r"clock\.mem_0\.clk$"),
    "ecc_corrected": (r"ecc\.total_correctable_count$",),
    "ecc_uncorrected": (r"ecc\.total_uncorrectable_count$",),
}  # fmt: skip
_COMPILED = {field: [re.compile(p) for p in patterns] for field, patterns in _PATTERNS.items()}
_SHOWN = ("sm_ratio", "bandwidth_ratio", "total_bytes", "used_bytes", "temperature_c", "power_w")
_NUMBER = re.compile(r"\(?\s*(-?\d+(?:\.\d+)?)\s*([A-Za-z%/]*)\)?\s*$")
_UNITS = {"MB": 2**20, "GB": 2**30, "B": 1, "KB": 2**10, "Mhz": 1e6, "MHz": 1e6, "GHz": 1e9}


def readings(rest: str, profile: Profile) -> Iterator[list[AnyRecord]]:
    """The AMD GPUs of this node by ``amd-smi``, else ``rocm-smi``."""
    choices = [
        ("amd-smi", "metric", "--json"),
        ("rocm-smi", "-a", "--showmeminfo", "all", "--json"),
    ]
    yield from readings_of(choices, json_page, profile)


def tool() -> Iterator[Check]:
    """Whether such devices are here, and the tool that reads them."""
    yield check_tool("amd", "0x1002", ("amd-smi", "rocm-smi"))


def json_page(text: str, origin: Origin) -> list[AnyRecord]:
    """A JSON document of rocm-smi (an object by card) or amd-smi (a list of GPUs)."""
    start = min((i for i in (text.find("{"), text.find("[")) if i >= 0), default=-1)
    try:
        document: Any = msgspec.json.decode(text[start:].encode() if start > 0 else text.encode())
    except (msgspec.DecodeError, RecursionError) as error:
        raise MmctlError(f"not JSON: {error}") from None
    if isinstance(document, dict) and isinstance(document.get("gpu_data"), list):
        document = document["gpu_data"]
    if isinstance(document, list):
        return [
            _device(flat, origin, f"gpu{flat.get('gpu', number)}")
            for number, gpu in enumerate(document)
            if isinstance(gpu, dict)
            for flat in [dict(_flat(gpu, ""))]
        ]
    records: list[AnyRecord] = []
    if isinstance(document, dict):
        for name, card in document.items():
            if isinstance(card, dict) and re.fullmatch(r"card\d+", name):
                flat = {key: str(value) for key, value in card.items()}
                records.append(_device(flat, origin, f"gpu{name[4:]}"))
        records += _links(document.get("system"), origin)
    return records


def _flat(value: Any, path: str, depth: int = 0) -> Iterator[tuple[str, str]]:
    """Dotted paths → text; amd-smi's ``{"value": 3, "unit": "MB"}`` is one value with a unit."""
    if isinstance(value, dict) and depth < 12:
        if set(value) == {"value", "unit"}:
            yield path, f"{value['value']} {value['unit']}"
            return
        for key, item in value.items():
            yield from _flat(item, f"{path}.{key}" if path else str(key), depth + 1)
    elif not isinstance(value, (list, dict)):
        yield path, str(value)


def _device(flat: dict[str, str], origin: Origin, name: str) -> Device:
    values: dict[str, Any] = {}
    absent: dict[str, str] = {}
    for field, patterns in _COMPILED.items():
        for pattern in patterns:
            text = next((v for key, v in flat.items() if pattern.search(key)), None)
            if text is None:
                continue
            value = _value(field, text)
            if value is not None:
                values[field] = value
                break
            absent.setdefault(field, f"the tool says: {text[:40] or 'nothing'}")
    for field in _SHOWN:
        if field not in values:
            absent.setdefault(field, "not in what the tool printed")
    if {"total_bytes", "used_bytes"} <= values.keys():
        values["free_bytes"] = max(values["total_bytes"] - values["used_bytes"], 0)
    return Device(
        ts_ns=origin.ts_ns, node=origin.node, device=name, kind="gpu",
        absent={field: why for field, why in absent.items() if field not in values}, **values,
    )  # fmt: skip


def _value(field: str, text: str) -> Any:
    if field in ("uuid", "pci", "model"):
        return (
            None if text in ("N/A", "", "None") or text.startswith("0x0000000000000000") else text
        )
    found = _NUMBER.match(text)
    if found is None or float(found[1]) < 0:
        return None
    number = float(found[1]) * _UNITS.get(found[2], 1)
    if number > 1e18:
        return None
    if field.endswith("_ratio"):
        return min(number / 100, 1.0)
    if field.endswith("_bytes") or field.startswith("ecc"):
        return round(number)
    return number


def _links(system: Any, origin: Origin) -> list[Link]:
    """rocm-smi's topology: link type and hops between two devices."""
    if not isinstance(system, dict):
        return []
    pairs: dict[tuple[str, str], dict[str, str]] = {}
    for key, value in system.items():
        found = re.match(r"\(Topology\) (.+) between DRM devices (\d+) and (\d+)$", str(key))
        if found:
            pairs.setdefault((found[2], found[3]), {})[found[1]] = str(value)
    records = []
    for (a, b), said in pairs.items():
        kind, hops = said.get("Link type", ""), said.get("Hops", "")
        if kind:
            records.append(
                Link(
                    ts_ns=origin.ts_ns,
                    node=origin.node,
                    a=f"gpu{a}",
                    b=f"gpu{b}",
                    link_class="PCIE" if kind == "PCIE" else kind,
                    hops=int(hops) if hops.isdigit() else None,
                    absent={
                        "latency_us": "rocm-smi does not measure it",
                        "bandwidth_bytes_per_s": "rocm-smi does not measure it",
                    },
                )
            )
    return records
