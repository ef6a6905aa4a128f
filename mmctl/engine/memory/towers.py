"""Vision towers of the model families: their parameters, and the tokens that an image becomes."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

# Sizes that configurations leave out because they are their class's defaults.
_DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {
        "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
        "num_attention_heads": 32, "vocab_size": 32000,
    },
    "vicuna": {},
    "mistral": {
        "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 32000,
    },
    "qwen2": {
        "hidden_size": 4096, "intermediate_size": 22016, "num_hidden_layers": 32,
        "num_attention_heads": 32, "vocab_size": 151936,
    },
    "gemma3_text": {
        "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26,
        "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256,
        "vocab_size": 262208, "sliding_window": 4096, "tie_word_embeddings": True,
    },
    "clip_vision_model": {
        "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12,
        "num_attention_heads": 12, "image_size": 224, "patch_size": 32,
    },
    "siglip_vision_model": {
        "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12,
        "num_attention_heads": 12, "image_size": 224, "patch_size": 16,
    },
    "pixtral": {
        "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24,
        "num_attention_heads": 16, "image_size": 1024, "patch_size": 16,
    },
    "intern_vit_6b": {
        "hidden_size": 3200, "intermediate_size": 12800, "num_hidden_layers": 48,
        "num_attention_heads": 25, "image_size": 448, "patch_size": 14,
    },
    "internvl_vision": {
        "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24,
        "num_attention_heads": 16, "image_size": 448, "patch_size": 14,
    },
    "qwen2_vl": {
        "depth": 32, "embed_dim": 1280, "num_heads": 16, "mlp_ratio": 4, "patch_size": 14,
        "spatial_merge_size": 2, "temporal_patch_size": 2,
    },
    "qwen2_5_vl": {
        "depth": 32, "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16,
        "patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2,
    },
    "qwen3_vl": {
        "depth": 27, "hidden_size": 1152, "intermediate_size": 4304, "num_heads": 16,
        "patch_size": 16, "spatial_merge_size": 2, "temporal_patch_size": 2,
        "num_position_embeddings": 2304, "deepstack_visual_indexes": [8, 16, 24],
    },
}  # fmt: skip
# How many pixels an image may keep, by its family's own processor.
_MAX_PIXELS = {"qwen2_vl": 12_845_056, "qwen2_5_vl": 12_845_056, "qwen3_vl": 16_777_216}
_MIN_PIXELS = {"qwen2_vl": 3136, "qwen2_5_vl": 3136, "qwen3_vl": 65_536}


class Vision(NamedTuple):
    """The vision tower's shape."""

    family: str
    hidden: int
    intermediate: int
    layers: int
    heads: int
    patch: int
    merge: int
    image: int
    gated: bool
    parameters: int
    fields: dict[str, Any]


def with_defaults(fields: dict[str, Any], kind: str) -> dict[str, Any]:
    """``fields`` over the defaults of the model type ``kind``; a null counts as absent."""
    return {**_DEFAULTS.get(kind, {}), **{k: v for k, v in fields.items() if v is not None}}


def tower(config: dict[str, Any], hidden: int) -> Vision | None:
    """The vision tower of a ``config.json``, None for a model without one."""
    fields = config.get("vision_config")
    if not isinstance(fields, dict):
        return None
    kind = str(config.get("model_type", ""))
    own = str(fields.get("model_type", ""))
    if kind.startswith(("qwen2_vl", "qwen2_5_vl", "qwen3_vl")):
        return _qwen_tower(kind.removesuffix("_moe"), fields, hidden)
    if own == "pixtral" or kind in ("mistral3", "pixtral"):
        family, own = "pixtral", "pixtral"
    elif kind.startswith("internvl"):
        family = "internvl"
        own = own if own in _DEFAULTS else "internvl_vision"
    elif kind.startswith("gemma3"):
        family, own = "gemma3", "siglip_vision_model"
    elif kind in ("llava_next", "llava_onevision"):
        family = "llava_next"
    else:
        family = "llava"
    return _tower(family, config, with_defaults(fields, own or "clip_vision_model"), hidden)


