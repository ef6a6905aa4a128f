"""Settings that fight each other, do nothing, or are in force already."""

from __future__ import annotations

import msgspec

from mmctl.engine.memory.settings import MIB, Settings, show
from mmctl.engine.units import show_bytes


class Lint(msgspec.Struct, frozen=True, kw_only=True):
    """One remark: ``kind`` is conflict, useless or in_force."""

    kind: str
    setting: str
    message: str


def lint(
    settings: Settings, largest_segment_bytes: int | None = None, in_force: Settings | None = None
) -> list[Lint]:
    """Remarks on ``settings``; ``in_force`` is what they are proposed instead of."""
    name = show(settings)
    found = []
    split = settings.max_split_bytes
    if split is not None and settings.expandable_segments:
        found.append(
            Lint(
                kind="conflict",
                setting=f"max_split_size_mb:{split // MIB},expandable_segments:True",
                message=f"max_split_size_mb and expandable_segments conflict: freed blocks of an "
                f"expandable segment merge to {show_bytes(split)} or more, which smaller requests "
                "may then not split, so that reserved memory grows with every cycle; remove "
                "max_split_size_mb",
            )
        )
    if settings.garbage_collection_threshold and settings.memory_fraction is None:
        found.append(
            Lint(
                kind="useless",
                setting=f"garbage_collection_threshold:{settings.garbage_collection_threshold:g}",
                message="garbage_collection_threshold does nothing without a memory fraction "
                "(torch.cuda.set_per_process_memory_fraction)",
            )
        )
    if settings.garbage_collection_threshold and settings.expandable_segments:
        found.append(
            Lint(
                kind="useless",
                setting=f"garbage_collection_threshold:{settings.garbage_collection_threshold:g}",
                message="garbage collection frees whole plain segments only: with "
                "expandable_segments it finds none",
            )
        )
    if (
        split is not None
        and not settings.expandable_segments
        and largest_segment_bytes is not None
        and split > largest_segment_bytes
    ):
        found.append(
            Lint(
                kind="useless",
                setting=f"max_split_size_mb:{split // MIB}",
                message=f"no segment reaches {show_bytes(split)} (the largest has "
                f"{show_bytes(largest_segment_bytes)}): max_split_size_mb changes nothing",
            )
        )
    if in_force is not None and settings == in_force:
        found.append(Lint(kind="in_force", setting=name, message=f"{name} is in force already"))
    return found
