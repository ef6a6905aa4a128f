"""What ``nvidia-smi`` prints of a GPU as names and values (-q -x, -q, --query-gpu) → records."""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from mmctl.engine.errors import MmctlError, NoSourceError
from mmctl.engine.records import THROTTLE, AnyRecord, Device, Process
from mmctl.engine.sources.nvml_values import FABRIC, RECOVERY


class Origin(NamedTuple):
    """Where a text is from: the file's name, the node it is read on, when it was written."""

    name: str
    node: str
    ts_ns: int


_UNITS: dict[str, float] = {
    "": 1, "B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "MB": 2**20, "%": 0.01,
    "W": 1, "mW": 1e-3, "C": 1, "MHz": 1e6, "Mhz": 1e6, "KB/s": 1e3, "MB/s": 1e6,
    "J": 1, "mJ": 1e-3,
}  # fmt: skip

FIELDS: dict[str, tuple[str, ...]] = {
    "uuid": ("uuid", "gpu_uuid", "gpu uuid"),
    "pci": ("pci/pci_bus_id", "pci/bus_id", "pci.bus_id", "gpu_bus_id", "@id"),
    "model": ("product_name", "name", "gpu_name"),
    "nvml_index": ("index", "minor_number"),
    "sm_ratio": ("utilization/gpu_util", "utilization/gpu", "utilization.gpu"),
    "bandwidth_ratio": ("utilization/memory_util", "utilization/memory", "utilization.memory"),
    "total_bytes": ("fb_memory_usage/total", "memory.total"),
    "used_bytes": ("fb_memory_usage/used", "memory.used"),
    "free_bytes": ("fb_memory_usage/free", "memory.free"),
    "reserved_bytes": ("fb_memory_usage/reserved", "memory.reserved"),
    "temperature_c": ("temperature/gpu_temp", "temperature/gpu_current_temp", "temperature.gpu"),
    "memory_temperature_c": ("temperature/memory_temp", "temperature/memory_current_temp",
                             "temperature.memory"),
    "power_w": (
        "gpu_power_readings/average_power_draw", "gpu_power_readings/power_draw",
        "power_readings/power_draw", "gpu_power_readings/instantaneous_power_draw",
        "power.draw.average", "power.draw",
    ),
    "power_instant_w": ("gpu_power_readings/instant_power_draw", "power.draw.instant",
                        "gpu_power_readings/instantaneous_power_draw"),
    "power_limit_w": (
        "gpu_power_readings/current_power_limit", "power_readings/enforced_power_limit",
        "gpu_power_readings/enforced_power_limit", "power_readings/power_limit",
        "enforced.power.limit", "power.limit",
    ),
    "sm_clock_hz": ("clocks/sm_clock", "clocks/sm", "clocks.current.sm", "clocks.sm"),
    "memory_clock_hz": ("clocks/mem_clock", "clocks/memory", "clocks.current.memory",
                        "clocks.mem"),
    "pcie_tx_bytes_per_s": ("pci/tx_util", "pci/tx_throughput"),
    "pcie_rx_bytes_per_s": ("pci/rx_util", "pci/rx_throughput"),
    "ecc_corrected": ("ecc.errors.corrected.volatile.total",
                      "ecc_errors/volatile/single_bit/total"),
    "ecc_uncorrected": ("ecc.errors.uncorrected.volatile.total",
                        "ecc_errors/volatile/double_bit/total"),
    "remap_pending": ("remapped_rows/remapped_row_pending", "remapped_rows/pending",
                      "remapped_rows.pending"),
    "fabric": ("fabric/state", "fabric.state"),
    "recovery_action": ("gpu_recovery_action",),
}  # fmt: skip
"""Field → the names that nvidia-smi has had for it, in XML, in -q and in CSV."""

_SHOWN = ("sm_ratio", "bandwidth_ratio", "total_bytes", "used_bytes", "free_bytes",
          "temperature_c", "power_w")  # fmt: skip
_ECC = {
    "ecc_corrected": ("sram_correctable", "dram_correctable"),
    "ecc_uncorrected": ("sram_uncorrectable", "sram_uncorrectable_parity",
                        "sram_uncorrectable_secded", "dram_uncorrectable"),
}  # fmt: skip
_THROTTLE_WORDS = {
    "applications_clocks_setting": "applications_clocks_setting", "sw_power_cap": "sw_power_cap",
    "hw_slowdown": "hw_slowdown", "sync_boost": "sync_boost",
    "sw_thermal_slowdown": "sw_thermal_slowdown", "hw_thermal_slowdown": "hw_thermal_slowdown",
    "hw_power_brake_slowdown": "hw_power_brake", "hw_power_brake": "hw_power_brake",
    "display_clock_setting": "display_clock_setting",
    "display_clocks_setting": "display_clock_setting",
}  # fmt: skip
_THROTTLE_KEY = re.compile(
    r"clocks_(?:event|throttle)_reasons?[/.](?:.*/)?(?:clocks_(?:event|throttle)_reason_)?(\w+)$"
)
_QUANTITY = re.compile(r"\s*(-?\d+(?:\.\d+)?)\s*([A-Za-z%/]*)\s*$")
_NOTHING = re.compile(
    r"\s*\[?\s*(N/?A|Not Supported|Not Available|Unknown Error|Unknown|None|Insufficient "
    r"Permissions|Function Not Found|GPU is lost|GPU requires reset|Requested functionality has "
    r"been deprecated|No data|Reset Required|ERR!|-|)\s*\]?\s*$",
    re.IGNORECASE,
)

