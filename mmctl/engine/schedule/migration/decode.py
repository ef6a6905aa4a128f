"""A decode that runs: an engine, the position in the sequence, and how the demo's begins."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from mmctl.engine.schedule.migration import graph
from mmctl.engine.schedule.migration.engines import Engine
from mmctl.engine.schedule.migration.state import Frozen, Position, Sampler

if TYPE_CHECKING:
    from numpy import ndarray

REMEMBERED = 32
"""Steps whose logits are kept, so that another engine can be checked against them."""


class Begin(msgspec.Struct, frozen=True, kw_only=True):
    """A decode of the demo's model, all of it drawn from ``seed``: weights, an image of
    ``image_pixels`` a side (0: none) and a prompt of ``cache_tokens``."""

    cache_tokens: int = 1024
    image_pixels: int = 224
    seed: int = 0
    temperature: float = 0.0


class Decode:
    """A sequence on an engine; between two steps it may be frozen.

    ``recent`` are the last steps: how many tokens the cache held, the token run, its logits.
    """

    def __init__(self, engine: Engine, position: Position) -> None:
        self.engine, self.position = engine, position
        self.recent: tuple[tuple[int, int, ndarray], ...] = ()

    def step(self, told: int | None = None) -> int:
        """Run the next token; the one that follows it, drawn or, where it is known, ``told``."""
        at = self.position
        logits, row = self.engine.step(at.token, at.past)
        self.engine.write(at.past, row)
        drawn, sampler = at.sampler.draw(logits)
        token = drawn if told is None else told
        self.recent = (*self.recent, (at.past, at.token, logits))[-REMEMBERED:]
        # Last: a copier in another thread takes what lies before ``past`` for written.
        self.position = Position(
            past=at.past + 1, token=token, index=at.index + 1, sampler=sampler,
            last=(at.past, at.token),
        )  # fmt: skip
        return token


def first(begin: Begin) -> Frozen:
    """The demo's decode after its prompt, before its first step."""
    import torch

    from mmctl.engine import model as demo

    torch.set_num_threads(1)
    config = demo.Config()
    model = demo.build(config, begin.seed)
    random = torch.Generator().manual_seed(begin.seed)
    with torch.inference_mode():
        kept: list[Any] = []
        if begin.image_pixels:
            image = torch.rand(1, 3, begin.image_pixels, begin.image_pixels, generator=random)
            kept = model.cross_cache(model.encode(image)[0])
        prompt = torch.randint(0, 256, (begin.cache_tokens,), generator=random)
        cache = demo.KvCache(config, "cpu")
        logits = model.decode(prompt, cache, demo.in_float32(kept) if kept else None).numpy()
        rows = torch.stack([one[: cache.length] for one in (*cache.keys, *cache.values)]).numpy()
    frozen, weights = graph.freeze(model, bool(kept))
    token, sampler = Sampler(temperature=begin.temperature, seed=begin.seed).draw(logits)
    return Frozen(
        graph=frozen, weights=weights, cache=rows, cross=[one.numpy() for one in kept],
        position=Position(past=cache.length, token=token, index=1, sampler=sampler),
        logits=logits,
    )  # fmt: skip


def l2(found: ndarray, wanted: ndarray) -> tuple[float, float]:
    """‖found − wanted‖₂, and the same as a share of ‖wanted‖₂; infinite where one is no number."""
    import numpy as np

    apart = float(np.linalg.norm(found.astype(np.float64) - wanted.astype(np.float64)))
    if not np.isfinite(apart):
        return float("inf"), float("inf")
    size = float(np.linalg.norm(wanted.astype(np.float64)))
    return apart, apart / size if size else float(apart > 0)
