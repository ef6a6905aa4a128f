"""The names of responses: what a rule's ``respond`` and ``order`` of ``[responses]`` may say."""

from __future__ import annotations

from collections.abc import Iterable

from mmctl.engine import plugins
from mmctl.engine.errors import suggestion
from mmctl.engine.profiles import Profile

CARRIED_OUT = frozenset(
    {
        # of a worker with an agent
        "hold_admission", "cap_batch", "light_vision", "offload_kv", "distill", "quantize_vision",
        "compact", "choose",
        # of an engine over HTTP
        "reset_prefix_cache", "reset_mm_cache",
        # of the guard, to requests
        "shrink_images", "cap_output", "defer_images", "limit_admission",
        # of the breaker itself
        "rebuild",
    }
)  # fmt: skip
"""What a worker, an engine, the guard or the breaker does."""

PUBLISHED = frozenset(
    {"degrade", "evict_kv", "rate_limit", "close_workers", "cache_warm", "recalibrate"}
)
"""Names that 'paper' gives as they were published; nobody carries them out."""


def unknown(names: Iterable[str]) -> list[str]:
    """What is wrong with each of ``names`` that is neither ours nor a plugin's."""
    strange = [name for name in names if name not in CARRIED_OUT | PUBLISHED]
    if not strange:
        return []
    known = sorted(CARRIED_OUT | plugins.named("mmctl.responses").keys())
    return [
        f"no response '{name}'{suggestion(name, known) or ': one of ' + ', '.join(known)}"
        for name in strange
        if name not in known
    ]


def problems(profile: Profile) -> list[str]:
    """Every response of the breaker's rules and order that nobody knows, with its place."""
    asked = {f"rule '{rule.name}'": rule.respond for rule in profile.breaker.rules}
    asked["[responses] order"] = profile.responses.order
    return [f"{place}: {said}" for place, names in asked.items() for said in unknown(names)]
