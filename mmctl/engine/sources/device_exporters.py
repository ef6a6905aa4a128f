"""Device exporters: which metric of which exporter is which field of a device record.

dcgm-exporter (names before and since DCGM 4.6), nvidia_gpu_exporter, npu-exporter, AMD's
device-metrics-exporter. A field lists names with the factor to its unit, newest first.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, NamedTuple

from mmctl.engine.records import THROTTLE, Device, Process
from mmctl.engine.sources.exposition import Sample
from mmctl.engine.sources.nvml_values import FABRIC, RECOVERY

MIB, MB = float(1 << 20), 1e6

Names = tuple[tuple[str, float], ...]


class Exporter(NamedTuple):
    """A device exporter: its kind of device, its fields, and how it names a device."""

    kind: str
    fields: dict[str, Names]
    ordinal: tuple[str, ...]
    uuid: tuple[str, ...]
    pci: tuple[str, ...]
    model: tuple[str, ...]


_D, _P = "DCGM_FI_DEV_", "DCGM_FI_PROF_"

EXPORTERS: dict[str, Exporter] = {
    "dcgm": Exporter(
        "gpu",
        {
            "sm_ratio": ((f"{_P}SM_UTIL_RATIO", 1), (f"{_P}SM_ACTIVE", 1),
                         (f"{_D}GPU_UTIL_RATIO", 1), (f"{_D}GPU_UTIL", 0.01)),
            "bandwidth_ratio": ((f"{_P}DRAM_UTIL_RATIO", 1), (f"{_P}DRAM_ACTIVE", 1),
                                (f"{_D}MEM_COPY_UTIL_RATIO", 1), (f"{_D}MEM_COPY_UTIL", 0.01)),
            "occupancy_ratio": ((f"{_P}SM_OCCUPANCY_RATIO", 1), (f"{_P}SM_OCCUPANCY", 1)),
            "total_bytes": ((f"{_D}FB_TOTAL_BYTES", 1), (f"{_D}FB_TOTAL", MIB)),
            "used_bytes": ((f"{_D}FB_USED_BYTES", 1), (f"{_D}FB_USED", MIB)),
            "free_bytes": ((f"{_D}FB_FREE_BYTES", 1), (f"{_D}FB_FREE", MIB)),
            "reserved_bytes": ((f"{_D}FB_RESERVED_BYTES", 1), (f"{_D}FB_RESERVED", MIB)),
            "temperature_c": ((f"{_D}GPU_TEMP_CELSIUS", 1), (f"{_D}GPU_TEMP", 1)),
            "memory_temperature_c": ((f"{_D}MEMORY_TEMP_CELSIUS", 1), (f"{_D}MEMORY_TEMP", 1)),
            "power_w": ((f"{_D}BOARD_POWER_WATTS", 1), (f"{_D}POWER_USAGE", 1)),
            "power_instant_w": ((f"{_D}BOARD_POWER_INSTANT_WATTS", 1),
                                (f"{_D}POWER_USAGE_INSTANT", 1)),
            "energy_j": ((f"{_D}GPU_ENERGY_JOULES_TOTAL", 1),
                         (f"{_D}TOTAL_ENERGY_CONSUMPTION", 1e-3)),
            "sm_clock_hz": ((f"{_D}SM_CLOCK_HERTZ", 1), (f"{_D}SM_CLOCK", 1e6)),
            "memory_clock_hz": ((f"{_D}MEMORY_CLOCK_HERTZ", 1), (f"{_D}MEM_CLOCK", 1e6)),
            "throttle": ((f"{_D}CLOCKS_EVENT_REASONS", 1), (f"{_D}CLOCK_THROTTLE_REASONS", 1)),
            "pcie_tx_bytes_per_s": ((f"{_P}PCIE_TX_BYTES", 1),),
            "pcie_rx_bytes_per_s": ((f"{_P}PCIE_RX_BYTES", 1),),
            "nvlink_tx_bytes_per_s": ((f"{_P}NVLINK_TX_BYTES", 1),),
            "nvlink_rx_bytes_per_s": ((f"{_P}NVLINK_RX_BYTES", 1),),
            "nvlink_errors": ((f"{_D}NVLINK_REPLAY_ERROR_COUNT_TOTAL", 1),),
            "ecc_corrected": ((f"{_D}ECC_SBE_VOL_TOTAL", 1),),
            "ecc_uncorrected": ((f"{_D}ECC_DBE_VOL_TOTAL", 1),),
            "remap_pending": ((f"{_D}ROW_REMAP_PENDING", 1),),
            "fabric": ((f"{_D}FABRIC_MANAGER_STATUS", 1),),
            "xid": ((f"{_D}XID_ERROR", 1), (f"{_D}XID_ERRORS", 1)),
            "recovery_action": ((f"{_D}GET_GPU_RECOVERY_ACTION", 1),),
        },
        ("gpu",), ("uuid", "gpu_uuid"), ("pci_bus_id",), ("modelname", "model_name"),
    ),
    "nvidia_gpu_exporter": Exporter(
        "gpu",
        {
            "sm_ratio": (("nvidia_smi_utilization_gpu_ratio", 1),),
            "bandwidth_ratio": (("nvidia_smi_utilization_memory_ratio", 1),),
            "total_bytes": (("nvidia_smi_memory_total_bytes", 1),),
            "used_bytes": (("nvidia_smi_memory_used_bytes", 1),),
            "free_bytes": (("nvidia_smi_memory_free_bytes", 1),),
            "reserved_bytes": (("nvidia_smi_memory_reserved_bytes", 1),),
            "temperature_c": (("nvidia_smi_temperature_gpu", 1),),
            "memory_temperature_c": (("nvidia_smi_temperature_memory", 1),),
            "power_w": (("nvidia_smi_power_draw_average_watts", 1),
                        ("nvidia_smi_power_draw_watts", 1)),
            "power_instant_w": (("nvidia_smi_power_draw_instant_watts", 1),),
            "power_limit_w": (("nvidia_smi_enforced_power_limit_watts", 1),
                              ("nvidia_smi_power_limit_watts", 1)),
            "sm_clock_hz": (("nvidia_smi_clocks_current_sm_clock_hz", 1),),
            "memory_clock_hz": (("nvidia_smi_clocks_current_memory_clock_hz", 1),),
            "throttle": (("nvidia_smi_clocks_event_reasons_active", 1),
                         ("nvidia_smi_clocks_throttle_reasons_active", 1)),
            "ecc_corrected": (("nvidia_smi_ecc_errors_corrected_volatile_total", 1),),
            "ecc_uncorrected": (("nvidia_smi_ecc_errors_uncorrected_volatile_total", 1),),
            "remap_pending": (("nvidia_smi_remapped_rows_pending", 1),),
            "fabric": (("nvidia_smi_fabric_state", 1),),
            "recovery_action": (("nvidia_smi_gpu_recovery_action", 1),),
            "index": (("nvidia_smi_index", 1),),
            "info": (("nvidia_smi_gpu_info", 1),),
            "process_bytes": (("nvidia_smi_compute_app_used_memory_bytes", 1),),
        },
        ("index",), ("uuid",), ("pci_bus_id",), ("name",),
    ),
    "triton": Exporter(
        "gpu",
        {
            "sm_ratio": (("nv_gpu_utilization", 1),),
            "total_bytes": (("nv_gpu_memory_total_bytes", 1),),
            "used_bytes": (("nv_gpu_memory_used_bytes", 1),),
            "power_w": (("nv_gpu_power_usage", 1),),
            "power_limit_w": (("nv_gpu_power_limit", 1),),
            "energy_j": (("nv_energy_consumption", 1),),
        },
        ("gpu",), ("gpu_uuid",), ("pci_bus_id",), ("model_name",),
    ),
    "npu": Exporter(
        "npu",
        {
            "sm_ratio": (("npu_chip_info_utilization", 0.01),
                         ("npu_chip_info_ai_core_utilization", 0.01)),
            "bandwidth_ratio": (("npu_chip_info_hbm_bandwidth_utilization", 0.01),),
            "total_bytes": (("npu_chip_info_hbm_total_memory", MIB),
                            ("npu_chip_info_total_memory", MIB)),
            "used_bytes": (("npu_chip_info_hbm_used_memory", MIB),
                           ("npu_chip_info_used_memory", MIB)),
            "temperature_c": (("npu_chip_info_temperature", 1),),
            "memory_temperature_c": (("npu_chip_info_hbm_temperature", 1),),
            "power_w": (("npu_chip_info_power", 1),),
            "sm_clock_hz": (("npu_chip_info_aicore_current_freq", 1e6),),
            "ecc_corrected": (("npu_chip_info_hbm_ecc_single_bit_error_cnt", 1),),
            "ecc_uncorrected": (("npu_chip_info_hbm_ecc_double_bit_error_cnt", 1),),
            "health": (("npu_chip_info_health_status", 1),),
            "process_bytes": (("npu_chip_info_process_info", MIB),),
        },
        ("id", "npuid"), ("vdie_id", "vdieid"), ("pcie_bus_info", "pciebusinfo"),
        ("model_name", "modelname"),
    ),
    "amd": Exporter(
        "gpu",
        {
            "sm_ratio": (("gpu_gfx_activity", 0.01), ("gpu_usage", 0.01)),
            "bandwidth_ratio": (("gpu_umc_activity", 0.01), ("gpu_memory_usage", 0.01)),
            "total_bytes": (("gpu_total_vram", MIB), ("gpu_total_memory", MB)),
            "used_bytes": (("gpu_used_vram", MIB), ("gpu_used_memory", MB)),
            "free_bytes": (("gpu_free_vram", MIB),),
            "temperature_c": (("gpu_junction_temperature", 1), ("gpu_edge_temperature", 1)),
            "memory_temperature_c": (("gpu_memory_temperature", 1), ("gpu_hbm_temperature", 1)),
            "power_w": (("gpu_package_power", 1), ("gpu_average_package_power", 1),
                        ("gpu_power_usage", 1)),
            "energy_j": (("gpu_energy_consumed", 1e-6),),
            "ecc_corrected": (("gpu_ecc_correct_total", 1),),
            "ecc_uncorrected": (("gpu_ecc_uncorrect_total", 1),),
        },
        ("gpu_id", "gpu_index", "gpu"), ("gpu_uuid",), ("pcie_bus_id", "pci_bus_id"),
        ("card_model", "card_series"),
    ),
}  # fmt: skip

FIELD_OF: dict[str, tuple[str, str, int, float]] = {
    name: (exporter, field, rank, factor)
    for exporter, entry in EXPORTERS.items()
    for field, names in entry.fields.items()
    for rank, (name, factor) in enumerate(names)
}
"""Metric name → exporter, field, rank among that field's names, factor to the field's unit."""

_INTEGERS = ("total_bytes", "used_bytes", "free_bytes", "reserved_bytes", "nvlink_errors",
             "ecc_corrected", "ecc_uncorrected", "xid")  # fmt: skip
_SHOWN = ("sm_ratio", "bandwidth_ratio", "total_bytes", "used_bytes", "free_bytes",
          "temperature_c", "power_w", "throttle")  # fmt: skip


def canonical(name: str) -> str | None:
    """The name as the table knows it; AMD's exporter may put a prefix of its own before it."""
    if name in FIELD_OF:
        return name
    place = name.find("gpu_")
    if place > 0 and name[place - 1] == "_" and name[place:] in FIELD_OF:
        return name[place:]
    return None


