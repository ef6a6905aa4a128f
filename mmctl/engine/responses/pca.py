"""Hierarchical PCA: shallow (edge) features 768 → 128, deep (semantic) features 1024 → 256.

A basis is fitted offline, or on the first batches of the model at hand, and kept as a file; at
run time a projection is one matrix product. The shipped bases come from a seeded model over
drawn images: they show the cost, not the error on a trained model. Fit your own.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mmctl.engine import atomic
from mmctl.engine.errors import MmctlError
from mmctl.engine.responses.estimate import CHUNK_BYTES, Estimate, bytes_of, chunk_rows, spans

if TYPE_CHECKING:
    import torch

SHIPPED = {"shallow": (768, 128), "deep": (1024, 256)}
"""Channels in and out of the shipped bases."""


@dataclass(frozen=True)
class Basis:
    """``mean`` [C] and orthonormal ``components`` [K, C], float32, and where they come from.

    ``explained_ratio`` is the share of the variance of the fitted features that K keep.
    """

    mean: torch.Tensor
    components: torch.Tensor
    explained_ratio: float
    origin: str


@dataclass(frozen=True)
class Projected:
    """Coordinates [..., N, K] in ``basis``; the type of what they stand for."""

    values: torch.Tensor
    basis: Basis
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of the coordinates; the basis is kept once for all."""
        return bytes_of(self.values)


def fit(batches: Iterable[torch.Tensor], keep: int, origin: str) -> Basis:
    """The ``keep`` principal components of features [..., N, C], in one pass over ``batches``.

    Sums are float64 and C x C: a fit is for offline, or for the first batches of a calm
    server. Raises MmctlError when there are fewer features than components.
    """
    import torch

    count, total, products = 0, None, None
    for batch in batches:
        rows = batch.reshape(-1, batch.shape[-1]).double()
        count += len(rows)
        total = rows.sum(0) if total is None else total + rows.sum(0)
        products = rows.T @ rows if products is None else products + rows.T @ rows
    if total is None or products is None or count < keep:
        raise MmctlError(f"a basis of {keep} components needs as many features, not {count}")
    mean = total / count
    values, vectors = torch.linalg.eigh(products / count - mean[:, None] * mean[None, :])
    values = values.clamp_min(0)
    kept = vectors[:, -keep:].flip(1).T
    # The sign of an eigenvector is free: fix it, so that equal features give equal files.
    kept = kept * kept.gather(1, kept.abs().argmax(1, keepdim=True)).sign()
    share = float(values[-keep:].sum() / values.sum()) if float(values.sum()) else 1.0
    return Basis(mean.float(), kept.float().contiguous(), share, origin)


def save(basis: Basis, path: Path) -> None:
    """Write a basis in one step; half precision, which is far below what PCA itself loses."""
    with atomic.replacing(path) as file:
        np.savez_compressed(
            file, mean=basis.mean.numpy(), components=basis.components.half().numpy(),
            explained_ratio=np.float64(basis.explained_ratio), origin=np.str_(basis.origin),
        )  # fmt: skip


def load(path: Path) -> Basis:
    """The basis in ``path``; MmctlError for a broken file. Nothing in it is executed."""
    import torch

    try:
        with np.load(path, allow_pickle=False) as content:
            mean = torch.from_numpy(content["mean"].astype(np.float32))
            components = torch.from_numpy(content["components"].astype(np.float32))
            share, origin = float(content["explained_ratio"]), str(content["origin"])
    except (OSError, ValueError, KeyError, EOFError) as error:
        raise MmctlError(f"{path} holds no basis: {error}") from None
    except Exception as error:  # zipfile and zlib raise their own
        raise MmctlError(f"{path} holds no basis: {type(error).__name__}") from None
    if components.dim() != 2 or mean.shape != components.shape[1:]:
        raise MmctlError(f"{path} holds no basis: mean and components do not fit")
    return Basis(mean, components, share, origin)


@cache
def shipped(level: str) -> Basis:
    """The basis ``shallow`` or ``deep`` that comes with mmctl."""
    return load(Path(__file__).parent / f"pca_{level}.npz")


def estimate_project(features: torch.Tensor, basis: Basis) -> Estimate:
    """What projecting ``features`` [..., N, C] on ``basis`` frees."""
    before = bytes_of(features)
    after = before // features.shape[-1] * len(basis.components)
    return Estimate(
        response="pca", before_bytes=before, frees_bytes=before - after,
        scratch_bytes=after + CHUNK_BYTES,
    )  # fmt: skip


def project(features: torch.Tensor | Projected, basis: Basis) -> Projected:
    """Coordinates of ``features`` [..., N, C] in ``basis``, in the features' own type.

    On processors with bfloat16 products these are used, with float32 sums: their rounding
    (2^-9) is far below what PCA loses. MmctlError when the channels do not fit.
    """
    import torch

    if isinstance(features, Projected):
        return features
    _check(features.shape[-1], basis)
    mean, matrix, shift = _matrix(basis, features.device)
    keep = matrix.shape[1]
    out = torch.empty((*features.shape[:-1], keep), dtype=features.dtype, device=features.device)
    flat, target = features.reshape(-1, features.shape[-1]), out.view(-1, keep)
    if matrix.dtype == features.dtype == torch.float32:
        torch.addmm(shift, flat, matrix, beta=-1, out=target)
    else:
        # Centred before it is rounded: the mean may be much greater than what varies.
        for rows in spans(len(flat), chunk_rows(features.shape[-1])):
            target[rows] = torch.mm((flat[rows].float() - mean).to(matrix.dtype), matrix)
    return Projected(out, basis, features.dtype)


def restore(projected: Projected) -> torch.Tensor:
    """The features again, as far as the basis spans them."""
    import torch

    basis, values = projected.basis, projected.values
    components = basis.components.to(values.device)
    mean = basis.mean.to(values.device)
    out = torch.empty((*values.shape[:-1], len(mean)), dtype=projected.dtype, device=values.device)
    flat, target = values.reshape(-1, len(components)), out.view(-1, len(mean))
    for rows in spans(len(flat), chunk_rows(len(mean))):
        target[rows] = torch.addmm(mean, flat[rows].float(), components).to(out.dtype)
    return out


def _check(channels: int, basis: Basis) -> None:
    if channels != len(basis.mean):
        raise MmctlError(
            f"features have {channels} channels, the basis {len(basis.mean)}: "
            "fit one on the first batches of this model"
        )


_prepared: dict[tuple[int, str], tuple[Basis, Any]] = {}


def _matrix(basis: Basis, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(mean [C], basis [C, K] in the type that ``device`` multiplies best, mean x basis [K])."""
    import torch

    key = (id(basis), str(device))
    if key not in _prepared:
        fast = device.type == "cuda" or (device.type == "cpu" and _bfloat16_products())
        mean, components = basis.mean.to(device), basis.components.to(device)
        matrix = components.T.to(torch.bfloat16 if fast else torch.float32).contiguous()
        # The basis is kept with it: its id is not given to another one.
        _prepared[key] = (basis, (mean, matrix, components @ mean))
    found: tuple[torch.Tensor, torch.Tensor, torch.Tensor] = _prepared[key][1]
    return found


@cache
def _bfloat16_products() -> bool:
    import torch

    capabilities: dict[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()
    return bool(capabilities.get("avx512_bf16") or capabilities.get("amx_bf16"))
