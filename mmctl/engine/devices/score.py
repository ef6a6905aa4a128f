"""The resource score of a device: temperature, fragmentation and bandwidth in one figure.

score = w_t · clamp((°C − low) / span, 0, 1) + w_f · fragmentation + w_b · bandwidth, smoothed
exponentially over a time. Weights, ``low``, ``span`` and the time are the profile's
``[devices]``; published: 0.3, 0.4, 0.3, 35 °C, 65 °C, 2 s.
"""

from __future__ import annotations

import math

import msgspec

from mmctl.engine.profiles import Devices
from mmctl.engine.records import AnyRecord, Basis, Device, Pool


class Score(msgspec.Struct, frozen=True, kw_only=True):
    """A device's score in [0, 1], higher is worse, with its inputs.

    The score is absent while an input is: its reason stands in ``absent``. ``score_ratio`` is of
    this moment, ``smoothed_ratio`` over the smoothing time.
    """

    ts_ns: int
    node: str
    device: str
    score_ratio: float | None
    smoothed_ratio: float | None
    temperature_c: float | None
    temperature_ratio: float | None
    fragmentation_ratio: float | None
    bandwidth_ratio: float | None
    basis: Basis = "measured"
    absent: dict[str, str] = {}


class _Inputs:
    """The newest inputs of one device, and the smoothed score."""

    __slots__ = ("bandwidth", "fragmentation", "smoothed", "temperature", "ts_ns", "why")

    def __init__(self) -> None:
        self.temperature: tuple[int, float] | None = None
        self.fragmentation: tuple[int, float] | None = None
        self.bandwidth: tuple[int, float] | None = None
        self.smoothed: float | None = None
        self.ts_ns = 0
        self.why: dict[str, str] = {}


_MAX_AGE_NS = 5 * 10**9
"""An input older than this is no longer this moment's."""


class Scores:
    """Follows the device and pool records of a stream, device by device."""

    def __init__(self, settings: Devices) -> None:
        self.settings = settings
        self._inputs: dict[tuple[str, str], _Inputs] = {}

    def step(self, record: AnyRecord) -> Score | None:
        """Take a record; the device's score after it, None for a record of no device."""
        if not isinstance(record, (Device, Pool)):
            return None
        state = self._inputs.setdefault((record.node, record.device), _Inputs())
        if isinstance(record, Pool):
            state.fragmentation = (record.ts_ns, record.fragmentation_ratio)
        else:
            for name, value in (("temperature", record.temperature_c),
                                ("bandwidth", record.bandwidth_ratio)):  # fmt: skip
                if value is not None:
                    setattr(state, name, (record.ts_ns, value))
            state.why = record.absent
        return self._score(state, record.node, record.device, record.ts_ns)

    def _score(self, state: _Inputs, node: str, device: str, ts_ns: int) -> Score:
        s = self.settings
        temperature_c = _young(state.temperature, ts_ns)
        fragmentation = _young(state.fragmentation, ts_ns)
        bandwidth = _young(state.bandwidth, ts_ns)
        warmth = None
        if temperature_c is not None:
            span = max(s.temperature_span_c, 1e-9)
            warmth = min(max((temperature_c - s.temperature_low_c) / span, 0.0), 1.0)
        absent = {}
        if temperature_c is None:
            absent["temperature_c"] = state.why.get("temperature_c", "no reading in the last 5 s")
        if bandwidth is None:
            absent["bandwidth_ratio"] = state.why.get("bandwidth_ratio", "no reading in 5 s")
        if fragmentation is None:
            absent["fragmentation_ratio"] = "no pool record: it needs an agent, hook or snapshot"
        score = None
        if warmth is not None and fragmentation is not None and bandwidth is not None:
            score = (
                s.temperature_weight * warmth + s.fragmentation_weight * fragmentation
                + s.bandwidth_weight * bandwidth
            )  # fmt: skip
            state.smoothed = _smoothed(state, score, ts_ns, s.smoothing_s)
            state.ts_ns = max(ts_ns, state.ts_ns)
        else:
            absent["score_ratio"] = "without " + ", ".join(absent)
        return Score(
            ts_ns=ts_ns, node=node, device=device, score_ratio=score,
            smoothed_ratio=None if score is None else state.smoothed,
            temperature_c=temperature_c, temperature_ratio=warmth,
            fragmentation_ratio=fragmentation, bandwidth_ratio=bandwidth, absent=absent,
        )  # fmt: skip


def _young(value: tuple[int, float] | None, ts_ns: int) -> float | None:
    return None if value is None or ts_ns - value[0] > _MAX_AGE_NS else value[1]


def _smoothed(state: _Inputs, score: float, ts_ns: int, smoothing_s: float) -> float:
    """Exponential smoothing by the time that passed, so that the rate of readings is no matter."""
    if state.smoothed is None or smoothing_s <= 0:
        return score
    share = 1 - math.exp(-max(ts_ns - state.ts_ns, 0) / (smoothing_s * 1e9))
    return state.smoothed + share * (score - state.smoothed)
