"""The two queues by known waits, and the downscale loop by the published matrix."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from mmctl.engine.records import Device, Request
from mmctl.engine.schedule import filled, fleet, generate, workload
from mmctl.engine.schedule.queues import Downscale, Limit, Queues, action_of
from mmctl.engine.schedule.workload import Workload

S = 1_000_000_000
LIMITS = (
    Limit(queue="vision", batch=2, deadline_s=0.2), Limit(queue="stream", batch=1, deadline_s=0.03)
)  # fmt: skip


def test_depth_wait_and_misses() -> None:
    queues = Queues(LIMITS)
    # Three image requests at once, served one by one, a second each.
    for i in range(3):
        queues.add(Request(ts_ns=0, id=str(i), images=1, state="queued"))
    for i in range(3):
        queues.add(Request(ts_ns=i * S, id=str(i), images=1, state="admitted"))
        queues.add(Request(ts_ns=(i + 1) * S, id=str(i), images=1, state="completed"))
    vision, stream = queues.report()
    assert vision["finished"] == 3 and vision["most_depth"] == 3 and vision["depth"] == 0
    assert vision["wait_s"]["mean"] == pytest.approx(1.0)
    assert vision["utilisation_ratio"] == 1.0 and vision["most_running"] == 1
    assert vision["late_ratio"] == pytest.approx(2 / 3)
    assert vision["mean_depth"] == pytest.approx((2 + 1) / 3)
    by_servers = {entry["servers"]: entry for entry in vision["alternatives"]}
    assert by_servers[1]["wait_s"]["mean"] == pytest.approx(1.0)
    assert by_servers[2]["wait_s"]["mean"] == pytest.approx(1 / 3)
    assert stream["finished"] == 0 and stream["wait_s"] is None and stream["late_ratio"] is None


@pytest.mark.parametrize(
    ("cpu", "p99", "action"),
    [
        (0.3, 1.0, "close_noncore_workers"),
        (0.44, 0.9, "cache_warm"),
        (0.3, 0.85, "degrade"),
        (0.55, 0.78, "cache_warm"),
        (0.61, 2.0, "none"),
        (0.3, 0.8, "none"),
    ],
)
def test_the_matrix(cpu: float, p99: float, action: str) -> None:
    assert action_of(cpu, p99) == action


def test_three_slow_seconds_with_an_idle_cpu_act_and_a_short_spike_does_not() -> None:
    def run(slow: set[int], cpu: float | None) -> list[str]:
        queues = Queues(LIMITS)
        if cpu is not None:
            queues.add(Device(ts_ns=0, device="cpu0", kind="cpu", sm_ratio=cpu))
        for second in range(12):
            queues.downscale.add(second * S, 1.0 if second in slow else 0.1)
        return [decision["action"] for decision in queues.downscale.decisions]

    assert run({4, 5, 6}, 0.3) == ["close_noncore_workers", "none"]
    assert run({4, 5}, 0.3) == run({4, 5, 6}, 0.8) == run({4, 5, 6}, None) == []


def test_the_baseline_is_the_window_s_p99_and_a_fifth() -> None:
    loop = Downscale()
    for second in range(5):
        loop.add(second * S, 0.5)
    assert loop.baseline_s == pytest.approx(0.6)


def test_a_completed_request_says_itself_how_long_it_waited() -> None:
    queues = Queues(LIMITS)
    queues.add(Request(ts_ns=0, id="a", text_tokens=5, state="queued"))
    queues.add(
        Request(ts_ns=S, id="a", text_tokens=5, state="completed", stages={"queue_wait_s": 0.25})
    )
    stream = queues.report()[1]
    assert stream["finished"] == 1 and stream["depth"] == 0
    assert stream["wait_s"]["mean"] == pytest.approx(0.25)


def test_each_queue_fills_its_device_and_waits_as_long_as_a_closed_form_says() -> None:
    model = fleet.model("qwen3-vl-8b")
    (device,) = fleet.parse("h100_sxm", model, fleet.Engine())

    def work(rate: float) -> Workload:
        made = generate.poisson(
            rate_per_s=rate, count=20_000, seed=3, text_tokens=256, output_tokens=2
        )
        ones = np.ones(made.requests, "i4")
        vision = 1196 * ones
        return msgspec.structs.replace(
            made, images=ones, vision_tokens=vision, patches=workload.patches_of(vision, ones)
        )

    found = filled.stream(work, device, LIMITS[1], fleet.Engine())
    assert found.utilisation_ratio == pytest.approx(0.67, abs=0.01) and found.batch == 1
    rho, takes = found.utilisation_ratio, found.service_mean_s
    assert found.wait_s is not None
    assert found.wait_s["mean"] == pytest.approx(rho / (2 * (1 - rho)) * takes, rel=0.1)
    images = filled.vision(work, device, Limit(queue="vision", batch=8, deadline_s=0.2))
    assert images.utilisation_ratio >= 0.92 and images.met
    single = filled.vision(work, device, Limit(queue="vision", batch=1, deadline_s=0.2))
    assert single.wait_s is not None and images.e2e_s is not None
    rho, takes = single.utilisation_ratio, single.service_mean_s
    assert single.wait_s["mean"] == pytest.approx(rho / (2 * (1 - rho)) * takes, rel=0.15)
