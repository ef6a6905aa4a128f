"""Names as models, profilers and people write them."""

from __future__ import annotations

import pytest

from mmctl.engine.errors import UsageError
from mmctl.engine.modality import Matcher
from mmctl.engine.profiles import ModalityPatterns, load


@pytest.mark.parametrize(
    ("name", "modality"),
    [
        ("ViTModel", "vision"), ("ViTLayer", "vision"), ("vit_b_16", "vision"),
        ("activity", None), ("CLIPModel", "vision"), ("CLIPVisionModel_0", "vision"),
        ("eclipse", None), ("clip_grad_norm_", None), ("SigLIPEncoder", "vision"),
        ("VAEDecoder", "vision"), ("InternViT6B", "vision"), ("television", None),
        ("modeling_vit.py", "vision"), ("model.vision_tower.blocks.0", "vision"),
        ("nn.Module: GPT2Block_3", "text"), ("gpts", "text"), ("lm_head", "text"),
        ("KVCache", "text"), ("kv_caches", "text"), ("Qwen2DecoderLayer", "text"),
        ("torch.nn.modules.linear.Linear", None), ("", None),
    ],
)  # fmt: skip
def test_patterns_are_words(name, modality):
    assert Matcher(load("default").profile.modality).modality(name) == modality


def test_no_pattern_matches_nothing_and_a_broken_one_is_named():
    assert Matcher(ModalityPatterns(vision=(), text=())).modality("vision decoder") is None
    with pytest.raises(UsageError, match="no valid pattern"):
        Matcher(ModalityPatterns(vision=("(",), text=()))
