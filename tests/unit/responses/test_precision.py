"""Hand-over: half precision out, float32 gradients back, never both copies."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from mmctl.engine.responses.estimate import CHUNK_BYTES  # noqa: E402
from mmctl.engine.responses.precision import (  # noqa: E402
    estimate_hand_over,
    hand_over,
    release_cache,
)


def test_the_source_gives_its_memory_back(peak_bytes) -> None:
    source = torch.randn(2, 300, 512)
    expected = source.half()
    promised = estimate_hand_over(source, torch.float16)
    with torch.inference_mode():
        alias = source
        peak, out = peak_bytes(lambda: hand_over(source, torch.float16))
    assert torch.equal(out, expected)
    assert alias.untyped_storage().nbytes() == 0
    assert peak <= out.numel() * 2 + CHUNK_BYTES
    assert promised.frees_bytes == promised.before_bytes - out.numel() * 2
    assert hand_over(out, torch.float16) is out


def test_gradients_are_those_of_float32_and_come_back_as_float32() -> None:
    weight = torch.randn(8, 8, requires_grad=True)
    x = torch.randn(3, 5, 8)
    embedding = x @ weight
    hand_over(embedding, torch.bfloat16).float().square().sum().backward()
    assert weight.grad is not None and weight.grad.dtype == torch.float32
    rounded = (x @ weight.detach()).bfloat16().float()
    assert torch.allclose(
        weight.grad, (x.reshape(-1, 8).T @ (2 * rounded).reshape(-1, 8)), rtol=2e-2
    )
    assert embedding.untyped_storage().nbytes() > 0


def test_odd_shapes() -> None:
    for shape in ((), (7,), (0, 3), (2, 3), (2, 0, 4)):
        source = torch.randn(shape)
        expected = source.bfloat16()
        assert torch.equal(hand_over(source, torch.bfloat16), expected)


def test_no_cache_is_released_where_there_is_none() -> None:
    assert release_cache(torch.device("cpu")) is False
