"""Figures of a pool on states small enough to work out by hand."""

from __future__ import annotations

import pytest

from mmctl.engine.memory import state
from mmctl.engine.memory.allocator import Allocator, Tag
from mmctl.engine.memory.causes import cause
from mmctl.engine.memory.dryrun import Step, dry_run, headroom
from mmctl.engine.memory.settings import Settings

MIB = 1 << 20
VISION, TEXT = Tag("vision", "patch_embed"), Tag("text", "kv_cache")


def checkered(capacity: int = 40) -> Allocator:
    """A 40 MiB segment: 8 MiB free, 4 vision, 8 free, 4 text, 8 free, 8 text."""
    model = Allocator(capacity_bytes=capacity * MIB)
    model.free(model.malloc(40 * MIB))
    gaps = []
    for size, tag in ((8, None), (4, VISION), (8, None), (4, TEXT), (8, None), (8, TEXT)):
        block = model.malloc(size * MIB, tag=tag or Tag())
        if tag is None:
            gaps.append(block)
    for block in gaps:
        model.free(block)
    return model


def test_figures_per_pool_and_stream() -> None:
    model = checkered(80)
    model.free(model.malloc(12 * MIB, stream=3), pending=True)
    first, other = state.stream_figures(model.segments())
    assert (first.reserved_bytes, first.free_bytes) == (40 * MIB, 24 * MIB)
    assert first.largest_free_bytes == 8 * MIB
    assert first.fragmentation_ratio == pytest.approx(1 - 8 / 24)
    assert (first.segments, first.blocks, first.releasable_bytes) == (1, 6, 0)
    assert (other.stream, other.pending_bytes, other.active_bytes) == (3, 12 * MIB, 12 * MIB)


def test_stranded_says_who_pins_whom() -> None:
    segments = checkered().segments()
    # Without vision two gaps and its block join to 20 MiB; without text the upper two do.
    assert state.stranded(segments, "vision", 16 * MIB) == 16 * MIB
    assert state.stranded(segments, "text", 16 * MIB) == 16 * MIB
    assert state.stranded(segments, "vision", 8 * MIB) == 0
    assert state.stranded(segments, "vision", 24 * MIB) == 0


def test_conflict_per_region() -> None:
    segments = checkered().segments()
    low, high = state.regions(segments)
    assert (low.size, low.vision_bytes, low.free_bytes) == (20 * MIB, 4 * MIB, 16 * MIB)
    assert (high.vision_bytes, high.text_bytes) == (0, 12 * MIB)
    assert state.conflict(4, 0, 16, 0) == 0  # one modality alone is at peace
    assert state.conflict(4, 4, 16, 0) == 1
    assert state.conflict(4, 4, 16, 12) == 0.25
    assert state.conflict(4, 12, 0, 0) == 0.5
    assert state.conflict(0, 0, 0, 0) == 0


def test_conflict_over_a_window_remembers_and_forgets() -> None:
    model = Allocator(capacity_bytes=20 * MIB)
    window = state.Window(1.0)
    second = 10**9
    block = model.malloc(12 * MIB, tag=VISION)
    window.update(0, model.segments())
    model.free(block)
    model.malloc(12 * MIB, tag=TEXT)
    window.update(second // 2, model.segments())
    ((_, value),) = window.update(second, model.segments())
    assert value == pytest.approx(1.0)  # half a second of each
    ((_, value),) = window.update(2 * second, model.segments())
    assert value == 0.0  # a second of text alone


def test_pages() -> None:
    model = Allocator()
    model.malloc(6 * 1024)  # one page and a half
    model.malloc(1024)  # in the second page as well
    found = state.pages(model.segments())
    assert (found.used, found.partial, found.free) == (1, 1, 510)


def test_releasable_counts_whole_pages() -> None:
    model = Allocator(Settings(expandable_segments=True))
    model.malloc(30 * MIB)
    free = model.malloc(45 * MIB)
    model.malloc(5 * MIB)
    model.free(free)  # 30 to 75 MiB is free: the pages from 40 to 60 are whole
    assert state.releasable(model.segments()) == 20 * MIB
    before = model.reserved_bytes
    model.release_cached()
    assert before - model.reserved_bytes == 20 * MIB


def test_heat_covers_every_byte() -> None:
    model = checkered()
    window = state.Window(60.0)
    found = window.update(0, model.segments())
    column = state.heat(found, 10)
    assert sum(sum(cell[1:5]) for cell in column.cells) == pytest.approx(40 * MIB, abs=100)
    assert column.row_bytes == 4 * MIB


def test_regions_count_every_page_once() -> None:
    model = Allocator()
    blocks = [model.malloc(size) for size in (1024, 6144, 512, 9 * MIB, 700_000, 45 * MIB, 3000)]
    for block in blocks[1::2]:
        model.free(block)
    pages = state.pages(model.segments())
    found = state.regions(model.segments())
    assert sum(one.partial_pages for one in found) == pages.partial > 0
    assert sum(one.free_pages for one in found) == pages.free
    (column,) = (state.heat([(one, 0.0) for one in found], 40),)
    assert sum(map(sum, column.pages)) == pytest.approx(model.reserved_bytes // 4096, abs=40)


def test_age_is_of_the_blocks_that_are_held() -> None:
    model = Allocator()
    window = state.Window(60.0)
    second = 10**9
    model.malloc(12 * MIB)
    window.update(0, model.segments())
    young = model.malloc(4 * MIB)
    window.update(2 * second, model.segments())
    column = state.heat(window.update(6 * second, model.segments()), 1)
    assert column.age_s == (pytest.approx((12 * 6 + 4 * 4) / 16, abs=0.01),)
    model.free(young)
    model.malloc(4 * MIB + 512)  # another block in the same place
    column = state.heat(window.update(7 * second, model.segments()), 1)
    assert column.age_s == (pytest.approx(12 * 7 / 16, abs=0.01),)


def test_dry_run_leaves_the_pool_alone_and_names_the_cause() -> None:
    model = checkered()
    before = model.segments()
    fits = dry_run(model, [Step(8 * MIB), Step(8 * MIB), Step(16 * MIB)])
    assert (fits.fits, fits.allocations, fits.need_bytes) == (False, 2, 16 * MIB)
    assert fits.cause == "capacity"
    assert dry_run(model, [Step(16 * MIB)]).cause == "false_free"
    assert dry_run(model, [Step(8 * MIB), Step(8 * MIB, frees=(0,))]).fits
    assert model.segments() == before
    assert headroom(model, [Step(16 * MIB)]) == -16 * MIB


@pytest.mark.parametrize(
    ("capacity", "others", "size", "expected"),
    [
        (60, 0, 32, "split_free"), (60, 0, 100, "capacity"), (100, 50, 80, "other_process"),
    ],
)  # fmt: skip
def test_causes(capacity: int, others: int, size: int, expected: str) -> None:
    model = checkered(capacity)
    model.set_other_process_bytes(others * MIB)
    assert dry_run(model, [Step(size * MIB)]).cause == expected


def test_causes_that_need_other_pools_or_pending() -> None:
    model = checkered(40)
    figures = model.figures(30 * MIB, model.arena(30 * MIB, 9, (0, 0)))
    assert cause(figures) == "capacity"
    figures = model.figures(20 * MIB, model.arena(20 * MIB, 9, (0, 0)))
    assert cause(figures) == "pool_split"
    for block in model.blocks():
        if block.tag == TEXT:
            model.free(block, pending=True)
    assert cause(model.figures(30 * MIB, model.arena(30 * MIB, 0, (0, 0)))) == "pending"
