"""Distillation: sizes add up, order is kept, padding is inert, items are independent."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from mmctl.engine.errors import UsageError  # noqa: E402
from mmctl.engine.responses.distill import (  # noqa: E402
    distill,
    distill_kv,
    distill_pair,
    estimate_distill,
    kept_count,
    undistill,
    undistill_kv,
)
from mmctl.engine.responses.estimate import CHUNK_BYTES, bytes_of, compare  # noqa: E402

COUNTS = st.integers(1, 60)
RATIOS = st.floats(0.05, 1.0)


def random(shape, seed: int, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@given(count=COUNTS, keep=RATIOS, seed=st.integers(0, 99), half=st.booleans())
@settings(max_examples=60, deadline=None)
def test_sizes_add_up_and_rows_are_the_means_of_their_tokens(count, keep, seed, half) -> None:
    tokens = random((2, count, 12), seed, torch.float16 if half else torch.float32)
    merged = distill(tokens, keep)
    kept = kept_count(count, keep)
    assert merged.tokens.shape == (2, kept, 12)
    assert torch.equal(merged.sizes.sum(1), torch.full((2,), float(count)))
    assert merged.sizes.min() >= 1
    for item in range(2):
        owner = merged.owner[item].long()
        for row in range(kept):
            mean = tokens[item, owner == row].float().mean(0)
            near = merged.tokens[item, row].float() - mean
            assert float(near.abs().max()) < (2e-2 if half else 1e-5)
        # Rows stand in the order of the first tokens that stayed where they were.
        alone = [i for i in range(count) if (owner == owner[i]).sum() == 1]
        assert owner[alone].tolist() == sorted(owner[alone].tolist())
    back = undistill(merged)
    assert back.shape == tokens.shape and back.dtype == tokens.dtype
    if kept == count:
        assert torch.equal(back, tokens)


@given(count=st.integers(2, 40), keep=RATIOS, seed=st.integers(0, 99))
@settings(max_examples=30, deadline=None)
def test_items_of_a_batch_are_independent(count, keep, seed) -> None:
    tokens = random((3, count, 8), seed)
    together = distill(tokens, keep)
    for item in range(3):
        alone = distill(tokens[item : item + 1], keep)
        assert torch.equal(together.tokens[item], alone.tokens[0])
        assert torch.equal(together.owner[item], alone.owner[0])


@given(real=st.integers(1, 30), padding=st.integers(0, 20), keep=RATIOS, seed=st.integers(0, 99))
@settings(max_examples=60, deadline=None)
def test_padding_is_inert(real, padding, keep, seed) -> None:
    tokens = random((1, real + padding, 8), seed)
    mask = (torch.arange(real + padding) < real)[None]
    first = distill(tokens, keep, mask=mask)
    tokens[:, real:] = 1e4
    second = distill(tokens, keep, mask=mask)
    assert first.sizes.sum() == real
    assert torch.equal(first.owner[:, :real], second.owner[:, :real])
    assert torch.equal(undistill(first)[:, :real], undistill(second)[:, :real])


def test_pairs_merge_alike() -> None:
    pair = random((2, 60, 16), 11)
    merged = distill_pair(pair, 0.5)
    assert merged.tokens.shape == (2, 30, 16) and merged.sizes.sum() == 60
    keys_alone = distill(pair[:1], 0.5)
    assert torch.equal(merged.tokens[0], keys_alone.tokens[0])
    assert torch.equal(merged.owner, keys_alone.owner)
    for row in range(30):
        members = merged.owner[0] == row
        assert torch.allclose(merged.tokens[1, row], pair[1, members].mean(0), atol=1e-6)


def test_alike_tokens_merge_without_loss_and_correlated_ones_nearly() -> None:
    pairs = random((1, 288, 64), 1).repeat_interleave(2, dim=1)
    assert torch.allclose(undistill(distill(pairs, 0.5)), pairs, atol=1e-6)
    steps = random((576, 1024), 2)
    for i in range(1, 576):
        steps[i] = 0.95 * steps[i - 1] + 0.31 * steps[i]
    assert compare(steps, undistill(distill(steps[None], 0.5))[0])[1] >= 0.98


def test_the_most_alike_go_first() -> None:
    tokens = random((1, 20, 16), 3)
    tokens[0, 4] = tokens[0, 5] * 1.001
    merged = distill(tokens, 0.95)
    assert merged.owner[0, 4] == merged.owner[0, 5]
    assert merged.sizes.max() == 2 and len(merged.sizes[0]) == 19


def test_twice_is_once_estimate_is_kept_and_nonsense_is_refused() -> None:
    tokens = random((2, 576, 64), 4)
    merged = distill(tokens)
    assert distill(merged) is merged
    promised = estimate_distill(tokens)
    assert promised.before_bytes - promised.frees_bytes == merged.nbytes
    assert merged.nbytes <= 0.47 * bytes_of(tokens)
    for ratio in (0, -1, 1.5):
        with pytest.raises(UsageError, match="share of tokens"):
            distill(tokens, ratio)


def test_scratch_is_one_output_and_one_chunk(peak_bytes) -> None:
    tokens = random((1, 576, 1024), 5)
    peak, merged = peak_bytes(lambda: distill(tokens))
    assert merged.nbytes <= 0.45 * bytes_of(tokens)
    assert peak <= merged.nbytes + CHUNK_BYTES
    keys, values = random((1, 8, 576, 64), 6), random((1, 8, 576, 64), 7)
    peak, merged = peak_bytes(lambda: distill_kv(keys, values))
    assert peak <= merged.nbytes + CHUNK_BYTES


@given(count=COUNTS, keep=RATIOS, seed=st.integers(0, 99), given_importance=st.booleans())
@settings(max_examples=60, deadline=None)
def test_kv_keeps_the_important_and_merges_neighbours(count, keep, seed, given_importance) -> None:
    keys, values = random((2, 3, count, 4), seed), random((2, 3, count, 5), seed + 1)
    importance = random((2, count), seed + 2).abs() if given_importance else None
    merged = distill_kv(keys, values, keep, importance)
    kept = kept_count(count, keep)
    assert merged.keys.shape == (2, 3, kept, 4) and merged.values.shape == (2, 3, kept, 5)
    assert torch.equal(merged.sizes.sum(1), torch.full((2,), float(count)))
    for owner in merged.owner.tolist():  # rows in order, a token in one of the two beside it
        assert len(set(owner)) == kept
        assert all(row >= max(owner[: i + 1]) - 1 for i, row in enumerate(owner))
    back = undistill_kv(merged)
    assert back[0].shape == keys.shape and back[1].shape == values.shape
    if kept == count:
        assert torch.allclose(back[0], keys, atol=1e-6)
    if given_importance:
        heaviest = int(importance[0].argmax())
        row = merged.owner[0, heaviest]
        members = (merged.owner[0] == row).nonzero().flatten()
        share = importance[0, members].clamp_min(1e-6)
        share = share / share.sum()
        mean = (keys[0][:, members] * share[None, :, None]).sum(1)
        assert torch.allclose(merged.keys[0, :, row], mean, atol=1e-5)


def test_kv_padding_is_inert() -> None:
    keys, values = random((1, 2, 40, 4), 8), random((1, 2, 40, 4), 9)
    mask = (torch.arange(40) >= 10)[None]  # padded on the left, as generation does
    importance = random((1, 40), 10).abs()
    first = distill_kv(keys, values, 0.5, importance, mask)
    keys[:, :, :10], values[:, :, :10], importance[:, :10] = 1e4, -1e4, 1e4
    second = distill_kv(keys, values, 0.5, importance, mask)
    assert first.sizes.sum() == 30
    real = undistill_kv(first)[0][:, :, 10:]
    assert torch.equal(real, undistill_kv(second)[0][:, :, 10:])
    assert real.abs().max() < 100
