"""Hardware counters of NVIDIA devices since Hopper (GPM): shares of time between two samples."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from mmctl.engine.sources.nvml_values import LOST, WARMING, Lost, Missing, Sheet

_SM, _OCCUPANCY, _DRAM, _NVLINK_RX, _NVLINK_TX = 2, 3, 10, 60, 61
_METRICS = (_SM, _OCCUPANCY, _DRAM, _NVLINK_RX, _NVLINK_TX)
_MIN_S = 0.1
_MIB = 1 << 20


class Counters:
    """The last two samples of a device, or of one GPU instance of it."""

    def __init__(self, instance: int | None = None) -> None:
        self.instance = instance
        self.samples: list[tuple[Any, float]] = []
        self.last: dict[int, float] = {}
        self.supported: bool | str | None = None
        self.reused = False

    def take(self, sheet: Sheet, ask: Callable[..., Any], handle: Any) -> bool:
        """Put what the counters say on the sheet; False, with the reason, when they say nothing.

        ``handle`` is of the whole device. Raises Lost with it.
        """
        counted = self._since_last(ask, handle)
        if isinstance(counted, str) or _SM not in counted:
            sheet.absent["occupancy_ratio"] = (
                counted if isinstance(counted, str) else "the counter is not supported here"
            )
            return False
        sheet.values["counters"] = "gpm"
        sheet.values["repeated"] = self.reused
        sheet.answered += 1
        for field, metric in (("sm_ratio", _SM), ("bandwidth_ratio", _DRAM),
                              ("occupancy_ratio", _OCCUPANCY)):  # fmt: skip
            if metric in counted:
                sheet.put(field, min(counted[metric] / 100, 1.0))
            else:
                sheet.absent[field] = "the counter is not supported by this device"
        for field, metric in (("nvlink_rx_bytes_per_s", _NVLINK_RX),
                              ("nvlink_tx_bytes_per_s", _NVLINK_TX)):  # fmt: skip
            if metric in counted:
                sheet.put(field, counted[metric] * _MIB)
        return True

    def _since_last(self, ask: Callable[..., Any], handle: Any) -> dict[int, float] | str:
        """Metrics over the time since the last sample, or the reason for their absence."""
        if isinstance(self.supported, str):
            return self.supported
        self.reused = False
        try:
            if self.supported is None:
                if not ask("nvmlGpmQueryDeviceSupport", handle).isSupportedDevice:
                    raise Missing("hardware counters (GPM) need Hopper or later")
                self.supported = True
            if self.samples and (wait_s := _MIN_S - (time.monotonic() - self.samples[-1][1])) > 0:
                if self.last and wait_s > _MIN_S / 2:
                    self.reused = True
                    return self.last
                time.sleep(wait_s)  # this thread is the device's own
            full = len(self.samples) == 2
            sample = self.samples.pop(0)[0] if full else ask("nvmlGpmSampleAlloc")
            if self.instance is None:
                ask("nvmlGpmSampleGet", handle, sample)
            else:
                ask("nvmlGpmMigSampleGet", handle, self.instance, sample)
            self.samples.append((sample, time.monotonic()))
            if len(self.samples) < 2:
                return WARMING
            self.last = self._metrics(ask)
            return self.last
        except Missing as problem:
            if problem.code in LOST:
                raise Lost(str(problem), problem.code) from None
            self.supported = str(problem)
            return self.supported

    def _metrics(self, ask: Callable[..., Any]) -> dict[int, float]:
        import pynvml

        request = pynvml.c_nvmlGpmMetricsGet_t()
        request.version = pynvml.NVML_GPM_METRICS_GET_VERSION
        request.numMetrics = len(_METRICS)
        request.sample1, request.sample2 = self.samples[0][0], self.samples[1][0]
        for place, metric in enumerate(_METRICS):
            request.metrics[place].metricId = metric
        answer = ask("nvmlGpmMetricsGet", request)
        return {
            metric: float(answer.metrics[place].value)
            for place, metric in enumerate(_METRICS)
            if answer.metrics[place].nvmlReturn == 0 and 0 <= answer.metrics[place].value < 1e9
        }
