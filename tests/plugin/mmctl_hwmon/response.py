"""Half the vision tokens: each pair of neighbours as its mean."""

from __future__ import annotations

import torch


def pair_tokens(tokens: torch.Tensor) -> torch.Tensor:
    """``tokens`` [..., N, C] as [..., ⌈N/2⌉, C]; an odd last token stays as it is."""
    paired = tokens.shape[-2] // 2 * 2
    means = tokens[..., :paired, :].unflatten(-2, (-1, 2)).mean(-2)
    return torch.cat([means, tokens[..., paired:, :]], dim=-2)
