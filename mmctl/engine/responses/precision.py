"""Mixed-precision hand-over: a float32 embedding becomes half-precision input, and goes.

Both copies are never kept: the conversion runs chunk by chunk and the source's memory is given
back at once, or, while gradients are recorded, is held by nobody on this side. Gradients come
back in float32.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mmctl.engine.responses.estimate import CHUNK_BYTES, Estimate, bytes_of, chunk_rows, spans

if TYPE_CHECKING:
    import torch


def estimate_hand_over(embedding: torch.Tensor, dtype: torch.dtype) -> Estimate:
    """What handing ``embedding`` over as ``dtype`` frees."""
    before = bytes_of(embedding)
    after = embedding.numel() * dtype.itemsize
    return Estimate(
        response="hand_over", before_bytes=before, frees_bytes=before - after,
        scratch_bytes=after + CHUNK_BYTES,
    )  # fmt: skip


def hand_over(embedding: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """``embedding`` as ``dtype``; the source gives its memory back where nothing needs it.

    Without gradients the source's storage is emptied, whoever else refers to it: it must be
    the caller's own, and is not to be read again. With gradients its memory is free as soon
    as the caller drops it, because the conversion does not keep it; the gradient that comes
    back has the source's type. A tensor that has ``dtype`` already is returned as it is.
    """
    import torch

    if embedding.dtype == dtype:
        return embedding
    if torch.is_grad_enabled() and embedding.requires_grad:
        converted: torch.Tensor = _conversion().apply(embedding, dtype)
        return converted
    out = _convert(embedding, dtype)
    embedding.untyped_storage().resize_(0)
    return out


def _convert(source: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    import torch

    out = torch.empty(source.shape, dtype=dtype, device=source.device)
    if source.dim() < 2:
        return out.copy_(source)
    for row, target in zip(source, out, strict=True):
        for rows in spans(len(row), chunk_rows(row.numel() // max(1, len(row)))):
            target[rows].copy_(row[rows])
    return out


def _conversion() -> Any:
    """The autograd function, made where torch is imported."""
    import torch

    class Conversion(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, source: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
            ctx.source_dtype = source.dtype
            return _convert(source, dtype)

        @staticmethod
        def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
            return gradients[0].to(ctx.source_dtype), None

    return Conversion


def release_cache(device: torch.device) -> bool:
    """Give cached memory of ``device`` back to its driver; True when that was done.

    Never while a graph is captured: the graph would lose addresses that it recorded.
    """
    import torch

    if device.type != "cuda" or torch.cuda.is_current_stream_capturing():
        return False
    torch.cuda.empty_cache()
    return True
