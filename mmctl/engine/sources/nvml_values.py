"""Values of NVML as records have them: absence with its reason, rates, names, processes."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

from mmctl.engine.records import Process
from mmctl.engine.sources.processes import describe

REASONS: dict[int, str] = {
    1: "NVML was shut down",
    2: "the driver rejects the request",
    3: "not supported by this device",
    4: "no permission; run as root or grant access to /dev/nvidia*",
    6: "not found",
    9: "the NVIDIA driver is not loaded; nvidia-smi and dmesg say more",
    10: "the driver timed out",
    12: "libnvidia-ml.so.1 was not found; install the driver or mount its library",
    13: "this driver is too old to have it",
    14: "the infoROM is corrupted",
    15: "the GPU is lost; it fell off the bus or needs a reset",
    16: "the GPU requires a reset",
    17: "the operating system blocked the request",
    18: "driver and library versions differ; reboot or reload the driver",
    23: "the driver is out of resources",
    25: "this driver has another version of the call",
    26: "deprecated in this driver",
    27: "not ready yet",
    28: "the GPU was not found",
    999: "the driver gives an unknown error",
}
"""What an NVML return code means to an operator, by nvml.h's nvmlReturn_t."""

RECOVERY: tuple[str, ...] = (
    "none", "gpu_reset", "node_reboot", "drain_p2p", "drain_and_reset", "recover_imex_domain",
    "bus_reset", "system_reboot",
)  # fmt: skip
"""nvmlDeviceGpuRecoveryAction_t, field value 230."""

FABRIC: tuple[str, ...] = ("not_supported", "not_started", "in_progress", "completed")
"""nvmlGpuFabricState_t: how far Fabric Manager has come with this GPU."""

LOST = (15, 16, 28)
"""Return codes that mean the device as a whole."""

MAX_BYTES = 1 << 50

WARMING = "warming up: a rate needs two readings"

FIELDS: tuple[str, ...] = (
    "uuid", "pci", "model", "sm_ratio", "bandwidth_ratio", "occupancy_ratio", "total_bytes",
    "used_bytes", "reserved_bytes", "free_bytes", "temperature_c", "memory_temperature_c",
    "power_w", "power_instant_w", "power_limit_w", "energy_j", "sm_clock_hz", "memory_clock_hz",
    "throttle", "pcie_rx_bytes_per_s", "pcie_tx_bytes_per_s", "nvlink_rx_bytes_per_s",
    "nvlink_tx_bytes_per_s", "nvlink_errors", "fabric", "ecc_corrected", "ecc_uncorrected",
    "remap_pending", "recovery_action", "processes",
)  # fmt: skip
"""What a reading of an NVIDIA device gives, or gives a reason for."""


class Missing(Exception):
    """A value that the driver does not give; the message says why."""

    def __init__(self, reason: str, code: int = 0) -> None:
        super().__init__(reason)
        self.code = code


class Lost(Exception):
    """The device as a whole cannot be read."""

    def __init__(self, reason: str, code: int) -> None:
        super().__init__(reason)
        self.code = code