Tree = dict[str, str]


def absent_word(text: str) -> str | None:
    """nvidia-smi's word for an absent value, or None when the text is a value."""
    found = _NOTHING.match(text)
    return None if found is None else found[1] or "empty"


def quantity(text: str) -> float | None:
    """A number in the base unit of what follows it (bytes, shares, W, °C, Hz, bytes/s); None for
    one that cannot be."""
    found = _QUANTITY.match(text)
    if found is None or found[2] not in _UNITS:
        return None
    number = float(found[1]) * _UNITS[found[2]]
    return number if abs(number) < 1e18 else None


def device(tree: Tree, origin: Origin, number: int, **more: Any) -> Device:
    """A record of the names and values of one GPU."""
    values: dict[str, Any] = {}
    absent: dict[str, str] = {}
    for field, names in FIELDS.items():
        for name in names:
            if name not in tree:
                continue
            why = _take(field, tree[name], values)
            if why is None:
                absent.pop(field, None)
                break
            absent.setdefault(field, why)
    _ecc(tree, values)
    _throttle(tree, values, absent)
    _marks(values)
    for field in _SHOWN:
        if values.get(field) is None:
            absent.setdefault(field, "not in what nvidia-smi printed")
    index = values.pop("nvml_index", None)
    processes = more.pop("processes", None)
    name = more.pop("device", f"gpu{index if index is not None else number}")
    if values.get("model") and any(w in values["model"] for w in ("GB10", "Orin", "Thor")):
        values["unified"] = True
    return Device(
        ts_ns=origin.ts_ns, node=origin.node, device=name, kind="gpu",
        nvml_index=index if "parent" not in more else None, processes=processes,
        counters="utilization" if values.get("sm_ratio") is not None else None,
        absent={field: why for field, why in absent.items() if values.get(field) is None},
        **values, **more,
    )  # fmt: skip


def _take(field: str, text: str, values: dict[str, Any]) -> str | None:
    """Put the value of a field; the reason when it has none."""
    word = absent_word(text)
    if field in ("uuid", "pci", "model"):
        if word is None:
            values[field] = text.strip()
        return word and f"nvidia-smi says: {word}"
    if field in ("fabric", "recovery_action", "remap_pending"):
        values[field] = text.strip()
        return None
    if word is not None:
        return f"nvidia-smi says: {word}"
    number = quantity(text)
    if number is None or number < 0:
        return f"nvidia-smi says: {text.strip()[:40]}"
    if field == "sm_ratio" or field == "bandwidth_ratio":
        if not text.rstrip().endswith("%"):
            number /= 100  # --format=nounits prints percent without saying so
        values[field] = round(min(number, 1.0), 9)
    elif field in ("nvml_index", "ecc_corrected", "ecc_uncorrected"):
        values[field] = round(number)
    elif field.endswith("_bytes"):
        unit = _QUANTITY.match(text)
        # --format=nounits prints MiB without saying so.
        values[field] = round(number * (1 if unit and unit[2] else 2**20))
    elif field.endswith("_hz") and number < 1e5:
        values[field] = number * 1e6
    else:
        values[field] = number
    return None


def _ecc(tree: Tree, values: dict[str, Any]) -> None:
    """Volatile counts by place, on devices that print no total."""
    for field, names in _ECC.items():
        if values.get(field) is None:
            found = [
                quantity(tree[key])
                for name in names
                if (key := f"ecc_errors/volatile/{name}") in tree
            ]
            known = [number for number in found if number is not None]
            if known:
                values[field] = round(sum(known))


