"""Settings of the caching allocator, as integers and as the text torch reads."""

from __future__ import annotations

import msgspec

MIB = 1 << 20
INTERVALS = 16  # powers of two from 1 MiB to 32 GiB, each with its own division


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """What ``PYTORCH_CUDA_ALLOC_CONF`` and a memory fraction set, with torch's defaults.

    ``pool_per_modality`` and ``lifetime_pool`` are mmctl's own: separate arenas per modality,
    or per class of lifetime.
    """

    expandable_segments: bool = False
    max_split_bytes: int | None = None
    garbage_collection_threshold: float = 0.0
    roundup_power2_divisions: tuple[int, ...] = (0,) * INTERVALS
    large_segment_bytes: int = 20 * MIB
    max_non_split_rounding_bytes: int = 20 * MIB
    memory_fraction: float | None = None
    pool_per_modality: bool = False
    lifetime_pool: bool = False


def round_size(size: int, divisions: tuple[int, ...]) -> int:
    """``size`` as the allocator rounds it: to 512 B, or to a division of its power of two.

    ``divisions`` has one entry per power of two from 1 MiB on; 0 or 1 rounds to 512 B.
    """
    if size < 512:
        return 512
    power = size.bit_length() - 1
    parts = divisions[min(max(power - 20, 0), INTERVALS - 1)]
    if parts > 1 and size > 512 * parts:
        if size & (size - 1) == 0:
            return size
        step = (1 << power) >> (parts.bit_length() - 1)
        return -(-size // step) * step if step else 2 << power
    return -(-size // 512) * 512
