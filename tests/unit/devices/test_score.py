"""The resource score: its formula, its inputs, absence, smoothing; whose memory is whose."""

from __future__ import annotations

import math

import pytest

from mmctl.engine import profiles
from mmctl.engine.devices.score import Scores
from mmctl.engine.devices.shares import with_non_torch
from mmctl.engine.records import Device, Pool, Process

SECOND = 10**9


def device(second: float, temperature_c: float | None, bandwidth_ratio: float | None) -> Device:
    return Device(
        ts_ns=int(second * SECOND),
        node="n",
        device="gpu0",
        kind="gpu",
        temperature_c=temperature_c,
        bandwidth_ratio=bandwidth_ratio,
        absent={"temperature_c": "no sensor"} if temperature_c is None else {},
    )


def pool(second: float, fragmentation_ratio: float, **more: int) -> Pool:
    sizes = {
        "reserved_bytes": 100,
        "allocated_bytes": 50,
        "free_bytes": 50,
        "largest_free_bytes": 10,
        "releasable_bytes": 0,
        **more,
    }
    return Pool(
        ts_ns=int(second * SECOND),
        node="n",
        device="gpu0",
        fragmentation_ratio=fragmentation_ratio,
        **sizes,
    )


@pytest.fixture
def scores() -> Scores:
    return Scores(profiles.load("default").profile.devices)


@pytest.mark.parametrize(
    ("temperature_c", "fragmentation", "bandwidth", "score"),
    [
        (35, 0, 0, 0.0),
        (100, 1, 1, 1.0),
        (20, 0.5, 0.5, 0.35),
        (130, 0, 0, 0.3),
        (67.5, 0.2, 0.6, 0.3 * 0.5 + 0.4 * 0.2 + 0.3 * 0.6),
    ],
)
def test_the_formula(scores, temperature_c, fragmentation, bandwidth, score) -> None:
    scores.step(pool(1, fragmentation))
    found = scores.step(device(1, temperature_c, bandwidth))
    assert found is not None and found.score_ratio == pytest.approx(score)
    assert found.smoothed_ratio == found.score_ratio and found.absent == {}
    assert (found.temperature_c, found.fragmentation_ratio) == (temperature_c, fragmentation)


def test_an_absent_input_makes_the_score_absent_with_its_reason(scores) -> None:
    found = scores.step(device(1, None, 0.5))
    assert found is not None and found.score_ratio is None and found.smoothed_ratio is None
    assert found.absent["temperature_c"] == "no sensor"
    assert "agent" in found.absent["fragmentation_ratio"] and "score_ratio" in found.absent


def test_old_inputs_are_not_of_this_moment(scores) -> None:
    scores.step(pool(1, 0.5))
    assert scores.step(device(5, 60, 0.5)).score_ratio is not None
    assert scores.step(device(7, 60, 0.5)).score_ratio is None


def test_smoothing_is_over_two_seconds_whatever_the_rate() -> None:
    ends = []
    for rate in (2, 50):
        scores = Scores(profiles.load("default").profile.devices)
        scores.step(pool(0, 0.0))
        scores.step(device(0, 35, 0.0))
        for tick in range(1, 2 * rate + 1):
            scores.step(pool(tick / rate, 1.0))
            last = scores.step(device(tick / rate, 100, 1.0))
        assert last is not None
        ends.append(last.smoothed_ratio)
    assert ends[1] == pytest.approx(1 - math.exp(-1), abs=0.02)
    assert ends[0] == pytest.approx(ends[1], abs=0.1)


def test_non_torch_memory_of_the_one_process() -> None:
    one = Device(
        ts_ns=0, node="n", device="gpu0", kind="gpu", processes=(Process(pid=1, used_bytes=1500),)
    )
    assert with_non_torch(one, [pool(0, 0.0, reserved_bytes=1000)]).processes == (
        Process(pid=1, used_bytes=1500, non_torch_bytes=500),
    )
    assert with_non_torch(one, []) == one
    two = Device(
        ts_ns=0,
        node="n",
        device="gpu0",
        kind="gpu",
        processes=(Process(pid=1, used_bytes=9), Process(pid=2, used_bytes=9)),
    )
    found = with_non_torch(two, [pool(0, 0.0)])
    assert found.processes == two.processes and "processes.non_torch_bytes" in found.absent
