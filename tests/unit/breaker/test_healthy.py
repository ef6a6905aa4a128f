"""Healthy telemetry trips nothing, however the file is flawed; the same with a fault trips."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import msgspec
import pytest

from mmctl.engine import profiles
from mmctl.engine.breaker.evaluate import Alarm, observe
from mmctl.engine.records import AnyRecord, Device, Host, Serving
from tests.unit.breaker.healthy import GIB, START_NS, damaged, host, serving, training

PROFILE = profiles.load("default").profile
Source = Callable[[int], Iterator[AnyRecord]]
HEALTHY: dict[str, Source] = {
    "training at 10 Hz": lambda seed: training(seed, 10.0, 8.0),
    "training at 1 Hz": lambda seed: training(seed, 1.0, 20.0),
    "serving at 1 Hz": lambda seed: serving(seed, 1.0, 22.0),
    "a page every 5 s": lambda seed: serving(seed, 0.2, 31.0),
    "host at 2 Hz": lambda seed: host(seed, 2.0),
    "host every 10 s": lambda seed: host(seed, 0.1),
}


@pytest.mark.parametrize("name", HEALTHY)
@pytest.mark.parametrize("seed", [1, 2])
def test_what_is_healthy_trips_nothing(name: str, seed: int) -> None:
    assert observe(HEALTHY[name](seed), PROFILE).alarms == ()
    assert observe(damaged(HEALTHY[name](seed), seed), PROFILE).alarms == ()


def changed(records: Iterator[AnyRecord], after_s: float, change: Callable) -> list[Alarm]:
    """Alarms of damaged telemetry in which every record from ``after_s`` on is ``change``d."""

    def sick() -> Iterator[AnyRecord]:
        for record in records:
            at = (record.ts_ns - START_NS) / 1e9 - after_s  # type: ignore[union-attr]
            yield change(record, at) if at > 0 else record

    return list(observe(damaged(sick(), 5), PROFILE).alarms)


def test_a_host_that_leaks_is_told_of_in_time() -> None:
    def leak(record: Host, at: float) -> Host:
        left = record.available_bytes - round(0.02 / 60 * at * 512 * GIB)  # type: ignore[operator]
        return msgspec.structs.replace(record, available_bytes=max(left, 0))

    alarm, *again = changed(host(3), 600, leak)
    assert not again, "one leak, one alarm"
    empty_s = 600 + 0.49 / (0.02 / 60)
    lead_s = empty_s - (alarm.start_ns - START_NS) / 1e9
    assert alarm.rule == "host_fill" and 240 < lead_s < 900


def test_heat_and_slowdown_of_one_device_are_found() -> None:
    def hot(record: Device, at: float) -> Device:
        if record.device != "gpu3":
            return record
        return msgspec.structs.replace(
            record, temperature_c=95.0, throttle=("hw_thermal_slowdown", "sw_power_cap")
        )

    alarms = changed(training(3, 10.0, 3.0), 60, hot)
    assert {(alarm.rule, alarm.device) for alarm in alarms} == {
        ("too_hot", "gpu3"), ("throttled", "gpu3"),
    }  # fmt: skip
    assert all(5 <= (a.start_ns - START_NS) / 1e9 - 60 < 25 for a in alarms)


def test_a_stall_is_found_though_the_page_answers() -> None:
    def stalled(record: AnyRecord, at: float) -> AnyRecord:
        if not isinstance(record, Serving):
            return record
        return msgspec.structs.replace(
            record, waiting=9, generation_tokens_per_s=0.0, prompt_tokens_per_s=0.0
        )

    alarms = changed((r for r in serving(4) if isinstance(r, Serving)), 900, stalled)
    assert ("stall", 10) in {
        (a.rule, round((a.start_ns - START_NS) / 1e10 - 90) * 10) for a in alarms
    }
