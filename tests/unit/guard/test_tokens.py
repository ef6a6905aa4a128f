"""Predictions against what the families' own processors count, and their correction."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

pytest.importorskip("aiohttp", reason="the guard needs the extra 'guard'")

from mmctl.engine import profiles
from mmctl.guard.images import Size
from mmctl.guard.seeing import look
from mmctl.guard.tokens import Predictor, of_model, smaller
from tests.integration.guard.test_safety import chat, data_url, png

FAMILIES = profiles.load("default").profile.guard.families


def seen_of(size: tuple[int, int] | None, text: str = "") -> Any:
    if size is None:
        body = {"model": "m", "messages": [{"role": "user", "content": text}]}
        return look(msgspec.json.encode(body), 10**8)
    return look(chat(data_url(png(1, 1, size))), 10**8)


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        # tiles without their padding, a newline a row: as transformers' own processor counts
        ("llava-hf/llava-v1.6-vicuna", {(256, 256): 1176, (512, 512): 2928, (1024, 768): 2340}),
        ("llava-hf/llava-1.5-7b-hf", {(256, 256): 576, (1024, 768): 576}),
        # 28 x 28 merged patches, at least 4 of them
        ("Qwen/Qwen2.5-VL-7B-Instruct", {(280, 280): 100, (1024, 768): 999, (20, 20): 4}),
        ("Qwen/Qwen3-VL-8B-Instruct", {(320, 320): 100}),
        # 16 x 16 patches, a break a row
        ("mistralai/Pixtral-12B-2409", {(512, 512): 32 * 33, (1024, 1024): 64 * 65}),
        # 256 a tile of 448, and a thumbnail beside several
        ("OpenGVLab/InternVL3-8B", {(448, 448): 256, (896, 896): 5 * 256}),
    ],
)  # fmt: skip
def test_rules_of_families(name: str, sizes: dict[tuple[int, int], int]) -> None:
    predictor = of_model(name, FAMILIES)
    assert {size: predictor.image(Size(*size)) for size in sizes} == sizes


def test_corrected_by_usage_within_five_percent_after_ten_of_each() -> None:
    """A server whose images are other than any rule, with a template and words of its own."""
    stated = {(256, 256): 700, (512, 512): 2000, (1024, 768): 2900, None: 0}
    predictor = Predictor()
    for _ in range(10):
        for size, tokens in stated.items():
            seen = seen_of(size, "seven words of text are in here " * 8)
            prompt = tokens + 9 + (64 if size is None else 0)
            predictor.learn(seen, predictor.predict(seen), prompt)
    for size, tokens in stated.items():
        seen = seen_of(size, "seven words of text are in here " * 8)
        prompt = tokens + 9 + (64 if size is None else 0)
        assert abs(predictor.predict(seen).prompt - prompt) <= 0.05 * prompt
    # A size not seen before is scaled by what the others were found to be.
    assert predictor.image(Size(300, 300)) > 2 * predictor.by_rule(Size(300, 300))


def test_tokens_of_text_from_its_bytes() -> None:
    predictor = Predictor()
    for number in range(60):
        text = "word " * (number % 13 + 1)
        seen = seen_of(None, text)
        predictor.learn(seen, predictor.predict(seen), 12 + len(text) // 5)
    seen = seen_of(None, "word " * 40)
    assert predictor.predict(seen).prompt == pytest.approx(52, rel=0.05)


def test_a_scale_keeps_the_budget_and_the_floors() -> None:
    predictor = of_model("llava-v1.6", FAMILIES)
    size = Size(512, 512)
    scale = smaller(predictor, size, 1200, 0.25, 100)
    assert predictor.image(size.scaled(scale)) <= 1200
    assert predictor.image(size.scaled(min(1.0, scale * 1.03))) > 1200  # and no smaller than that
    assert smaller(predictor, size, 5000, 0.25, 100) == 1.0
    # Out of reach: the fewest tokens there are, at the largest scale that has them.
    assert predictor.image(size.scaled(smaller(predictor, size, 10, 0.25, 100))) == 1176
    assert smaller(predictor, size, 10, 0.9, 100) == 1.0  # all scales from 0.9 up have as many
