"""Settings of the caching allocator, as integers and as the text torch reads."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import msgspec

from mmctl.engine.errors import UsageError, suggestion

MIB = 1 << 20
INTERVALS = 16  # powers of two from 1 MiB to 32 GiB, each with its own division


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """What ``PYTORCH_CUDA_ALLOC_CONF`` and a memory fraction set, with torch's defaults.

    ``pool_per_modality`` and ``lifetime_pool`` are mmctl's own: separate arenas per modality,
    or per class of lifetime, each class growing in a reserved range of its own.
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


# Keys of the text that change where blocks go; the others do not concern this model.
_PLACING = (
    "expandable_segments", "max_split_size_mb", "garbage_collection_threshold",
    "roundup_power2_divisions", "large_segment_size_mb", "max_non_split_rounding_mb",
    "per_process_memory_fraction", "mmctl:pool_per_modality", "mmctl:lifetime_pool",
)  # fmt: skip
_OTHER = (
    "backend", "release_lock_on_cudamalloc", "release_lock_on_hipmalloc",
    "pinned_use_cuda_host_register", "pinned_use_hip_host_register", "pinned_num_register_threads",
    "pinned_reserve_segment_size_mb", "pinned_use_background_threads", "pinned_max_cached_size_mb",
    "pinned_max_round_threshold_mb", "pinned_free_catch_all", "graph_capture_record_stream_reuse",
    "throw_on_cudamalloc_oom",
)  # fmt: skip
_ITEM = re.compile(r"\s*((?:mmctl:)?[a-z_0-9]+)\s*:\s*(\[[^\]]*\]|[^,\[\]]+)\s*(?:,|\Z)")


def parse(text: str, base: Settings | None = None) -> Settings:
    """The settings that ``k:v,k:v`` makes of ``base``, in the syntax of PYTORCH_CUDA_ALLOC_CONF.

    Raises UsageError for an unknown key or a value that torch would refuse.
    """
    changes: dict[str, Any] = {}
    at = 0
    while at < len(text.rstrip()):
        item = _ITEM.match(text, at)
        if not item:
            raise UsageError(f"'{text[at:]}' is not an allocator setting such as 'key:value'")
        at = item.end()
        key, value = item[1], item[2].strip()
        if key in _OTHER:
            if key == "backend" and value != "native":
                raise UsageError(f"backend {value} is not modelled: its blocks are not observable")
            continue
        if key not in _PLACING:
            hint = suggestion(key, (*_PLACING, *_OTHER))
            raise UsageError(f"unknown allocator setting '{key}'{hint}")
        changes.update(_change(key, value))
    return msgspec.structs.replace(base or Settings(), **changes)


def _change(key: str, value: str) -> dict[str, Any]:
    if key in ("expandable_segments", "mmctl:pool_per_modality", "mmctl:lifetime_pool"):
        if value not in ("True", "False", "true", "false"):
            raise UsageError(f"{key} must be True or False, not '{value}'")
        return {key.removeprefix("mmctl:"): value.lower() == "true"}
    if key == "roundup_power2_divisions":
        return {key: _divisions(value)}
    try:
        number = float(value)
    except ValueError:
        raise UsageError(f"{key} must be a number, not '{value}'") from None
    if key == "garbage_collection_threshold":
        if not 0 < number < 1:
            raise UsageError(f"{key} must lie between 0 and 1, not {value}")
        return {key: number}
    if key == "per_process_memory_fraction":
        if not 0 < number <= 1:
            raise UsageError(f"{key} must lie between 0 and 1, not {value}")
        return {"memory_fraction": number}
    if key == "max_split_size_mb":
        if number < 20:
            raise UsageError(f"{key} must be at least 20, not {value}")
        return {"max_split_bytes": int(number) * MIB}
    if number < 20:
        raise UsageError(f"{key} must be at least 20, not {value}")
    field = "large_segment_bytes" if key == "large_segment_size_mb" else _ROUNDING
    return {field: int(number) * MIB}


