"""Rebuilding in steps: drain, destroy, is the memory back, does the driver agree, rebuild, warm up.

Each step has a deadline and a report; the first that fails ends the rebuild. What a step does is
the caller's: a worker drops its model, an operator's tool ends a process.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from typing import Any, Literal, NamedTuple

import msgspec

from mmctl.engine.errors import MmctlError
from mmctl.engine.profiles import Recovery
from mmctl.engine.records import Device
from mmctl.engine.units import show_bytes, show_seconds

Name = Literal["drain", "destroy", "baseline", "driver", "rebuild", "warm_up"]


class Step(NamedTuple):
    """A step: what it does, giving evidence or raising MmctlError, and what to do before it is
    tried once more (destroying a context: synchronise, then again)."""

    name: Name
    run: Callable[[], dict[str, Any]]
    before_retry: Callable[[], object] | None = None


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """How one step went; ``error`` is absent where it passed."""

    step: Name
    passed: bool
    took_ns: int
    tries: int
    error: str | None = None
    evidence: dict[str, Any] = {}


def rebuild(
    steps: Sequence[Step], settings: Recovery, report: Callable[[Report], object]
) -> tuple[Report, ...]:
    """Take ``steps`` in turn until one fails; each is reported as it ends.

    A step that ends after ``settings.step_deadline_s`` has failed, whatever it returned: steps
    that wait must give up by themselves, they are not interrupted.
    """
    done = []
    for step in steps:
        done.append(_take(step, settings.step_deadline_s))
        report(done[-1])
        if not done[-1].passed:
            break
    return tuple(done)


def _take(step: Step, deadline_s: float) -> Report:
    started = time.monotonic_ns()
    error: str | None = None
    evidence: dict[str, Any] = {}
    tries = 0
    while tries < (2 if step.before_retry else 1):
        tries += 1
        try:
            evidence, error = step.run(), None
            break
        except MmctlError as failure:
            error = str(failure)
            if step.before_retry and tries == 1:
                step.before_retry()
    took_ns = time.monotonic_ns() - started
    if error is None and took_ns > deadline_s * 1e9:
        took, limit = show_seconds(took_ns / 1e9), show_seconds(deadline_s)
        error = f"took {took}, its deadline was {limit}"
    return Report(
        step=step.name, passed=error is None, took_ns=took_ns, tries=tries, error=error,
        evidence=evidence,
    )  # fmt: skip


def memory_is_back(held_bytes: int, baseline_bytes: int, settings: Recovery) -> dict[str, Any]:
    """Evidence that no more is held than before the worker came; MmctlError where more is."""
    over = held_bytes - baseline_bytes
    if over > settings.memory_tolerance_bytes:
        raise MmctlError(
            f"{show_bytes(held_bytes)} are still held, {show_bytes(over)} above the baseline: "
            "something keeps memory of the old context"
        )
    return {"held_bytes": held_bytes, "baseline_bytes": baseline_bytes}


def no_orphan(reading: Device, allowed_pids: Collection[int]) -> dict[str, Any]:
    """Evidence that no process but those allowed holds memory of the device; MmctlError where one
    does. Where the device does not tell its processes that is said, and is no failure."""
    if reading.processes is None:
        reason = reading.absent.get("processes", "the device does not tell its processes")
        return {"orphans": None, "absent": reason}
    orphans = [p for p in reading.processes if p.pid not in allowed_pids and p.used_bytes != 0]
    if orphans:
        named = ", ".join(f"{p.pid} {p.name or ''}".strip() for p in orphans)
        raise MmctlError(f"orphan processes hold memory of {reading.device}: {named}")
    return {"orphans": []}


def driver_agrees(before: Device | None, now: Device) -> dict[str, Any]:
    """Evidence that the driver asks for no recovery of its own and has no new error; MmctlError
    where it does. NVML's recovery action (field 230) outweighs every canary."""
    if now.recovery_action not in (None, "none"):
        raise MmctlError(f"the driver asks for '{now.recovery_action}' of {now.device}")
    if now.xid is not None and now.xid != (before.xid if before else None):
        raise MmctlError(f"the driver reports a new Xid {now.xid} of {now.device}")
    reason = now.absent.get("recovery_action")
    return {"recovery_action": now.recovery_action, "xid": now.xid} | (
        {"absent": reason} if reason else {}
    )
