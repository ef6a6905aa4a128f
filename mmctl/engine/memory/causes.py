"""Why a request was refused: exactly one cause, proved by the figures, and what to do about it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypeAlias

from mmctl.engine.memory.allocator import Figures
from mmctl.engine.memory.settings import Settings
from mmctl.engine.units import show_bytes

VARIABLE = "PYTORCH_CUDA_ALLOC_CONF"
"""Where torch reads its settings from at the start of a process. Every version knows this name;
the newer ``PYTORCH_ALLOC_CONF`` does not reach all CUDA settings in torch 2.9 (pytorch#183387)."""

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
    F < need <= F + D, yet neither alone; else unexplained. ``unknown`` where D is not known.
    Others' bytes that nothing tells of prove nothing and count as none; device free serves a
    request alone only if its whole segment fits.
    """
    need, free, everywhere = figures.need_bytes, figures.free_bytes, figures.all_free_bytes
    device = figures.device_free_bytes
    if device is None:
        return "unknown"
    if free + device < need:
        if need <= everywhere + device:
            return "pool_split"
        within = everywhere + figures.pending_bytes + device
        if need <= within:
            return "pending"
        return "other_process" if need <= within + (figures.other_process_bytes or 0) else (
            "capacity"
        )  # fmt: skip
    if free < need:
        return "split_free" if device < max(need, figures.segment_bytes) else "unexplained"
    if figures.largest_free_bytes < need and device + figures.releasable_bytes < need:
        return "false_free"
    return "unexplained"


def short_bytes(figures: Figures, why: Cause) -> int | None:
    """How many bytes more of what the cause names would have served the request."""
    device = figures.device_free_bytes
    if device is None:
        return None
    have = {
        "pool_split": figures.free_bytes + device,
        "pending": figures.all_free_bytes + device,
        "other_process": figures.all_free_bytes + figures.pending_bytes + device,
        "capacity": figures.all_free_bytes + figures.pending_bytes + device,
        "false_free": max(figures.largest_free_bytes, device + figures.releasable_bytes),
        "split_free": max(figures.free_bytes, device),
    }.get(why, figures.need_bytes)
    return max(figures.need_bytes - have, 0)


_LESS_VISION = (
    "limit image size (vLLM --mm-processor-kwargs max_pixels, SGLang --mm-process-config) and "
    "images per prompt (--limit-mm-per-prompt), or place the encoder elsewhere "
    "(--mm-encoder-tp-mode data)"
)
_LESS_TEXT = (
    "lower --max-num-batched-tokens or --max-num-seqs, or keep the KV cache in fp8 "
    "(--kv-cache-dtype fp8)"
)
_LESS_KV = "lower --gpu-memory-utilization (SGLang --mem-fraction-static)"


def explain(
    figures: Figures,
    why: Cause,
    settings: Settings | None,
    held: dict[str, int] | None = None,
    avoided_by: Sequence[str] = (),
    tried: Sequence[str] = (),
    non_torch_bytes: int | None = None,
) -> str:
    """Two sentences: what the figures show, and what an operator can change.

    ``settings`` are those in force (None: not known); what is in force is not recommended.
    ``avoided_by`` are settings under which a replay served the request, of those ``tried``:
    what a replay has shown to be of no use is not recommended. ``non_torch_bytes`` is what this
    process holds beside torch: context, graphs, communication buffers.
    """
    short = short_bytes(figures, why)
    device = figures.device_free_bytes
    asked = (
        f"{show_bytes(figures.need_bytes)} were asked with "
        f"{'an unknown amount' if device is None else show_bytes(device)} free on the device and "
        f"{show_bytes(figures.free_bytes)} free in the pool"
    )
    if figures.largest_free_bytes:
        asked += f" (largest block {show_bytes(figures.largest_free_bytes)})"
    found = {
        "pool_split": f"another pool or stream holds "
        f"{show_bytes(figures.all_free_bytes - figures.free_bytes)} free that this request "
        "may not use",
        "pending": f"{show_bytes(figures.pending_bytes)} are freed but wait for other streams",
        "other_process": f"other processes hold {show_bytes(figures.other_process_bytes)}",
        "capacity": f"capacity, short by {show_bytes(short)} even if every free byte were usable"
        + (f", with {show_bytes(non_torch_bytes)} of this process outside torch"
           if non_torch_bytes else "")
        + ("" if figures.other_process_bytes is not None
           else " (what other processes hold is not recorded)"),
        "false_free": f"free bytes would do, but no block does: short by {show_bytes(short)}",
        "split_free": "device and pool together would do, neither alone does: "
        f"short by {show_bytes(short)}",
        "unexplained": "enough was free by every figure, so that the driver itself refused",
        "unknown": "what the device had left is not known (give --capacity)",
    }[why]  # fmt: skip
    vision_first = (held or {}).get("vision", 0) >= (held or {}).get("text", 0)
    less = (_LESS_VISION, _LESS_TEXT) if vision_first else (_LESS_TEXT, _LESS_VISION)
    if avoided_by:
        served = f"{_applied(avoided_by)} would have served it"
        advice = f"By replay {served}; else {less[0]}; or {_LESS_KV}"
    else:
        advice = _advice(why, settings, less, useless=bool(tried))
    return f"{asked}: {found}. {advice}."


def _applied(settings: Sequence[str]) -> str:
    """Settings as an operator sets them; pools of mmctl's own are said to be none of torch's."""
    ours = [text for text in settings if "mmctl:" in text]
    torchs = [text for text in settings if text not in ours and text != "default"]
    named = [f"{VARIABLE}={' or '.join(torchs)}"] if torchs else []
    if "default" in settings:
        named.append(f"no {VARIABLE}")
    if ours:
        named.append(f"the modelled {' or '.join(ours)} (torch has no such setting)")
    return " or ".join(named)


def _advice(why: Cause, settings: Settings | None, less: tuple[str, str], useless: bool) -> str:
    expandable = settings is not None and settings.expandable_segments
    if why == "capacity":
        return f"No allocator setting makes memory: {less[0]}; or {less[1]}; or {_LESS_KV}"
    if why == "other_process":
        return f"Stop or move the other processes, or {_LESS_KV}; else {less[0]}"
    if why == "pool_split":
        return (
            "Capture fewer graphs (vLLM --cudagraph-capture-sizes, --enforce-eager) or let the "
            f"work share a stream and pool (no separate MemPool); else {_LESS_KV}"
        )
    if why == "pending":
        return (
            "Synchronise before large requests or drop record_stream where an event does "
            f"(TORCH_NCCL_AVOID_RECORD_STREAMS=1); else {less[0]}"
        )
    if why in ("false_free", "split_free") and useless:
        return f"No allocator setting that was replayed serves it: {less[0]}; or {_LESS_KV}"
    if why in ("false_free", "split_free"):
        if settings is not None and settings.max_split_bytes is not None and expandable:
            return (
                "Remove max_split_size_mb, which keeps expandable segments from being reused; "
                f"else {less[0]}"
            )
        if expandable:
            return (
                "expandable_segments is on already: release the cache before the large request "
                f"(torch.cuda.empty_cache), or {less[0]}; or {_LESS_KV}"
            )
        return (
            f"Set {VARIABLE}=expandable_segments:True, which maps only the missing "
            f"pages (check with --what-if); else {less[0]}; or {_LESS_KV}"
        )
    if why == "unexplained":
        return (
            "Look for a memory limit outside torch (MIG slice, container, "
            f"per_process_memory_fraction) and in the kernel log (mmctl doctor); else {_LESS_KV}"
        )
    return f"Run again with the device's size to name the cause; meanwhile {less[0]}"
