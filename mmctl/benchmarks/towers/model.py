"""The two towers (torch), and their contrast; images, texts and weights follow from seeds."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from mmctl.engine.model import VisionBlock

DIM, HEADS, LAYERS, JOINT = 192, 6, 4, 128
PATCH, SIDE = 16, 112
PATCHES = (SIDE // PATCH) ** 2
TOKENS, VOCABULARY = 48, 512
TEMPERATURE = math.log(1 / 0.07)
"""Logarithm of what logits are scaled by, as CLIP starts it."""


class Tower(nn.Module):
    """A transformer over what ``embed`` makes of its input; the mean of its tokens, projected
    and normalised, is ``[n, 128]``."""

    def __init__(self, embed: nn.Module, tokens: int) -> None:
        super().__init__()
        self.embed = embed
        self.positions = nn.Parameter(torch.randn(tokens, DIM) * 0.02)
        self.blocks = nn.Sequential(*(VisionBlock(DIM, HEADS) for _ in range(LAYERS)))
        self.norm, self.project = nn.LayerNorm(DIM), nn.Linear(DIM, JOINT, bias=False)

    def forward(self, given: Tensor) -> Tensor:
        """Patches or token ids, batch first, to embeddings ``[n, width]`` of length 1."""
        x = self.blocks(self.embed(given) + self.positions)
        return functional.normalize(self.project(self.norm(x).mean(1)), dim=-1)


def image_tower() -> Tower:
    """Of patches ``[n, 49, 768]``; the same weights every time."""
    return _seeded(1, lambda: Tower(nn.Linear(3 * PATCH * PATCH, DIM), PATCHES))


def text_tower() -> Tower:
    """Of token ids ``[n, 48]``; the same weights every time."""
    return _seeded(2, lambda: Tower(nn.Embedding(VOCABULARY, DIM), TOKENS))


def _seeded(seed: int, make: Callable[[], Tower]) -> Tower:
    state = torch.random.get_rng_state()
    torch.manual_seed(seed)
    tower = make()
    torch.random.set_rng_state(state)
    return tower


def images(batch: int, size: int) -> Tensor:
    """The patches of ``size`` images of a batch, ``[size, 49, 768]``."""
    draw = torch.Generator().manual_seed(1000 + batch)
    return torch.rand(size, PATCHES, 3 * PATCH * PATCH, generator=draw)


def texts(batch: int, size: int) -> Tensor:
    """The token ids of ``size`` texts of a batch, ``[size, 48]``."""
    draw = torch.Generator().manual_seed(2000 + batch)
    return torch.randint(VOCABULARY, (size, TOKENS), generator=draw)


def contrast(image: Tensor, text: Tensor, temperature: Tensor) -> Tensor:
    """Logits ``[images, texts]``."""
    return temperature.exp() * image @ text.T


def loss(logits: Tensor) -> Tensor:
    """CLIP's: the right text of each image, and the right image of each text."""
    right = torch.arange(len(logits), device=logits.device)
    return (functional.cross_entropy(logits, right) + functional.cross_entropy(logits.T, right)) / 2


class Reference(NamedTuple):
    """What one process alone computes: logits ``[batches, n, n]`` and the gradients' sums."""

    logits: Tensor
    gradients: dict[str, Tensor]


def reference(batches: int, size: int) -> Reference:
    """All batches in this process."""
    image, text = image_tower(), text_tower()
    temperature = torch.tensor(TEMPERATURE, requires_grad=True)
    found = []
    for batch in range(batches):
        logits = contrast(image(images(batch, size)), text(texts(batch, size)), temperature)
        loss(logits).backward()  # type: ignore[no-untyped-call]
        found.append(logits.detach())
    return Reference(torch.stack(found), gradients(image, text, temperature))


def gradients(
    image: Tower | None, text: Tower | None, temperature: Tensor | None
) -> dict[str, Tensor]:
    """The gradients that are there, by tower and parameter."""
    found = {} if temperature is None or temperature.grad is None else {
        "temperature": temperature.grad.clone()
    }  # fmt: skip
    for name, tower in (("image", image), ("text", text)):
        for key, parameter in tower.named_parameters() if tower is not None else ():
            if parameter.grad is not None:
                found[f"{name}.{key}"] = parameter.grad.clone()
    return found
