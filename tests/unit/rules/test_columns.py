"""Columns and live rules give the same truths for the same records."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mmctl.engine import profiles
from mmctl.engine.records import (
    AnyRecord,
    Device,
    Event,
    Fits,
    Host,
    Latencies,
    Memory,
    Pool,
    Request,
    Serving,
)  # fmt: skip
from mmctl.engine.rules.columns import Columns
from mmctl.engine.rules.live import Live
from mmctl.engine.rules.rule import compile_rules

TICK = 10**8

WHENS = (
    "temperature_c > 5.5 and power_w < 7.5",
    "temperature_c > 5.5 or not (power_w < 3.5)",
    '"hot" in throttle or known(power_w)',
    "recovery_action == 'reset'",
    "mean(temperature_c, 1s) > 4.97",
    "std(power_w, 2s) > 1.003 and count(power_w, 2s) > 2",
    "median(temperature_c, 1s) > 4.9 or mad(temperature_c, 5) > 2.01",
    "p95(temperature_c, 7) > 7.93 and p50(power_w, 1s) < 4.4",
    "min(temperature_c, 500ms) > 2.5 or max(power_w, 3) < 4.5",
    "slope(temperature_c, 1s) > 0.513 and time_to(20, temperature_c, 1s) < 11.7s",
    "rate(nvml_index, 1s) > 1.73 or delta(temperature_c, 1s) > 3.5 or first(power_w, 1s) > 7.5",
    "mean(temperature_c, 1s, 500ms) > 4.97",
    "max(min(temperature_c, 300ms), 1s) > 3.5",
    "not fits and largest_free_bytes < 5.5",
    "fits_cause == 'capacity' or pool.free_bytes > 6.5",
    "fragmentation_ratio > 0.35 and waiting > 2.5",
    "size_bytes > 5.5 and fragmentation_ratio > 0.35 and count(size_bytes > 3.5, 1s) >= 2",
    "sum(released_bytes, 1s) > 8.5",
    "vision.ttft_p99_s > 4.5 or text.queue_wait_s > 4.5",
    "mean(request_latency_s, 1s) > 4.97 or min(vision.request_latency_s, 2) > 3.5",
    "host.available_bytes < 5.5 and 2 * cpu.sm_ratio > 9.1",
    "host.available_bytes < 5.5 and temperature_c > 3.5",
    "count(2 * reclaim_ratio < 9.1, 2s) >= 2",
    "abs(temperature_c - mean(temperature_c, 2s)) > 1.997 * at_least(std(temperature_c, 2s), 1)",
    "log(temperature_c) > 1.5 and sqrt(power_w) < 2.3 and temperature_c / power_w > 1.01",
)

number = st.one_of(st.none(), st.integers(0, 9).map(float))
sure = st.integers(0, 9)


@st.composite
def record(draw: st.DrawFn, ts_ns: int) -> AnyRecord:
    kind = draw(st.sampled_from("ddppsmrhce"))
    node = "n"
    if kind == "d":
        return Device(
            ts_ns=ts_ns, node=node, device=draw(st.sampled_from(["gpu0", "gpu1"])), kind="gpu",
            group=draw(st.sampled_from([None, None, "a"])), temperature_c=draw(number),
            power_w=draw(number), nvml_index=draw(sure),
            throttle=draw(st.sampled_from([None, (), ("hot",), ("a", "hot")])),
            recovery_action=draw(st.sampled_from([None, "reset", "none"])),
        )  # fmt: skip
    if kind == "c":
        return Device(ts_ns=ts_ns, node=node, device="cpu0", kind="cpu", sm_ratio=draw(number))
    if kind == "h":
        return Host(ts_ns=ts_ns, node=node, available_bytes=draw(sure))
    if kind == "p":
        no = draw(st.booleans())
        fits = Fits(fits=not no, allocations=1, peak_bytes=1, cause="capacity" if no else None)
        return Pool(
            ts_ns=ts_ns, node=node, device="gpu0", reserved_bytes=9, allocated_bytes=draw(sure),
            free_bytes=draw(sure), largest_free_bytes=draw(sure), releasable_bytes=0,
            fragmentation_ratio=draw(sure) / 10, fits=draw(st.sampled_from([None, fits])),
        )  # fmt: skip
    if kind == "s":
        return Serving(
            ts_ns=ts_ns,
            node=node,
            engine="e",
            instance=draw(st.sampled_from(["a", "a", "b"])),
            waiting=draw(st.one_of(st.none(), sure)),
            modalities=draw(
                st.sampled_from(
                    [{}, {"vision": Latencies(ttft_p99_s=6.0)}, {"text": Latencies(queue_wait_s=2)}]
                )
            ),
        )
    if kind == "m":
        return Memory(
            ts_ns=ts_ns, node=node, device="gpu0", address=0, size_bytes=draw(sure),
            action=draw(st.sampled_from(["alloc", "free", "segment_free"])),
        )  # fmt: skip
    if kind == "r":
        return Request(
            ts_ns=ts_ns, node=node, id="r", images=draw(st.integers(0, 1)),
            state=draw(st.sampled_from(["queued", "completed"])),
            stages={"queue_wait_s": float(draw(sure)), "decode": 1.0},
        )  # fmt: skip
    evidence = {"recovered_ratio": draw(sure)}
    return Event(ts_ns=ts_ns, node=node, what="reclaim", evidence=evidence)


@st.composite
def streams(draw: st.DrawFn) -> list[AnyRecord]:
    now, out = 1_790_000_000 * 10 * TICK, []
    for _ in range(draw(st.integers(1, 60))):
        now += draw(st.sampled_from([0, 1, 1, 2, 3, 30])) * TICK
        late = draw(st.sampled_from([0, 0, 0, 0, 0, 7]))
        out.append(draw(record(now - late * TICK)))
    return out


@pytest.mark.parametrize("min_samples", [1, 3])
@settings(max_examples=60, deadline=None)
@given(stream=streams())
def test_columns_equal_live(min_samples: int, stream: list[AnyRecord]) -> None:
    rules = compile_rules(
        profiles.Rule(name=when, when=when, max_age_s=1.05, min_samples=min_samples)
        for when in WHENS
    )
    live, expected = Live(rules), {}
    position = -1
    for item in stream:
        if live.router.route(item):
            position += 1
        for instance, truth in live.step(item):
            key = (instance.rule.name, instance.subject, position)
            expected[key] = math.nan if truth is None else float(truth)
    got = {
        (found.rule.name, found.subject, int(at)): float(truth)
        for found in Columns(rules, stream).truths()
        for at, truth in zip(found.positions, found.truth, strict=True)
    }
    assert got.keys() ^ expected.keys() == set()
    different = {
        key: (expected[key], got[key])
        for key in got
        if got[key] != expected[key] and not (math.isnan(got[key]) and math.isnan(expected[key]))
    }
    assert not different
