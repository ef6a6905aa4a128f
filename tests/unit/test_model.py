from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="needs the extra 'torch'")

from mmctl.engine.model import KvCache, build, in_float32, tokenize  # noqa: E402


@pytest.fixture(scope="module")
def model():
    return build(seed=3)


@torch.inference_mode()
def test_prefill_in_chunks_equals_one_prefill(model) -> None:
    ids = torch.arange(700) % 256
    cross = in_float32(model.cross_cache(model.encode(torch.rand(1, 3, 56, 70))[0]))
    whole, chunked = KvCache(model.config, "cpu"), KvCache(model.config, "cpu")
    expected = model.decode(ids, whole, cross)
    for start in range(0, 700, 256):
        logits = model.decode(ids[start : start + 256], chunked, cross)
    assert torch.allclose(logits, expected, atol=2e-3)
    assert chunked.length == 700 and chunked.keys[0].shape[0] == 1024


@torch.inference_mode()
def test_a_token_does_not_see_what_comes_after_it(model) -> None:
    ids = torch.tensor(tokenize("what colour is the circle"))
    short, long = KvCache(model.config, "cpu"), KvCache(model.config, "cpu")
    model.decode(ids[:10], short)
    model.decode(ids, long)
    for layer in range(model.config.text_layers):
        assert torch.allclose(short.keys[layer][:10], long.keys[layer][:10], atol=1e-5)


@torch.inference_mode()
def test_images_in_a_batch_do_not_touch_each_other(model) -> None:
    images = torch.rand(3, 3, 56, 56)
    together = model.encode(images)
    assert together.shape == (3, model.patches(56, 56), model.config.text_dim)
    for image, tokens in zip(images, together, strict=True):
        assert torch.allclose(model.encode(image[None])[0], tokens, atol=2e-4)


def test_the_same_seed_gives_the_same_answers_and_another_seed_others(model) -> None:
    image = torch.rand(3, 112, 112, generator=torch.Generator().manual_seed(0))
    ids, logits, embedding = model.answer(image, "How many?")
    again, same, _ = build(seed=3).answer(image, "How many?")
    other, _, _ = build(seed=4).answer(image, "How many?")
    assert ids == again and torch.equal(logits, same) and other != ids
    assert embedding.shape == (model.config.text_dim,)


def test_the_answer_depends_on_the_image(model) -> None:
    answers = {
        tuple(model.answer(torch.full((3, 112, 112), shade), "What colour?")[0])
        for shade in (0.0, 0.5, 1.0)
    }
    assert len(answers) > 1
