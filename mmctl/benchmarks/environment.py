"""Where a benchmark ran: hardware, versions, threads and load, for every result file.

A figure without these cannot be compared. What would spoil it (a machine under load, a battery,
a core that the hypervisor gave to others) stands in ``remarks``, in words.
"""

from __future__ import annotations

import os
import platform
import sys
from importlib import metadata
from pathlib import Path

import msgspec
import psutil

from mmctl.engine.errors import UsageError, nearest

PACKAGES = ("mmctl", "numpy", "torch", "numba", "onnx", "onnxruntime", "openvino", "ray")

LISTEN_S = 0.2
BUSY_RATIO = 0.15  # of all cores taken by others before the start
STEAL_RATIO = 0.05


class Environment(msgspec.Struct, frozen=True, kw_only=True):
    """The machine as the benchmark found it.

    ``cores`` may be used by this process, of ``machine_cores``. ``busy_ratio`` is the share of
    all cores that was busy and ``steal_ratio`` the share that the hypervisor took, over a fifth
    of a second before the benchmark; ``load_factor`` the load average of a minute per core.
    ``threads`` are those of torch, where it is loaded. ``accelerators`` are the devices that
    torch reaches beside the CPU, absent where torch is not loaded.
    """

    system: str
    processor: str | None
    cores: int
    machine_cores: int
    memory_bytes: int
    accelerators: tuple[str, ...] | None
    versions: dict[str, str]
    threads: int | None
    busy_ratio: float
    steal_ratio: float | None
    load_factor: float | None
    on_battery: bool | None
    remarks: tuple[str, ...]
    absent: dict[str, str]


def environment() -> Environment:
    """The machine now; call it before the work begins, which otherwise counts as load."""
    times = psutil.cpu_times_percent(LISTEN_S)
    busy = 1 - (times.idle + getattr(times, "iowait", 0.0)) / 100
    steal = times.steal / 100 if hasattr(times, "steal") else None
    cores, machine_cores = usable_cores(), os.cpu_count() or 1
    load = os.getloadavg()[0] / machine_cores if hasattr(os, "getloadavg") else None
    battery = psutil.sensors_battery() if hasattr(psutil, "sensors_battery") else None
    accelerators, threads = _torch()
    absent = {}
    if accelerators is None:
        absent["accelerators"] = absent["threads"] = "torch is not loaded"
    if steal is None:
        absent["steal_ratio"] = "not counted by this system"
    if load is None:
        absent["load_factor"] = "not counted by this system"
    if battery is None:
        absent["on_battery"] = "no battery is known to this system"
    on_battery = None if battery is None else not battery.power_plugged
    remarks = []
    if busy > BUSY_RATIO:
        remarks.append(f"others used {busy:.0%} of the cores when it began: times are too long")
    if steal is not None and steal > STEAL_RATIO:
        remarks.append(f"the hypervisor gave {steal:.0%} of the cores to other machines")
    if on_battery:
        remarks.append("on battery: clocks may be lower than on mains")
    if cores < machine_cores:
        remarks.append(f"may use {cores} of the {machine_cores} cores")
    return Environment(
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
        processor=processor(), cores=cores, machine_cores=machine_cores,
        memory_bytes=psutil.virtual_memory().total, accelerators=accelerators,
        versions=versions(), threads=threads, busy_ratio=min(max(busy, 0.0), 1.0),
        steal_ratio=steal, load_factor=load, on_battery=on_battery, remarks=tuple(remarks),
        absent=absent,
    )  # fmt: skip


def usable_cores() -> int:
    """The cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def processor() -> str | None:
    """The processor's name as its maker gives it."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith(("model name", "Model", "Hardware")):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or None


def versions() -> dict[str, str]:
    """Python and the packages a figure depends on, those that are installed."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def _torch() -> tuple[tuple[str, ...] | None, int | None]:
    torch = sys.modules.get("torch")
    if torch is None:
        return None, None
    names = []
    for kind in ("cuda", "xpu", "npu"):
        backend = getattr(torch, kind, None)
        if backend is not None and backend.is_available():
            names += [backend.get_device_name(i) for i in range(backend.device_count())]
    if torch.backends.mps.is_available():
        names.append("mps")
    return tuple(names), torch.get_num_threads()


TORCH_DEVICES = ("cpu", "cuda", "xpu", "npu", "mps")


def check_torch_device(name: str) -> None:
    """UsageError for what is no device of torch here."""
    import torch

    kind, _, index = name.partition(":")
    if kind not in TORCH_DEVICES or (index and not index.isdigit()):
        raise UsageError(f"no device '{name}'{nearest(kind, TORCH_DEVICES)}")
    try:
        torch.empty(1, device=name)
    except (RuntimeError, AssertionError) as error:
        raise UsageError(f"no device '{name}' here: {str(error).splitlines()[0]}") from None
