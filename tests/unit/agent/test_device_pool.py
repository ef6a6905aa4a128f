"""The pool of a real device, fed with what a device's allocator would list."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs the extra 'torch'")

from mmctl.agent.device_pool import DevicePool  # noqa: E402
from mmctl.agent.tracker import Tracker, labelled  # noqa: E402
from mmctl.engine.memory.dryrun import Step, dry_run  # noqa: E402
from mmctl.engine.records import AnyRecord, Memory  # noqa: E402

MIB = 1 << 20


def segment(address: int, size: int, blocks: list[tuple[int, str]]) -> dict[str, Any]:
    listed = []
    for length, state in blocks:
        listed.append({"address": address, "size": length, "requested_size": length,
                       "state": state})  # fmt: skip
        address += length
    return {
        "address": listed[0]["address"], "total_size": size, "stream": 0, "is_expandable": False,
        "segment_type": "large", "segment_pool_id": (0, 0), "blocks": listed,
    }  # fmt: skip


@torch.inference_mode()
def test_blocks_of_the_snapshot_carry_the_trackers_labels() -> None:
    records: list[AnyRecord] = []
    listed: list[Any] = []
    pool = DevicePool(64 * MIB, "gpu0", "n", records.append, listed=lambda: listed)
    with Tracker(pool), labelled("vision", "r1"):
        tensor = torch.ones(MIB)  # 4 MiB
    at = tensor.untyped_storage().data_ptr()
    listed.append(segment(at, 20 * MIB, [(4 * MIB, "active_allocated"), (16 * MIB, "inactive")]))
    pool.alloc(-1, 0, pool._held[at][1], address=0)  # what was read before is no longer true
    block = pool.allocator.live(at)
    assert block is not None and block.tag == ("vision", "r1")
    assert pool.allocator.device_free_bytes == 44 * MIB
    assert dry_run(pool.allocator, [Step(40 * MIB)]).fits
    assert not dry_run(pool.allocator, [Step(50 * MIB)]).fits
    assert isinstance(records[0], Memory) and records[0].address == at
    pool.free(-1)
    del tensor
    assert pool.allocated_bytes == 0 and records[-1].action == "free"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@torch.inference_mode()
def test_on_a_gpu_the_snapshot_and_the_tracker_agree() -> None:
    pool = DevicePool(1 << 30, "gpu0", "n", lambda record: None)
    with Tracker(pool, "cuda"), labelled("text", "r2"):
        kept = [torch.ones(size, device="cuda") for size in (100, 500_000, 5_000_000)]
    held = [block for block in pool.allocator.blocks() if block.tag.holder == "r2"]
    assert sorted(block.requested_size for block in held) == [400, 2_000_000, 20_000_000]
    del kept
    assert pool.allocated_bytes == 0
