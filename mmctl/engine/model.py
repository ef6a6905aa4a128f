"""The small vision-language model of demo, benchmarks and canaries (torch).

A ViT over patches, a projector, and a decoder that attends to its own growing KV cache and,
by cross attention, to the vision tokens of its request. Plain operators only: fused ones hide
their allocations from a tracker. Weights are random, seeded, and scaled so that the greedy
answer depends on every part of the model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional


class Config(NamedTuple):
    """Sizes of the model; ``dim`` is in features, ``patch`` in pixels."""

    patch: int = 14
    vision_dim: int = 192
    vision_heads: int = 6
    vision_layers: int = 4
    text_dim: int = 256
    text_heads: int = 8
    text_layers: int = 4
    vocabulary: int = 320
    kv_growth_tokens: int = 512


LIGHT_MERGE = 2
"""Patches a side that the light vision branch merges into one."""

CrossCache = Callable[[int], tuple[Tensor, Tensor]]
"""Layer → keys and values of the vision tokens, each ``[tokens, text_dim]`` in float32."""


class KvCache:
    """Keys and values of one request, per layer ``[capacity, text_dim]`` float32.

    Grown by whole steps of ``growth_tokens`` into new storage, as serving engines without
    paging do; ``length`` counts the tokens that are valid.
    """

    def __init__(self, config: Config, device: torch.device | str) -> None:
        self.config, self.device, self.length = config, device, 0
        empty = torch.empty(0, config.text_dim, device=device)
        self.keys: list[Tensor] = [empty] * config.text_layers
        self.values: list[Tensor] = [empty] * config.text_layers

    @property
    def capacity(self) -> int:
        """Tokens for which storage is held."""
        return self.keys[0].shape[0]

    def append(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Store ``keys`` and ``values`` ``[new, text_dim]`` behind the valid tokens of a layer;
        all valid ones, the new included, come back."""
        end = self.length + keys.shape[0]
        if end > self.keys[layer].shape[0]:
            self.keys[layer] = self._grown(self.keys[layer], end)
            self.values[layer] = self._grown(self.values[layer], end)
        self.keys[layer][self.length : end] = keys
        self.values[layer][self.length : end] = values
        return self.keys[layer][:end], self.values[layer][:end]

    def _grown(self, old: Tensor, tokens: int) -> Tensor:
        step = self.config.kv_growth_tokens
        capacity = math.ceil(tokens / step) * step
        new = torch.empty(capacity, self.config.text_dim, device=self.device)
        new[: self.length] = old[: self.length]
        return new


class Attention(nn.Module):
    """Multi-head attention written out: scores, softmax, weighted sum."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads, self.scale = heads, 1 / math.sqrt(dim // heads)
        self.query, self.key = nn.Linear(dim, dim), nn.Linear(dim, dim)
        self.value, self.out = nn.Linear(dim, dim), nn.Linear(dim, dim)
        self.softmax = nn.Softmax(-1)  # a module of its own: a hook sees the weights

    def forward(self, x: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
        """``x`` is ``[…, queries, dim]``, ``keys`` and ``values`` ``[…, tokens, dim]``; a mask is
        added to the scores ``[…, heads, queries, tokens]``."""
        query = self._heads(self.query(x))
        scores = query @ self._heads(keys).transpose(-1, -2) * self.scale
        if mask is not None:
            scores = scores + mask
        mixed = self.softmax(scores) @ self._heads(values)
        return self.out(mixed.transpose(-2, -3).flatten(-2))

    def _heads(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:-1], self.heads, -1).transpose(-2, -3)


class VisionBlock(nn.Module):
    """Self attention and a two-layer perceptron, each behind a norm."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.norm_attention, self.norm_mlp = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attention = Attention(dim, heads)
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        """Hidden states ``[batch, patches, dim]`` through one block; each sees all."""
        y = self.norm_attention(x)
        x = x + self.attention(y, self.attention.key(y), self.attention.value(y), None)
        return x + self.down(functional.gelu(self.up(self.norm_mlp(x))))