def blank(value: float) -> str | None:
    """Why a value is none: DCGM's sentinels by dcgm_structs.h, NaN, or a negative reading."""
    if value != value:
        return "the exporter gave NaN"
    if value >= 140737488355328 or 0x7FFFFFF0 <= value <= 0x7FFFFFFF:
        return f"a sentinel of the exporter ({value:.0f}): not supported or not yet sampled"
    if value < 0:
        return f"the exporter gave {value:g}: it could not read it"
    return None


def devices(samples: Iterable[Sample], node: str, ts_ns: int) -> list[Device]:
    """One record a device on the page; the labels' names are in lower case."""
    found: dict[tuple[str, str, str], dict[str, Any]] = {}
    for sample in samples:
        entry = FIELD_OF.get(sample.name)
        if entry is None:
            continue
        labels = sample.labels
        where = EXPORTERS[entry[0]]
        index, uuid = _first(labels, where.ordinal), _first(labels, where.uuid)
        if entry[0] == "nvidia_gpu_exporter":
            index = ""  # one device has many label sets there; its uuid is in all of them
        # A masked UUID is all zeros; then the index on its host tells devices apart.
        masked = not uuid.upper().removeprefix("GPU").strip("0-")
        own = f"{labels.get('hostname', '')}/{index or uuid}" if masked else uuid
        key = (entry[0], own, labels.get("gpu_i_id", ""))
        state = found.get(key)
        if state is None:
            state = found[key] = {"labels": {}, "best": {}, "absent": {}, "processes": {}}
        known = state["labels"]
        for label, value in labels.items():
            if value and label not in known:
                known[label] = value
        _put(state, sample, entry, labels)
    records = [
        _device(key, state, node, ts_ns, number)
        for number, (key, state) in enumerate(found.items())
    ]
    return sorted(records, key=lambda record: _natural(record.device))


