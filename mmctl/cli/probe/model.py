"""``mmctl probe model``: what a model needs, from its configuration."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec
import typer

from mmctl.cli.app import output, quantity
from mmctl.cli.render import emit, to_table
from mmctl.engine.errors import UsageError
from mmctl.engine.memory import config as models
from mmctl.engine.records import SCHEMA
from mmctl.engine.units import show_bytes

SIZES = ("336x336", "448x448", "1024x1024", "1920x1080", "3840x2160")


def _size(text: str) -> tuple[int, int]:
    width, _, height = text.lower().partition("x")
    if not (width.isdigit() and height.isdigit() and int(width) > 0 and int(height) > 0):
        raise UsageError(f"--image '{text}' is no size such as 1024x768")
    return int(width), int(height)


def model(
    config: Annotated[
        Path, typer.Argument(metavar="CONFIG.json", help="The model's config.json or its folder.")
    ],
    image: Annotated[
        list[str] | None, typer.Option(metavar="WxH", help="Image size in pixels (repeatable).")
    ] = None,
    precision: Annotated[
        str | None, typer.Option(metavar="NAME", help="fp32, bf16, fp16, fp8, int8 or int4.")
    ] = None,
    kv_precision: Annotated[
        str | None, typer.Option(metavar="NAME", help="The KV cache's, if not the weights'.")
    ] = None,
    capacity: Annotated[
        str | None, typer.Option(metavar="SIZE", help="A device's memory, such as 80GiB.")
    ] = None,
    memory_ratio: Annotated[
        float, typer.Option(metavar="RATIO", min=0.01, max=1, help="Share of it to be used.")
    ] = 0.9,
    context: Annotated[
        int, typer.Option(metavar="TOKENS", min=1, help="Tokens of one sequence, image included.")
    ] = 4096,
    max_pixels: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Pixels an image may keep (Qwen-VL).")
    ] = None,
) -> int:
    """Weights, KV cache, vision tokens and encoder peak of a model, before it is loaded.

    Reads the Hugging Face configurations of Qwen2-VL, Qwen2.5-VL, Qwen3-VL, LLaVA, LLaVA-NeXT,
    InternVL, Pixtral, Mistral 3, Gemma 3, and of plain Llama, Mistral and Qwen models. Every
    figure is modelled, from the shapes of the layers; the encoder's peak assumes fused
    attention, the eager one holds the attention matrix too.

    \b
    Examples:
      mmctl probe model ./Qwen2.5-VL-7B-Instruct/config.json
      mmctl probe model config.json --image 1920x1080 --capacity 80GiB --context 8192
      mmctl probe model config.json --capacity 24GiB --memory-ratio 0.85 --max-pixels 1003520
      mmctl probe model config.json --precision int4 --kv-precision fp8 -o json
    """
    sizes = [_size(text) for text in image or SIZES]
    capacity_bytes = None
    if capacity is not None:
        capacity_bytes = int(quantity("--capacity", capacity, "bytes"))
    needed = models.needs(
        models.read(config), sizes, precision=precision, kv_precision=kv_precision,
        capacity_bytes=capacity_bytes, memory_ratio=memory_ratio, context_tokens=context,
        max_pixels=max_pixels,
    )  # fmt: skip
    document = {"schema": SCHEMA, "file": str(config), **msgspec.to_builtins(needed)}
    plain = {key: value for key, value in document.items() if not isinstance(value, (dict, list))}
    rows = [
        {**plain, **{f"image_{key}": value for key, value in msgspec.to_builtins(one).items()}}
        for one in needed.images
    ] or [plain]
    emit(document, rows, output(), table=_table(needed))
    return 0


def _table(needed: models.Needs) -> str:
    lines = [
        f"{needed.model_type} · {needed.parameters / 1e9:.2f} G parameters "
        f"({needed.vision_parameters / 1e9:.2f} G vision) · {needed.precision} · modelled",
        f"weights        {show_bytes(needed.weight_bytes)}",
        f"KV per token   {show_bytes(needed.kv_bytes_per_token)} ({needed.kv_precision})",
    ]
    if needed.kv_window_bytes:
        lines.append(f"KV of windows  {show_bytes(needed.kv_window_bytes)} a sequence at most")
    if needed.capacity_bytes is not None:
        lines.append(
            f"fits           {needed.sequences} sequences of {needed.context_tokens} tokens in "
            f"{show_bytes(needed.usable_bytes)} of {show_bytes(needed.capacity_bytes)}"
        )
        if needed.images_at_once is not None:
            lines.append(f"               or {needed.images_at_once} such images at once")
    if not needed.images:
        return "\n".join(lines)
    rows = [
        {
            "image": f"{one.width}x{one.height}",
            "patches": one.patches,
            "vision tokens": one.vision_tokens,
            "KV": show_bytes(one.kv_bytes),
            "encoder peak": show_bytes(one.encoder_peak_bytes),
            "eager peak": show_bytes(one.encoder_eager_peak_bytes),
        }
        for one in needed.images
    ]
    return "\n".join(lines) + "\n\n" + to_table(rows)