class TextBlock(nn.Module):
    """Causal self attention over the cache, cross attention to vision tokens, perceptron."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.norm_self, self.norm_cross = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.norm_mlp = nn.LayerNorm(dim)
        self.attention, self.cross = Attention(dim, heads), Attention(dim, heads)
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(
        self, x: Tensor, layer: int, cache: KvCache, cross: CrossCache | None, mask: Tensor | None
    ) -> Tensor:
        """Hidden states ``[batch, new, dim]`` of the tokens after those in ``cache``, which grows
        by them; ``cross`` gives the vision tokens' keys and values, ``mask`` what is attended."""
        y = self.norm_self(x)
        keys, values = cache.append(layer, self.attention.key(y), self.attention.value(y))
        x = x + self.attention(y, keys, values, mask)
        if cross is not None:
            x = x + self.cross(self.norm_cross(x), *cross(layer), None)
        return x + self.down(functional.gelu(self.up(self.norm_mlp(x))))


class VisionLanguageModel(nn.Module):
    """The whole model; build it with ``build``."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        pixels = 3 * config.patch * config.patch
        self.patch_embed = nn.Linear(pixels, config.vision_dim)
        self.vision_blocks = nn.ModuleList(
            VisionBlock(config.vision_dim, config.vision_heads) for _ in range(config.vision_layers)
        )
        self.vision_norm = nn.LayerNorm(config.vision_dim)
        self.projector = nn.Linear(config.vision_dim, config.text_dim)
        self.embedding = nn.Embedding(config.vocabulary, config.text_dim)
        self.text_blocks = nn.ModuleList(
            TextBlock(config.text_dim, config.text_heads) for _ in range(config.text_layers)
        )
        self.text_norm = nn.LayerNorm(config.text_dim)
        self.head = nn.Linear(config.text_dim, config.vocabulary, bias=False)

    def patches(self, height: int, width: int, light: bool = False) -> int:
        """Vision tokens of an image of ``height`` × ``width`` pixels."""
        side = self.config.patch * (LIGHT_MERGE if light else 1)
        return (height // side) * (width // side)

    def encode(self, images: Tensor, light: bool = False) -> Tensor:
        """``[n, 3, height, width]`` pixels in [0, 1] → vision tokens ``[n, patches, text_dim]``.

        The ``light`` branch merges each square of neighbouring patches into their mean before
        the blocks: a quarter of the tokens, a sixteenth of the attention.
        """
        n, _, height, width = images.shape
        patch = self.config.patch
        rows, columns = height // patch, width // patch
        cut = images[:, :, : rows * patch, : columns * patch]
        cut = cut.reshape(n, 3, rows, patch, columns, patch).permute(0, 2, 4, 1, 3, 5)
        x = self.patch_embed(cut.reshape(n, rows * columns, -1))
        x = x + _grid_positions(rows, columns, self.config.vision_dim, images.device)
        if light:
            x = _merged(x, rows, columns)
        for block in self.vision_blocks:
            x = block(x)
        return self.projector(self.vision_norm(x))

    def cross_cache(self, tokens: Tensor) -> list[Tensor]:
        """Keys and values of vision tokens ``[tokens, text_dim]``, ``[2, tokens, text_dim]`` per
        layer, kept in float16 (storage only: arithmetic in float16 is slow on CPUs)."""
        kept = []
        for block in self.text_blocks:
            assert isinstance(block, TextBlock)
            pair = torch.stack([block.cross.key(tokens), block.cross.value(tokens)])
            kept.append(pair.half())
        return kept

    def decode(self, ids: Tensor, cache: KvCache, cross: CrossCache | None = None) -> Tensor:
        """Run ``ids`` ``[new]`` behind what ``cache`` holds; logits ``[vocabulary]`` of the last.

        The cache is longer by ``new`` afterwards.
        """
        new, past = ids.shape[0], cache.length
        x = self.embedding(ids) + _positions(past, new, self.config.text_dim, ids.device)
        mask = _causal(new, past, ids.device) if new > 1 else None
        for layer, block in enumerate(self.text_blocks):
            x = block(x, layer, cache, cross, mask)
        cache.length += new
        return self.head(self.text_norm(x[-1:]))[0]

    @torch.inference_mode()
    def answer(
        self, image: Tensor | None, prompt: str, tokens: int = 4
    ) -> tuple[list[int], Tensor, Tensor | None]:
        """Greedy answer to ``prompt`` about ``image`` ``[3, height, width]``: token ids, the
        logits ``[tokens, vocabulary]`` they were taken from, and the mean image embedding."""
        device = self.head.weight.device
        cross: CrossCache | None = None
        embedding = None
        if image is not None:
            vision = self.encode(image.to(device)[None])[0]
            embedding = vision.mean(0)
            cross = in_float32(self.cross_cache(vision))
        cache = KvCache(self.config, device)
        logits = self.decode(torch.tensor(tokenize(prompt), device=device), cache, cross)
        ids, rows = [], []
        for _ in range(tokens):
            rows.append(logits)
            ids.append(int(logits.argmax()))
            logits = self.decode(torch.tensor(ids[-1:], device=device), cache, cross)
        return ids, torch.stack(rows), embedding


def in_float32(kept: Sequence[Tensor]) -> CrossCache:
    """What ``decode`` takes, from the result of ``cross_cache``."""

    def layer_pair(layer: int) -> tuple[Tensor, Tensor]:
        keys, values = kept[layer].float().unbind(0)
        return keys, values

    return layer_pair


def tokenize(text: str) -> list[int]:
    """One token a byte: the model has no vocabulary of words."""
    return list(text.encode("utf-8"))


def build(
    config: Config | None = None, seed: int = 0, device: torch.device | str = "cpu"
) -> VisionLanguageModel:
    """A model with seeded random weights on ``device`` (``meta`` for shapes without storage).

    Every matrix but the head and the embedding is scaled by 3: with the usual initialisation
    the answer hardly depends on the image, and no closed question could tell a broken model.
    """
    if str(device) == "meta":
        with torch.device("meta"):
            return VisionLanguageModel(config or Config()).eval().requires_grad_(False)
    state = torch.random.get_rng_state()
    torch.manual_seed(seed)
    model = VisionLanguageModel(config or Config())
    torch.random.set_rng_state(state)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 2 and name not in ("head.weight", "embedding.weight"):
                parameter.mul_(3)
    return model.to(device).eval().requires_grad_(False)


def _positions(start: int, count: int, dim: int, device: torch.device) -> Tensor:
    """Sinusoidal positions ``[count, dim]`` (Vaswani et al. 2017)."""
    at = torch.arange(start, start + count, device=device, dtype=torch.float32)
    step = torch.arange(dim // 2, device=device, dtype=torch.float32)
    angle = at[:, None] * torch.exp(step * (-math.log(10000) * 2 / dim))
    return torch.cat([angle.sin(), angle.cos()], -1)


def _grid_positions(rows: int, columns: int, dim: int, device: torch.device) -> Tensor:
    """Half the features tell the row, half the column: ``[rows * columns, dim]``."""
    row = _positions(0, rows, dim // 2, device).repeat_interleave(columns, 0)
    column = _positions(0, columns, dim // 2, device).repeat(rows, 1)
    return torch.cat([row, column], -1)


def _merged(x: Tensor, rows: int, columns: int) -> Tensor:
    """``[n, rows * columns, dim]`` → the means of squares of patches; a rest at the edge goes."""
    n, step = x.shape[0], LIGHT_MERGE
    down, across = rows // step, columns // step
    grid = x.view(n, rows, columns, -1)[:, : down * step, : across * step]
    return grid.reshape(n, down, step, across, step, -1).mean((2, 4)).flatten(1, 2)


def _causal(new: int, past: int, device: torch.device) -> Tensor:
    """Added to scores ``[new, past + new]``: minus infinity where a token lies ahead."""
    mask = torch.full((new, past + new), float("-inf"), device=device)
    return mask.triu(past + 1)
