"""What ``mmctl doctor`` says of ``nvml:``: the binding, the driver, each device."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from importlib import metadata, util
from pathlib import Path

from mmctl.engine import profiles
from mmctl.engine.errors import MmctlError
from mmctl.engine.records import Device
from mmctl.engine.sources import open_sources
from mmctl.engine.sources.check import Check, State, pci_devices


def binding() -> Iterator[Check]:
    """nvidia-ml-py and the old package ``pynvml`` both bring a module of that name."""
    fix = "pip uninstall pynvml; pip install --force-reinstall nvidia-ml-py"
    try:
        version = metadata.version("nvidia-ml-py")
    except metadata.PackageNotFoundError:
        yield Check(
            "nvml.binding", "problem", "nvidia-ml-py is not installed", "pip install nvidia-ml-py"
        )
        return
    found = util.find_spec("pynvml")
    if found is None or found.origin is None:
        yield Check("nvml.binding", "problem", "nvidia-ml-py is installed without its module", fix)
        return
    if Path(found.origin).name != "pynvml.py":
        yield Check("nvml.binding", "problem", f"{found.origin} hides nvidia-ml-py {version}", fix)
        return
    try:
        old = metadata.version("pynvml")
    except metadata.PackageNotFoundError:
        old = ""
    if old and int(old.split(".")[0] or 0) < 12:
        yield Check("nvml.binding", "problem", f"pynvml {old} may hide nvidia-ml-py {version}", fix)
        return
    yield Check("nvml.binding", "ok", f"nvidia-ml-py {version}")


def nvidia_driver() -> Iterator[Check]:
    """The library, the driver behind it and each GPU."""
    present = pci_devices("0x10de")
    from mmctl.engine.sources.nvml import Session

    profile = profiles.load("default").profile
    try:
        session = Session(profile.sources.timeout_s)
    except MmctlError as error:
        said = str(error)
        state: State = "absent" if "was not found" in said and not present else "problem"
        if "finds no GPU" in said and not present:
            state = "absent"
        fix = {
            "was not found": "install the NVIDIA driver, or run the container with --gpus all",
            "versions differ": "reboot, or unload and load the nvidia modules; in a container "
            "mount the library of the host's driver",
            "no permission": "run as root or add the user to the group of /dev/nvidia*",
            "not loaded": "modprobe nvidia; dmesg says why it fails",
            "does not return": "the driver hangs: dmesg, then reset the GPU or reboot",
            "finds no GPU": "lspci -d 10de: shows what the bus sees; --gpus all in a container",
        }
        how = next((text for words, text in fix.items() if words in said), None)
        where = f"{len(present)} NVIDIA devices on the bus: " if present else ""
        yield Check("nvml.driver", state, f"{where}{said}", how)
        return
    try:
        yield Check(
            "nvml.driver",
            "ok",
            f"driver {session.driver or 'of unknown version'}, {len(session.handles)} GPUs",
        )
        kernel = kernel_driver()
        if kernel and session.driver and kernel != session.driver:
            yield Check(
                "nvml.version",
                "problem",
                f"the kernel module is {kernel}, the library is of {session.driver}",
                "reboot, or mount the library of the host's driver",
            )
    finally:
        session.close()


def nvidia_devices() -> Iterator[Check]:
    """One reading: GPUs that cannot be read, processes of another namespace."""
    profile = profiles.load("default").profile
    devices: dict[str, Device] = {}
    try:
        for record in open_sources(["nvml:"], profile, threading.Event(), 1):
            if isinstance(record, Device):
                devices[record.device] = record
    except MmctlError:
        return
    for name, device in devices.items():
        if device.used_bytes is None and device.temperature_c is None and device.parent is None:
            why = device.absent.get("used_bytes", "no reason is known")
            yield Check(
                f"nvml.device.{name}",
                "problem",
                why,
                "nvidia-smi -q -i and dmesg; drain it, then reset it",
            )
        elif device.recovery_action not in (None, "none"):
            yield Check(
                f"nvml.device.{name}",
                "problem",
                f"the driver asks for {device.recovery_action}",
                "drain it and do so",
            )
        elif device.remap_pending:
            yield Check(
                f"nvml.device.{name}",
                "problem",
                "a row remap waits for a reset",
                "drain it and reset it",
            )
        else:
            missing = [
                f
                for f in ("sm_ratio", "used_bytes", "power_w", "temperature_c")
                if getattr(device, f) is None
            ]
            yield Check(
                f"nvml.device.{name}",
                "ok",
                device.model or "a GPU without a name"
                if not missing
                else f"{device.model}; not given: {', '.join(missing)}",
            )
    held = [process for device in devices.values() for process in device.processes or ()]
    if held and all(process.name is None for process in held):
        yield Check(
            "nvml.processes",
            "problem",
            f"{len(held)} pids are of another PID namespace",
            "run the container with --pid=host (Kubernetes: hostPID: true)",
        )
    elif held:
        yield Check("nvml.processes", "ok", f"{len(held)} processes, named")


def kernel_driver() -> str | None:
    """The version of the loaded kernel module."""
    try:
        return Path("/sys/module/nvidia/version").read_text().strip()
    except OSError:
        return None
