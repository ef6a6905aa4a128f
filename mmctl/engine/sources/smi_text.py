"""What ``nvidia-smi`` draws for people: the plain table, dmon, pmon, and whole captures."""

from __future__ import annotations

import re
from typing import Any

import msgspec

from mmctl.engine.errors import MmctlError, NoSourceError
from mmctl.engine.records import AnyRecord, Device, Link, Process
from mmctl.engine.sources import smi
from mmctl.engine.sources.smi import Origin

FAILURES = re.compile(
    r"NVIDIA-SMI has failed|Unable to determine the device handle|Failed to initialize NVML|"
    r"couldn't communicate with the NVIDIA driver|NVML: Driver/library version mismatch|"
    r"No devices were found"
)

_GPU = re.compile(r"\|\s*(\d+)\s+(\S.*?)\s+(On|Off|N/A|WDDM|TCC|MCDM)?\s*\|\s*([0-9A-Fa-f]+:\S+)")
_READING = re.compile(
    r"\|\s*(?P<fan>\S+?)\s+(?P<temp>-?\d+C|N/A|ERR!)\s+(?P<perf>P\d+|N/A|ERR!)\s+"
    r"(?P<power>\S+)\s*/\s*(?P<limit>\S+)\s*\|"
    r"\s*(?:(?P<used>\S+)\s*/\s*(?P<total>\S+)|(?P<none>[A-Za-z/ !]+?))\s*\|\s*(?P<util>\S+)"
)
_INSTANCE = re.compile(r"\|\s*(\d+)\s+(\d+)\s+(\d+)\s+(\d+)\s*\|\s*(\d+MiB)\s*/\s*(\d+MiB)\s*\|")
_PROCESS = re.compile(
    r"\|\s*(?P<gpu>\d+)\s+(?:(?P<gi>N/A|\d+)\s+(?P<ci>N/A|\d+)\s+)?(?P<pid>\d+)\s+"
    r"(?P<type>[A-Z+/]+)\s+(?P<name>\S.*?)\s+(?P<used>\d+MiB|N/A)\s*\|"
)


def failure(text: str, origin: Origin) -> list[AnyRecord]:
    """nvidia-smi's own words that it could not read anything."""
    raise NoSourceError(f"nvidia-smi said: {' '.join(text.split())[:200]}")


def table(text: str, origin: Origin) -> list[AnyRecord]:
    """The plain table of all drivers since 2016, whole or a part of it."""
    first = text.lstrip().split("\n", 1)[0]
    origin = origin._replace(ts_ns=smi.time_of(first, origin.ts_ns))
    trees: dict[int, smi.Tree] = {}
    instances: list[tuple[int, int, smi.Tree]] = []
    processes: dict[int, list[Process]] = {}
    current: smi.Tree | None = None
    listed = "Processes:" in text
    for line in text.splitlines():
        if found := _INSTANCE.match(line):
            own = {"fb_memory_usage/used": found[5], "fb_memory_usage/total": found[6]}
            instances.append((int(found[1]), int(found[4]), own))
        elif found := _PROCESS.match(line):
            process = smi.process_record(found["pid"], found["name"], found["used"])
            processes.setdefault(int(found["gpu"]), []).append(process)
        elif found := _GPU.match(line):
            current = {"name": found[2].rstrip("."), "pci.bus_id": found[4], "index": found[1]}
            trees[int(found[1])] = current
        elif current is not None and (found := _READING.match(line)):
            current |= {
                "temperature.gpu": found["temp"], "power.draw": found["power"],
                "enforced.power.limit": found["limit"], "utilization.gpu": found["util"],
                "fb_memory_usage/used": found["used"] or found["none"],
                "fb_memory_usage/total": found["total"] or found["none"],
            }  # fmt: skip
            current = None
    records: list[AnyRecord] = []
    for index, tree in trees.items():
        held = tuple(processes.get(index, ())) if listed else None
        records.append(smi.device(tree, origin, index, processes=held))
    for gpu, place, tree in instances:
        records.append(
            smi.device(tree, origin, gpu, device=f"gpu{gpu}.mig{place}", parent=f"gpu{gpu}")
        )
    return records


_DMON: dict[str, tuple[str, float]] = {
    "pwr": ("power_w", 1), "gtemp": ("temperature_c", 1), "mtemp": ("memory_temperature_c", 1),
    "sm": ("sm_ratio", 0.01), "mem": ("bandwidth_ratio", 0.01), "mclk": ("memory_clock_hz", 1e6),
    "pclk": ("sm_clock_hz", 1e6), "fb": ("used_bytes", 2**20),
    "rxpci": ("pcie_rx_bytes_per_s", 1e6), "txpci": ("pcie_tx_bytes_per_s", 1e6),
}  # fmt: skip


def monitor(text: str, origin: Origin) -> list[AnyRecord]:
    """``dmon`` and ``pmon``: columns under a header that begins with #; a second a cycle."""
    columns: list[str] = []
    rows: list[dict[str, str]] = []
    for line in text.splitlines():
        words = line.lstrip("#").split()
        if line.lstrip().startswith("#"):
            if "gpu" in words:
                columns = [word.lower() for word in words]
            continue
        if columns and len(words) >= len(columns):
            head = words[: len(columns) - 1]
            rows.append(dict(zip(columns, [*head, " ".join(words[len(head) :])], strict=True)))
    if not rows:
        raise MmctlError("a header of dmon or pmon without rows")
    return _process_rows(rows, origin) if "pid" in columns else _device_rows(rows, origin)