class Sheet:
    """What one reading of one device has brought so far: values, and reasons for the rest."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}
        self.absent: dict[str, str] = {}
        self.answered = 0
        self.last_missing: Missing | None = None

    def take(
        self, field: str, ask: Callable[[], Any], low: float = 0.0, high: float = float("inf"),
        scale: float = 1.0,
    ) -> Any:  # fmt: skip
        """The value of ``field`` times ``scale``; None with a reason when it is absent or when
        what the driver gave lies outside [low, high]. A lost device ends the reading."""
        try:
            value = ask()
        except Missing as problem:
            self.last_missing = problem
            if problem.code in LOST:
                raise Lost(str(problem), problem.code) from None
            self.absent[field] = str(problem)
            return None
        self.answered += 1
        if isinstance(value, (int, float)):
            if not low <= value <= high:
                self.absent[field] = f"the driver gave {value}, which cannot be"
                return None
            value = value * scale if scale != 1.0 else value
        self.put(field, value)
        return value

    def put(self, field: str, value: Any) -> None:
        """Set a field, which then is no longer absent."""
        self.values[field] = value
        self.absent.pop(field, None)

    def absent_rest(self, reason: str) -> None:
        """Give every field that has neither value nor reason this reason."""
        for field in FIELDS:
            if self.values.get(field) is None and field not in self.absent:
                self.absent[field] = reason


class Rates:
    """Counters → rates between two readings; absent at first and after a reset."""

    def __init__(self) -> None:
        self.last: dict[str, tuple[float, float]] = {}

    def take(self, sheet: Sheet, field: str, total: float | None, now_s: float) -> None:
        """The field's rate since the last reading, from its counter's ``total`` at ``now_s``."""
        if total is None:
            return
        before = self.last.get(field)
        self.last[field] = (now_s, total)
        if before is None or now_s <= before[0]:
            sheet.absent[field] = WARMING
        elif total < before[1]:
            sheet.absent[field] = "the counter was reset"
        else:
            sheet.put(field, (total - before[1]) / (now_s - before[0]))


def text_of(value: Any) -> str:
    """NVML gives some texts as bytes."""
    return value.decode("ascii", "replace") if isinstance(value, bytes) else str(value)


def given(value: int | float | Missing) -> int | float:
    """A field value; raises what it is missing for."""
    if isinstance(value, Missing):
        raise value
    return value


def named(names: tuple[str, ...], number: Any, what: str) -> str:
    """The word for a number of an enumeration; Missing for one this version does not know."""
    if not 0 <= number < len(names):
        raise Missing(f"{what} {number} is not one this version knows")
    return names[int(number)]


def field_value(value: Any) -> int | float | Missing:
    """One nvmlFieldValue_t, by its value type."""
    if value.nvmlReturn != 0:
        code = int(value.nvmlReturn)
        return Missing(REASONS.get(code, f"NVML error {code}"), 0)
    kinds = ("dVal", "uiVal", "ulVal", "ullVal", "sllVal", "siVal")
    kind = int(value.valueType)
    if not 0 <= kind < len(kinds):
        return Missing(f"a value of unknown type {kind}")
    number: int | float = getattr(value.value, kinds[kind])
    if isinstance(number, float) and number != number:
        return Missing("the driver gave no number")
    return number


def fabric(ask: Callable[..., Any], handle: Any) -> str:
    """How far Fabric Manager has come with this GPU."""
    import ctypes

    import pynvml

    struct = getattr(pynvml, "c_nvmlGpuFabricInfo_v2_t", None)
    if struct is None:
        raise Missing("this pynvml does not know Fabric Manager", 13)
    info = struct()
    ask("nvmlDeviceGetGpuFabricInfoV", handle, ctypes.byref(info))
    return named(FABRIC, info.state, "fabric state")


def processes_on(ask: Callable[..., Any], handle: Any) -> tuple[Process, ...]:
    """Processes of all kinds, once each; the memory of one may be absent."""
    found: dict[int, int | None] = {}
    answered = False
    problem: Missing | None = None
    for name in ("nvmlDeviceGetComputeRunningProcesses", "nvmlDeviceGetGraphicsRunningProcesses",
                 "nvmlDeviceGetMPSComputeRunningProcesses"):  # fmt: skip
        try:
            for process in ask(name, handle):
                used = process.usedGpuMemory
                if used is not None and not 0 <= used < MAX_BYTES:
                    used = None
                if found.get(process.pid) is None:
                    found[process.pid] = used
            answered = True
        except Missing as why:
            if why.code in LOST:
                raise
            problem = problem or why
    if not answered and problem is not None:
        raise problem
    return tuple(describe(pid, used) for pid, used in sorted(found.items()))


def mig_instances(ask: Callable[..., Any], handle: Any) -> list[tuple[Any, dict[str, Any]]]:
    """Handles of the MIG instances with what never changes of them."""
    try:
        if not ask("nvmlDeviceGetMigMode", handle)[0]:
            return []
        limit = ask("nvmlDeviceGetMaxMigDeviceCount", handle)
    except Missing:
        return []
    found = []
    for number in range(min(limit, 64)):
        try:
            child = ask("nvmlDeviceGetMigDeviceHandleByIndex", handle, number)
            facts = {"uuid": ask("nvmlDeviceGetUUID", child)}
        except Missing:
            continue
        with suppress(Missing):
            facts["model"] = ask("nvmlDeviceGetName", child)
        with suppress(Missing):
            facts["instance"] = ask("nvmlDeviceGetGpuInstanceId", child)
        found.append((child, facts))
    return found
