"""Named memory systems for the cache and bank models.

Sizes and channel counts are as published by the vendors. How an address maps to channel, bank
and row is published by none of them: the mapping here is this project's own (``streams``), and
figures that rest on it are labelled ``modelled``.
"""

from __future__ import annotations

import re

import msgspec

from mmctl.engine import units
from mmctl.engine.errors import UsageError, suggestion


class MemoryModel(msgspec.Struct, frozen=True, kw_only=True):
    """A last-level cache in front of DRAM: sizes in bytes, counts per device."""

    name: str
    l2_bytes: int
    ways: int = 16
    line_bytes: int = 128
    sector_bytes: int = 32
    channels: int
    banks: int = 16
    row_bytes: int = 2048
    hash: str = "xor-fold"


def _model(name: str, l2: str, channels: int, ways: int = 16) -> MemoryModel:
    l2_bytes = int(units.parse(l2, "bytes"))
    return MemoryModel(name=name, l2_bytes=l2_bytes, channels=channels, ways=ways)


MODELS: dict[str, MemoryModel] = {
    model.name: model
    for model in (
        _model("reference", "32MiB", 32),
        _model("v100", "6MiB", 32),
        _model("t4", "4MiB", 16),
        _model("a10", "6MiB", 24),
        _model("l4", "48MiB", 12),
        _model("a100", "40MiB", 40),
        _model("h100", "50MiB", 80),
        _model("h200", "50MiB", 96),
        _model("b200", "126MiB", 128),
        _model("mi300x", "256MiB", 128),
    )
}  # fmt: skip


def find(name: str) -> MemoryModel:
    """A model by name (``h100``) or size (``50MiB``, ``50MiB/8`` for 8 ways)."""
    if name in MODELS:
        return MODELS[name]
    size = re.fullmatch(r"([\d.]+\s*[KMG]i?B)(?:/(\d+))?", name)
    if size is None:
        raise UsageError(
            f"no memory model '{name}': one of {', '.join(MODELS)}, or a size such as 50MiB"
            f"{suggestion(name, MODELS)}"
        )
    ways = int(size[2]) if size[2] else 16
    model = _model(name, size[1], MODELS["reference"].channels, ways=ways)
    if ways < 1 or model.l2_bytes < ways * model.line_bytes:
        raise UsageError(f"'{name}' is too small for {ways} ways")
    return model
