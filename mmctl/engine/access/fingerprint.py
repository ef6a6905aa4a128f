"""64-bit fingerprints of access patterns.

``classic`` is the published formula. ``locality`` is ours: order-free statistics of the
accesses (sizes, strides, reuse, footprint), projected on 64 directions whose signs are the
bits. The directions and the centre were fitted once, on model families that no evaluation
reports as held out (``mmctl benchmark fingerprints``): along them tasks differ much and the
same task with accesses missing differs little.

Nearby codes mean similar *patterns*. Whether two tasks disturb each other is another question,
answered from their reuse signatures (``reuse.collision``).
"""

from __future__ import annotations

from functools import lru_cache
from importlib import resources

import numpy as np
import numpy.typing as npt

from mmctl.engine.access import reuse
from mmctl.engine.access.accesses import Accesses

Float = npt.NDArray[np.float64]
PAGE_BYTES = 4096
BITS = 64


def classic(accesses: Accesses) -> int:
    """``(int(mean |Δaddress|) & 0xFFFF) << 16 ^ (n // max(1, pages)) << 8 ^ (n & 0xFF)``."""
    n = len(accesses)
    steps = np.abs(np.diff(accesses.address))
    mean = int(steps.mean()) if len(steps) else 0
    pages = len(np.unique(accesses.address // PAGE_BYTES))
    return (((mean & 0xFFFF) << 16) ^ ((n // max(1, pages)) << 8) ^ (n & 0xFF)) & (1 << 64) - 1


def locality(accesses: Accesses, signature: reuse.Signature | None = None) -> int:
    """Our 64 bits; they do not change when all addresses move by the same amount."""
    return code(features(accesses, signature))


def code(values: Float) -> int:
    """The bits of a feature vector: bit i is the sign of its projection on direction i."""
    directions, offset = _projection()
    bits = directions @ values > offset
    return int(sum(1 << i for i, bit in enumerate(bits.tolist()) if bit))


@lru_cache(maxsize=1)
def _projection() -> tuple[Float, Float]:
    """Directions (64 × features) and offsets (64) as fitted."""
    file = resources.files("mmctl.engine.access").joinpath("locality.npz")
    with resources.as_file(file) as path, np.load(path, allow_pickle=False) as stored:
        return stored["directions"].astype(np.float64), stored["offset"].astype(np.float64)


def distance(a: int, b: int) -> int:
    """Bits in which two codes differ."""
    return (a ^ b).bit_count()


def features(accesses: Accesses, signature: reuse.Signature | None = None) -> Float:
    """What a code is made of: histograms with soft edges as square roots, and logarithms.

    Counts and bytes are taken so that dropping a small random share of the accesses moves every
    value a little: no maximum, no order, no exact address.
    """
    found = signature or reuse.signature(accesses)
    n = len(accesses)
    size = np.log2(accesses.size_bytes)
    load = ~accesses.store
    bytes_ = accesses.size_bytes.astype(np.float64)
    step = np.diff(accesses.address)
    gaps = np.log2(reuse.circular_gaps(accesses.address) / n)
    footprint = np.log2(np.maximum(found.footprint_bytes, 1.0))
    window = np.log2(reuse.windows())
    loads = float(load.mean())
    scalars = [
        np.log2(n), np.log2(bytes_.sum()), footprint[-1], 8 * loads,
        float(np.log2((bytes_[load].sum() + 1) / (bytes_[~load].sum() + 1))),
        8 * float((step < 0).mean()) if len(step) else 0.0,
    ]  # fmt: skip
    return np.concatenate(
        [
            np.sqrt(loads * _histogram(size[load], 0, 32)),
            np.sqrt((1 - loads) * _histogram(size[~load], 0, 32)),
            np.sqrt(_histogram(size, 0, 32, np.sqrt(bytes_))),
            np.sqrt(_histogram(np.log2(1 + np.abs(step)), 0, 40, width=2)),
            np.sqrt(_histogram(gaps, -20, 0)),
            np.array(found.reuse_ratio)[::2],
            (window - footprint)[::2] / 4,
            np.array(scalars) / 4,
        ]
    )


def _histogram(
    values: Float, low: float, high: float, weights: Float | None = None, width: float = 1.0
) -> Float:
    """Shares by bin; a value between two bins counts in both, by nearness."""
    count = int((high - low) / width)
    found = np.zeros(count + 2)
    if len(values) == 0:
        return found
    place = np.clip((values - low) / width, 0, count)
    below = place.astype(np.int64)
    above_share = place - below
    weight = np.ones(len(values)) if weights is None else weights
    found += np.bincount(below, weight * (1 - above_share), count + 2)
    found += np.bincount(below + 1, weight * above_share, count + 2)
    return found / weight.sum()
