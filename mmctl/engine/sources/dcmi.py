"""Ascend NPUs through DCMI, the driver's own library: what ``npu-smi`` reads, without a process.

Names and layouts by Huawei's public ``dcmi_interface_api.h``; power comes in tenths of a watt,
memory in MiB.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

from mmctl.engine.errors import NoSourceError
from mmctl.engine.records import Device
from mmctl.engine.sources.host import node_name

T = TypeVar("T")

_LIBRARIES = ("libdcmi.so", "/usr/local/dcmi/libdcmi.so")
_MAX_CARDS = 64
_MIB = 1 << 20
_NPU, _AICORE, _FREQUENCY_AICORE, _ECC_HBM = 0, 2, 7, 2
_HEALTH = {0: "OK", 1: "Warning", 2: "Alarm", 3: "Critical"}
_SHOWN = ("sm_ratio", "bandwidth_ratio", "total_bytes", "used_bytes", "temperature_c", "power_w")


class _Hbm(ctypes.Structure):
    _fields_ = (
        ("memory_size", ctypes.c_ulonglong), ("freq", ctypes.c_uint),
        ("memory_usage", ctypes.c_ulonglong), ("temp", ctypes.c_int),
        ("bandwidth_util_rate", ctypes.c_uint),
    )  # fmt: skip


class _Chip(ctypes.Structure):
    _fields_ = (
        ("type", ctypes.c_char * 32), ("name", ctypes.c_char * 32), ("version", ctypes.c_char * 32),
        ("aicore_count", ctypes.c_uint),
    )  # fmt: skip


class _Ecc(ctypes.Structure):
    _fields_ = (
        ("enabled", ctypes.c_int), ("single_bit", ctypes.c_uint), ("double_bit", ctypes.c_uint),
        ("total_single_bit", ctypes.c_uint), ("total_double_bit", ctypes.c_uint),
        ("single_bit_isolated_pages", ctypes.c_uint), ("double_bit_isolated_pages", ctypes.c_uint),
    )  # fmt: skip


def load() -> ctypes.CDLL:
    """The library, initialised. Raises NoSourceError where it is absent or refuses."""
    for name in _LIBRARIES:
        try:
            library = ctypes.CDLL(name)
        except OSError:
            continue
        code = library.dcmi_init()
        if code != 0:
            raise NoSourceError(f"DCMI does not start: code {code}; is the driver loaded?")
        return library
    raise NoSourceError("libdcmi.so was not found; install the Ascend driver or mount its library")


def read(library: ctypes.CDLL, timeout_s: float) -> list[Device]:
    """One record a chip. Raises NoSourceError when the driver does not answer in time."""
    return _within(timeout_s, lambda: _read(library))


def _read(library: ctypes.CDLL) -> list[Device]:
    cards = (ctypes.c_int * _MAX_CARDS)()
    count = ctypes.c_int()
    code = library.dcmi_get_card_list(ctypes.byref(count), cards, _MAX_CARDS)
    if code != 0 or not 0 < count.value <= _MAX_CARDS:
        raise NoSourceError(f"DCMI lists no card: code {code}, {count.value} cards")
    records = []
    for card in cards[: count.value]:
        chips = ctypes.c_int()
        if library.dcmi_get_device_num_in_card(card, ctypes.byref(chips)) != 0:
            continue
        for chip in range(min(chips.value, 16)):
            kind = ctypes.c_int(_NPU)
            if _call(library, "dcmi_get_device_type", card, chip, kind) in (None, _NPU):
                records.append(_device(library, card, chip))
    return records


def _device(library: ctypes.CDLL, card: int, chip: int) -> Device:
    values: dict[str, Any] = {}
    absent: dict[str, str] = {"throttle": "DCMI does not give it"}

    def take(field: str, value: float | int | None, scale: float = 1, top: float = 1e9) -> None:
        if value is None or not 0 <= value <= top:
            why = "not supported by this chip" if value is None else f"DCMI gave {value}"
            absent[field] = why
        else:
            values[field] = value * scale

    core = _call(library, "dcmi_get_device_utilization_rate", card, chip, _AICORE, ctypes.c_uint())
    take("sm_ratio", core, 0.01, 100)
    take("temperature_c", _call(library, "dcmi_get_device_temperature", card, chip, ctypes.c_int()))
    take("power_w", _call(library, "dcmi_get_device_power_info", card, chip, ctypes.c_int()), 0.1)
    clock = _call(
        library, "dcmi_get_device_frequency", card, chip, _FREQUENCY_AICORE, ctypes.c_uint()
    )
    take("sm_clock_hz", clock, 1e6, 1e5)
    hbm = _Hbm()
    if _ok(library, "dcmi_get_device_hbm_info", card, chip, hbm) and hbm.memory_size > 0:
        take("total_bytes", hbm.memory_size, _MIB, 1e9)
        take("used_bytes", hbm.memory_usage, _MIB, hbm.memory_size)
        take("memory_temperature_c", hbm.temp, 1, 250)
        take("bandwidth_ratio", hbm.bandwidth_util_rate, 0.01, 100)
    if {"total_bytes", "used_bytes"} <= values.keys():
        values["free_bytes"] = values["total_bytes"] - values["used_bytes"]
    ecc = _Ecc()
    if _ok(library, "dcmi_get_device_ecc_info", card, chip, _ECC_HBM, ecc):
        values |= {"ecc_corrected": ecc.single_bit, "ecc_uncorrected": ecc.double_bit}
    health = _call(library, "dcmi_get_device_health", card, chip, ctypes.c_uint())
    name = _Chip()
    model = None
    if _ok(library, "dcmi_get_device_chip_info", card, chip, name):
        model = name.name.decode("ascii", "replace") or None
    logical = ctypes.c_int()
    known = library.dcmi_get_device_logic_id(ctypes.byref(logical), card, chip) == 0
    for field in _SHOWN:
        if field not in values:
            absent.setdefault(field, "not supported by this chip")
    for field in ("sm_ratio", "bandwidth_ratio", "power_w"):
        if field in values:
            values[field] = round(values[field], 6)
    return Device(
        ts_ns=time.time_ns(), node=node_name(), kind="npu", model=model,
        device=f"npu{logical.value}" if known and logical.value >= 0 else f"npu{card}.{chip}",
        health=None if health is None else _HEALTH.get(int(health), "unknown"),
        absent={field: why for field, why in absent.items() if field not in values}, **values,
    )  # fmt: skip


def _call(library: ctypes.CDLL, name: str, *arguments: Any) -> int | None:
    """The number that a call writes to its last argument; None when it fails or is missing."""
    return int(arguments[-1].value) if _ok(library, name, *arguments) else None


def _ok(library: ctypes.CDLL, name: str, *arguments: Any) -> bool:
    try:
        function = getattr(library, name)
    except AttributeError:
        return False
    return bool(function(*arguments[:-1], ctypes.byref(arguments[-1])) == 0)


def _within(timeout_s: float, work: Callable[[], T]) -> T:
    """What ``work`` gives, in a thread that is left behind when the driver hangs."""
    done: list[T] = []
    problem: list[BaseException] = []

    def run() -> None:
        try:
            done.append(work())
        except BaseException as error:
            problem.append(error)

    thread = threading.Thread(target=run, daemon=True, name="dcmi")
    thread.start()
    thread.join(timeout_s)
    if problem:
        raise problem[0]
    if not done:
        raise NoSourceError(f"DCMI does not answer within {timeout_s:g} s; the driver hangs")
    return done[0]
