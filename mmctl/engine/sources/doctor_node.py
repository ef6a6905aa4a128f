"""Checks of what a node has: drivers, devices, kernel, compiler."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from importlib import metadata, util
from pathlib import Path
from typing import Literal, NamedTuple

from mmctl.engine import profiles
from mmctl.engine.errors import MmctlError
from mmctl.engine.records import Device
from mmctl.engine.sources import open_sources

State = Literal["ok", "problem", "absent"]


class Check(NamedTuple):
    """One answer. ``problem``: something is here and does not work; ``absent``: it is not here."""

    id: str
    state: State
    detail: str
    fix: str | None = None


_CAPABILITIES = {"CAP_SYS_ADMIN": 21, "CAP_PERFMON": 38, "CAP_BPF": 39}
_PROGRAM = '#include <dlfcn.h>\nvoid *f(void) { return dlsym(0, "x"); }\n'


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
    present = _pci_devices("0x10de")
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
        yield Check("nvml.driver", state, f"{where}{said}", how if state == "problem" else None)
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


def other_vendors() -> Iterator[Check]:
    """Devices of other vendors and the tools that read them."""
    for vendor, number, tools in (
        ("ascend", "0x19e5", ("npu-smi",)),
        ("amd", "0x1002", ("amd-smi", "rocm-smi")),
    ):
        present = _pci_devices(number)
        tool = next((path for path in map(shutil.which, tools) if path), None)
        if tool:
            yield Check(f"{vendor}.tool", "ok", f"{tool}; {len(present)} devices on the bus")
        elif present:
            yield Check(
                f"{vendor}.tool",
                "problem",
                f"{len(present)} devices on the bus and no {' or '.join(tools)}",
                f"install {tools[0]} or put it on PATH",
            )
        else:
            yield Check(f"{vendor}.tool", "absent", "no such device on this node")


def host() -> Iterator[Check]:
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


def kernel_messages() -> Iterator[Check]:
    """Whether Xids and PCIe errors can be heard."""
    try:
        descriptor = os.open("/dev/kmsg", os.O_RDONLY | os.O_NONBLOCK)
        os.close(descriptor)
        yield Check("kernel.messages", "ok", "/dev/kmsg can be read")
    except OSError as error:
        yield Check(
            "kernel.messages",
            "problem",
            f"/dev/kmsg: {error.strerror}",
            "run as root, or sysctl kernel.dmesg_restrict=0 and mount /dev/kmsg",
        )


def ebpf() -> Iterator[Check]:
    """Whether kernel timelines can be aligned with the devices'."""
    tool = shutil.which("bpftrace")
    effective = 0
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("CapEff:"):
            effective = int(line.split()[1], 16)
    has = [name for name, bit in _CAPABILITIES.items() if effective >> bit & 1]
    able = "CAP_SYS_ADMIN" in has or {"CAP_BPF", "CAP_PERFMON"} <= set(has)
    if tool is None:
        yield Check(
            "ebpf.tool",
            "absent",
            "bpftrace is not installed: no aligned kernel timelines",
            "apt-get install bpftrace",
        )
    if able:
        yield Check("ebpf.capability", "ok", ", ".join(has))
    else:
        yield Check(
            "ebpf.capability",
            "problem" if tool else "absent",
            "neither CAP_SYS_ADMIN nor CAP_BPF with CAP_PERFMON",
            "run as root, or with --cap-add BPF --cap-add PERFMON",
        )


def compiler() -> Iterator[Check]:
    """Whether the allocation hook can be built."""
    found = shutil.which("cc")
    fix = "apt-get install gcc libc6-dev"
    if found is None:
        yield Check(
            "hook.compiler", "problem", "no C compiler: the allocation hook cannot be built", fix
        )
        return
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [found, "-x", "c", "-shared", "-fPIC", "-o", f"{folder}/x.so", "-"],
            input=_PROGRAM,
            capture_output=True,
            text=True,
            timeout=30,
        )
    if done.returncode == 0:
        yield Check("hook.compiler", "ok", found)
    else:
        said = " ".join(done.stderr.split())[:120]
        yield Check("hook.compiler", "problem", f"{found} cannot build a library: {said}", fix)


def _pci_devices(vendor: str) -> list[str]:
    """Display and processing devices of a vendor on the PCI bus (classes 0x03 and 0x12)."""
    found = []
    for device in Path("/sys/bus/pci/devices").glob("*"):
        try:
            kind = (device / "class").read_text().strip()
            if (device / "vendor").read_text().strip() == vendor and (
                kind.startswith(("0x12", "0x03"))
            ):
                found.append(device.name)
        except OSError:
            continue
    return found


def kernel_driver() -> str | None:
    """The version of the loaded kernel module."""
    try:
        return Path("/sys/module/nvidia/version").read_text().strip()
    except OSError:
        return None


def _container() -> str | None:
    if Path("/.dockerenv").exists():
        return "docker"
    if Path("/run/.containerenv").exists():
        return "podman"
    return "kubernetes" if "KUBERNETES_SERVICE_HOST" in os.environ else None
