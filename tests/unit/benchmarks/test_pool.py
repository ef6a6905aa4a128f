"""The benchmark of pools: its costs, and what no pool can exceed."""

from __future__ import annotations

import pytest

from mmctl.benchmarks import pool
from mmctl.engine.memory.allocator import Allocator, DeviceEvent
from mmctl.engine.memory.settings import MIB, Settings


def test_calls_cost_what_was_measured() -> None:
    moved = [DeviceEvent("unmap", 0, 4 * MIB), DeviceEvent("map", 0, 4 * MIB)]
    move_s = 2 * (pool.UNMAP_S + pool.MAP_S)
    assert pool.device_s(moved, created_bytes=0) == pytest.approx(move_s)
    assert pool.device_s(moved, created_bytes=2 * MIB) == pytest.approx(move_s + pool.CREATE_S)
    handle = [DeviceEvent("map", 0, 40 * MIB)]
    assert pool.device_s(handle, None) == pytest.approx(2 * (pool.CREATE_S + pool.MAP_S))
    plain = [DeviceEvent("segment_alloc", 0, 40 * MIB), DeviceEvent("segment_free", 0, 20 * MIB)]
    assert pool.device_s(plain, None) == pytest.approx(2 * pool.SEGMENT_CALL_S)


def test_with_memory_enough_all_batches_are_the_largest() -> None:
    load = pool.pairs(160)
    pairs_per_s, refused = pool.bound(load, 1 << 40)
    assert refused == 0
    assert pairs_per_s == pytest.approx(8 / pool.batch_s(8))


@pytest.mark.parametrize("capacity_mib", [500, 800])
def test_fragmentation_and_calls_only_cost(capacity_mib: int) -> None:
    """A pool without them serves more pairs a second, and refuses no more of them."""
    load = pool.pairs(400)
    pairs_per_s, refused = pool.bound(load, capacity_mib * MIB)
    for settings in (
        Settings(),
        Settings(expandable_segments=True),
        Settings(lifetime_pool=True),
    ):
        ran = pool.serve(load, Allocator(settings, capacity_mib * MIB))
        assert ran.served / ran.seconds < pairs_per_s
        assert ran.refused >= refused
