"""Faults to practise on: a model's weights damaged in the ways that memory and loaders do.

Each takes a model and a seed, damages one place in it, and says in words what it did.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import TYPE_CHECKING

from mmctl.engine.errors import UsageError, suggestion

if TYPE_CHECKING:
    import torch
    from torch import nn


def _matrices(model: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """The weight matrices, tables of embeddings apart: most rows of a table are never read."""
    return [
        (name, parameter.data)
        for name, parameter in model.named_parameters()
        if parameter.dim() == 2 and "embedding" not in name
    ]


def _integers(matrix: torch.Tensor) -> torch.Tensor:
    """The bits of ``matrix`` as integers of its width, flat, sharing its memory."""
    import torch

    kinds = {2: torch.int16, 4: torch.int32, 8: torch.int64}
    return matrix.view(-1).view(kinds[matrix.element_size()])


def _bit(model: nn.Module, random: Random, exponent: bool) -> str:
    import torch

    name, matrix = random.choice(_matrices(model))
    place = random.randrange(matrix.numel())
    mantissa = {torch.float32: 23, torch.float16: 10, torch.bfloat16: 7}[matrix.dtype]
    sign = matrix.element_size() * 8 - 1
    bit = random.randrange(mantissa, sign) if exponent else random.randrange(mantissa)
    _integers(matrix)[place] ^= 1 << bit
    return f"{name}[{place}]: bit {bit} flipped"


def exponent_bit(model: nn.Module, seed: int) -> str:
    """One bit of one weight's exponent."""
    return _bit(model, Random(seed), exponent=True)


def mantissa_bit(model: nn.Module, seed: int) -> str:
    """One bit of one weight's mantissa: mostly too small to matter."""
    return _bit(model, Random(seed), exponent=False)


def zeroed_head(model: nn.Module, seed: int) -> str:
    """One attention head gives nothing: its columns of the output projection are 0."""
    random = Random(seed)
    outs = [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(getattr(module, "heads", None), int) and hasattr(module, "out")
    ]
    name, module = random.choice(outs)
    head, heads = random.randrange(module.heads), module.heads
    weight = module.out.weight.data
    width = weight.shape[1] // heads
    weight[:, head * width : (head + 1) * width] = 0
    return f"{name}: head {head} of {heads} is 0"


def scaled_matrix(model: nn.Module, seed: int) -> str:
    """One weight matrix times 1.05: a scale gone wrong."""
    name, matrix = Random(seed).choice(_matrices(model))
    matrix.mul_(1.05)
    return f"{name} times 1.05"


def swapped_matrices(model: nn.Module, seed: int) -> str:
    """Two weight matrices of one shape in each other's place: a loader's mistake."""
    random = Random(seed)
    shapes: dict[tuple[int, ...], list[tuple[str, torch.Tensor]]] = {}
    for name, matrix in _matrices(model):
        shapes.setdefault(tuple(matrix.shape), []).append((name, matrix))
    (a, first), (b, second) = random.sample(
        random.choice([group for group in shapes.values() if len(group) > 1]), 2
    )
    kept = first.clone()
    first.copy_(second)
    second.copy_(kept)
    return f"{a} and {b} swapped"


def swapped_rows(model: nn.Module, seed: int) -> str:
    """Ten pairs of rows of one weight matrix in each other's place."""
    random = Random(seed)
    name, matrix = random.choice(_matrices(model))
    rows = random.sample(range(len(matrix)), min(20, len(matrix) // 2 * 2))
    half = len(rows) // 2
    kept = matrix[rows[:half]].clone()
    matrix[rows[:half]] = matrix[rows[half:]]
    matrix[rows[half:]] = kept
    return f"{name}: {half} pairs of rows swapped"


FAULTS: dict[str, Callable[[nn.Module, int], str]] = {
    "exponent_bit": exponent_bit,
    "mantissa_bit": mantissa_bit,
    "zeroed_head": zeroed_head,
    "scaled_matrix": scaled_matrix,
    "swapped_matrices": swapped_matrices,
    "swapped_rows": swapped_rows,
}
"""Every fault by name."""


def inject(model: nn.Module, fault: str, seed: int = 0) -> str:
    """Damage ``model`` by one of ``FAULTS``; what was done, in words. UsageError for others."""
    import torch

    if fault not in FAULTS:
        raise UsageError(
            f"no fault '{fault}': one of {', '.join(FAULTS)}{suggestion(fault, FAULTS)}"
        )
    with torch.no_grad():
        return FAULTS[fault](model, seed)
