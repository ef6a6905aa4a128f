"""Needs of models against parameter counts that their own cards and files state."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mmctl.engine.errors import MmctlError, UsageError
from mmctl.engine.memory.config import Needs, needs, read
from mmctl.engine.memory.towers import fitted

QWEN2_VL: dict[str, Any] = {
    "model_type": "qwen2_vl",
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "vocab_size": 152064,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vision_config": {
        "depth": 32,
        "embed_dim": 1280,
        "mlp_ratio": 4,
        "num_heads": 16,
        "in_chans": 3,
        "hidden_size": 3584,
        "patch_size": 14,
        "spatial_merge_size": 2,
        "spatial_patch_size": 14,
        "temporal_patch_size": 2,
    },
}
QWEN25_VL: dict[str, Any] = {
    "model_type": "qwen2_5_vl",
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "vocab_size": 152064,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vision_config": {
        "depth": 32,
        "hidden_act": "silu",
        "hidden_size": 1280,
        "intermediate_size": 3420,
        "num_heads": 16,
        "in_chans": 3,
        "out_hidden_size": 3584,
        "patch_size": 14,
        "spatial_merge_size": 2,
        "window_size": 112,
        "temporal_patch_size": 2,
    },
}
QWEN25_VL_3B: dict[str, Any] = {
    "model_type": "qwen2_5_vl",
    "hidden_size": 2048,
    "intermediate_size": 11008,
    "num_hidden_layers": 36,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "vocab_size": 151936,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "vision_config": {
        "depth": 32,
        "hidden_act": "silu",
        "hidden_size": 1280,
        "intermediate_size": 3420,
        "num_heads": 16,
        "in_chans": 3,
        "out_hidden_size": 2048,
        "patch_size": 14,
        "spatial_merge_size": 2,
        "window_size": 112,
        "temporal_patch_size": 2,
    },
}
QWEN3_VL: dict[str, Any] = {
    "model_type": "qwen3_vl",
    "text_config": {
        "model_type": "qwen3_vl_text",
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
    },
    "tie_word_embeddings": False,
    "vision_config": {
        "depth": 27,
        "hidden_size": 1152,
        "intermediate_size": 4304,
        "num_heads": 16,
        "out_hidden_size": 4096,
        "patch_size": 16,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "num_position_embeddings": 2304,
        "deepstack_visual_indexes": [8, 16, 24],
    },
}
LLAVA: dict[str, Any] = {
    "model_type": "llava",
    "text_config": {"model_type": "llama", "vocab_size": 32064, "torch_dtype": "float16"},
    "vision_config": {
        "model_type": "clip_vision_model",
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "image_size": 336,
        "patch_size": 14,
    },
    "torch_dtype": "float16",
}
LLAVA_NEXT: dict[str, Any] = {
    "model_type": "llava_next",
    "text_config": {
        "model_type": "mistral",
        "intermediate_size": 14336,
        "num_key_value_heads": 8,
        "vocab_size": 32064,
    },
    "vision_config": {
        "model_type": "clip_vision_model",
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "image_size": 336,
        "patch_size": 14,
    },
    "torch_dtype": "float16",
    "image_grid_pinpoints": [[336, 672], [672, 336], [672, 672], [1008, 336], [336, 1008]],
}
INTERNVL: dict[str, Any] = {
    "model_type": "internvl_chat",
    "downsample_ratio": 0.5,
    "max_dynamic_patch": 12,
    "use_thumbnail": True,
    "llm_config": {
        "model_type": "internlm2",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 92553,
    },
    "vision_config": {
        "model_type": "intern_vit_6b",
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "image_size": 448,
        "patch_size": 14,
    },
    "torch_dtype": "bfloat16",
}
PIXTRAL: dict[str, Any] = {
    "model_type": "llava",
    "text_config": {
        "model_type": "mistral",
        "hidden_size": 5120,
        "head_dim": 128,
        "intermediate_size": 14336,
        "num_hidden_layers": 40,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 131072,
    },
    "vision_config": {
        "model_type": "pixtral",
        "hidden_size": 1024,
        "head_dim": 64,
        "image_size": 1024,
        "intermediate_size": 4096,
        "num_attention_heads": 16,
        "num_hidden_layers": 24,
        "patch_size": 16,
    },
}
GEMMA3: dict[str, Any] = {
    "model_type": "gemma3",
    "mm_tokens_per_image": 256,
    "text_config": {
        "model_type": "gemma3_text",
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "num_hidden_layers": 34,
        "sliding_window": 1024,
    },
    "vision_config": {
        "model_type": "siglip_vision_model",
        "hidden_size": 1152,
        "intermediate_size": 4304,
        "num_hidden_layers": 27,
        "num_attention_heads": 16,
        "image_size": 896,
        "patch_size": 14,
    },
}
LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "tie_word_embeddings": False,
}
QWEN2: dict[str, Any] = {
    "model_type": "qwen2",
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "vocab_size": 152064,
}


@pytest.mark.parametrize(
    ("config", "parameters"),
    [
        (QWEN2_VL, 8_291_375_616), (QWEN25_VL, 8_292_166_656), (QWEN25_VL_3B, 3_754_622_976),
        (QWEN3_VL, 8_767_123_696), (LLAVA, 7_063_427_072), (LLAVA_NEXT, 7_566_747_648),
        (INTERNVL, 8_075_365_376), (GEMMA3, 4_300_079_472), (LLAMA, 8_030_261_248),
        (QWEN2, 7_615_616_512),
    ],
    ids=lambda value: value["model_type"] if isinstance(value, dict) else "",
)  # fmt: skip
def test_parameters_are_those_of_the_published_weights(
    config: dict[str, Any], parameters: int
) -> None:
    assert needs(config, []).parameters == parameters


@pytest.mark.parametrize(
    ("config", "size", "tokens"),
    [
        (LLAVA, (640, 480), 576), (GEMMA3, (640, 480), 256), (INTERNVL, (448, 448), 256),
        (INTERNVL, (896, 448), 768), (QWEN2_VL, (448, 448), 256), (QWEN3_VL, (1024, 1024), 1024),
        (PIXTRAL, (1024, 1024), 64 * 65), (LLAVA_NEXT, (672, 672), 576 + 48 * 48 + 48),
    ],
)  # fmt: skip
def test_vision_tokens(config: dict[str, Any], size: tuple[int, int], tokens: int) -> None:
    assert needs(config, [size]).images[0].vision_tokens == tokens


def test_kv_cache_and_windows() -> None:
    assert needs(LLAMA, []).kv_bytes_per_token == 2 * 32 * 8 * 128 * 2
    assert needs(LLAMA, [], kv_precision="fp8").kv_bytes_per_token == 2 * 32 * 8 * 128
    windowed = needs(GEMMA3, [])  # one layer in six sees everything
    assert windowed.kv_bytes_per_token == 2 * 5 * 4 * 256 * 2
    assert windowed.kv_window_bytes == 2 * 29 * 4 * 256 * 2 * 1024


def test_what_fits_shrinks_with_images_and_grows_with_memory() -> None:
    def fit(size: int, capacity: int) -> Needs:
        return needs(QWEN2_VL, [(size, size)], capacity_bytes=capacity << 30)

    small, large, more = fit(336, 24), fit(3000, 24), fit(3000, 80)
    assert large.sequences < small.sequences < more.sequences  # type: ignore[operator]
    assert fit(336, 8).sequences == 0  # the weights alone are larger
    assert large.images_at_once < small.images_at_once  # type: ignore[operator]


def test_precisions() -> None:
    quantised = {**QWEN2, "quantization_config": {"quant_method": "awq", "bits": 4}}
    assert needs(quantised, []).precision == "int4"
    assert needs(QWEN2, [], precision="int8").weight_bytes == 7_615_616_512
    with pytest.raises(UsageError, match="did you mean 'bf16'"):
        needs(QWEN2, [], precision="bf61")


def test_resize_keeps_to_the_limits() -> None:
    rows, columns = fitted(8000, 6000, 28, 3136, 1_003_520)
    assert rows * columns * 28 * 28 <= 1_003_520
    assert fitted(10, 10, 28, 3136, 1_003_520) == (2, 2)


def test_command(mmctl: Callable[..., Any], tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(QWEN25_VL))
    result = mmctl("probe", "model", str(path), "--image", "1920x1080", "--capacity", "80GiB")
    assert result.returncode == 0
    assert "8.29 G parameters (0.68 G vision)" in result.stdout
    assert "1920x1080" in result.stdout
    found = json.loads(mmctl("probe", "model", str(tmp_path), "-o", "json").stdout)
    assert found["schema"] == 1
    assert found["basis"] == "modelled"
    assert found["parameters"] == 8_292_166_656
    wrong = mmctl("probe", "model", str(path), "--image", "big")
    assert (wrong.returncode, wrong.stdout) == (2, "")


def test_what_is_no_configuration_is_said(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    for text, what in (("{", "not JSON"), ("[]", "no Hugging Face"), ("{}", "no Hugging Face")):
        path.write_text(text)
        with pytest.raises(MmctlError, match=what):
            read(path)
    with pytest.raises(MmctlError, match="lacks or misstates"):
        needs({"model_type": "new", "hidden_size": 8}, [])
