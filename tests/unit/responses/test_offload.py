"""Offload and reload: bit for bit, at once, and never more than the host can spare."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from mmctl.engine.errors import MmctlError  # noqa: E402
from mmctl.engine.responses import offload as room  # noqa: E402
from mmctl.engine.responses.offload import HostBlocks, HostMemoryError, offload  # noqa: E402


@given(
    shape=st.lists(st.integers(0, 9), min_size=0, max_size=4),
    dtype=st.sampled_from([torch.float16, torch.bfloat16, torch.float32, torch.int8]),
    transposed=st.booleans(),
    block=st.sampled_from([64, 100, 4096]),
)
@settings(max_examples=60, deadline=None)
def test_everything_comes_back_bit_for_bit(shape, dtype, transposed, block) -> None:
    tensor = torch.randint(-100, 100, shape).to(dtype)
    if transposed and tensor.dim() >= 2:
        tensor = tensor.transpose(0, -1)
    pool = HostBlocks(block_bytes=block, reserve_bytes=0)
    handle = offload(tensor, pool)
    assert handle.finish() == tensor.numel() * tensor.element_size()
    assert handle.finish() == 0
    back = handle.reload()
    assert back.dtype == dtype and torch.equal(back, tensor)
    assert back.data_ptr() != tensor.data_ptr() or not tensor.numel()


def test_large_views_with_gaps_are_copied_in_chunks() -> None:
    for view in (torch.randn(700, 300).t(), torch.randn(400_000)[::2]):
        handle = offload(view, HostBlocks(block_bytes=2**20, reserve_bytes=0))
        handle.finish()
        assert torch.equal(handle.reload(), view)


def test_blocks_are_used_again() -> None:
    pool = HostBlocks(block_bytes=1024, reserve_bytes=0)
    pool.reserve(4096)
    assert pool.free_bytes == 4096
    handle = offload(torch.ones(1000), pool)
    handle.finish()
    assert pool.free_bytes == 0
    handle.reload()
    assert pool.free_bytes == 4096
    with pytest.raises(MmctlError, match="before"):
        handle.reload()
    pool.release()
    assert pool.free_bytes == 0


def test_before_finish_the_device_copy_is_given_back_as_it_is() -> None:
    tensor = torch.ones(1000)
    handle = offload(tensor, HostBlocks(reserve_bytes=0))
    assert handle.reload().data_ptr() == tensor.data_ptr()


def test_the_host_keeps_its_reserve(monkeypatch) -> None:
    monkeypatch.setattr(room, "host_free_bytes", lambda: 3 * 2**20)
    pool = HostBlocks(block_bytes=2**20, reserve_bytes=2 * 2**20)
    with pytest.raises(HostMemoryError, match=r"needs 2\.0 MiB"):
        offload(torch.ones(2**18 + 1), pool)
    offload(torch.ones(2**18), pool).finish()
