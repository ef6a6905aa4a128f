"""Signals from records, the published actions at their limits, and a front that nothing beats."""

from __future__ import annotations

from typing import Any

import pytest

from mmctl.engine.records import Device, Event, Span
from mmctl.engine.schedule.rebalance import Limits, Signals

MS = 1_000_000
LIMITS = Limits(collective_s=0.007, use_ratio=0.7, fixed_s=20e-6)


def collective(start_ms: int, duration_ms: float, device: str = "gpu0") -> Span:
    return Span(
        ts_ns=start_ms * MS, device=device, stream="7", name="all_gather", kind="collective",
        duration_ns=int(duration_ms * MS),
    )  # fmt: skip


def report(*records: Any, vision: tuple[str, ...] = (), **more: Any) -> dict[str, Any]:
    signals = Signals(vision)
    for record in records:
        signals.add(record)
    return signals.report(LIMITS, **more)


def test_slow_collectives_ask_for_a_gather_that_keeps_the_limit() -> None:
    told = report(*(collective(i * 100, 12.0 + i % 3) for i in range(30)), gather_batch=32)
    assert told["signals"]["collective_mean_s"] == pytest.approx(0.013)
    (action,) = told["actions"]
    assert action["action"] == "smaller_gather_batch" and action["from"] == 32
    factor = (0.007 - 20e-6) / (0.013 - 20e-6)
    assert action["factor"] == pytest.approx(factor) and action["to"] == int(32 * factor)
    assert "vision_use_ratio" in told["signals"]["absent"]
    for point in told["points"]:
        assert point["vision_use_ratio"] is None
        assert point["within_limits"] is (point["collective_mean_s"] <= 0.007)
    assert report(*(collective(i, 6.9) for i in range(5)))["actions"] == []


def test_idle_vision_devices_ask_for_more_side_by_side_and_others_do_not_count() -> None:
    def reading(device: str, ratio: float) -> Device:
        return Device(ts_ns=0, device=device, kind="gpu", sm_ratio=ratio)

    records = [reading("gpu0", 0.3), reading("gpu0", 0.4), reading("gpu1", 0.99)]
    told = report(*records, vision=("gpu0",))
    (action,) = told["actions"]
    assert action["action"] == "more_vision_parallelism" and action["factor"] == pytest.approx(2.0)
    assert told["signals"]["vision_use_ratio"] == pytest.approx(0.35)
    assert report(reading("gpu0", 0.7))["actions"] == []
    idle = report(reading("gpu0", 0.0))["actions"][0]
    assert idle["factor"] is None and "do nothing" in idle["why"]


def test_use_is_taken_from_vision_spans_where_no_device_was_read_and_overlap_counts_once() -> None:
    def vision(start_ms: int, duration_ms: int) -> Span:
        return Span(
            ts_ns=start_ms * MS, device="gpu0", stream="s", name="vit", kind="kernel",
            duration_ns=duration_ms * MS, modality="vision",
        )  # fmt: skip

    told = report(vision(0, 40), vision(20, 40), vision(90, 10), collective(95, 1.0))
    assert told["signals"]["vision_use_ratio"] == pytest.approx(0.7)
    assert told["signals"]["vision_use_from"] == "vision spans"


def test_waits_of_an_imbalance_count_and_nonsense_does_not() -> None:
    event = Event(ts_ns=1, what="imbalance", evidence={"waits_s": {"0": 0.2, "1": "soon"}})
    told = report(event, Event(ts_ns=2, what="imbalance", evidence={"wait_s": float("nan")}))
    assert told["signals"]["collectives"] == 1
    assert told["signals"]["collective_mean_s"] == pytest.approx(0.2)


def test_no_point_of_the_front_is_beaten() -> None:
    told = report(
        *(collective(i * 50, 9.0) for i in range(10)),
        Device(ts_ns=0, device="gpu0", kind="gpu", sm_ratio=0.4),
    )

    def aims(point: dict[str, Any]) -> tuple[float, ...]:
        return (
            point["collective_mean_s"], point["communication_factor"],
            -point["vision_use_ratio"], point["vision_parallelism_factor"],
        )  # fmt: skip

    front = [point for point in told["points"] if point["front"]]
    rest = [point for point in told["points"] if not point["front"]]
    assert front and rest and len(told["actions"]) == 2
    for point in told["points"]:
        beaten = any(
            all(a <= b for a, b in zip(aims(other), aims(point), strict=True))
            and aims(other) != aims(point)
            for other in told["points"]
        )
        assert point["front"] is not beaten
