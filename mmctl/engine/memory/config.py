"""What a model needs, from its Hugging Face configuration alone: weights, KV cache, images.

Every figure is modelled: parameters are counted from the layer shapes, activations from the
largest tensors that are alive at once in one layer.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from mmctl.engine.errors import MmctlError, UsageError, suggestion
from mmctl.engine.memory.towers import Vision, count, tower, with_defaults

PRECISIONS = {"fp32": 4.0, "bf16": 2.0, "fp16": 2.0, "fp8": 1.0, "int8": 1.0, "int4": 0.5}
_DTYPES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16", "float8_e4m3fn": "fp8"}


class Text(NamedTuple):
    """The language model's shape."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    parameters: int
    kv_layers: int  # layers whose cache grows with the context
    window_layers: int  # layers that keep only the last ``window`` tokens
    window: int
    positions: int


class Image(msgspec.Struct, frozen=True, kw_only=True):
    """What one image of a size costs. The eager peak holds the attention matrix as well."""

    width: int
    height: int
    patches: int
    vision_tokens: int
    kv_bytes: int
    encoder_peak_bytes: int
    encoder_eager_peak_bytes: int


class Needs(msgspec.Struct, frozen=True, kw_only=True):
    """What a model needs; ``sequences`` and ``images`` are None without a device's size."""

    model_type: str
    precision: str
    kv_precision: str
    parameters: int
    text_parameters: int
    vision_parameters: int
    weight_bytes: int
    kv_bytes_per_token: int
    kv_window_bytes: int
    context_tokens: int
    images: list[Image]
    capacity_bytes: int | None = None
    usable_bytes: int | None = None
    sequences: int | None = None
    images_at_once: int | None = None
    absent: dict[str, str] = {}
    basis: str = "modelled"


def read(path: Path) -> dict[str, Any]:
    """A configuration file; MmctlError for one that is none."""
    try:
        if path.is_dir():
            path = path / "config.json"
        data = json.loads(path.read_text("utf-8"))
    except OSError as error:
        raise MmctlError(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, RecursionError):
        raise MmctlError(f"{path} is not JSON: give a model's config.json") from None
    if not isinstance(data, dict) or not ("model_type" in data or "hidden_size" in data):
        raise MmctlError(f"{path} is no Hugging Face model configuration: model_type is missing")
    return data


def needs(
    config: dict[str, Any],
    sizes: list[tuple[int, int]],
    *,
    precision: str | None = None,
    kv_precision: str | None = None,
    capacity_bytes: int | None = None,
    memory_ratio: float = 0.9,
    context_tokens: int = 4096,
    max_pixels: int | None = None,
) -> Needs:
    """The needs of a configuration for images of ``sizes`` (width, height).

    ``sequences`` is how many contexts of ``context_tokens`` fit beside the weights and one
    encoder at its largest image; ``images_at_once`` how many such images the encoder can take
    beside the weights and one context.
    """
    try:
        text = _text(config)
        vision = tower(config, text.hidden)
        kind = _precision(precision) if precision else _own_precision(config)
        kv = _precision(kv_precision) if kv_precision else (kind if PRECISIONS[kind] >= 2 else
                                                            "bf16")  # fmt: skip
        width = PRECISIONS[kv]
        per_token = int(2 * text.kv_heads * text.head_dim * width)
        images = []
        if vision is not None:
            images = [_image(vision, text, size, per_token, kind, max_pixels) for size in sizes]
    except (KeyError, TypeError, ValueError, AttributeError, ZeroDivisionError) as error:
        raise MmctlError(
            f"the configuration lacks or misstates {error}: give the model's own config.json"
        ) from None
    towers = vision.parameters if vision else 0
    # Quantised weights leave the vision tower and the embeddings as they were.
    weights = _weight_bytes(text, towers, kind)
    needed = Needs(
        model_type=str(config.get("model_type", "unknown")),
        precision=kind,
        kv_precision=kv,
        parameters=text.parameters + towers,
        text_parameters=text.parameters,
        vision_parameters=towers,
        weight_bytes=weights,
        kv_bytes_per_token=per_token * text.kv_layers,
        kv_window_bytes=per_token * text.window_layers * text.window,
        context_tokens=context_tokens,
        images=images,
        absent={} if vision else {"images": "the model has no vision tower"},
    )
    return needed if capacity_bytes is None else _fit(needed, text, capacity_bytes, memory_ratio)


