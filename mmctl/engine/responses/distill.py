"""Token distillation: fewer tokens that stand for all, the recommended response.

Vision tokens are merged by similarity (bipartite matching after ToMe, arXiv:2210.09461); text
KV entries by importance: the heavy hitters, the first and the latest stay, the others merge into
the nearer of their neighbours. Merging is weighted by size and remembers who went
where, so that the tokens can be spread out again. Eager torch operations: no fused kernel.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mmctl.engine.errors import UsageError
from mmctl.engine.responses.estimate import CHUNK_BYTES, Estimate, bytes_of, chunk_rows, spans

if TYPE_CHECKING:
    import torch

KEEP_RATIO = 0.44
"""Share of tokens that the recommended path keeps: 55 % of the bytes come back, maps included."""

SINKS = 4
"""First entries of a sequence that attention leans on whatever they hold (arXiv:2309.17453)."""

RECENT = 32
"""Latest entries, whose importance is not known yet."""


MATCH_CHANNELS = 512
"""Channels that similarity is taken over: their order means nothing, and half of them rank
neighbours as well as all (mean cosine after unmerging within 0.0002) in half the time."""


@dataclass(frozen=True)
class Distilled:
    """Merged tokens [B, M, C], how many each stands for [B, M], and the row of each [B, N].

    Attention over merged tokens should add ``log(sizes)`` to the scores of a row, so that it
    weighs as much as the tokens it stands for.
    """

    tokens: torch.Tensor
    sizes: torch.Tensor
    owner: torch.Tensor

    @property
    def nbytes(self) -> int:
        """Bytes of all parts together."""
        return bytes_of(self.tokens, self.sizes, self.owner)


@dataclass(frozen=True)
class DistilledKV:
    """Merged keys and values [B, H, M, D], sizes [B, M] and the row of each entry [B, N]."""

    keys: torch.Tensor
    values: torch.Tensor
    sizes: torch.Tensor
    owner: torch.Tensor

    @property
    def nbytes(self) -> int:
        """Bytes of all parts together."""
        return bytes_of(self.keys, self.values, self.sizes, self.owner)


def kept_count(count: int, keep_ratio: float) -> int:
    """How many of ``count`` tokens stay; UsageError for a ratio outside (0, 1]."""
    if not 0 < keep_ratio <= 1:
        raise UsageError(f"a share of tokens to keep lies in (0, 1], not {keep_ratio:g}")
    return min(count, math.ceil(count * keep_ratio))


def estimate_distill(tensor: torch.Tensor, keep_ratio: float = KEEP_RATIO) -> Estimate:
    """What merging ``tensor`` [B, N, C] or [B, H, N, D] frees; give keys and values apart."""
    before, count = bytes_of(tensor), tensor.shape[-2]
    kept = kept_count(count, keep_ratio)
    maps = tensor.shape[0] * (4 * kept + 4 * count)
    after = before // max(1, count) * kept + maps
    return Estimate(
        response="distill", before_bytes=before, frees_bytes=max(0, before - after),
        scratch_bytes=after + CHUNK_BYTES,
    )  # fmt: skip


def distill(
    tokens: torch.Tensor | Distilled,
    keep_ratio: float = KEEP_RATIO,
    mask: torch.Tensor | None = None,
) -> Distilled:
    """``tokens`` [B, N, C] merged to ceil(N * keep_ratio) per item; the order is kept.

    Every second token (or fewer, evenly spaced) is a place to merge into; of the others the
    most similar ones merge, each into the place of greatest cosine. ``mask`` [B, N] is True
    for real tokens: padding neither takes nor changes them, and counts for nothing. What is
    distilled already is returned.
    """
    import torch

    if isinstance(tokens, Distilled):
        return tokens
    batch, count, channels = tokens.shape
    keep = kept_count(count, keep_ratio)
    out = torch.empty((batch, keep, channels), dtype=tokens.dtype, device=tokens.device)
    sizes = torch.empty((batch, keep), dtype=torch.float32, device=tokens.device)
    owner = torch.empty((batch, count), dtype=torch.int32, device=tokens.device)
    places = _evenly(min(keep, count // 2 if count > 1 else 1), count, tokens.device)
    for item, content in enumerate(tokens):
        real = None if mask is None else mask[item]
        kept, into = _match(content, places, keep, real, out[item])
        weights = torch.ones(count, device=tokens.device) if real is None else real.float()
        row = _rows(kept, into)
        _merge(out[item], content, kept, row, weights)
        sizes[item], owner[item] = _sums(row, weights, keep), row
    return Distilled(out, sizes, owner)


def distill_pair(pair: torch.Tensor, keep_ratio: float = KEEP_RATIO) -> Distilled:
    """Keys and values [2, N, C] of cross attention merged alike to [2, ceil(N * keep_ratio), C].

    Who merges into whom is decided by the keys, so that both stay aligned; ``sizes`` and
    ``owner`` are of one item.
    """
    import torch

    _, count, channels = pair.shape
    keep = kept_count(count, keep_ratio)
    out = torch.empty((2, keep, channels), dtype=pair.dtype, device=pair.device)
    places = _evenly(min(keep, count // 2 if count > 1 else 1), count, pair.device)
    kept, into = _match(pair[0], places, keep, None, out[0])
    row = _rows(kept, into)
    weights = torch.ones(count, device=pair.device)
    for source, target in zip(pair, out, strict=True):
        _merge(target, source, kept, row, weights)
    return Distilled(out, _sums(row, weights, keep)[None], row.int()[None])


def _evenly(some: int, count: int, device: torch.device) -> torch.Tensor:
    """``some`` of ``count`` places, evenly spaced."""
    import torch

    steps = torch.arange(some, device=device)
    return torch.div((2 * steps + 1) * count, 2 * max(1, some), rounding_mode="floor")


def _match(
    item: torch.Tensor, places: torch.Tensor, keep: int, real: torch.Tensor | None,
    scratch: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """(tokens that stay, for every token the one it goes to; itself where it stays).

    ``scratch`` [>= places, C] holds the places' tokens meanwhile: the output serves.
    """
    import torch

    count = len(item)
    into = torch.arange(count, device=item.device)
    stays = torch.zeros(count, dtype=torch.bool, device=item.device)
    stays[places] = True
    merges = count - keep
    if merges <= 0:
        return into, into
    others = (~stays).nonzero().flatten()
    targets = scratch[: len(places)]
    torch.index_select(item, 0, places, out=targets)
    score, best = nearest(item, others, targets, None if real is None else real[places])
    if merges < len(others):
        # Padding goes first: it stands for nothing.
        rank = score if real is None else score.masked_fill(~real[others], 2.0)
        chosen = rank.topk(merges).indices
        others, best = others[chosen], best[chosen]
    into[others] = places[best]
    stays.fill_(True)
    stays[others] = False
    return stays.nonzero().flatten(), into


def nearest(
    item: torch.Tensor, queries: torch.Tensor, targets: torch.Tensor, real: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """For each of ``queries`` (rows of ``item``) its greatest cosine to a row of ``targets``,
    and which row that is. Where ``real`` is False a target is nobody's nearest."""
    import torch

    item, targets = item[:, :MATCH_CHANNELS], targets[:, :MATCH_CHANNELS]
    step = chunk_rows(item.shape[1])
    # CPUs multiply halves some eighty times slower than floats: they convert, chunk by chunk.
    convert = item.device.type == "cpu" and item.dtype != torch.float32
    block_rows = step if convert else len(targets)
    score = torch.full((len(queries),), -2.0, device=item.device)
    best = torch.zeros(len(queries), dtype=torch.long, device=item.device)
    for block in spans(len(targets), block_rows):
        target = targets[block].float() if convert else targets[block]
        scale = target.norm(dim=1, dtype=torch.float32).clamp_min_(1e-30).reciprocal_()
        for part in spans(len(queries), step):
            query = item.index_select(0, queries[part])
            query = query.float() if convert else query
            cosine = torch.mm(query, target.t()).float().mul_(scale)
            if real is not None:
                cosine.masked_fill_(~real[block], -2.0)
            top, at = cosine.max(1)
            top.div_(query.norm(dim=1, dtype=torch.float32).clamp_min_(1e-30))
            del query, cosine  # before the next of them is made
            better = top > score[part]
            score[part] = torch.where(better, top, score[part])
            best[part] = torch.where(better, at + block.start, best[part])
    return score, best


