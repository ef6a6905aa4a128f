"""Blocks by row number: the same addresses, figures and refusals as the allocator's own nouns."""

from __future__ import annotations

from random import Random

import pytest

pytest.importorskip("torch", reason="the demo needs torch")

from mmctl.demo.rows import BASE_ADDRESS, Rows
from mmctl.engine.memory import core
from mmctl.engine.memory.allocator import Allocator, OutOfMemory, Tag
from mmctl.engine.memory.state import fragmentation, modality_bytes, stream_figures

MIB = 1 << 20


@pytest.mark.parametrize("fast", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_rows_and_blocks_agree(seed: int, fast: bool) -> None:
    if fast:
        pytest.importorskip("numba", reason="the compiled loop needs numba")
    random = Random(seed)
    rows = Rows(96 * MIB, [3 * MIB], fast)
    blocks = Allocator(capacity_bytes=96 * MIB, base_address=BASE_ADDRESS)
    blocks.malloc(3 * MIB)
    live: list[tuple[int, int]] = []
    refused = 0
    for _ in range(3000):
        if live and random.random() < 0.48:
            row, address = live.pop(random.randrange(len(live)))
            rows.free(row, "text")
            blocks.free(address)
            continue
        size = random.choice((100, 5000, 700_000, 2 * MIB, 9 * MIB, 13 * MIB))
        trial = rows.copy()
        try:
            address = blocks.malloc(size, tag=Tag("text", "r")).address
        except OutOfMemory as error:
            refused += 1
            assert not trial.admits([(0, size)])
            with pytest.raises(OutOfMemory) as raised:
                rows.malloc(size, "text")
            assert raised.value.figures == error.figures
            continue
        row = rows.malloc(size, "text")
        assert trial.malloc(size, "text") == row, "a copy gives the same rows"
        assert rows.columns.blocks[core.ADDRESS][row] + BASE_ADDRESS == address
        assert rows.requested_bytes(row) == size
        live.append((row, address))
    assert refused
    (figures,) = stream_figures(blocks.segments())
    assert rows.reserved_bytes == figures.reserved_bytes == blocks.reserved_bytes
    free, largest, releasable = rows.free_figures()
    assert (free, largest) == (figures.free_bytes, figures.largest_free_bytes)
    assert releasable == figures.releasable_bytes
    assert 1 - largest / free == fragmentation([figures])
    assert rows.held == modality_bytes(blocks.segments())
