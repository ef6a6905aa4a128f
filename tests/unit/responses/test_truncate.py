"""Truncation keeps the most informative tokens, in order; entropy is right on known rows."""

from __future__ import annotations

import math

import pytest

torch = pytest.importorskip("torch")

from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from mmctl.engine import profiles  # noqa: E402
from mmctl.engine.errors import MmctlError, UsageError  # noqa: E402
from mmctl.engine.records import decode, encode  # noqa: E402
from mmctl.engine.responses import entropy  # noqa: E402
from mmctl.engine.responses.truncate import estimate_truncate, truncate  # noqa: E402

SETTINGS = profiles.load("default").profile.responses


@given(count=st.integers(1, 50), limit=st.integers(1, 60), real=st.integers(1, 50),
       seed=st.integers(0, 99))  # fmt: skip
@settings(max_examples=60, deadline=None)
def test_order_is_kept_and_the_best_stay(count, limit, real, seed) -> None:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randn(2, count, 3, generator=generator)
    scores = torch.rand(2, count, generator=generator)
    mask = (torch.arange(count) < min(real, count)).expand(2, count)
    cut = truncate(tokens, scores, limit, mask)
    assert cut.tokens.shape == (2, min(limit, count), 3)
    for item in range(2):
        index = cut.index[item].tolist()
        assert index == sorted(set(index))
        assert torch.equal(cut.tokens[item], tokens[item, index])
        kept = {i for i, ok in zip(index, cut.mask[item].tolist(), strict=True) if ok}
        order = sorted(range(min(real, count)), key=lambda i: -float(scores[item, i]))
        assert kept == set(order[:limit])
        alone = truncate(tokens[item : item + 1], scores[item : item + 1], limit, mask[:1])
        assert torch.equal(alone.index[0], cut.index[item])
    assert truncate(cut, scores, limit) is cut


def test_limits_and_estimate() -> None:
    tokens = torch.randn(1, 1000, 64)
    cut = truncate(tokens, torch.rand(1, 1000))
    promised = estimate_truncate(tokens)
    assert promised.before_bytes - promised.frees_bytes == cut.nbytes
    assert not promised.reversible
    with pytest.raises(UsageError, match="at least 1"):
        truncate(tokens, torch.rand(1, 1000), 0)


def attention(scale: float, heads: int = 4, causal: bool = False, seed: int = 0):
    scores = torch.randn(2, heads, 12, 12, generator=torch.Generator().manual_seed(seed)) * scale
    if causal:
        scores = scores.masked_fill(torch.ones(12, 12).triu(1).bool(), -torch.inf)
    return scores.softmax(-1)


def test_entropy_of_known_rows() -> None:
    uniform = torch.full((1, 1, 4, 8), 1 / 8)
    assert entropy.head_entropy(uniform) == pytest.approx([1.0])
    assert entropy.head_entropy(torch.eye(5)[None, None]) == [0.0]
    half = torch.tensor([[[[0.5, 0.5, 0.0, 0.0]]]])
    assert entropy.head_entropy(half) == pytest.approx([1.0])  # of the two keys it sees
    causal = torch.ones(6, 6).tril()
    causal = (causal / causal.sum(-1, keepdim=True))[None, None]
    assert entropy.head_entropy(causal) == pytest.approx([1.0])
    values = entropy.head_entropy(attention(1.0, causal=True))
    assert len(values) == 4 and all(0 < value < 1 for value in values)
    wide, narrow = (entropy.head_entropy(attention(scale))[0] for scale in (0.1, 8.0))
    assert narrow < 0.5 < wide


def test_padding_queries_do_not_count() -> None:
    weights = attention(3.0)
    padded = weights.clone()
    padded[:, :, 6:] = 1 / 12
    mask = (torch.arange(12) < 6).expand(2, 12)
    assert entropy.head_entropy(padded, mask) == pytest.approx(entropy.head_entropy(weights, mask))


def test_informative_keys_are_those_that_focused_queries_look_at() -> None:
    weights = torch.full((1, 2, 6, 6), 1 / 6)
    weights[:, :, 2] = torch.nn.functional.one_hot(torch.tensor(4), 6).float()
    assert int(entropy.informativeness(weights)[0].argmax()) == 4


def test_attention_is_captured_where_it_is_materialised_and_nowhere_else() -> None:
    class Eager(torch.nn.Module):
        def forward(self, x):
            weights = (x @ x.transpose(-1, -2)).softmax(-1)
            return weights @ x, weights

    class Fused(torch.nn.Module):
        def forward(self, x):
            return torch.nn.functional.scaled_dot_product_attention(x, x, x)

    x = torch.randn(1, 2, 5, 4)
    with entropy.captured(torch.nn.Sequential(Eager())) as seen:
        Eager()(x)
    assert seen == []  # another instance
    module = Eager()
    with entropy.captured(module) as seen:
        module(x)
    assert [tensor.shape for tensor in seen] == [(1, 2, 5, 5)]
    module(x)
    assert len(seen) == 1
    fused = Fused()
    with entropy.captured(fused) as seen:
        fused(x)
    assert seen == []


def test_a_look_is_normalised_and_in_nats() -> None:
    uniform, sharp = torch.full((1, 1, 4, 4), 0.25), torch.eye(4)[None, None]
    seen = entropy.look([uniform, torch.cat([uniform, sharp], 1)])
    assert seen.per_head == pytest.approx((1, 1, 0))
    assert seen.mean == pytest.approx(2 / 3) and seen.mean_nats == pytest.approx(
        2 * math.log(4) / 3
    )
    with pytest.raises(MmctlError, match="not materialised"):
        entropy.look([])


def test_drift_asks_once_and_a_recording_asks_the_same() -> None:
    high = entropy.sample([0.9, 0.88, 0.9])
    calm = entropy.sample([0.5, 0.52, 0.5])
    spread = entropy.sample([0.1, 0.9, 0.5])
    run = [calm, high, high, calm, calm, high, high, high, high, calm, spread, calm]
    drift = entropy.Drift(SETTINGS)
    asked = [drift.step(new) for new in run]
    assert asked[7] == ["recalibrate"] and asked[10] == ["light_vision"]
    assert sum(map(len, asked)) == 2
    events = [decode(encode(entropy.event(new, [], i, "gpu0"))) for i, new in enumerate(run)]
    assert [found for _, found in entropy.watch(iter(events), SETTINGS)] == asked
