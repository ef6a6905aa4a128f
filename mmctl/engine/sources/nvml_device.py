"""One NVIDIA device, and the MIG instances on it: which calls give which field."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from mmctl.engine.records import THROTTLE, Device
from mmctl.engine.sources.nvml_counters import Counters
from mmctl.engine.sources.nvml_values import (
    LOST,
    MAX_BYTES,
    RECOVERY,
    Lost,
    Missing,
    Rates,
    Sheet,
    fabric,
    field_value,
    given,
    mig_instances,
    named,
    processes_on,
    text_of,
)

_ALL_LINKS = 0xFFFFFFFF
_ENERGY, _NVLINK_TX, _NVLINK_RX = 83, 138, 139
_MEMORY_TEMP, _POWER_AVERAGE, _POWER_INSTANT, _PCIE_TX, _PCIE_RX = 82, 185, 186, 197, 198
_RECOVERY, _REMAP_PENDING = 230, 144
_NVLINK_ERRORS = (38, 45, 52, 59)  # CRC flit, CRC data, replay, recovery: totals of all links
_FAST = (
    _MEMORY_TEMP, _ENERGY, _POWER_AVERAGE, _POWER_INSTANT, _PCIE_TX, _PCIE_RX,
    (_NVLINK_TX, _ALL_LINKS), (_NVLINK_RX, _ALL_LINKS),
)  # fmt: skip
_SLOW = (_RECOVERY, _REMAP_PENDING, *_NVLINK_ERRORS)

_SLOW_EVERY_S = 1.0
_UTILIZATION_WINDOW_S = 1.0
_PCIE_EVERY_S = 2.0
_KIB = 1 << 10

_UNIFIED = ("GB10", "Orin", "Xavier", "Thor", "Tegra", "Jetson", "(nvgpu)")
"""Words in the name of a GPU that has no memory of its own: it uses the host's."""