def _side(value: Any) -> int:
    return int(value[0]) if isinstance(value, list) else int(value)


def _tower(family: str, config: dict[str, Any], fields: dict[str, Any], hidden: int) -> Vision:
    """A plain vision transformer with a projector into the language model."""
    wide, inner = fields["hidden_size"], fields["intermediate_size"]
    layers, heads = fields["num_hidden_layers"], fields["num_attention_heads"]
    patch, image = _side(fields["patch_size"]), _side(fields["image_size"])
    gated = family == "pixtral"
    merge = int(config.get("spatial_merge_size") or 1)
    if family == "internvl":
        merge = round(1 / float(config.get("downsample_ratio", 0.5)))
    each = (
        4 * wide * wide + 3 * wide * inner + 2 * wide
        if gated
        else 4 * (wide * wide + wide) + 2 * wide * inner + inner + wide + 4 * wide
    )
    if family == "internvl":
        each += 2 * wide  # layer scale
    total = layers * each + 3 * patch * patch * wide
    places = (image // patch) ** 2
    if family in ("llava", "llava_next", "internvl"):
        total += (places + 1) * wide + wide  # positions and the class token
    if family in ("llava", "llava_next") and "siglip" not in str(fields.get("model_type")):
        total += 4 * wide  # norms before and after
    if family == "gemma3":
        total += places * wide + wide + 2 * wide
    if family == "internvl":
        total += wide  # bias of the patches
    if family == "pixtral":
        total += wide
    if family == "llava_next":
        total += hidden  # the learned end of a row
    total += _projector(family, config, wide, merge, hidden)
    return Vision(
        family, wide, inner, layers, heads, patch, merge, image, gated, total,
        {**config, "vision": fields},
    )  # fmt: skip


def _projector(family: str, config: dict[str, Any], wide: int, merge: int, hidden: int) -> int:
    out = hidden
    if family == "gemma3":
        return wide * out + wide
    if family == "internvl":
        joined = wide * merge * merge
        return 2 * joined + joined * out + out + out * out + out
    if family == "pixtral" and config.get("model_type") == "mistral3":
        return wide + wide * merge * merge * wide + wide * out + out * out
    return wide * out + out + out * out + out


def _qwen_tower(kind: str, fields: dict[str, Any], hidden: int) -> Vision:
    fields = with_defaults(fields, kind)
    wide = fields["embed_dim"] if kind == "qwen2_vl" else fields["hidden_size"]
    inner = int(wide * fields["mlp_ratio"]) if kind == "qwen2_vl" else fields["intermediate_size"]
    layers, patch, merge = fields["depth"], fields["patch_size"], fields["spatial_merge_size"]
    out = fields.get("out_hidden_size") or hidden
    if kind == "qwen2_vl":
        out = hidden
    gated = kind == "qwen2_5_vl"
    attention = 4 * wide * wide + 4 * wide
    mlp = 3 * wide * inner + 2 * inner + wide if gated else 2 * wide * inner + inner + wide
    norms = 2 * wide if gated else 4 * wide
    joined = wide * merge * merge
    merger = joined * joined + joined + joined * out + out + (wide if gated else 2 * wide)
    total = layers * (attention + mlp + norms) + merger
    total += 3 * fields.get("temporal_patch_size", 2) * patch * patch * wide
    if kind == "qwen3_vl":
        total += wide + fields["num_position_embeddings"] * wide
        deep = len(fields["deepstack_visual_indexes"])
        total += deep * (joined * joined + joined + joined * out + out + 2 * joined)
    return Vision(
        kind, wide, inner, layers, fields["num_heads"], patch, merge, 0, gated, total, fields
    )


def count(vision: Vision, size: tuple[int, int], max_pixels: int | None) -> tuple[int, int, int]:
    """Patches, tokens, and the patches that attend to each other."""
    width, height = size
    if vision.family in _MAX_PIXELS:
        unit = vision.patch * vision.merge
        most = max_pixels or vision.fields.get("max_pixels") or _MAX_PIXELS[vision.family]
        rows, columns = fitted(width, height, unit, _MIN_PIXELS[vision.family], most)
        patches = rows * columns * vision.merge * vision.merge
        return patches, rows * columns, patches
    if vision.family == "pixtral":
        rows, columns = _pixtral(vision, width, height)
        patches = rows * columns
        rows, columns = rows // vision.merge, columns // vision.merge
        return patches, rows * (columns + 1), patches
    places = (vision.image // vision.patch) ** 2
    if vision.family == "gemma3":
        return places, int(vision.fields.get("mm_tokens_per_image", 256)), places
    if vision.family == "internvl":
        tiles = _tiles(vision, width, height)
        return places * tiles, places // vision.merge**2 * tiles, places
    if vision.family == "llava_next":
        return _anyres(vision, width, height, places)
    return places, places, places


def fitted(width: int, height: int, unit: int, least: int, most: int) -> tuple[int, int]:
    """Rows and columns of ``unit`` pixels after the Qwen-VL processors' resize: whole units,
    between ``least`` and ``most`` pixels."""
    tall, wide = max(round(height / unit), 1) * unit, max(round(width / unit), 1) * unit
    if tall * wide > most:
        scale = math.sqrt(height * width / most)
        tall = max(math.floor(height / scale / unit), 1) * unit
        wide = max(math.floor(width / scale / unit), 1) * unit
    elif tall * wide < least:
        scale = math.sqrt(least / (height * width))
        tall, wide = (math.ceil(side * scale / unit) * unit for side in (height, width))
    return tall // unit, wide // unit


def _pixtral(vision: Vision, width: int, height: int) -> tuple[int, int]:
    unit = vision.patch * vision.merge
    scale = max(width / vision.image, height / vision.image, 1.0)
    rows = (math.floor(height / scale) - 1) // unit + 1
    columns = (math.floor(width / scale) - 1) // unit + 1
    return max(rows, 1) * vision.merge, max(columns, 1) * vision.merge


def _tiles(vision: Vision, width: int, height: int) -> int:
    """Tiles of the grid whose shape is nearest to the image's, and the thumbnail."""
    most = int(vision.fields.get("max_dynamic_patch") or 12)
    least = int(vision.fields.get("min_dynamic_patch") or 1)
    grids = sorted(
        {(a, b) for n in range(least, most + 1) for a in range(1, n + 1) for b in range(1, n + 1)
         if least <= a * b <= most},
        key=lambda grid: grid[0] * grid[1],
    )  # fmt: skip
    ratio, best, area = width / height, (1, 1), width * height
    nearest = math.inf
    for a, b in grids:
        off = abs(ratio - a / b)
        if off < nearest or (off == nearest and area > 0.5 * vision.image**2 * a * b):
            nearest, best = off, (a, b)
    tiles = best[0] * best[1]
    thumbnail = vision.fields.get("use_thumbnail", True) and tiles > 1
    return tiles + (1 if thumbnail else 0)


def _anyres(vision: Vision, width: int, height: int, places: int) -> tuple[int, int, int]:
    """LLaVA-NeXT: the whole image once, and the best grid of tiles without its padding."""
    pins = vision.fields.get("image_grid_pinpoints") or [
        [336, 672], [672, 336], [672, 672], [1008, 336], [336, 1008]
    ]  # fmt: skip
    best, most, least = pins[0], -1, 0
    for tall, wide in pins:
        scale = min(wide / width, tall / height)
        used = min(int(width * scale) * int(height * scale), width * height)
        waste = tall * wide - used
        if used > most or (used == most and waste < least):
            best, most, least = [tall, wide], used, waste
    tall, wide = best
    side = vision.image // vision.patch
    tiles = (tall // vision.image) * (wide // vision.image)
    rows, columns = tall // vision.image * side, wide // vision.image * side
    if width / height > columns / rows:
        rows -= 2 * ((rows - int(height * (columns / width))) // 2)
    else:
        columns -= 2 * ((columns - int(width * (rows / height))) // 2)
    return places * (tiles + 1), places + rows * columns + rows, places
