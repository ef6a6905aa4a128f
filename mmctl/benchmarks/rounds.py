"""Timing in rounds: everything that is measured takes turns, so that a busy moment of the
machine falls on all of it and not on one figure."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from mmctl.engine.errors import MmctlError

_BATCH_S = 1e-3
"""Calls are timed together for at least so long: the clock itself costs little then."""

_TRIES = 5
"""Of so many timings in a row the best makes the block: being interrupted only ever adds."""

_MOST_ROUNDS = 40
LEAST_ROUNDS = 5
_BUSY_ROUNDS = 3


class Case(NamedTuple):
    """Something to time: ``call`` starts it, ``wait`` returns when the device has done it."""

    name: str
    call: Callable[[], object]
    wait: Callable[[], object] = lambda: None


def run(
    cases: Sequence[Case], budget_s: float,
    progress: Callable[[str, float], None] = lambda what, share: None,
) -> dict[str, list[float]]:  # fmt: skip
    """Seconds of one call of each case, a block a round, for about ``budget_s`` in all.

    Every case runs ``LEAST_ROUNDS`` at least; on a machine so busy that they would take longer,
    with one timing a block, and after twice the time no more than three of them. Raises
    MmctlError for a case that fails.
    """
    begun = time.monotonic()
    counts = {}
    for number, case in enumerate(cases):
        progress(f"warm-up: {case.name}", 0.1 * number / len(cases))
        counts[case.name] = _calls(case)
    blocks: dict[str, list[float]] = {case.name: [] for case in cases}
    tries = _TRIES
    for number in range(_MOST_ROUNDS):
        passed = time.monotonic() - begun
        if number >= LEAST_ROUNDS and passed * (number + 1) / number > budget_s:
            break
        if number >= _BUSY_ROUNDS and passed > 2 * budget_s:
            break
        if passed > budget_s * (number + 1) / LEAST_ROUNDS:
            tries = 1
        for case in cases:
            done = max(number / _MOST_ROUNDS, min((time.monotonic() - begun) / budget_s, 1.0))
            progress(case.name, 0.1 + 0.9 * done)
            count = counts[case.name]
            least = min(tries, 2) if count == 1 else tries
            blocks[case.name].append(min(_timed(case, count) for _ in range(least)))
    return blocks


def _calls(case: Case) -> int:
    """How many calls make one timing: a second call where the first was short, as the first
    of all pays for memory and code."""
    try:
        once = _timed(case, 1)
        if once < 0.05:
            once = min(_timed(case, 1), once)
    except (RuntimeError, MemoryError) as error:
        raise MmctlError(f"{case.name}: {str(error).splitlines()[0]}") from None
    return max(1, min(1000, int(_BATCH_S / max(once, 1e-9)) + 1))


def _timed(case: Case, calls: int) -> float:
    begun = time.perf_counter()
    for _ in range(calls):
        case.call()
    case.wait()
    return (time.perf_counter() - begun) / calls