def _throttle(tree: Tree, values: dict[str, Any], absent: dict[str, str]) -> None:
    names: list[str] = []
    seen = False
    for key, text in tree.items():
        if key in ("clocks_event_reasons.active", "clocks_throttle_reasons.active"):
            try:
                bits = int(text.strip(), 16)
            except ValueError:
                absent["throttle"] = f"nvidia-smi says: {absent_word(text) or text.strip()[:40]}"
                continue
            values["throttle"] = tuple(name for bit, name in THROTTLE.items() if bits & bit)
            return
        found = _THROTTLE_KEY.match(key)
        if found and text.strip() in ("Active", "Not Active"):
            seen = True
            word = _THROTTLE_WORDS.get(found[1])
            if text.strip() == "Active" and word and word not in names:
                names.append(word)
    if seen:
        values["throttle"] = tuple(names)
    else:
        absent.setdefault("throttle", "not in what nvidia-smi printed")


def _marks(values: dict[str, Any]) -> None:
    """Words of nvidia-smi → the words of the record."""
    for field, known in (("fabric", FABRIC), ("recovery_action", RECOVERY)):
        if field in values:
            word = re.sub(r"[^a-z0-9]+", "_", values[field].lower()).strip("_")
            values[field] = word if word in known else None
    if "remap_pending" in values:
        word = values["remap_pending"].strip("[] ").lower()
        values["remap_pending"] = {"yes": True, "no": False, "1": True, "0": False}.get(word)


def xml(text: str, origin: Origin) -> list[AnyRecord]:
    """``nvidia-smi -q -x``, from drivers of 2017 to now."""
    from xml.etree import ElementTree

    if "<!ENTITY" in text:
        raise MmctlError("an XML file with entities of its own is not read")
    try:
        root = ElementTree.fromstring(text)
    except ElementTree.ParseError as error:
        raise MmctlError(f"not well-formed XML: {error}") from None
    except (RecursionError, ValueError) as error:
        raise MmctlError(f"XML that cannot be read: {error}") from None
    origin = origin._replace(ts_ns=time_of(root.findtext("timestamp") or "", origin.ts_ns))
    records: list[AnyRecord] = []
    for number, gpu in enumerate(root.iter("gpu")):
        tree = dict(_walk(gpu, ""))
        tree.setdefault("@id", gpu.get("id", ""))
        tree.pop("index", None)
        tree.pop("minor_number", None)  # not the index where devices are hidden
        processes = _xml_processes(gpu)
        records.append(device(tree, origin, number, processes=processes))
        for place, instance in enumerate(gpu.iter("mig_device")):
            own = dict(_walk(instance, ""))
            index = quantity(own.pop("index", "")) or place
            records.append(
                device(own, origin, number, device=f"gpu{number}.mig{index:.0f}",
                       parent=f"gpu{number}")
            )  # fmt: skip
    return records


def _walk(element: Any, path: str) -> Iterator[tuple[str, str]]:
    stack = [(element, path)]
    while stack:
        node, where = stack.pop()
        for child in node:
            if child.tag in ("mig_devices", "processes", "supported_clocks"):
                continue
            name = f"{where}{child.tag}"
            if len(child):
                stack.append((child, f"{name}/"))
            elif child.text is not None:
                yield name, child.text


def _xml_processes(gpu: Any) -> tuple[Process, ...] | None:
    holder = gpu.find("processes")
    if holder is None or (not len(holder) and absent_word(holder.text or "N/A") == "N/A"
                          and "N/A" in (holder.text or "")):  # fmt: skip
        return None
    found = []
    for info in holder.iter("process_info"):
        pid = (info.findtext("pid") or "").strip()
        if pid.isdigit():
            found.append(
                process_record(pid, info.findtext("process_name"), info.findtext("used_memory"))
            )
    return tuple(found)


def process_record(pid: str, name: str | None, used: str | None) -> Process:
    """A process as nvidia-smi prints it: pid, path, used memory with its unit."""
    amount = quantity(used or "")
    base = (name or "").strip().replace("\\", "/").rsplit("/", 1)[-1]
    return Process(
        pid=int(pid),
        name=base if base and absent_word(base) is None else None,
        used_bytes=None if amount is None else round(amount),
    )


