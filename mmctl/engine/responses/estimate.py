"""What a response will free and cost, told before it runs, and what it did, told afterwards."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    import torch

CHUNK_BYTES = 256 * 1024
"""Scratch of one response: half for the rows it converts at a time, half for sums and masks."""


class Estimate(msgspec.Struct, frozen=True, kw_only=True):
    """What ``response`` will free and need, from shapes alone.

    ``frees_bytes`` is net of what the response keeps on the device; ``scratch_bytes`` is the
    most that it holds above the state before, its output included; ``host_bytes`` is what it
    takes of the host. An offload moves bytes instead of losing them: ``lossy`` is False.
    """

    response: str
    before_bytes: int
    frees_bytes: int
    scratch_bytes: int
    host_bytes: int = 0
    lossy: bool = True
    reversible: bool = True


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """What a response did. ``error`` is the relative L2 error of what can be restored, and
    ``cosine_mean`` the mean cosine over tokens; both are absent where nothing was compared."""

    response: str
    before_bytes: int
    freed_bytes: int
    took_ns: int
    error: float | None = None
    cosine_mean: float | None = None


def chunk_rows(columns: int) -> int:
    """How many rows of ``columns`` float32 values fit in half a chunk; at least one."""
    return max(1, CHUNK_BYTES // (8 * max(1, columns)))


def spans(rows: int, step: int) -> Iterator[slice]:
    """``rows`` rows in slices of at most ``step``."""
    for start in range(0, rows, max(1, step)):
        yield slice(start, min(start + step, rows))


def bytes_of(*tensors: torch.Tensor) -> int:
    """Bytes that the elements of ``tensors`` take."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def compare(original: torch.Tensor, restored: torch.Tensor) -> tuple[float, float]:
    """(relative L2 error, mean cosine over the last dimension), chunk by chunk in float32.

    A pair of zero rows agrees (cosine 1); a zero row against another does not (cosine 0).
    """
    import torch

    columns = original.shape[-1]
    a, b = original.reshape(-1, columns), restored.reshape(-1, columns)
    difference = norm = cosine = 0.0
    for rows in spans(len(a), chunk_rows(columns)):
        x, y = a[rows].float(), b[rows].to(a.device).float()
        xx, yy, xy = (x * x).sum(-1), (y * y).sum(-1), (x * y).sum(-1)
        sizes = (xx.sqrt() * yy.sqrt()).clamp_min(1e-30)
        both = torch.where((xx == 0) & (yy == 0), 1.0, xy / sizes)
        difference += float(((x - y) ** 2).sum(dtype=torch.float64))
        norm += float(xx.sum(dtype=torch.float64))
        cosine += float(both.sum(dtype=torch.float64))
    if not len(a):
        return 0.0, 1.0
    error = math.sqrt(difference / norm) if norm else (0.0 if difference == 0 else math.inf)
    return error, cosine / len(a)