def _put(
    state: dict[str, Any], sample: Sample, entry: tuple[str, str, int, float],
    labels: dict[str, str],
) -> None:  # fmt: skip
    _, field, rank, factor = entry
    if field == "process_bytes":
        pid = labels.get("pid") or labels.get("process_id", "")
        if pid.isdigit() and int(pid) > 0:
            used = None if blank(sample.value) else int(sample.value * factor)
            state["processes"][int(pid)] = Process(
                pid=int(pid), name=_base(labels.get("process_name")), used_bytes=used
            )
        return
    if sample.time_ms is not None:
        state["time_ms"] = max(state.get("time_ms", 0), sample.time_ms)
    why = blank(sample.value)
    before = state["best"].get(field)
    if why is not None:
        state["absent"].setdefault(field, why)
    elif before is None or rank < before[0]:
        state["best"][field] = (rank, sample.value * factor)
    elif rank == before[0] and field in ("nvlink_errors", "memory_temperature_c"):
        # One series a link or a stack: errors add up, the hottest stack counts.
        join = sum if field == "nvlink_errors" else max
        state["best"][field] = (rank, join((before[1], sample.value * factor)))


def _device(
    key: tuple[str, str, str], state: dict[str, Any], node: str, ts_ns: int, number: int
) -> Device:
    exporter = EXPORTERS[key[0]]
    labels, absent = state["labels"], state["absent"]
    values = {field: value for field, (_, value) in state["best"].items()}
    values.pop("info", None)
    index = _first(labels, exporter.ordinal)
    if "index" in values:
        index = f"{values.pop('index'):.0f}"
    device = f"{exporter.kind}{index if index.isdigit() else number}"
    parent = None
    if key[2]:
        parent, device = device, f"{device}.gi{key[2]}"
    model = _first(labels, exporter.model) or None
    if profile := labels.get("gpu_i_profile"):
        model = f"{model or 'MIG'} {profile}"
    if key[0] == "dcgm":
        values["counters"] = "dcgm" if any(
            state["best"].get(f, (9,))[0] < 2 for f in ("sm_ratio", "bandwidth_ratio")
        ) else "utilization"  # fmt: skip
    _shape(values, absent)
    for field in _SHOWN:
        if values.get(field) is None:
            absent.setdefault(field, "the exporter does not give it; enable its metric there")
    if state["processes"]:
        values["processes"] = tuple(state["processes"][pid] for pid in sorted(state["processes"]))
    uuid = _first(labels, exporter.uuid) or None
    return Device(
        ts_ns=state["time_ms"] * 1_000_000 if "time_ms" in state else ts_ns,
        node=labels.get("hostname") or labels.get("node") or node,
        device=device, kind=exporter.kind, parent=parent, uuid=uuid,  # type: ignore[arg-type]
        pci=_first(labels, exporter.pci) or None, model=model,
        nvml_index=int(index) if key[0] == "dcgm" and index.isdigit() else None,
        absent={field: why for field, why in absent.items() if values.get(field) is None},
        **values,
    )  # fmt: skip


