"""``ascend:`` and the texts of ``npu-smi`` → device records; chips of a dual-die card apart."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from mmctl.engine.errors import MmctlError, NoSourceError
from mmctl.engine.profiles import Profile
from mmctl.engine.records import AnyRecord, Device, Process
from mmctl.engine.sources.check import Check
from mmctl.engine.sources.command import check_tool, readings_of
from mmctl.engine.sources.smi import Origin

_MB = 1 << 20
_NOT_SHOWN = {
    "bandwidth_ratio": "npu-smi info does not show it; npu-smi info -t usages does",
    "throttle": "npu-smi does not show it",
}


def readings(rest: str, profile: Profile) -> Iterator[list[AnyRecord]]:
    """The NPUs of this node by DCMI, or by npu-smi where its library is not to be had."""
    from mmctl.engine.sources import dcmi

    try:
        library = dcmi.load()
    except NoSourceError as error:
        try:
            yield from readings_of([("npu-smi", "info")], info, profile)
        except NoSourceError as other:
            raise NoSourceError(f"{error}; {other}") from None
        return
    while True:
        records: list[AnyRecord] = [*dcmi.read(library, profile.sources.timeout_s)]
        if not records:
            raise NoSourceError("DCMI works and finds no NPU on this node")
        yield records


def tool() -> Iterator[Check]:
    """Whether such devices are here, and the tool that reads them."""
    yield check_tool("ascend", "0x19e5", ("npu-smi",))


def info(text: str, origin: Origin) -> list[AnyRecord]:
    """``npu-smi info``: two lines a chip, of 98 or more columns, then the processes."""
    chips: list[tuple[list[str], list[str]]] = []
    processes: dict[tuple[str, str], list[Process]] = {}
    listed = physical = False
    above: list[str] | None = None
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        words = cells[0].split()
        if not line.startswith("|") or not words:
            continue
        if "Process id" in line:
            listed = True
        elif "Phy-ID" in line:
            physical = True
        elif listed:
            if len(cells) >= 4 and len(words) == 2 and cells[1].isdigit():
                process = Process(
                    pid=int(cells[1]), name=cells[2] or None, used_bytes=_pair(cells[3])[0]
                )
                processes.setdefault((words[0], words[1]), []).append(process)
        elif len(cells) == 3 and words[0].isdigit():
            if above is None:
                above = cells
            else:
                chips.append((above, cells))
                above = None
    if not chips:
        raise MmctlError("a table of npu-smi without a chip in it")
    cards = [first[0].split()[0] for first, _ in chips]
    records: list[AnyRecord] = []
    for (first, second), card in zip(chips, cards, strict=True):
        words = second[0].split()
        if physical and len(words) > 1:
            name = words[1]
        else:
            name = card if cards.count(card) == 1 else f"{card}.{words[0]}"
        held = tuple(processes.get((card, words[0]), ())) if listed else None
        records.append(_chip(f"npu{name}", first, second, held, origin))
    return records


def _chip(
    device: str, first: list[str], second: list[str], held: tuple[Process, ...] | None,
    origin: Origin,
) -> Device:  # fmt: skip
    absent = dict(_NOT_SHOWN)
    values: dict[str, Any] = {}
    readings = first[2].split()
    loads = second[2].split()
    power_w = _number(readings[0] if readings else "")
    _put(values, absent, "power_w", power_w, readings)
    warmth_c = _number(readings[1] if len(readings) > 1 else "")
    _put(values, absent, "temperature_c", warmth_c, readings[1:])
    core = _number(loads[0] if loads else "")
    _put(values, absent, "sm_ratio", None if core is None else min(core / 100, 1.0), loads)
    pairs = _pairs(second[2])
    used, total = (
        (pairs[1] if len(pairs) > 1 and pairs[1][1] else pairs[0]) if pairs else (None, None)
    )
    if total:
        values |= {"used_bytes": used, "total_bytes": total}
        if used is not None:
            values["free_bytes"] = max(total - used, 0)
    else:
        absent["used_bytes"] = absent["total_bytes"] = "npu-smi shows no memory of this chip"
    model = " ".join(first[0].split()[1:]) or None
    return Device(
        ts_ns=origin.ts_ns, node=origin.node, device=device, kind="npu", model=model,
        health=first[1] or None, pci=second[1] if ":" in second[1] else None, processes=held,
        absent=absent, **values,
    )  # fmt: skip


def _put(
    values: dict[str, Any], absent: dict[str, str], field: str, value: float | None, said: list[str]
) -> None:
    if value is None:
        absent[field] = f"npu-smi says: {said[0] if said else 'nothing'}"
    else:
        values[field] = value


def _number(text: str) -> float | None:
    try:
        number = float(text)
    except ValueError:
        return None
    return number if 0 <= number < 1e7 else None


def _pairs(text: str) -> list[tuple[int | None, int | None]]:
    """Every ``used / total`` of a cell, in bytes; the first word of it is a share."""
    return [(int(a) * _MB, int(b) * _MB) for a, b in re.findall(r"(\d+)\s*/\s*(\d+)", text)]


def _pair(text: str) -> tuple[int | None, None]:
    return (int(text) * _MB if text.isdigit() else None), None


_SHOWN = ("sm_ratio", "total_bytes", "used_bytes", "temperature_c", "power_w")

_USAGES = {
    "Aicore Usage Rate(%)": ("sm_ratio", 0.01),
    "NPU Utilization(%)": ("sm_ratio", 0.01),
    "HBM Bandwidth Usage Rate(%)": ("bandwidth_ratio", 0.01),
    "HBM Capacity(MB)": ("total_bytes", _MB),
    "Memory Capacity(MB)": ("total_bytes", _MB),
    "HBM Temperature (C)": ("memory_temperature_c", 1),
    "NPU Temperature (C)": ("temperature_c", 1),
    "Temperature(C)": ("temperature_c", 1),
    "Power Dissipation(W)": ("power_w", 1),
    "NPU Real-time Power(W)": ("power_w", 1),
    "Aicore Freq(MHZ)": ("sm_clock_hz", 1e6),
}  # fmt: skip


def page(text: str, origin: Origin) -> list[AnyRecord]:
    """``npu-smi info -t usages`` and its like: ``name : value`` lines, a block a card or chip."""
    blocks: list[dict[str, str]] = []
    for line in text.splitlines():
        name, colon, value = line.partition(":")
        name = " ".join(name.split())
        if not colon:
            continue
        if name == "NPU ID" or (name == "Chip ID" and blocks and "Chip ID" in blocks[-1]):
            blocks.append({} if name == "NPU ID" else {"NPU ID": blocks[-1].get("NPU ID", "")})
        if blocks:
            blocks[-1][name] = value.strip()
    records: list[AnyRecord] = []
    many = [block.get("NPU ID", "") for block in blocks]
    for block in blocks:
        values: dict[str, Any] = {}
        absent = {
            "power_w": "not on this page of npu-smi",
            "temperature_c": "not on this page of npu-smi",
        }
        for label, (field, scale) in _USAGES.items():
            number = _number(block.get(label, ""))
            if number is not None and (field not in values or number):
                values[field] = number * scale
        for field in ("sm_ratio", "bandwidth_ratio"):
            if field in values:
                values[field] = round(min(values[field], 1.0), 9)
        used = _number(block.get("HBM Usage Rate(%)", ""))
        if values.get("total_bytes"):
            values["total_bytes"] = round(values["total_bytes"])
            if used is not None:
                values["used_bytes"] = round(values["total_bytes"] * used / 100)
        for field in (*_SHOWN, "bandwidth_ratio"):
            if field not in values:
                absent[field] = "not on this page of npu-smi"
        card = block.get("NPU ID", "")
        name = card if many.count(card) == 1 else f"{card}.{block.get('Chip ID', '')}"
        if card.isdigit():
            records.append(
                Device(
                    ts_ns=origin.ts_ns,
                    node=origin.node,
                    device=f"npu{name}",
                    kind="npu",
                    absent={f: why for f, why in absent.items() if f not in values},
                    **values,
                )
            )
    return records