_ROUNDING = "max_non_split_rounding_bytes"


def _divisions(value: str) -> tuple[int, ...]:
    """One number for all, or ``[256:1,512:2,>:8]`` by powers of two of MiB."""
    try:
        if not value.startswith("["):
            return (_power_of_two(value),) * INTERVALS
        found = [0] * INTERVALS
        last = 0
        for number, pair in enumerate(value.strip("[]").split(",")):
            size, parts = (part.strip() for part in pair.split(":"))
            division = _power_of_two(parts)
            if size == ">":
                found[last:] = [division] * (INTERVALS - last)
                continue
            last = min(_power_of_two(size).bit_length() - 1, INTERVALS - 1)
            if number == 0:
                found[:last] = [division] * last
            found[last] = division
        return tuple(found)
    except ValueError:
        raise UsageError(
            f"roundup_power2_divisions must be powers of two such as 4 or [256:1,>:4], not {value}"
        ) from None


def _power_of_two(text: str) -> int:
    number = int(text)
    if number < 1 or number & (number - 1):
        raise ValueError(text)
    return number


def from_snapshot(found: Mapping[str, Any], expandable: bool) -> Settings:
    """The settings recorded in a snapshot; ``expandable`` tells whether it holds such segments,
    for files that record no settings."""
    text = str(found.get("PYTORCH_CUDA_ALLOC_CONF", ""))
    try:
        settings = parse(text)
    except UsageError:
        settings = Settings()
    changes: dict[str, Any] = {
        "expandable_segments": bool(found.get("expandable_segments", expandable))
    }
    split = found.get("max_split_size")
    if isinstance(split, int):
        # torch writes its "unlimited", the largest size_t, as -1; older versions as 2^63 - 1.
        changes["max_split_bytes"] = split if 0 < split < 1 << 60 else None
    threshold = found.get("garbage_collection_threshold")
    if isinstance(threshold, float):
        changes["garbage_collection_threshold"] = threshold
    divisions = found.get("roundup_power2_divisions")
    if isinstance(divisions, Mapping):
        row = [int(divisions.get(str(1 << power), 0)) for power in range(INTERVALS)]
        changes["roundup_power2_divisions"] = tuple(row)
    return msgspec.structs.replace(settings, **changes)


def show(settings: Settings) -> str:
    """The settings that differ from torch's defaults, in torch's syntax; ``default`` for none."""
    default = Settings()
    parts = []
    if settings.expandable_segments:
        parts.append("expandable_segments:True")
    if settings.max_split_bytes is not None:
        parts.append(f"max_split_size_mb:{settings.max_split_bytes // MIB}")
    if settings.garbage_collection_threshold:
        parts.append(f"garbage_collection_threshold:{settings.garbage_collection_threshold:g}")
    if settings.roundup_power2_divisions != default.roundup_power2_divisions:
        parts.append(f"roundup_power2_divisions:{_show(settings.roundup_power2_divisions)}")
    if settings.large_segment_bytes != default.large_segment_bytes:
        parts.append(f"large_segment_size_mb:{settings.large_segment_bytes // MIB}")
    if settings.max_non_split_rounding_bytes != default.max_non_split_rounding_bytes:
        parts.append(f"max_non_split_rounding_mb:{settings.max_non_split_rounding_bytes // MIB}")
    if settings.memory_fraction is not None:
        parts.append(f"per_process_memory_fraction:{settings.memory_fraction:g}")
    parts += [
        f"mmctl:{name}:True"
        for name in ("pool_per_modality", "lifetime_pool")
        if getattr(settings, name)
    ]
    return ",".join(parts) or "default"


def _show(divisions: tuple[int, ...]) -> str:
    if len(set(divisions)) == 1:
        return str(divisions[0])
    pairs = ",".join(f"{1 << power}:{parts or 1}" for power, parts in enumerate(divisions))
    return f"[{pairs}]"
