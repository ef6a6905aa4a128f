"""The memory oracle of these tests: the allocator's own record of a call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest


@pytest.fixture
def peak_bytes() -> Callable[[Callable[[], Any]], tuple[int, Any]]:
    """Run a call and say how far above the state before memory rose, as torch's allocator saw."""
    torch = pytest.importorskip("torch")

    def measure(call: Callable[[], Any]) -> tuple[int, Any]:
        with torch.profiler.profile(
            activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
        ) as profile:
            result = call()
        level = peak = 0
        events = profile.profiler.kineto_results.events()
        for event in sorted(
            (e for e in events if e.name() == "[memory]"), key=lambda e: e.start_ns()
        ):
            level += event.nbytes()
            peak = max(peak, level)
        return peak, result

    return measure
