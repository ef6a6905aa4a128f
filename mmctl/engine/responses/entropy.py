"""Attention entropy: how diffuse a model's attention is, per head, and what its drift asks for.

Only eager attention has weights to look at: FlashAttention and its like never materialise them,
and nothing here pretends otherwise.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from mmctl.engine.errors import MmctlError
from mmctl.engine.profiles import Responses
from mmctl.engine.records import Event
from mmctl.engine.responses.estimate import chunk_rows, spans

if TYPE_CHECKING:
    import torch

NOT_AVAILABLE = "attention is not materialised by this engine (fused kernel): run it eagerly"

Action = Literal["recalibrate", "light_vision"]


def row_entropy(weights: torch.Tensor, nats: bool = False) -> torch.Tensor:
    """Entropy of each attention row, ``weights`` [..., Q, K] to [..., Q], from 0 to 1.

    In units of the logarithm of the keys that the row can see (its weights above 0), so that
    causal rows of any length compare; a row that sees one key has no entropy to speak of: 0.
    Or in plain ``nats``, as it was published.
    """
    import torch

    flat = weights.reshape(-1, weights.shape[-1])
    found = torch.empty(len(flat), dtype=torch.float32, device=weights.device)
    for rows in spans(len(flat), chunk_rows(2 * flat.shape[1])):
        part = flat[rows].float()
        seen = (part > 0).sum(-1)
        bits = torch.special.entr(part).sum(-1)
        whole = torch.ones(()) if nats else seen.clamp_min(2).log()
        found[rows] = torch.where(seen > 1, bits / whole, 0.0)
    if not nats:
        found.clamp_(0, 1)
    return found.view(weights.shape[:-1])


def head_entropy(
    weights: torch.Tensor, mask: torch.Tensor | None = None, nats: bool = False
) -> list[float]:
    """Mean entropy per head of ``weights`` [B, H, Q, K], from 0 to 1 or in ``nats``.

    ``mask`` [B, Q] is True for real queries. Rows that see one key are left out; a head
    without any other is 0.
    """
    rows = row_entropy(weights, nats)
    counted = (weights > 0).sum(-1) > 1
    if mask is not None:
        counted &= mask[:, None, :]
    total = (rows * counted).sum((0, 2))
    values: list[float] = (total / counted.sum((0, 2)).clamp_min(1)).tolist()
    return values


def informativeness(weights: torch.Tensor) -> torch.Tensor:
    """How much each key tells, ``weights`` [B, H, Q, K] to [B, K].

    The attention it receives, where a query counts the more the more it is focused (1 - its
    entropy): a query that looks everywhere says nothing about where to look.
    """
    import torch

    focus = 1 - row_entropy(weights)
    told = torch.zeros(weights.shape[0], weights.shape[-1], device=weights.device)
    for head in range(weights.shape[1]):
        told += torch.einsum("bq,bqk->bk", focus[:, head], weights[:, head].float())
    return told


@contextmanager
def captured(model: torch.nn.Module) -> Iterator[list[torch.Tensor]]:
    """Collect the attention weights that modules of ``model`` return while the block runs.

    Weights are recognised in the outputs: [B, H, Q, K], not negative, rows that sum to 1. An
    empty list afterwards means ``NOT_AVAILABLE``.
    """
    import torch

    found: list[torch.Tensor] = []

    def look(_: Any, __: Any, output: Any) -> None:
        items = output if isinstance(output, (tuple, list)) else (output,)
        tensors = [item for item in items if isinstance(item, torch.Tensor)]
        found.extend(tensor.detach() for tensor in tensors if is_attention(tensor))

    hooks = [module.register_forward_hook(look) for module in model.modules()]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()


def is_attention(tensor: torch.Tensor) -> bool:
    """Does ``tensor`` look like attention weights?"""
    if tensor.dim() != 4 or not tensor.is_floating_point() or not tensor.numel():
        return False
    sums = tensor[:1, :1].float().sum(-1)
    return bool(((sums - 1).abs() < 1e-2).all()) and bool((tensor[:1, :1] >= 0).all())


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """One look at the attention: entropy per head, over all heads its mean and deviation; the
    mean in plain nats too where the weights themselves were seen."""

    per_head: tuple[float, ...]
    mean: float
    deviation: float
    mean_nats: float | None = None


def look(layers: Sequence[torch.Tensor]) -> Sample:
    """One sample of what ``captured`` found, [B, H, Q, K] of each layer.

    Raises MmctlError when nothing was found.
    """
    if not layers:
        raise MmctlError(NOT_AVAILABLE)
    nats = [value for weights in layers for value in head_entropy(weights, nats=True)]
    new = sample([value for weights in layers for value in head_entropy(weights)])
    return msgspec.structs.replace(new, mean_nats=sum(nats) / len(nats))


def sample(per_head: Sequence[float]) -> Sample:
    """The mean and standard deviation over heads."""
    mean = sum(per_head) / len(per_head)
    spread = math.sqrt(sum((value - mean) ** 2 for value in per_head) / len(per_head))
    return Sample(per_head=tuple(per_head), mean=mean, deviation=spread)


class Drift:
    """Watches samples: a mean above the limit in so many in a row asks for recalibration, a
    deviation risen above that of the first samples for the light vision branch."""

    def __init__(self, settings: Responses) -> None:
        self.settings = settings
        self._high = 0
        self._first: deque[float] = deque(maxlen=settings.entropy_samples)

    def step(self, new: Sample) -> list[Action]:
        """What this sample asks for; each action once until the cause is gone."""
        settings, asked = self.settings, list[Action]()
        self._high = self._high + 1 if new.mean > settings.entropy_limit else 0
        if self._high == settings.entropy_samples:
            asked.append("recalibrate")
        if len(self._first) < settings.entropy_samples:
            self._first.append(new.deviation)
        elif new.deviation - sum(self._first) / len(self._first) > settings.entropy_rise:
            asked.append("light_vision")
            self._first.clear()
        return asked


def event(
    new: Sample, asked: Sequence[Action], ts_ns: int, device: str, node: str = ""
) -> Event:  # fmt: skip
    """The sample as a record: rules read it, and a recording can be watched like a live run."""
    return Event(
        ts_ns=ts_ns, node=node, what="entropy", device=device, state=asked[0] if asked else None,
        evidence={"entropy_ratio": new.mean, "entropy_std": new.deviation,
                  "entropy_nats": new.mean_nats, "entropy_per_head": list(new.per_head),
                  "basis": "measured"},
    )  # fmt: skip


def watch(events: Iterator[Event], settings: Responses) -> Iterator[tuple[Event, list[Action]]]:
    """The entropy events of a recording, each with what it asks for."""
    drift = Drift(settings)
    for record in events:
        heads = record.evidence.get("entropy_per_head")
        if record.what == "entropy" and heads:
            yield record, drift.step(sample([float(value) for value in heads]))