def _rows(kept: torch.Tensor, into: torch.Tensor) -> torch.Tensor:
    """For every token the place among ``kept`` of the one it goes to."""
    import torch

    place = torch.zeros(len(into), dtype=torch.long, device=into.device)
    place[kept] = torch.arange(len(kept), device=into.device)
    return place[into]


def _sums(row: torch.Tensor, weights: torch.Tensor, count: int) -> torch.Tensor:
    """Sum of ``weights`` [N] by row [count]."""
    import torch

    return torch.zeros(count, device=row.device).index_add_(0, row, weights)


def _merge(
    out: torch.Tensor, item: torch.Tensor, kept: torch.Tensor, row: torch.Tensor,
    weights: torch.Tensor,
) -> None:  # fmt: skip
    """Make row i of ``out`` the weighted mean of all rows of ``item`` whose row is i."""
    import torch

    total = _sums(row, weights, len(kept))
    moves = torch.ones(len(row), dtype=torch.bool, device=row.device)
    moves[kept] = False
    # A row that stands for nothing real keeps its own content.
    share = torch.where(total[row] > 0, weights / total[row].clamp_min(1e-30), (~moves).float())
    merged = moves.nonzero().flatten()

    def scaled(rows: torch.Tensor) -> torch.Tensor:
        content = item.index_select(0, rows)
        return content.mul_(share[rows].to(content.dtype).view(-1, *[1] * (content.dim() - 1)))

    step = chunk_rows(item[0].numel())
    for part in spans(len(kept), step):
        out[part] = scaled(kept[part])
    for part in spans(len(merged), step):
        out.index_add_(0, row[merged[part]], scaled(merged[part]))


