"""Truncation: a hard limit of tokens, the most informative ones kept in their order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from mmctl.engine.errors import UsageError
from mmctl.engine.responses.estimate import CHUNK_BYTES, Estimate, bytes_of

if TYPE_CHECKING:
    import torch

MAX_LEN = 512
"""The published limit of the service level."""


@dataclass(frozen=True)
class Truncated:
    """Tokens that stayed [B, M, C], where they stood [B, M], and which are real [B, M]."""

    tokens: torch.Tensor
    index: torch.Tensor
    mask: torch.Tensor

    @property
    def nbytes(self) -> int:
        """Bytes of all parts together."""
        return bytes_of(self.tokens, self.index, self.mask)


def estimate_truncate(tokens: torch.Tensor, max_len: int = MAX_LEN) -> Estimate:
    """What truncating ``tokens`` [B, N, C] frees; what is dropped is gone."""
    batch, count, _ = tokens.shape
    kept = min(count, max_len)
    before = bytes_of(tokens)
    after = before // max(1, count) * kept + batch * kept * 9
    return Estimate(
        response="truncate", before_bytes=before,
        frees_bytes=max(0, before - after) if kept < count else 0,
        scratch_bytes=after + CHUNK_BYTES, reversible=False,
    )  # fmt: skip


def truncate(
    tokens: torch.Tensor | Truncated,
    scores: torch.Tensor,
    max_len: int = MAX_LEN,
    mask: torch.Tensor | None = None,
) -> Truncated:
    """The ``max_len`` tokens of greatest score of each item, in the order they had.

    ``scores`` [B, N] say how informative a token is (``entropy.informativeness``); equal ones
    keep the earlier token. ``mask`` [B, N] is True for real tokens: padding stays only where
    too few are real. Raises UsageError for a limit below 1.
    """
    import torch

    if isinstance(tokens, Truncated):
        return tokens
    if max_len < 1:
        raise UsageError(f"a limit of tokens is at least 1, not {max_len}")
    batch, count, channels = tokens.shape
    real = (
        torch.ones(batch, count, dtype=torch.bool, device=tokens.device) if mask is None else mask
    )
    rank = scores.float().masked_fill(~real, -torch.inf)
    best = rank.sort(dim=1, descending=True, stable=True).indices[:, :max_len]
    index = best.sort(dim=1).values
    kept = tokens.gather(1, index[:, :, None].expand(batch, index.shape[1], channels))
    return Truncated(kept, index, real.gather(1, index))
