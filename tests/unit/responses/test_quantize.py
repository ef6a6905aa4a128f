"""INT8 and back: bounded error, outliers kept, items independent, scratch bounded."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from mmctl.engine.errors import MmctlError  # noqa: E402
from mmctl.engine.responses.estimate import CHUNK_BYTES, bytes_of, compare  # noqa: E402
from mmctl.engine.responses.quantize import (  # noqa: E402
    OUTLIER_RATIO,
    dequantize,
    estimate_quantize,
    quantize,
)

SHAPES = st.tuples(st.integers(1, 3), st.integers(1, 70), st.integers(1, 40))


@given(shape=SHAPES, seed=st.integers(0, 99), dtype=st.sampled_from([torch.float16, torch.float32]))
@settings(max_examples=60, deadline=None)
def test_every_value_comes_back_within_half_a_step(shape, seed, dtype) -> None:
    generator = torch.Generator().manual_seed(seed)
    tokens = (torch.randn(shape, generator=generator) * 10).to(dtype)
    packed = quantize(tokens)
    back = dequantize(packed)
    assert back.dtype == dtype and back.shape == tokens.shape
    rounding = tokens.float().abs() * (2**-10 if dtype == torch.float16 else 2**-22)
    wrong = (back.float() - tokens.float()).abs() - packed.scale * 0.5001 - rounding
    assert float(wrong.max()) <= 1e-6


def test_the_usual_shape_is_nearly_exact() -> None:
    tokens = torch.randn(1, 576, 1024, generator=torch.Generator().manual_seed(0)).half()
    packed = quantize(tokens)
    error, cosine = compare(tokens, dequantize(packed))
    assert cosine >= 0.9998 and error < 0.02
    promised = estimate_quantize(tokens)
    kept = bytes_of(packed.outlier_index, packed.outlier_value)
    assert packed.nbytes - kept == promised.before_bytes - promised.frees_bytes


def test_massive_tokens_do_not_drown_the_others() -> None:
    tokens = torch.randn(2, 300, 64, generator=torch.Generator().manual_seed(1))
    tokens[:, 7, 3] = 5000.0
    tokens[1, 9, :] = -900.0
    packed = quantize(tokens)
    back = dequantize(packed)
    assert torch.equal(back[:, 7, 3], tokens[:, 7, 3])
    assert torch.equal(back[1, 9], tokens[1, 9])
    assert compare(tokens, back)[1] > 0.999
    assert len(packed.outlier_value) <= tokens.numel() * OUTLIER_RATIO


@given(seed=st.integers(0, 50))
@settings(max_examples=20, deadline=None)
def test_items_of_a_batch_are_independent(seed) -> None:
    tokens = torch.randn(3, 20, 8, generator=torch.Generator().manual_seed(seed))
    tokens[1] *= 1000
    together = dequantize(quantize(tokens))
    alone = torch.cat([dequantize(quantize(item[None])) for item in tokens])
    assert torch.equal(together, alone)


def test_twice_is_once_and_odd_inputs() -> None:
    tokens = torch.zeros(1, 4, 3)
    packed = quantize(tokens)
    assert quantize(packed) is packed
    assert torch.equal(dequantize(packed), tokens)
    assert dequantize(quantize(torch.zeros(0, 3))).shape == (0, 3)
    strided = torch.randn(8, 6, generator=torch.Generator().manual_seed(2)).t()
    assert torch.equal(dequantize(quantize(strided)), dequantize(quantize(strided.contiguous())))
    with pytest.raises(MmctlError, match="not finite"):
        quantize(torch.tensor([[1.0, float("inf")]]))


def test_scratch_is_one_output_and_one_chunk(peak_bytes) -> None:
    tokens = torch.randn(1, 576, 1024, generator=torch.Generator().manual_seed(3)).half()
    tokens[0, 5] *= 1000  # a massive token: every channel holds an outlier
    peak, packed = peak_bytes(lambda: quantize(tokens))
    assert peak <= packed.nbytes + CHUNK_BYTES
    freed, worst, held = 0, 0, 0
    for _ in range(16):
        peak, packed = peak_bytes(lambda: quantize(tokens))
        worst = max(worst, held + peak)
        freed += bytes_of(tokens) - packed.nbytes
        held -= bytes_of(tokens) - packed.nbytes
    assert worst <= 0.10 * freed