def _fit(needed: Needs, text: Text, capacity: int, ratio: float) -> Needs:
    usable = int(capacity * ratio)
    window = needed.kv_window_bytes // text.window if text.window else 0
    context = needed.context_tokens
    one = needed.kv_bytes_per_token * context + window * min(context, text.window)
    peak = max((image.encoder_peak_bytes for image in needed.images), default=0)
    left = usable - needed.weight_bytes
    return msgspec.structs.replace(
        needed,
        capacity_bytes=capacity,
        usable_bytes=usable,
        sequences=max((left - peak) // one, 0) if one else 0,
        images_at_once=max((left - one) // peak, 0) if peak else None,
    )


def _weight_bytes(text: Text, towers: int, kind: str) -> int:
    wide = max(PRECISIONS[kind], 2.0) if PRECISIONS[kind] < 1 else PRECISIONS[kind]
    return int(text.parameters * PRECISIONS[kind] + towers * wide)


def _precision(name: str) -> str:
    if name not in PRECISIONS:
        raise UsageError(
            f"unknown precision '{name}': one of {', '.join(PRECISIONS)}"
            f"{suggestion(name, PRECISIONS)}"
        )
    return name


def _own_precision(config: dict[str, Any]) -> str:
    quantised = config.get("quantization_config") or {}
    bits = quantised.get("bits") or quantised.get("w_bit")
    if bits in (4, 8):
        return f"int{bits}"
    if quantised.get("quant_method") in ("fp8", "fbgemm_fp8"):
        return "fp8"
    text = config.get("text_config") or config.get("llm_config") or {}
    name = config.get("torch_dtype") or config.get("dtype") or text.get("torch_dtype")
    return _DTYPES.get(str(name or text.get("dtype")), "bf16")


def _text(config: dict[str, Any]) -> Text:
    nested = next(
        (config[key] for key in ("text_config", "llm_config", "language_config") if key in config),
        None,
    )
    fields = dict(config) if nested is None else dict(nested)
    kind = str(fields.get("model_type", config.get("model_type", "")))
    if kind.startswith("gemma3"):
        kind = "gemma3_text"
    fields = with_defaults(fields, kind)
    for key in ("tie_word_embeddings", "vocab_size"):
        if nested is not None and key in config and key not in nested:
            fields[key] = config[key]
    hidden, layers = fields["hidden_size"], fields["num_hidden_layers"]
    heads = fields["num_attention_heads"]
    kv_heads = fields.get("num_key_value_heads") or heads
    head_dim = fields.get("head_dim") or hidden // heads
    attention = hidden * head_dim * (2 * heads + 2 * kv_heads)
    if kind.startswith("qwen2") or fields.get("attention_bias"):
        attention += head_dim * (heads + 2 * kv_heads)
    norms = 2 * hidden
    if kind.startswith(("qwen3", "gemma3")):
        norms += 2 * head_dim
    if kind.startswith("gemma3"):
        norms += 2 * hidden
    embedding = fields["vocab_size"] * hidden
    tied = fields.get("tie_word_embeddings", False)
    total = layers * (attention + norms + _mlp(fields, hidden)) + hidden
    total += embedding * (1 if tied else 2)
    window = _window_layers(fields, layers, kind)
    return Text(
        hidden, layers, heads, kv_heads, head_dim, total, layers - window, window,
        fields.get("sliding_window") or 0 if window else 0,
        fields.get("max_position_embeddings") or 0,
    )  # fmt: skip


def _mlp(fields: dict[str, Any], hidden: int) -> int:
    """Parameters of one gated feed-forward layer, or of its experts and their router."""
    experts = fields.get("num_experts") or fields.get("num_local_experts") or 0
    if not experts:
        return int(3 * hidden * fields["intermediate_size"])
    each = fields.get("moe_intermediate_size") or fields["intermediate_size"]
    shared = fields.get("shared_expert_intermediate_size") or 0
    return int(experts * 3 * hidden * each + hidden * experts + 3 * hidden * shared)


def _window_layers(fields: dict[str, Any], layers: int, kind: str) -> int:
    """Layers that look at a sliding window only."""
    if not fields.get("sliding_window"):
        return 0
    kinds = fields.get("layer_types")
    if isinstance(kinds, list):
        return sum(1 for one in kinds if one == "sliding_attention")
    if kind == "gemma3_text":
        every = fields.get("sliding_window_pattern") or 6
        return int(layers - layers // every)
    if kind == "mistral":
        return layers
    return 0


def _image(
    vision: Vision, text: Text, size: tuple[int, int], kv_layer_bytes: int, kind: str,
    max_pixels: int | None,
) -> Image:  # fmt: skip
    patches, tokens, at_once = count(vision, size, max_pixels)
    width = max(PRECISIONS[kind], 2.0)
    # Of one layer: the residual stream, and either queries, keys, values and the result, or the
    # feed-forward layer's inner tensors.
    inner = (3 if vision.gated else 2) * vision.intermediate
    per_patch = vision.hidden + max(4 * vision.hidden, inner)
    peak = int(width * (patches * per_patch + tokens * text.hidden))
    eager = peak + int(width * vision.heads * at_once * at_once * max(patches // at_once, 1))
    return Image(
        width=size[0],
        height=size[1],
        patches=patches,
        vision_tokens=tokens,
        kv_bytes=tokens * kv_layer_bytes * text.layers,
        encoder_peak_bytes=peak,
        encoder_eager_peak_bytes=eager,
    )
