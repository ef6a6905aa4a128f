"""``host:`` — processors, memory, pressure and network of this host, by psutil and /proc.

A ``device`` record of ``cpu0`` (all processors as one device, its memory the host's) and a
``host`` record. PSI: the kernel's Documentation/accounting/psi.rst.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from mmctl.engine.profiles import Profile
from mmctl.engine.records import AnyRecord, Device, Host
from mmctl.engine.sources.check import Check

_WARMING = "warming up: a rate needs two readings"
_PACKAGE_SENSORS = ("coretemp", "k10temp", "zenpower", "cpu_thermal", "soc_thermal", "acpitz")


def node_name() -> str:
    """The name of this node as records carry it."""
    return socket.gethostname()


def readings(rest: str, profile: Profile) -> Iterator[list[AnyRecord]]:
    """One ``device`` and one ``host`` record a reading."""
    import psutil

    node = node_name()
    last: dict[str, tuple[float, float]] = {}
    psutil.cpu_percent()
    first = True
    while True:
        ts_ns = time.time_ns()
        memory = psutil.virtual_memory()
        yield [
            _cpu(psutil, node, ts_ns, memory, first),
            _host(psutil, node, ts_ns, memory, last),
        ]
        first = False


def pressure_and_container() -> Iterator[Check]:
    """What the kernel tells of the host, and whether this is a container."""
    pressure = Path("/proc/pressure/memory")
    try:
        pressure.read_text()
        yield Check("host.pressure", "ok", "pressure stall information is on")
    except OSError as error:
        yield Check(
            "host.pressure",
            "problem",
            f"no pressure figures: {error.strerror}",
            "boot with psi=1, kernel 4.20 or later",
        )
    inside = _container()
    if inside:
        yield Check(
            "host.container",
            "ok",
            f"inside a container ({inside}): host figures are "
            "those of the whole node where the runtime does not hide them",
        )


def _container() -> str | None:
    if Path("/.dockerenv").exists():
        return "docker"
    if Path("/run/.containerenv").exists():
        return "podman"
    return "kubernetes" if "KUBERNETES_SERVICE_HOST" in os.environ else None


def _cpu(psutil: Any, node: str, ts_ns: int, memory: Any, first: bool) -> Device:
    absent: dict[str, str] = {}
    percent = psutil.cpu_percent()
    if first:
        absent["sm_ratio"] = _WARMING
    temperature_c = _temperature(psutil)
    if temperature_c is None:
        absent["temperature_c"] = "no sensor of the processor package"
    absent["bandwidth_ratio"] = "the kernel does not count memory traffic"
    absent["power_w"] = "not read on hosts"
    return Device(
        ts_ns=ts_ns,
        node=node,
        device="cpu0",
        kind="cpu",
        model=_model(),
        sm_ratio=None if first else min(percent / 100, 1.0),
        total_bytes=memory.total,
        used_bytes=memory.total - memory.available,
        free_bytes=memory.available,
        temperature_c=temperature_c,
        absent=absent,
    )


@cache
def _model() -> str | None:
    try:
        text = Path("/proc/cpuinfo").read_text("utf-8", "replace")
    except OSError:
        return None
    for line in text.splitlines():
        name, _, value = line.partition(":")
        if name.strip() in ("model name", "Model", "Hardware"):
            return value.strip() or None
    return None


def _temperature(psutil: Any) -> float | None:
    """The hottest package sensor, in °C."""
    try:
        sensors = psutil.sensors_temperatures()
    except (AttributeError, OSError):
        return None
    for name in _PACKAGE_SENSORS:
        values = [reading.current for reading in sensors.get(name, ()) if reading.current]
        if values:
            return float(max(values))
    return None


def _host(
    psutil: Any, node: str, ts_ns: int, memory: Any, last: dict[str, tuple[float, float]]
) -> Host:
    absent: dict[str, str] = {}

    def pressure(resource: str, line: str, field: str) -> float | None:
        value = _pressure(resource, line)
        if value is None:
            absent[field] = f"/proc/pressure/{resource} is not readable here"
        return value

    load_factor = None
    try:
        load_factor = os.getloadavg()[0] / (os.cpu_count() or 1)
    except OSError:
        absent["load_factor"] = "no load average here"
    retransmits, time_wait = _tcp()
    rate = _rate("retransmits", retransmits, ts_ns, last)
    if rate is None:
        absent["tcp_retransmits_per_s"] = (
            "/proc/net/snmp is not readable here" if retransmits is None else _WARMING
        )
    if time_wait is None:
        absent["tcp_time_wait"] = "/proc/net/sockstat is not readable here"
    numa = _numa_free()
    if numa is None:
        absent["numa_free_bytes"] = "no NUMA nodes in /sys"
    return Host(
        ts_ns=ts_ns,
        node=node,
        total_bytes=memory.total,
        available_bytes=memory.available,
        swap_used_bytes=psutil.swap_memory().used,
        load_factor=load_factor,
        cpu_pressure_ratio=pressure("cpu", "some", "cpu_pressure_ratio"),
        memory_pressure_ratio=pressure("memory", "some", "memory_pressure_ratio"),
        memory_full_pressure_ratio=pressure("memory", "full", "memory_full_pressure_ratio"),
        io_pressure_ratio=pressure("io", "some", "io_pressure_ratio"),
        numa_free_bytes=numa,
        tcp_retransmits_per_s=rate,
        tcp_time_wait=time_wait,
        absent=absent,
    )


def _rate(
    name: str, value: float | None, ts_ns: int, last: dict[str, tuple[float, float]]
) -> float | None:
    """Change of a counter per second since the last reading; None at first or after a reset."""
    if value is None:
        return None
    before = last.get(name)
    last[name] = (ts_ns, value)
    if before is None or value < before[1] or ts_ns <= before[0]:
        return None
    return (value - before[1]) / (ts_ns - before[0]) * 1e9


def _pressure(resource: str, line: str) -> float | None:
    """``avg10`` of one line of /proc/pressure, as a share of time."""
    try:
        text = Path("/proc/pressure", resource).read_text()
    except OSError:  # absent, or present and switched off: reading answers EOPNOTSUPP
        return None
    for row in text.splitlines():
        words = row.split()
        if words and words[0] == line:
            for word in words[1:]:
                name, _, value = word.partition("=")
                if name == "avg10":
                    return min(float(value) / 100, 1.0)
    return None


def _tcp() -> tuple[int | None, int | None]:
    """Retransmitted segments since boot, and sockets in TIME_WAIT now."""
    retransmits = time_wait = None
    try:
        rows = [
            row.split() for row in Path("/proc/net/snmp").read_text().splitlines()
            if row.startswith("Tcp:")
        ]  # fmt: skip
        if len(rows) == 2 and "RetransSegs" in rows[0]:
            retransmits = int(rows[1][rows[0].index("RetransSegs")])
    except OSError:
        pass
    try:
        for row in Path("/proc/net/sockstat").read_text().splitlines():
            words = row.split()
            if words[:1] == ["TCP:"] and "tw" in words:
                time_wait = int(words[words.index("tw") + 1])
    except OSError:
        pass
    return retransmits, time_wait


def _numa_free() -> tuple[int, ...] | None:
    """Free bytes of each NUMA node, in order of its number."""
    free = []
    nodes = sorted(
        Path("/sys/devices/system/node").glob("node[0-9]*"), key=lambda path: int(path.name[4:])
    )
    for node in nodes:
        try:
            for row in (node / "meminfo").read_text().splitlines():
                words = row.split()
                if len(words) >= 4 and words[2] == "MemFree:":
                    free.append(int(words[3]) * 1024)
        except OSError:
            continue
    return tuple(free) or None
