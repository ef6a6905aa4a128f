"""Why a request was refused: exactly one cause, proved by the figures."""

from __future__ import annotations

from typing import Literal, TypeAlias

from mmctl.engine.memory.allocator import Figures

Cause: TypeAlias = Literal[
    "pool_split", "pending", "other_process", "capacity", "false_free", "split_free",
    "unexplained", "unknown",
]  # fmt: skip


def cause(figures: Figures) -> Cause:
    """The one cause of a refused request.

    With ``need`` bytes asked, F free in its pool and stream, F* free anywhere, P pending,
    D device free, O held by others, R releasable and L the largest usable block:
    pool_split F + D < need <= F* + D; pending F* + D < need <= F* + P + D; other_process up to
    + O; capacity beyond; false_free F >= need but L < need and D + R < need; split_free
    F < need <= F + D, yet neither alone; else unexplained. ``unknown`` where a figure that
    decides is absent. Device free serves a request alone only if its whole segment fits.
    """
    need, free, everywhere = figures.need_bytes, figures.free_bytes, figures.all_free_bytes
    device, others = figures.device_free_bytes, figures.other_process_bytes
    if device is None:
        # Free bytes that would do, in no block that does: the device does not matter then.
        return "unknown"
    if free + device < need:
        if need <= everywhere + device:
            return "pool_split"
        within = everywhere + figures.pending_bytes + device
        if need <= within:
            return "pending"
        if others is None:
            return "unknown"
        return "other_process" if need <= within + others else "capacity"
    if free < need:
        return "split_free" if device < max(need, figures.segment_bytes) else "unexplained"
    if figures.largest_free_bytes < need and device + figures.releasable_bytes < need:
        return "false_free"
    return "unexplained"


def short_bytes(figures: Figures) -> int | None:
    """How many bytes more would have served the request where it was refused."""
    device = figures.device_free_bytes
    if device is None:
        return None
    best = max(figures.largest_free_bytes, device)
    if figures.free_bytes + device < figures.need_bytes:
        best = figures.free_bytes + device
    return max(figures.need_bytes - best, 0)
