"""The allocator model against published figures, and the laws that every state must obey."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mmctl.engine.memory.allocator import Allocator, Block, OutOfMemory, Tag
from mmctl.engine.memory.settings import Settings, round_size

MIB = 1 << 20


def test_settings_conflict_grows_as_published() -> None:
    """max_split_size_mb:128 with expandable segments on a real 16 GiB card."""
    model = Allocator(Settings(expandable_segments=True, max_split_bytes=128 * MIB))
    model.malloc(64 * MIB)
    seen = {}
    for cycle in range(101):
        a, b = model.malloc(91 * MIB), model.malloc(45 * MIB + MIB // 2)
        model.malloc(2 * MIB)
        model.free(a)
        model.free(b)
        allocated = sum(block.size for block in model.blocks() if block.state != "inactive")
        seen[cycle] = (allocated // MIB, model.reserved_bytes // MIB)
    assert [seen[cycle] for cycle in (0, 20, 40, 60, 80, 100)] == [
        (66, 220), (106, 2980), (146, 5760), (186, 8520), (226, 11300), (266, 14060),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("size", "parts", "rounded"),
    [
        (1, 0, 512), (513, 0, 1024), (1200 << 10, 4, 1280 << 10), (1 << 22, 4, 1 << 22),
        (513, 4, 1024), (2049, 4, 2560), ((1 << 21) + 1, 1, (1 << 21) + 512),
    ],
)  # fmt: skip
def test_round_size(size: int, parts: int, rounded: int) -> None:
    assert round_size(size, (parts,) * 16) == rounded


def test_best_fit_is_smallest_then_lowest() -> None:
    model = Allocator()
    first = [model.malloc(4 * MIB) for _ in range(5)]
    model.free(first[0])
    model.free(first[2])
    assert model.malloc(3 * MIB).address == first[0].address
    assert model.malloc(4 * MIB).address == first[2].address


def test_other_streams_and_pools_do_not_share() -> None:
    model = Allocator(capacity_bytes=20 * MIB)
    model.free(model.malloc(4 * MIB, stream=1))
    hold = model.malloc(2 * MIB, stream=1)
    with pytest.raises(OutOfMemory) as caught:
        model.malloc(4 * MIB, stream=0)
    figures = caught.value.figures
    assert (figures.free_bytes, figures.all_free_bytes) == (0, 18 * MIB)
    assert (figures.device_free_bytes, figures.largest_free_bytes) == (0, 0)
    model.free(hold)
    assert model.malloc(4 * MIB, stream=0).size == 4 * MIB  # the cache was released


def test_pending_block_is_not_reused_until_freed_again() -> None:
    model = Allocator(capacity_bytes=20 * MIB)
    block = model.malloc(12 * MIB)
    model.free(block, pending=True)
    assert model.live(block.address) is not None
    with pytest.raises(OutOfMemory) as caught:
        model.malloc(12 * MIB)
    assert caught.value.figures.pending_bytes == 12 * MIB
    model.free(block)
    assert model.malloc(12 * MIB).address == block.address


def test_the_lifetime_pool_moves_the_pages_that_lack_and_no_more() -> None:
    model = Allocator(Settings(lifetime_pool=True), capacity_bytes=64 * MIB)
    model.free(model.malloc(40 * MIB, lifetime="short"))
    model.device_events()
    model.malloc(30 * MIB, lifetime="long")
    moved = {event.action: event.size for event in model.device_events()}
    assert moved == {"unmap": 6 * MIB, "map": 30 * MIB}
    assert [block.size for block in model.blocks() if block.state == "inactive"] == [34 * MIB]
    with pytest.raises(OutOfMemory):
        model.malloc(36 * MIB, lifetime="short")


def test_memory_fraction_and_garbage_collection() -> None:
    model = Allocator(
        Settings(memory_fraction=0.5, garbage_collection_threshold=0.5), capacity_bytes=400 * MIB
    )
    blocks = [model.malloc(size * MIB) for size in (30, 40, 50)]
    for block in blocks:
        model.free(block)
    model.malloc(60 * MIB)
    freed = [event for event in model.device_events() if event.action == "segment_free"]
    assert sum(event.size for event in freed) >= 20 * MIB
    with pytest.raises(OutOfMemory):
        model.malloc(180 * MIB)


def test_copy_is_independent() -> None:
    model = Allocator(capacity_bytes=64 * MIB)
    block = model.malloc(12 * MIB, tag=Tag("vision", "patch"))
    twin = model.copy()
    twin.free(block)
    twin.malloc(30 * MIB)
    assert model.live(block.address) == block
    assert model.reserved_bytes == 12 * MIB


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["malloc", "malloc", "free", "pending", "release"]),
        st.integers(0, 40 * MIB) | st.integers(0, 3 * MIB),
        st.integers(0, 1),
    ),
    max_size=60,
)
KINDS = st.builds(
    Settings,
    expandable_segments=st.booleans(),
    max_split_bytes=st.none() | st.integers(21, 64).map(lambda n: n * MIB),
    roundup_power2_divisions=st.sampled_from([0, 1, 4]).map(lambda n: (n,) * 16),
    pool_per_modality=st.booleans(),
    lifetime_pool=st.booleans(),
)


@settings(max_examples=80, deadline=None)
@given(steps=STEPS, kind=KINDS)
def test_laws(steps: list[tuple[str, int, int]], kind: Settings) -> None:
    """Bytes are conserved, nothing overlaps, free neighbours are merged, tags stay."""
    model = Allocator(kind, capacity_bytes=160 * MIB)
    live: dict[int, Block] = {}
    for action, number, stream in steps:
        if action == "malloc":
            try:
                block = model.malloc(
                    number,
                    stream=stream,
                    tag=Tag("vision", str(number)),
                    lifetime=("short", "long")[number % 2],
                )
            except OutOfMemory as error:
                assert error.figures.need_bytes >= number
                continue
            assert block.size >= number
            live[block.address] = block
        elif action == "release":
            model.release_cached()
        elif live:
            address = sorted(live)[number % len(live)]
            model.free(address, pending=action == "pending")
            if action == "free":
                del live[address]
        check(model, live)


def check(model: Allocator, live: dict[int, Block]) -> None:
    segments = model.segments()
    assert sum(segment.size for segment in segments) == model.reserved_bytes <= 160 * MIB
    end = -1
    for segment in segments:
        assert segment.address >= end
        at = segment.address
        merged = None
        for block in segment.blocks:
            assert block.address == at
            at += block.size
            state = block.state
            assert not (state == merged == "inactive")
            merged = state
        assert at == segment.address + segment.size
        end = at
    held = {
        block.address: block.tag
        for segment in segments
        for block in segment.blocks
        if block.state != "inactive"
    }
    assert held == {address: block.tag for address, block in live.items()}