def _cycles(rows: list[dict[str, str]], key: str) -> list[int]:
    """The cycle of each row: a new one begins when a key comes again."""
    cycle, seen, found = 0, set[str](), []
    for row in rows:
        name = row["gpu"] + "/" + row.get(key, "")
        if name in seen:
            cycle += 1
            seen.clear()
        seen.add(name)
        found.append(cycle)
    return found


def _device_rows(rows: list[dict[str, str]], origin: Origin) -> list[AnyRecord]:
    records: list[AnyRecord] = []
    cycles = _cycles(rows, "gpu")
    for row, cycle in zip(rows, cycles, strict=True):
        values: dict[str, Any] = {}
        absent: dict[str, str] = {}
        for column, (field, scale) in _DMON.items():
            if column not in row:
                continue
            number = smi.quantity(row[column])
            if number is None or number < 0:
                absent[field] = f"nvidia-smi says: {row[column]}"
            else:
                values[field] = number * scale
        for field in ("sm_ratio", "bandwidth_ratio"):
            if field in values:
                values[field] = round(min(values[field], 1.0), 9)
        if "used_bytes" in values:
            values["used_bytes"] = round(values["used_bytes"])
        for field in ("used_bytes", "total_bytes"):
            if field not in values:
                absent.setdefault(field, "dmon does not show it")
        if row["gpu"].isdigit():
            ts_ns = origin.ts_ns - (cycles[-1] - cycle) * 10**9
            records.append(
                Device(ts_ns=ts_ns, node=origin.node, device=f"gpu{row['gpu']}", kind="gpu",
                       nvml_index=int(row["gpu"]), counters="utilization", absent=absent, **values)
            )  # fmt: skip
    return records


def _process_rows(rows: list[dict[str, str]], origin: Origin) -> list[AnyRecord]:
    cycles = _cycles(rows, "pid")
    held: dict[tuple[int, str], list[Process]] = {}
    for row, cycle in zip(rows, cycles, strict=True):
        own = held.setdefault((cycle, row["gpu"]), [])
        if row["pid"].isdigit():
            name = row.get("command") or row.get("name")
            own.append(smi.process_record(row["pid"], name, row.get("fb", "") + "MiB"))
    why = "pmon does not show it"
    absent = dict.fromkeys(
        ("sm_ratio", "used_bytes", "total_bytes", "temperature_c", "power_w"), why
    )
    return [
        Device(ts_ns=origin.ts_ns - (cycles[-1] - cycle) * 10**9, node=origin.node,
               device=f"gpu{gpu}", kind="gpu", processes=tuple(own), absent=absent)
        for (cycle, gpu), own in held.items() if gpu.isdigit()
    ]  # fmt: skip


_SECTION = re.compile(r"^#{20,}\n# (.*)\n# \$ (.*)\n(?:#.*\n)*?#{20,}\n", re.MULTILINE)


def capture(text: str, origin: Origin) -> list[AnyRecord]:
    """Many calls of nvidia-smi in one file: what they say of one device at one time is joined,
    and a later phase (idle, load) follows the earlier one."""
    from mmctl.engine.sources import files

    heads = list(_SECTION.finditer(text))
    if not heads:
        raise MmctlError("a capture without the heading of a section")
    phases: dict[str, dict[str, Device]] = {}
    links: list[Link] = []
    for head, end in zip(heads, [*(h.start() for h in heads[1:]), len(text)], strict=True):
        body = text[head.end() : end].strip("\n")
        if "nvidia-smi" not in head[2] or " --help" in head[2] or head[2].rstrip().endswith(" -h"):
            continue
        form = files.form_of(body[: 1 << 16])
        if form is None or form.target.endswith((":capture", ":_page")) or not body.strip():
            continue
        try:
            records = files.read_as(form, body, origin)
        except MmctlError:
            continue  # a section that holds nothing, such as an empty list of processes
        phase = phases.setdefault(head[1].split("::")[0].strip(), {})
        for record in records:
            if isinstance(record, Link):
                links.append(record)
            elif isinstance(record, Device):
                name = _same(phase, record)
                phase[name] = _join(phase[name], record) if name in phase else record
    found: list[AnyRecord] = [*links]
    for number, phase in enumerate(phases.values()):
        # A later phase of devices that print no time is put after the earlier one.
        found += [
            msgspec.structs.replace(device, ts_ns=device.ts_ns + number)
            if device.ts_ns == origin.ts_ns else device
            for device in phase.values()
        ]  # fmt: skip
    return found


def _same(phase: dict[str, Device], record: Device) -> str:
    """The name of the device that ``record`` is about: by its bus, by its UUID unless that was
    masked, else by its own name."""
    for name, device in phase.items():
        if record.parent is not None or device.parent is not None:
            continue
        if record.pci and device.pci:
            if _bus(record.pci) == _bus(device.pci):
                return name
        elif record.uuid and record.uuid == device.uuid and record.uuid.strip("GPU0-"):
            return name
    return record.device


def _bus(pci: str) -> str:
    """A bus id without the width of its domain."""
    return pci.lower().lstrip("0") if pci.count(":") > 1 else pci.lower()


def _join(a: Device, b: Device) -> Device:
    """The reading that says more, with what only the other has."""
    first, second = (a, b) if _said(a) >= _said(b) else (b, a)
    extra = {
        field: value
        for field in Device.__struct_fields__
        if field not in ("absent", "ts_ns") and getattr(first, field) in (None, ())
        and (value := getattr(second, field)) is not None
    }  # fmt: skip
    absent = {field: why for field, why in first.absent.items() if field not in extra}
    return msgspec.structs.replace(first, absent=absent, **extra)


def _said(device: Device) -> int:
    return sum(getattr(device, field) is not None for field in Device.__struct_fields__)
