"""An allocator that takes over a state: what it holds, and that it goes on as the first would."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from mmctl.engine import profiles
from mmctl.engine.memory import snapshot as snapshots
from mmctl.engine.memory.adopt import adopt, from_torch
from mmctl.engine.memory.allocator import Allocator, Segment, Tag
from mmctl.engine.memory.settings import Settings

FILES = (
    "verl_megatron_vllm_pools", "kivi_kvcache_llama", "sd_img2img_two_gpu", "flexgen_oom_2023",
    "oom_expandable_no_frames", "cs336_train_128",
)  # fmt: skip


@pytest.mark.parametrize("expandable", [False, True])
def test_goes_on_as_the_allocator_that_was_there(expandable: bool) -> None:
    draw = random.Random(7)
    settings = Settings(expandable_segments=expandable)
    first = Allocator(settings, capacity_bytes=1 << 30)
    live = [
        first.malloc(
            draw.choice((700, 5000, 300_000, 3 << 20, 30 << 20)), tag=Tag("vision", str(i))
        )
        for i in range(120)
    ]
    for block in draw.sample(live, 60):
        first.free(block)
    second = adopt(first.segments(), settings, 1 << 30)
    assert second.segments() == first.segments()
    assert second.reserved_bytes == first.reserved_bytes
    for size in (400, 200_000, 2 << 20, 9 << 20):
        assert second.malloc(size).address == first.malloc(size).address
    first.release_cached()
    second.release_cached()
    assert second.reserved_bytes == first.reserved_bytes


@pytest.mark.parametrize("name", FILES)
def test_real_states_are_taken_over_whole(data: Path, name: str) -> None:
    found = snapshots.read(data / "snapshots" / f"{name}.pickle")
    tags = snapshots.stack_tags(found, profiles.load("default").profile.modality)
    for device in found.devices():
        segments = snapshots.segments_of(found, device, tags)
        expandable = any(segment.expandable for segment in segments)
        again = adopt(segments, Settings(expandable_segments=expandable)).segments()
        assert _filled(again) == _filled(sorted(segments))


def _filled(segments: list[Segment]) -> list[tuple[Any, ...]]:
    return [
        (s.address, s.size, s.small, [(b.address, b.size, b.state, b.tag) for b in s.blocks])
        for s in segments
    ]


def test_reads_what_torch_lists() -> None:
    listed = [
        {
            "address": 1 << 30, "total_size": 2 << 20, "stream": 7, "segment_type": "small",
            "segment_pool_id": (0, 0), "is_expandable": False,
            "blocks": [
                {"address": 1 << 30, "size": 1024, "requested_size": 900,
                 "state": "active_allocated"},
                {"size": (2 << 20) - 1024, "requested_size": 0, "state": "inactive"},
            ],
        }
    ]  # fmt: skip
    (segment,) = from_torch(listed, lambda address: Tag("text", hex(address)))
    assert segment.blocks[0].tag == Tag("text", hex(1 << 30)) and segment.stream == 7
    assert segment.blocks[1].address == (1 << 30) + 1024
    allocator = adopt([segment], Settings(), 1 << 31)
    assert allocator.malloc(600, stream=7).address == (1 << 30) + 1024
