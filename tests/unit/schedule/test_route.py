"""Routing by live records: the published weight, its tie-break, affinity, what goes stale."""

from __future__ import annotations

from mmctl.engine.records import Device, Link
from mmctl.engine.schedule.route import STALE_NS, Ask, Router


def reading(device: str, sm: float, bandwidth: float = 0.0, ts_ns: int = 10) -> Device:
    return Device(
        ts_ns=ts_ns, device=device, kind="gpu", sm_ratio=sm, bandwidth_ratio=bandwidth
    )  # fmt: skip


def test_the_weight_is_the_published_one() -> None:
    router = Router(encoders=("gpu0",))
    router.update(Link(ts_ns=1, a="gpu0", b="gpu1", link_class="NV4", hops=1))
    router.update(reading("gpu0", 0.6, 0.5))
    router.update(reading("gpu1", 0.2, 0.5))
    found = router.decide(Ask(id="a", images=1))
    # gpu0: 0.4 × 0.5 × 1; gpu1: 0.8 × 0.5 × 1/2: alike, so that the first one keeps it.
    assert found.weight == 0.2 and found.device == "gpu0" and found.encoder == "gpu0"
    router.update(reading("gpu1", 0.1, 0.5))
    found = router.decide(Ask(id="b", images=1))
    assert (found.device, found.encoder, found.reason) == ("gpu1", "gpu0", "weight")


def test_busy_in_full_is_shared_out_by_what_is_outstanding() -> None:
    router = Router()
    for name in ("gpu0", "gpu1", "gpu2"):
        router.update(reading(name, 1.0))
    took = [router.decide(Ask(id=i, text_tokens=1000)).device for i in range(6)]
    assert sorted(took[:3]) == sorted(took[3:]) == ["gpu0", "gpu1", "gpu2"]
    router.release(1)
    assert router.decide(Ask(id=9, text_tokens=10)).device == took[1]


def test_a_pair_stays_with_its_kv_cache_until_that_costs_too_much() -> None:
    router = Router(("gpu0", "gpu1"))
    first = router.decide(Ask(id=0, text_tokens=100, pair="p")).device
    found = router.decide(Ask(id=1, text_tokens=100, pair="p"))
    assert found.device == first and found.reason == "affinity"
    router.decide(Ask(id=2, text_tokens=100_000, pair="p"))
    assert router.decide(Ask(id=3, text_tokens=1, pair="p")).device != first


def test_idle_devices_run_at_once_and_stale_ones_are_avoided() -> None:
    router = Router()
    router.update(reading("gpu0", 0.1, ts_ns=10))
    assert router.decide(Ask(id=0)).priority == "P0"
    router.update(reading("gpu1", 0.5, ts_ns=11 + STALE_NS))
    found = router.decide(Ask(id=1))
    assert found.device == "gpu1" and found.priority == "P1" and not found.stale
