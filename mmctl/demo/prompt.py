"""A prompt of the practice server, and the small model's answer to it, a token at a time."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mmctl.engine import model as models
from mmctl.engine.memory.towers import fitted

PATCH = models.Config().patch
MOST_PIXELS, LEAST_PIXELS = 672 * 672, 56 * 56


class Token(NamedTuple):
    """A token of an answer: its text, its log-probability, and the likeliest ones."""

    text: str
    logprob: float
    top: list[dict[str, Any]]


class Prompt(NamedTuple):
    """A prompt as the model takes it: pixels ``[1, 3, height, width]`` of each image, token ids."""

    images: list[Tensor]
    ids: list[int]

    @property
    def tokens(self) -> int:
        """Vision tokens, one for each patch of its pixels, and text tokens, one a byte."""
        vision = sum(image.shape[2] // PATCH * (image.shape[3] // PATCH) for image in self.images)
        return vision + len(self.ids)


def read(messages: list[dict[str, Any]]) -> Prompt:
    """The prompt of a chat; ValueError for what the server cannot take."""
    images, texts = [], []
    for message in messages:
        content = message.get("content") or ""
        parts: list[Any] = [{"text": content}] if isinstance(content, str) else content
        for part in parts:
            if part.get("type") == "image_url":
                images.append(_pixels(part["image_url"]["url"]))
            else:
                texts.append(str(part.get("text", "")))
    return Prompt(images, models.tokenize("\n".join(texts)) or [0])


def _pixels(url: str) -> Tensor:
    """An image of a ``data:`` URL, its sides fitted to whole patches as Qwen2-VL does."""
    import numpy as np
    from PIL import Image

    head, _, content = url.partition(",")
    if not head.startswith("data:"):
        raise ValueError("only data: URLs: this server fetches nothing")
    try:
        with Image.open(io.BytesIO(base64.b64decode(content, validate=True))) as image:
            rows, columns = fitted(image.width, image.height, PATCH, LEAST_PIXELS, MOST_PIXELS)
            pixels = np.array(image.convert("RGB").resize((columns * PATCH, rows * PATCH)))
    except (OSError, ValueError, Image.DecompressionBombError) as error:
        raise ValueError(f"the image cannot be read: {error}") from None
    return torch.from_numpy(pixels).permute(2, 0, 1)[None].float() / 255


@torch.inference_mode()
def _begin(model: models.VisionLanguageModel, prompt: Prompt) -> tuple[Tensor, Any, Any]:
    """Encode the images and read the prompt: logits, KV cache, keys and values of the images."""
    cross = None
    if prompt.images:
        vision = torch.cat([model.encode(image)[0] for image in prompt.images])
        cross = models.in_float32(model.cross_cache(vision))
    cache = models.KvCache(model.config, "cpu")
    return model.decode(torch.tensor(prompt.ids), cache, cross), cache, cross


def answer(
    model: models.VisionLanguageModel, prompt: Prompt, count: int, top: int
) -> Iterator[Token]:
    """The greedy answer, a token each time it is advanced."""
    logits, cache, cross = _begin(model, prompt)
    while True:
        likely = torch.log_softmax(logits, 0)
        chosen = int(logits.argmax())
        values, ids = (found.tolist() for found in likely.topk(top))
        tops = [{"token": f"{i} ", "logprob": v} for i, v in zip(ids, values, strict=True)]
        yield Token(f"{chosen} ", float(likely[chosen]), tops)
        if (count := count - 1) == 0:
            return
        with torch.inference_mode():
            logits = model.decode(torch.tensor([chosen]), cache, cross)