def query(text: str, origin: Origin) -> list[AnyRecord]:
    """``nvidia-smi -q``: an indented list of names and values a GPU."""
    records: list[AnyRecord] = []
    tree: Tree = {}
    found: list[tuple[Tree, list[Tree], list[Process]]] = []
    path: list[tuple[int, str]] = []
    process: dict[str, str] = {}
    for line in text.splitlines():
        head = re.match(r"GPU ([0-9A-Fa-f]{4,8}:[0-9A-Fa-f]{2}:[0-9A-Fa-f]{2}\.[0-9A-Fa-f])", line)
        if head:
            tree = {"@id": head[1]}
            found.append((tree, [], []))
            path, process = [], {}
            continue
        name, colon, value = line.partition(" : ")
        name, value = (name, value) if colon else (line.rstrip().removesuffix(":"), "")
        key = re.sub(r"[^a-z0-9]+", "_", name.strip().lower()).strip("_")
        if not key:
            continue
        if not found:
            if key == "timestamp":
                origin = origin._replace(ts_ns=time_of(value, origin.ts_ns))
            continue
        depth = len(name) - len(name.lstrip())
        while path and path[-1][0] >= depth:
            path.pop()
        if key == "mig_device" and not value:
            tree = {}
            found[-1][1].append(tree)
            path = [(depth, "")]
            continue
        if tree is not found[-1][0] and depth <= 4:
            tree = found[-1][0]
            path = []
        if key == "process_id" and value.strip().isdigit():
            process = {"pid": value.strip()}
            found[-1][2].append(process_record(process["pid"], None, None))
        elif process and key in ("name", "used_gpu_memory"):
            process[key] = value
            found[-1][2][-1] = process_record(
                process["pid"], process.get("name"), process.get("used_gpu_memory")
            )
        elif not value:
            path.append((depth, key))
        else:
            where = "/".join([part for _, part in path if part] + [key])
            tree.setdefault(where.replace("shared_fb_memory_usage", "fb_memory_usage"), value)
    for number, (own, instances, processes) in enumerate(found):
        own.pop("minor_number", None)
        records.append(device(own, origin, number, processes=tuple(processes)))
        for place, instance in enumerate(instances):
            index = quantity(instance.pop("index", "")) or place
            records.append(
                device(instance, origin, number, device=f"gpu{number}.mig{index:.0f}",
                       parent=f"gpu{number}")
            )  # fmt: skip
    return records


_COLUMN = re.compile(r"\s*([A-Za-z][\w.]*)\s*(?:\[[^\]]*\])?\s*$")


def is_csv_header(line: str) -> bool:
    """Whether a line is the header of ``--query-gpu`` or ``--query-compute-apps``."""
    cells = line.split(",")
    names = [match[1] for cell in cells if (match := _COLUMN.match(cell))]
    if len(names) != len(cells):
        return False
    known = {name for group in FIELDS.values() for name in group}
    known |= {"timestamp", "pid", "driver_version"}
    return any("." in name and name in known for name in names) or (
        len(names) > 1 and sum(name in known for name in names) >= max(2, len(names) // 2)
    )


def table_csv(text: str, origin: Origin) -> list[AnyRecord]:
    """``--query-gpu=… --format=csv`` (also in a loop) and ``--query-compute-apps``."""
    lines = text.splitlines()
    start = next((n for n, line in enumerate(lines) if is_csv_header(line)), None)
    if start is None:
        raise MmctlError("no header of nvidia-smi's CSV")
    matches = [_COLUMN.match(cell) for cell in lines[start].split(",")]
    names = [match[1] for match in matches if match]
    records: list[AnyRecord] = []
    apps: dict[tuple[str, str], list[Process]] = {}
    seen: dict[str, int] = {}
    rows: list[list[str]] = []
    try:
        rows = list(csv.reader(lines[start + 1 :], skipinitialspace=True))
    except csv.Error as error:
        raise MmctlError(f"not CSV: {error}") from None
    for row in rows:
        if not row or is_csv_header(",".join(row)):
            continue
        if len(row) != len(names):
            raise MmctlError(f"a row of {len(row)} cells under {len(names)} columns")
        tree = dict(zip(names, row, strict=True))
        at = origin._replace(ts_ns=time_of(tree.get("timestamp", ""), origin.ts_ns))
        if "pid" in tree:
            key = (tree.get("gpu_uuid", ""), tree.get("gpu_bus_id", ""))
            if tree["pid"].isdigit():
                name = tree.get("process_name") or tree.get("name")
                used = tree.get("used_gpu_memory") or tree.get("used_memory")
                apps.setdefault(key, []).append(process_record(tree["pid"], name, used))
            seen.setdefault(str(key), len(seen))
            continue
        stamp = tree.get("uuid") or tree.get("pci.bus_id") or tree.get("index") or ""
        number = seen.setdefault(stamp, len(seen)) if stamp else len(records)
        records.append(device(tree, at, number))
    for key, processes in apps.items():
        tree = {name: text for name, text in zip(("uuid", "@id"), key, strict=True) if text}
        records.append(device(tree, origin, seen[str(key)], processes=tuple(processes)))
    if not records and "pid" in names:
        raise NoSourceError("the list of processes is empty and says nothing of the devices")
    return records


def time_of(text: str, fallback_ns: int) -> int:
    """nvidia-smi's local time stamp in nanoseconds since the epoch."""
    from datetime import datetime

    for form in ("%Y/%m/%d %H:%M:%S.%f", "%a %b %d %H:%M:%S %Y", "%Y/%m/%d %H:%M:%S"):
        try:
            return int(datetime.strptime(text.strip(), form).timestamp() * 1e9)
        except (ValueError, OverflowError):
            continue
    return fallback_ns
