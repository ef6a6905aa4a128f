"""INT8 per channel and back: half the bytes of float16 tokens, a quarter of float32.

Symmetric, one scale per (item, channel). A few massive tokens would stretch a channel's scale
until all others round to nothing, so values beyond ``OUTLIER_FACTOR`` times the third quartile
of their channel's magnitudes are kept exactly beside the codes (after LLM.int8,
arXiv:2208.07339), in channels where they are at most ``OUTLIER_RATIO`` of the tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING

from mmctl.engine.errors import MmctlError
from mmctl.engine.responses.estimate import CHUNK_BYTES, Estimate, bytes_of, chunk_rows, spans

if TYPE_CHECKING:
    import torch

OUTLIER_FACTOR = 8.0
OUTLIER_RATIO = 1 / 64
SAMPLE_ROWS = 16
SAMPLE_CHANNELS = 256


@dataclass(frozen=True)
class Quantized:
    """INT8 codes [..., N, C], scales float32 [..., 1, C], and the values kept exactly.

    ``outlier_index`` (int32) counts elements of the flattened tensor.
    """

    codes: torch.Tensor
    scale: torch.Tensor
    outlier_index: torch.Tensor
    outlier_value: torch.Tensor
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of all parts together."""
        return bytes_of(self.codes, self.scale, self.outlier_index, self.outlier_value)


def estimate_quantize(tokens: torch.Tensor) -> Estimate:
    """What quantising ``tokens`` frees, outliers not counted: they are not known yet."""
    before = bytes_of(tokens)
    channels = tokens.numel() // max(1, tokens.shape[-2])
    after = tokens.numel() + 4 * channels
    return Estimate(
        response="quantize_vision", before_bytes=before, frees_bytes=before - after,
        scratch_bytes=after + CHUNK_BYTES,
    )  # fmt: skip


def quantize(tokens: torch.Tensor | Quantized) -> Quantized:
    """``tokens`` [..., N, C] of a floating type as INT8; what is quantised already is returned.

    Raises MmctlError for values that are not finite: they would spoil a whole channel.
    """
    import torch

    if isinstance(tokens, Quantized):
        return tokens
    rows, channels = tokens.shape[-2:]
    # By index and not by reshape, which would copy a tensor with gaps.
    items = [tokens[index] for index in product(*map(range, tokens.shape[:-2]))]
    device = tokens.device
    codes = torch.empty(tokens.shape, dtype=torch.int8, device=device)
    scale = torch.empty((*tokens.shape[:-2], 1, channels), dtype=torch.float32, device=device)
    buffer = torch.empty(
        (min(rows, chunk_rows(channels)), channels), dtype=torch.float32, device=device
    )
    indices, values = [], []
    flat_codes, flat_scale = codes.view(len(items), rows, channels), scale.view(-1, channels)
    for item, content in enumerate(items):
        cap, wild = _caps(content, buffer)
        torch.div(cap, 127.0, out=flat_scale[item])
        flat_scale[item].masked_fill_(cap == 0, 1.0)
        inverse = flat_scale[item].reciprocal()
        for span in spans(rows, len(buffer)):
            chunk = buffer[: span.stop - span.start]
            chunk.copy_(content[span])
            chunk.mul_(inverse).round_().clamp_(-127, 127)
            flat_codes[item, span].copy_(chunk)
        if wild.numel():
            index, value = _outliers(content, cap, wild)
            indices.append(index + item * rows * channels)
            values.append(value)
    nothing = torch.empty(0, device=device)
    return Quantized(
        codes, scale,
        torch.cat(indices).int() if indices else nothing.int(),
        torch.cat(values) if values else nothing.to(tokens.dtype),
        tokens.dtype,
    )  # fmt: skip


def _caps(item: torch.Tensor, buffer: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(largest magnitude to encode per channel, channels that hold greater ones)."""
    import torch

    rows, channels = item.shape
    largest = torch.zeros(channels, dtype=torch.float32, device=item.device)
    for span in spans(rows, len(buffer)):
        chunk = buffer[: span.stop - span.start]
        chunk.copy_(item[span])
        torch.maximum(largest, chunk.abs_().amax(0), out=largest)
    if not bool(torch.isfinite(largest).all()):
        raise MmctlError("tokens hold values that are not finite: they are not quantised")
    if not rows:
        return largest, torch.empty(0, dtype=torch.long, device=item.device)
    limit = torch.empty_like(largest)
    sample = item[:: -(-rows // SAMPLE_ROWS)]
    for group in spans(channels, SAMPLE_CHANNELS):
        # By channel, so that the quantile reads along memory.
        part = sample[:, group].t().to(torch.float32, copy=True).abs_()
        limit[group] = part.kthvalue(max(1, len(sample) * 3 // 4), dim=1).values
    limit.mul_(OUTLIER_FACTOR)
    wild = (largest > limit).nonzero().flatten()
    if wild.numel():
        beyond = torch.zeros(len(wild), dtype=torch.long, device=item.device)
        for span in spans(rows, chunk_rows(4 * len(wild))):
            beyond += (item[span].index_select(1, wild).float().abs_() > limit[wild]).sum(0)
        wild = wild[beyond <= rows * OUTLIER_RATIO]
    cap = largest.clone()
    cap[wild] = limit[wild]
    return cap, wild


def _outliers(
    item: torch.Tensor, cap: torch.Tensor, wild: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """(index into the flattened item, value) of everything beyond the cap of its channel."""
    import torch

    indices, values = [], []
    channels = item.shape[1]
    for span in spans(len(item), chunk_rows(4 * len(wild))):
        columns = item[span].index_select(1, wild)
        row, column = (columns.float().abs() > cap[wild]).nonzero(as_tuple=True)
        indices.append((row + span.start) * channels + wild[column])
        values.append(columns[row, column])
    return torch.cat(indices), torch.cat(values)


def dequantize(quantized: Quantized) -> torch.Tensor:
    """The tokens again, in their own type; outliers come back exactly."""
    import torch

    codes = quantized.codes
    rows, channels = codes.shape[-2:]
    out = torch.empty(codes.shape, dtype=quantized.dtype, device=codes.device)
    buffer = torch.empty(
        (min(rows, chunk_rows(channels)), channels), dtype=torch.float32, device=codes.device
    )
    flat_scale = quantized.scale.view(-1, channels)
    items = (len(flat_scale), rows, channels)
    flat_out, flat_codes = out.view(items), codes.view(items)
    for item in range(len(flat_codes)):
        for span in spans(rows, len(buffer)):
            chunk = buffer[: span.stop - span.start]
            chunk.copy_(flat_codes[item, span])
            flat_out[item, span].copy_(chunk.mul_(flat_scale[item]))
    if quantized.outlier_index.numel():
        out.view(-1)[quantized.outlier_index.long()] = quantized.outlier_value
    return out
