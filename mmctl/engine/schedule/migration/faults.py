"""What a drill breaks on the side that takes, in earnest."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from mmctl.engine.errors import UsageError, suggestion

if TYPE_CHECKING:
    from numpy import ndarray

PHASES = ("build", "open", "copy", "check", "pause", "take", "token")
FAULTS = {
    "weights": "build",  # one matrix comes out wrong by a thousandth
    "memory": "open",  # no memory is left when the cache is made
    "kill": "pause",  # the process is killed
    "hang": "pause",  # the process stands still
}


def parse(text: str) -> tuple[str, str]:
    """``kill:take`` as fault and phase; UsageError for what is none."""
    name, _, phase = text.partition(":")
    if name not in FAULTS:
        raise UsageError(f"unknown fault '{name}': {', '.join(FAULTS)}{suggestion(name, FAULTS)}")
    phase = phase or FAULTS[name]
    if phase not in PHASES or (name in ("weights", "memory") and phase != FAULTS[name]):
        raise UsageError(
            f"the fault '{name}' does not come in phase '{phase}': kill and hang take one of "
            f"{', '.join(PHASES)}{suggestion(phase, PHASES)}"
        )
    return name, phase


def injected(text: str) -> Callable[[str, dict[str, ndarray]], None]:
    """What the taker calls before each phase; nothing happens without a fault or elsewhere."""
    name, due = parse(text) if text else ("", "")

    def at(phase: str, weights: dict[str, ndarray]) -> None:
        if phase != due:
            return
        if name == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif name == "hang":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif name == "memory":
            _exhaust_memory()
        else:
            last = [key for key, weight in weights.items() if weight.ndim == 2][-1]
            weights[last] = weights[last] * 1.001

    return at


def _exhaust_memory() -> None:
    """Take all the memory that this process may have, and what it has in stock, but for crumbs."""
    limit_memory(0)
    size = 16 << 20
    while size >= 64 << 10:
        try:
            _TAKEN.append(bytearray(size))
        except MemoryError:
            size //= 2


_TAKEN: list[bytearray] = []


def limit_memory(more_bytes: int) -> None:
    """Let this process have ``more_bytes`` of data beyond what it has (Linux)."""
    import resource

    page = os.sysconf("SC_PAGE_SIZE")
    held = int(Path("/proc/self/statm").read_text().split()[5]) * page
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (held + more_bytes, hard))