class DeviceReader:
    """Reads one device again and again; holds what rates and samples need from before."""

    def __init__(self, index: int, node: str, driver: str | None) -> None:
        self.index, self.node, self.driver = index, node, driver
        self.device = f"gpu{index}"
        self.rates = Rates()
        self.counted_s = 0.0
        self.static: dict[str, Any] = {}
        self.slow: dict[str, Any] = {}
        self.slow_absent: dict[str, str] = {}
        self.slow_at = self.pcie_at = -1e9
        self.pcie: dict[str, float] = {}
        self.utilization: tuple[Any, float] | None = None
        self.counters = Counters()
        self.instances: dict[int, Counters] = {}
        self.mig: list[tuple[Any, dict[str, Any]]] = []
        self.mig_sheets: list[Sheet] = []
        self.begin(0)

    def fresh(self) -> DeviceReader:
        """A reader of the same device with nothing remembered but who it is."""
        reader = DeviceReader(self.index, self.node, self.driver)
        reader.static = dict(self.static)
        return reader

    def begin(self, ts_ns: int) -> None:
        """Start an empty sheet for the reading at ``ts_ns``."""
        self.ts_ns = ts_ns
        self.sheet = Sheet()
        self.mig_sheets = []

    def identity(self) -> dict[str, Any]:
        """What names the device in its records, as far as it was read."""
        return {key: self.static[key] for key in ("uuid", "pci", "model") if key in self.static}

    def read(self, ask: Callable[..., Any], handle: Any) -> None:
        """Fill the sheet. Raises Lost when the device, or every call to it, is gone."""
        sheet, now_s = self.sheet, time.monotonic()
        self._facts(sheet, ask, handle)
        self._memory(sheet, ask, handle)
        fields = self._fields(ask, handle, _FAST)
        counted_s = self.counted_s
        self._power(sheet, ask, handle, fields)
        self._thermal(sheet, ask, handle, fields)
        self._clocks(sheet, ask, handle)
        if now_s - self.slow_at >= _SLOW_EVERY_S:
            self.slow_at = now_s
            self._seldom(ask, handle)
        sheet.values.update(self.slow)
        sheet.absent.update(self.slow_absent)
        self._activity(sheet, ask, handle, now_s)
        self._links(sheet, ask, handle, fields, now_s, counted_s)
        self._instances(sheet, ask, handle)
        if not sheet.answered and sheet.last_missing is not None:
            raise Lost(str(sheet.last_missing), sheet.last_missing.code)

    def _facts(self, sheet: Sheet, ask: Callable[..., Any], handle: Any) -> None:
        """What never changes while the driver is loaded: asked once."""
        if "uuid" not in self.static:
            facts = Sheet()
            facts.take("uuid", lambda: ask("nvmlDeviceGetUUID", handle))
            facts.take("model", lambda: ask("nvmlDeviceGetName", handle))
            facts.take("pci", lambda: text_of(ask("nvmlDeviceGetPciInfo", handle).busId))
            facts.take(
                "power_limit_w", lambda: ask("nvmlDeviceGetEnforcedPowerLimit", handle),
                high=1e7, scale=1e-3,
            )  # fmt: skip
            self.static = facts.values
            sheet.absent.update(facts.absent)
            sheet.answered += facts.answered
            sheet.last_missing = facts.last_missing
        sheet.values.update(self.static)

    def _memory(self, sheet: Sheet, ask: Callable[..., Any], handle: Any) -> None:
        memory = reserved = None
        try:
            memory = ask("nvmlDeviceGetMemoryInfo", handle, 0x02000028)  # nvmlMemory_v2
            reserved = int(memory.reserved)
        except Missing as problem:
            if problem.code in LOST:
                raise Lost(str(problem), problem.code) from None
            sheet.absent["reserved_bytes"] = f"counted as used: {problem}"
            memory = sheet.take("used_bytes", lambda: ask("nvmlDeviceGetMemoryInfo", handle))
            sheet.values.pop("used_bytes", None)
        if memory is None:
            self._no_memory(sheet, sheet.absent.get("used_bytes", "not given"))
            return
        total, used, free = int(memory.total), int(memory.used), int(memory.free)
        if not 0 < total < MAX_BYTES:
            self._no_memory(sheet, f"the driver gave a total of {total} bytes, which cannot be")
            return
        sheet.answered += 1
        sheet.put("total_bytes", total)
        for field, value in (("used_bytes", used), ("free_bytes", free),
                             ("reserved_bytes", reserved)):  # fmt: skip
            if value is not None and 0 <= value <= total:
                sheet.put(field, value)
            elif value is not None:
                sheet.absent[field] = f"the driver gave {value}, which cannot be"

    def _no_memory(self, sheet: Sheet, reason: str) -> None:
        """A GPU without memory of its own shows the host's pool; another says why not."""
        model = sheet.values.get("model") or ""
        if any(word in model for word in _UNIFIED):
            import psutil

            host = psutil.virtual_memory()
            sheet.put("unified", True)
            sheet.put("total_bytes", host.total)
            sheet.put("used_bytes", host.total - host.available)
            sheet.put("free_bytes", host.available)
            sheet.absent["reserved_bytes"] = "memory is unified with the host's"
            return
        for field in ("total_bytes", "used_bytes", "free_bytes", "reserved_bytes"):
            sheet.absent[field] = reason

    def _fields(
        self, ask: Callable[..., Any], handle: Any, wanted: tuple[Any, ...]
    ) -> dict[int, int | float | Missing]:
        """Field values by id. Some drivers write one entry past the request: a dummy ends it.
        ``counted_s`` is when the driver read them, by its own clock where it says so."""
        ids = [field[0] if isinstance(field, tuple) else field for field in wanted]
        try:
            values = ask("nvmlDeviceGetFieldValues", handle, [*wanted, _ENERGY])
        except Missing as problem:
            if problem.code in LOST:
                raise Lost(str(problem), problem.code) from None
            return dict.fromkeys(ids, problem)
        stamp_us = max((int(value.timestamp) for value in values), default=0)
        self.counted_s = stamp_us / 1e6 if stamp_us > 0 else time.time()
        return {
            field: field_value(value) for field, value in zip(ids, values[: len(ids)], strict=True)
        }

    def _power(
        self, sheet: Sheet, ask: Callable[..., Any], handle: Any, fields: dict[int, Any]
    ) -> None:
        def average() -> Any:
            try:
                return given(fields[_POWER_AVERAGE])
            except Missing:
                return ask("nvmlDeviceGetPowerUsage", handle)

        sheet.take("power_w", average, high=1e7, scale=1e-3)
        sheet.take("power_instant_w", lambda: given(fields[_POWER_INSTANT]), high=1e7, scale=1e-3)
        sheet.take("energy_j", lambda: given(fields[_ENERGY]), high=float(1 << 62), scale=1e-3)

    def _thermal(
        self, sheet: Sheet, ask: Callable[..., Any], handle: Any, fields: dict[int, Any]
    ) -> None:
        def temperature() -> Any:
            try:
                return ask("nvmlDeviceGetTemperatureV", handle, 0)
            except Missing as problem:
                if problem.code in LOST:
                    raise
                return ask("nvmlDeviceGetTemperature", handle, 0)

        sheet.take("temperature_c", temperature, high=250)
        sheet.take("memory_temperature_c", lambda: given(fields[_MEMORY_TEMP]), high=250)

        def throttle() -> tuple[str, ...]:
            try:
                bits = ask("nvmlDeviceGetCurrentClocksEventReasons", handle)
            except Missing as problem:
                if problem.code in LOST:
                    raise
                bits = ask("nvmlDeviceGetCurrentClocksThrottleReasons", handle)
            if bits >= 1 << 32:
                raise Missing(f"the driver gave {bits}, which cannot be")
            return tuple(name for bit, name in THROTTLE.items() if bits & bit)

        sheet.take("throttle", throttle)

    def _clocks(self, sheet: Sheet, ask: Callable[..., Any], handle: Any) -> None:
        for field, kind in (("sm_clock_hz", 1), ("memory_clock_hz", 2)):
            sheet.take(
                field, lambda k=kind: ask("nvmlDeviceGetClockInfo", handle, k),  # type: ignore[misc]
                high=1e5, scale=1e6,
            )  # fmt: skip

    def _seldom(self, ask: Callable[..., Any], handle: Any) -> None:
        """Errors, recovery, fabric and processes: asked once a second, shown until then."""
        sheet = Sheet()
        fields = self._fields(ask, handle, _SLOW)
        sheet.take(
            "recovery_action",
            lambda: named(RECOVERY, given(fields[_RECOVERY]), "recovery action"),
        )
        for field, kind in (("ecc_corrected", 0), ("ecc_uncorrected", 1)):
            sheet.take(
                field, lambda k=kind: ask("nvmlDeviceGetTotalEccErrors", handle, k, 0),  # type: ignore[misc]
                high=float(1 << 62),
            )  # fmt: skip

        def remap() -> bool:
            try:
                return bool(given(fields[_REMAP_PENDING]))
            except Missing:
                return bool(ask("nvmlDeviceGetRemappedRows", handle)[2])

        sheet.take("remap_pending", remap)
        self.mig = mig_instances(ask, handle)
        sheet.take("fabric", lambda: fabric(ask, handle))
        sheet.take("nvlink_errors", lambda: self._nvlink_errors(ask, handle, fields))
        sheet.take("processes", lambda: processes_on(ask, handle))
        self.slow, self.slow_absent = sheet.values, sheet.absent
        if any(process.name is None for process in sheet.values.get("processes") or ()):
            self.slow_absent["processes.name"] = "the pid belongs to another namespace or has ended"

    def _nvlink_errors(self, ask: Callable[..., Any], handle: Any, fields: dict[int, Any]) -> int:
        known = [v for f in _NVLINK_ERRORS if not isinstance(v := fields[f], Missing)]
        if known:
            return int(sum(known))
        links = 0
        total = 0
        for link in range(18):
            try:
                if not ask("nvmlDeviceGetNvLinkState", handle, link):
                    continue
                links += 1
                total += sum(
                    ask("nvmlDeviceGetNvLinkErrorCounter", handle, link, kind) for kind in range(4)
                )
            except Missing:
                if not links:
                    raise
                break
        if not links:
            raise Missing("no NVLink of this device is up")
        return total

    def _activity(self, sheet: Sheet, ask: Callable[..., Any], handle: Any, now_s: float) -> None:
        """Shares of time: hardware counters where there are any, else utilisation windows."""
        if self.counters.take(sheet, ask, handle):
            return
        try:
            rates = ask("nvmlDeviceGetUtilizationRates", handle)
        except Missing as problem:
            if problem.code in LOST:
                raise Lost(str(problem), problem.code) from None
            reason = "not given for the whole GPU while MIG is on" if self.mig else str(problem)
            sheet.absent["sm_ratio"] = sheet.absent["bandwidth_ratio"] = reason
            return
        sheet.answered += 1
        pair = (rates.gpu, rates.memory)
        sheet.values["counters"] = "utilization"
        for field, value in zip(("sm_ratio", "bandwidth_ratio"), pair, strict=True):
            if 0 <= value <= 100:
                sheet.put(field, value / 100)
            else:
                sheet.absent[field] = f"the driver gave {value} %, which cannot be"
        before = self.utilization
        if before is not None and before[0] == pair and now_s - before[1] < _UTILIZATION_WINDOW_S:
            sheet.put("repeated", True)
        else:
            sheet.put("repeated", False)
            self.utilization = (pair, now_s)

    def _links(
        self, sheet: Sheet, ask: Callable[..., Any], handle: Any, fields: dict[int, Any],
        now_s: float, counted_s: float,
    ) -> None:  # fmt: skip
        for field, number, unit in (
            ("nvlink_tx_bytes_per_s", _NVLINK_TX, _KIB),
            ("nvlink_rx_bytes_per_s", _NVLINK_RX, _KIB),
            ("pcie_tx_bytes_per_s", _PCIE_TX, 1),
            ("pcie_rx_bytes_per_s", _PCIE_RX, 1),
        ):
            if field in sheet.values:
                continue
            total = fields[number]
            if isinstance(total, Missing):
                sheet.absent[field] = str(total)
            elif not 0 <= total < 1 << 62:
                sheet.absent[field] = f"the driver gave {total}, which cannot be"
            else:
                self.rates.take(sheet, field, total * unit, counted_s)
        if isinstance(fields[_PCIE_TX], Missing):
            self._pcie_window(sheet, ask, handle, now_s)

    def _pcie_window(
        self, sheet: Sheet, ask: Callable[..., Any], handle: Any, now_s: float
    ) -> None:
        """The slow call (20 ms each) on drivers without byte counters: one every two seconds."""
        if now_s - self.pcie_at >= _PCIE_EVERY_S:
            self.pcie_at = now_s
            for field, kind in (("pcie_tx_bytes_per_s", 0), ("pcie_rx_bytes_per_s", 1)):
                try:
                    self.pcie[field] = ask("nvmlDeviceGetPcieThroughput", handle, kind) * 1000.0
                except Missing as problem:
                    self.pcie.pop(field, None)
                    sheet.absent[field] = str(problem)
        for field, rate in self.pcie.items():
            if 0 <= rate < 1e13:
                sheet.put(field, rate)

    def _instances(self, sheet: Sheet, ask: Callable[..., Any], handle: Any) -> None:
        """The MIG instances of this GPU, each with a sheet of its own."""
        for child, facts in self.mig:
            own = Sheet()
            self.mig_sheets.append(own)
            own.values.update({k: v for k, v in facts.items() if k != "instance"})
            try:
                self._memory(own, ask, child)
                own.take("processes", lambda c=child: processes_on(ask, c))  # type: ignore[misc]
            except Lost as problem:
                own.absent_rest(str(problem))
            number = facts.get("instance")
            if isinstance(number, int):
                try:
                    self.instances.setdefault(number, Counters(number)).take(own, ask, handle)
                except Lost as problem:
                    own.absent_rest(str(problem))
                own.absent.setdefault("sm_ratio", own.absent.get("occupancy_ratio", ""))
                own.absent.setdefault("bandwidth_ratio", own.absent.get("occupancy_ratio", ""))
            own.absent_rest("not given for a MIG instance; its parent has it")

    def records(self, xid: int | None) -> list[Device]:
        """The reading as records: the device, then its MIG instances."""
        sheet = self.sheet
        parent = self._record(self.device, sheet, nvml_index=self.index, xid=xid)
        children = [
            self._record(f"{self.device}.mig{number}", own, parent=self.device)
            for number, own in enumerate(self.mig_sheets)
        ]
        return [parent, *children]

    def _record(self, device: str, sheet: Sheet, **more: Any) -> Device:
        values = dict(self.static) if device == self.device else {}
        values.update(sheet.values)
        absent = {field: why for field, why in sheet.absent.items() if values.get(field) is None}
        return Device(
            ts_ns=self.ts_ns, node=self.node, device=device, kind="gpu", absent=absent,
            **values, **more,
        )  # fmt: skip