def undistill(distilled: Distilled) -> torch.Tensor:
    """All N tokens again, in order; a merged token comes back as what it was merged into."""
    import torch

    batch, _, channels = distilled.tokens.shape
    owner = distilled.owner.long()
    return torch.gather(
        distilled.tokens, 1, owner[:, :, None].expand(batch, owner.shape[1], channels)
    )


def distill_kv(
    keys: torch.Tensor,
    values: torch.Tensor,
    keep_ratio: float = KEEP_RATIO,
    importance: torch.Tensor | None = None,
    mask: torch.Tensor | None = None,
) -> DistilledKV:
    """``keys`` and ``values`` [B, H, N, D] merged to ceil(N * keep_ratio) entries, in order.

    ``importance`` [B, N] is the attention that each entry has received; without it the norms
    of the values stand in for it. The first ``SINKS``, the last ``RECENT`` and the most
    important entries stay; every other merges, weighted by its importance, into that of its
    two neighbours among these whose key is nearer: order is kept, and a key is
    never averaged with one of a far position. ``mask`` [B, N] is True for real entries.
    """
    import torch

    batch, heads, count, _ = keys.shape
    keep = kept_count(count, keep_ratio)
    new_keys, new_values = (
        torch.empty((batch, heads, keep, t.shape[-1]), dtype=t.dtype, device=t.device)
        for t in (keys, values)
    )
    sizes = torch.empty((batch, keep), dtype=torch.float32, device=keys.device)
    owner = torch.empty((batch, count), dtype=torch.int32, device=keys.device)
    for item in range(batch):
        weights = _value_norms(values[item]) if importance is None else importance[item].float()
        weights = weights.clamp_min(1e-6)
        ones = torch.ones_like(weights)
        if mask is not None:
            weights, ones = weights * mask[item], mask[item].float()
        kept = _important(weights, keep)
        # [N, H, D] without a copy: a row is one entry of all heads.
        row = _neighbour_rows(keys[item].transpose(0, 1), kept, weights > 0)
        _merge(new_keys[item].transpose(0, 1), keys[item].transpose(0, 1), kept, row, weights)
        _merge(new_values[item].transpose(0, 1), values[item].transpose(0, 1), kept, row, weights)
        sizes[item], owner[item] = _sums(row, ones, keep), row
    return DistilledKV(new_keys, new_values, sizes, owner)


def _value_norms(values: torch.Tensor) -> torch.Tensor:
    """Norm of each entry's value over all heads; ``values`` [H, N, D] to [N]."""
    import torch

    squares = torch.zeros(values.shape[1], device=values.device)
    for head in values:
        for part in spans(len(squares), chunk_rows(values.shape[2])):
            squares[part] += head[part].float().square_().sum(-1)
    return squares.sqrt_()


def _important(weights: torch.Tensor, keep: int) -> torch.Tensor:
    """The indices of ``keep`` entries that stay, in order."""
    import torch

    rank = weights.clone()
    real = (weights > 0).nonzero().flatten()
    # Half of the places are left to importance, however few there are.
    rank[real[: min(SINKS, keep // 4)]] = torch.inf
    recent = min(RECENT, keep // 4)
    rank[real[len(real) - recent :]] = torch.inf
    return rank.topk(keep).indices.sort().values


def _neighbour_rows(entries: torch.Tensor, kept: torch.Tensor, real: torch.Tensor) -> torch.Tensor:
    """For every entry [N, H, D] the place in ``kept`` of its nearer kept neighbour, by the keys
    of the first heads."""
    import torch

    count, last = len(entries), len(kept) - 1
    entries = entries[:, : max(1, MATCH_CHANNELS // 2 // entries.shape[2])]
    after = torch.searchsorted(kept, torch.arange(count, device=kept.device))
    row = after.clamp_max(last)
    moves = torch.ones(count, dtype=torch.bool, device=kept.device)
    moves[kept] = False
    moved = moves.nonzero().flatten()
    for part in spans(len(moved), max(1, chunk_rows(entries[0].numel()) // 3)):
        own = moved[part]
        query = entries.index_select(0, own).flatten(1).float()
        scores = []
        for place in (after[own] - 1, after[own]):
            inside = (place >= 0) & (place <= last)
            source = kept[place.clamp(0, last)]
            target = entries.index_select(0, source).flatten(1).float()
            cosine = (query * target).sum(1) / target.norm(dim=1).clamp_min(1e-30)
            cosine.masked_fill_(~real[source], -3e38)  # rather a far neighbour than padding
            scores.append(cosine.masked_fill_(~inside, -torch.inf))
        row[own] = torch.where(scores[0] >= scores[1], after[own] - 1, after[own])
    return row


def undistill_kv(distilled: DistilledKV) -> tuple[torch.Tensor, torch.Tensor]:
    """(keys, values) of all N entries again, in order; merged ones as what they merged into."""
    owner = distilled.owner.long()[:, None, :, None]

    def spread(merged: torch.Tensor) -> torch.Tensor:
        batch, heads, _, width = merged.shape
        return merged.gather(2, owner.expand(batch, heads, owner.shape[2], width))

    return spread(distilled.keys), spread(distilled.values)
