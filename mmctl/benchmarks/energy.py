"""Energy of a piece of work, from the device's own counter where it has one.

RAPL counts a processor's packages in µJ (readable by root only on most systems), NVML a board in
mJ since the driver was loaded. NPUs tell their power, which is sampled and summed.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

_RAPL = Path("/sys/class/powercap")
_SAMPLE_S = 0.2


class Meter(NamedTuple):
    """``joules()`` is a counter that only rises; ``stop()`` ends what keeps it."""

    joules: Callable[[], float]
    source: str
    stop: Callable[[], None] = lambda: None


def meter(kind: str, index: int) -> tuple[Meter | None, str]:
    """The meter of a device, or why there is none. ``kind`` is torch's name of it."""
    if kind == "cpu":
        return rapl(_RAPL)
    if kind == "cuda":
        return _nvml(index)
    if kind == "npu":
        return _npu(index)
    return None, f"no energy counter is read for {kind} devices"


def rapl(folder: Path) -> tuple[Meter | None, str]:
    """The processor's packages below ``folder``."""
    packages = [
        path for path in sorted(folder.glob("*-rapl:*")) if path.name.count(":") == 1
    ]  # fmt: skip
    if not packages:
        return None, "this machine shows no RAPL counter (virtual machines hide it)"
    limits = []
    for path in packages:
        try:
            int((path / "energy_uj").read_text())
            limits.append(int((path / "max_energy_range_uj").read_text()))
        except PermissionError:
            return None, f"{path}/energy_uj is readable by root only"
        except (OSError, ValueError):
            return None, f"{path} does not count"
    last = [int((path / "energy_uj").read_text()) for path in packages]
    total = 0.0

    def joules() -> float:
        nonlocal total
        for number, path in enumerate(packages):
            now = int((path / "energy_uj").read_text())
            total += ((now - last[number]) % (limits[number] + 1)) / 1e6
            last[number] = now
        return total

    return Meter(joules, "RAPL, all packages"), ""


def _nvml(index: int) -> tuple[Meter | None, str]:
    try:
        import pynvml
        import torch

        pynvml.nvmlInit()
        uuid = str(torch.cuda.get_device_properties(index).uuid)
        handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid.removeprefix('GPU-')}")
        pynvml.nvmlDeviceGetTotalEnergyConsumption(handle)
    except (ImportError, AttributeError, RuntimeError) as error:
        return None, f"NVML counts no energy here: {error}"
    except Exception as error:  # pynvml raises its own classes, which are not one type per code
        if not type(error).__module__.startswith("pynvml"):
            raise
        return None, f"NVML counts no energy here: {error}"
    return Meter(
        lambda: float(pynvml.nvmlDeviceGetTotalEnergyConsumption(handle)) / 1e3,
        "NVML, the whole board",
    ), ""


def _npu(index: int) -> tuple[Meter | None, str]:
    """Power of an NPU as its driver tells it, summed over time by a thread."""
    from mmctl.engine import profiles
    from mmctl.engine.errors import MmctlError
    from mmctl.engine.records import Device
    from mmctl.engine.sources import open_sources

    def power() -> float | None:
        stop = threading.Event()
        profile = profiles.load(None).profile
        for record in open_sources(["ascend:"], profile, stop):
            if isinstance(record, Device) and record.device == f"npu{index}":
                stop.set()
                return record.power_w
        return None

    try:
        first = power()
    except MmctlError as error:
        return None, str(error)
    if first is None:
        return None, "the driver tells no power of this NPU"
    total, ended = 0.0, threading.Event()

    def sample() -> None:
        nonlocal total
        before, watts = time.monotonic(), first
        while not ended.wait(_SAMPLE_S):
            now = time.monotonic()
            total += watts * (now - before)
            before, watts = now, power() or watts  # a reading that fails leaves the last one

    threading.Thread(target=sample, daemon=True).start()
    return Meter(lambda: total, "power of the NPU, sampled", ended.set), ""
