"""Model architectures and kernels whose access patterns the fingerprints are judged on.

Weights are random and, on the ``meta`` device, not even there. Families are split once and for
all: ``fit`` families shape the directions of the code, the others are held out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from mmctl.engine.access.accesses import Accesses, make

FIT_FAMILIES = ("resnet", "encoder", "decoder", "speech", "pyramid", "mobile")

# name: (family, class, configuration, input); an input is its kind and size.
MODELS: dict[str, tuple[str, str, dict[str, Any], tuple[str, int]]] = {
    "resnet18": ("resnet", "ResNet", {"depths": [2, 2, 2, 2], "hidden_sizes": [64, 128, 256, 512],
                 "layer_type": "basic"}, ("image", 224)),
    "resnet50": ("resnet", "ResNet", {}, ("image", 224)),
    "bert": ("encoder", "Bert", {}, ("text", 128)),
    "roberta": ("encoder", "Roberta", {"vocab_size": 50265}, ("text", 256)),
    "distilbert": ("encoder", "DistilBert", {}, ("text", 128)),
    "albert": ("encoder", "Albert", {"hidden_size": 768, "num_attention_heads": 12,
               "intermediate_size": 3072}, ("text", 128)),
    "electra": ("encoder", "Electra", {}, ("text", 128)),
    "gpt2": ("decoder", "GPT2", {}, ("text", 128)),
    "opt": ("decoder", "OPT", {"hidden_size": 768, "num_hidden_layers": 12, "ffn_dim": 3072,
            "num_attention_heads": 12}, ("text", 128)),
    "bloom": ("decoder", "Bloom", {"hidden_size": 1024, "n_layer": 24, "n_head": 16},
              ("text", 96)),
    "gpt_neox": ("decoder", "GPTNeoX", {"hidden_size": 1024, "num_hidden_layers": 16,
                 "num_attention_heads": 8, "intermediate_size": 4096}, ("text", 128)),
    "wav2vec2": ("speech", "Wav2Vec2", {}, ("wave", 16000)),
    "swin": ("pyramid", "Swin", {}, ("image", 224)),
    "segformer": ("pyramid", "Segformer", {}, ("image", 512)),
    "poolformer": ("pyramid", "PoolFormer", {}, ("image", 224)),
    "mobilenet_v2": ("mobile", "MobileNetV2", {}, ("image", 224)),
    "efficientnet": ("mobile", "EfficientNet", {"width_coefficient": 1.0,
                     "depth_coefficient": 1.0, "hidden_dim": 1280}, ("image", 224)),
    "regnet": ("mobile", "RegNet", {}, ("image", 224)),
    "convnext": ("convnext", "ConvNext", {}, ("image", 224)),
    "vit": ("vit", "ViT", {}, ("image", 224)),
    "deit_small": ("vit", "DeiT", {"hidden_size": 384, "num_attention_heads": 6,
                   "intermediate_size": 1536}, ("image", 224)),
    "dinov2": ("vit", "Dinov2", {}, ("image", 224)),
    "yolos": ("vit", "Yolos", {}, ("image", 512)),
    "clip": ("clip", "CLIP", {}, ("image+text", 77)),
    "llava_tower": ("clip", "CLIPVision", {"hidden_size": 1024, "intermediate_size": 4096,
                    "num_hidden_layers": 24, "num_attention_heads": 16, "patch_size": 14,
                    "image_size": 336}, ("image", 336)),
    "blip": ("clip", "BlipVision", {}, ("image", 384)),
    "whisper_small": ("whisper", "Whisper", {"d_model": 768, "encoder_layers": 12,
                      "decoder_layers": 12, "encoder_attention_heads": 12,
                      "decoder_attention_heads": 12, "encoder_ffn_dim": 3072,
                      "decoder_ffn_dim": 3072}, ("mel", 16)),
    "llama_1b": ("llama", "Llama", {"hidden_size": 2048, "intermediate_size": 5632,
                 "num_hidden_layers": 22, "num_attention_heads": 32,
                 "num_key_value_heads": 4}, ("text", 128)),
    "qwen2_vl": ("llama", "Qwen2VLText", {"hidden_size": 1536, "intermediate_size": 8960,
                 "num_hidden_layers": 28, "num_attention_heads": 12,
                 "num_key_value_heads": 2}, ("text", 256)),
    "gemma": ("llama", "Gemma", {"num_hidden_layers": 18, "hidden_size": 2048,
              "intermediate_size": 16384, "num_attention_heads": 8, "num_key_value_heads": 1,
              "head_dim": 256}, ("text", 64)),
    "phi": ("llama", "Phi", {}, ("text", 128)),
    "fuyu": ("fuyu", "Persimmon", {"num_hidden_layers": 8}, ("text", 128)),
    "t5": ("t5", "T5", {}, ("text+text", 128)),
    "mamba": ("mamba", "Mamba", {"num_hidden_layers": 8}, ("text", 32)),
}  # fmt: skip

# How the fit varies a model: scale of the input, batch.
VARIANTS = ((1.0, 1), (1.0, 4), (0.5, 1), (2.0, 2))


def workload(name: str, scale: float = 1.0, batch: int = 1) -> Callable[[], Any]:
    """A function that runs one forward pass of a model on the ``meta`` device."""
    import os

    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    import torch
    import transformers

    _, cls, settings, (kind, size) = MODELS[name]
    fixed = kind.startswith("image") and cls in ("CLIP", "CLIPVision", "BlipVision", "Swin", "ViT",
                                                 "DeiT", "Dinov2", "Yolos")  # fmt: skip
    size = size if fixed or kind == "mel" else max(16, int(size * scale))
    with torch.device("meta"):
        config = getattr(transformers, f"{cls}Config")(**settings)
        model = getattr(transformers, f"{cls}Model")(config).eval()
        inputs = _inputs(kind, size, batch)

    def run() -> None:
        with torch.device("meta"):
            model(**inputs)

    return run


def _inputs(kind: str, size: int, batch: int) -> dict[str, Any]:
    import torch

    def tokens(count: int) -> Any:
        return torch.zeros(batch, count, dtype=torch.long)

    if kind == "image":
        return {"pixel_values": torch.zeros(batch, 3, size, size)}
    if kind == "image+text":
        return {"pixel_values": torch.zeros(batch, 3, 224, 224), "input_ids": tokens(size)}
    if kind == "wave":
        return {"input_values": torch.zeros(batch, size)}
    if kind == "mel":
        return {"input_features": torch.zeros(batch, 80, 3000), "decoder_input_ids": tokens(size)}
    if kind == "text+text":
        return {"input_ids": tokens(size), "decoder_input_ids": tokens(16)}
    return {"input_ids": tokens(size)}


def kernels(scale: int) -> Iterator[Accesses]:
    """Word-wise access traces of common kernels, made here: they anchor the fine-grained end."""
    base, n = 0x7F0000000000, 1024 * scale
    at = np.arange(n)
    rng = np.random.default_rng(scale)

    def trace(name: str, *streams: tuple[Any, bool]) -> Accesses:
        order = np.argsort(np.concatenate([np.arange(len(a)) / len(a) for a, _ in streams]),
                           kind="stable")  # fmt: skip
        address = np.concatenate([a for a, _ in streams])[order]
        store = np.concatenate([np.full(len(a), s) for a, s in streams])[order]
        return make(name, address, np.full(len(address), 4), store)

    a, b, c = base, base + 8 * n, base + 16 * n
    side = int(n**0.5)
    rows, columns = np.divmod(np.arange(side * side), side)
    yield trace("vector add", (a + 4 * at, False), (b + 4 * at, False), (c + 4 * at, True))
    yield trace("copy", (a + 4 * at, False), (b + 4 * at, True))
    yield trace("strided", (a + 128 * at, False), (c + 4 * at, True))
    yield trace("gather", (a + 4 * rng.integers(0, n, n), False), (c + 4 * at, True))
    yield trace("transpose", (a + 4 * (rows * side + columns), False),
                (b + 4 * (columns * side + rows), True))  # fmt: skip
    yield trace("stencil", *((a + 4 * ((at + d) % n), False) for d in (-1, 0, 1)),
                (c + 4 * at, True))  # fmt: skip
    yield trace("reduction", *((a + 4 * at[:: 1 << level], False) for level in range(5)))
    i, j, k = np.meshgrid(*(np.arange(min(side, 24)),) * 3, indexing="ij")
    width = min(side, 24)
    yield trace("matrix product", (a + 4 * (i * width + k).ravel(), False),
                (b + 4 * (k * width + j).ravel(), False),
                (c + 4 * np.arange(width * width), True))  # fmt: skip
    yield trace("softmax", *((a + 4 * at, False),) * 3, (c + 4 * at, True))