def _shape(values: dict[str, Any], absent: dict[str, str]) -> None:
    """Numbers → the types of the record; what cannot be is absent."""
    for field in ("sm_ratio", "bandwidth_ratio", "occupancy_ratio"):
        if field in values and values[field] > 1.001:
            absent[field] = f"the exporter gave {values.pop(field):g}, which is no share"
        elif field in values:
            values[field] = round(min(values[field], 1.0), 9)
    for field in _INTEGERS:
        if field in values:
            values[field] = round(values[field])
    if "total_bytes" not in values and {"used_bytes", "free_bytes"} <= values.keys():
        values["total_bytes"] = (
            values["used_bytes"] + values["free_bytes"] + values.get("reserved_bytes", 0)
        )
    if "free_bytes" not in values and {"used_bytes", "total_bytes"} <= values.keys():
        values["free_bytes"] = max(
            values["total_bytes"] - values["used_bytes"] - values.get("reserved_bytes", 0), 0
        )
    if "health" in values:
        values["health"] = "OK" if values["health"] == 1 else "fault"
    if "throttle" in values:
        bits = int(values["throttle"])
        values["throttle"] = tuple(name for bit, name in THROTTLE.items() if bits & bit)
    if values.get("xid") == 0:
        values["xid"] = None
    if "remap_pending" in values:
        values["remap_pending"] = bool(values["remap_pending"])
    for field, names in (("fabric", FABRIC), ("recovery_action", RECOVERY)):
        if field in values:
            number = int(values.pop(field))
            if 0 <= number < len(names):
                values[field] = names[number]
            else:
                absent[field] = f"{number} is not one this version knows"


def _first(labels: dict[str, str], names: tuple[str, ...]) -> str:
    return next((labels[name] for name in names if labels.get(name)), "")


def _base(path: str | None) -> str | None:
    return path.replace("\\", "/").rsplit("/", 1)[-1] or None if path else None


def _natural(name: str) -> list[Any]:
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name)]
