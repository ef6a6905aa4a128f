"""A workload on a fleet under a policy: the loop's columns made, and run."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from mmctl.engine.errors import MmctlError, UsageError
from mmctl.engine.schedule import columns, compiled
from mmctl.engine.schedule.costs import Model
from mmctl.engine.schedule.fleet import Device, Engine
from mmctl.engine.schedule.kernel import loop as plain_loop
from mmctl.engine.schedule.layout import (
    DECODE,
    ENCODE,
    LOGGED,
    MORE_LOG,
    PREFILL,
    REFUSED,
    Log,
    Result,
    Rule,
)
from mmctl.engine.schedule.workload import Workload

_ACCOUNTS = ("encode_busy_s", "prefill_busy_s", "decode_busy_s", "blocking_s", "steps")


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """What a simulation gave: ``result`` by request, the ``_busy_s`` and the like by device, and
    every step where a log was kept."""

    workload: Workload
    devices: tuple[Device, ...]
    policy: str
    result: Result
    log: Log | None
    encode_busy_s: Any
    prefill_busy_s: Any
    decode_busy_s: Any
    blocking_s: Any
    steps: Any
    end_s: float
    refused: int
    compiled: bool
    cpu_s: float


def run(
    workload: Workload, devices: Sequence[Device], rule: Rule, model: Model, engine: Engine, *,
    policy: str = "", receipts: bool = False, log: bool = False, plain: bool | None = None,
    loop: Any = None,
) -> Run:  # fmt: skip
    """Simulate ``workload``; compiled where numba is installed and the work is worth it.

    ``receipts`` keeps why each request went where it went, ``log`` every step too: memory then
    grows with the trace. ``loop`` stands in for the one that would be loaded. Raises UsageError
    for a fleet that lacks a stage.
    """
    for stage, name in ((PREFILL, "prefill (P)"), (DECODE, "decode (D)"), (ENCODE, "encode (E)")):
        needed = stage != ENCODE or bool((workload.images > 0).any())
        if needed and not any(device.role & stage for device in devices):
            raise UsageError(f"no device does {name}: give one that stage, such as 'h100_sxm@EPD'")
    use_plain = plain
    if use_plain is None:
        use_plain = not compiled.worth(workload.requests)
    loop = loop or (plain_loop if use_plain else compiled.load())
    jobs = columns.jobs(workload, use_plain)
    fleet = columns.fleet(devices, model, engine, use_plain)
    ring = int(workload.output_tokens.max()) + 3
    if ring * len(devices) > 1 << 27:
        raise MmctlError(f"a request of {ring - 3} output tokens is beyond what is simulated")
    rule = rule._replace(receipts=int(receipts or log), log=int(log))
    state = columns.state(workload, devices, ring, rule, use_plain)
    started = time.process_time()
    while (end_s := loop.run(jobs, fleet, rule, state, ring)) < 0:
        if end_s == MORE_LOG:
            state = columns.with_longer_log(state, use_plain)
        else:
            state = columns.with_more(state, len(devices), use_plain)
    cpu_s = time.process_time() - started
    steps = state.counters[LOGGED]
    return Run(
        workload=workload, devices=tuple(devices), policy=policy,
        result=Result(*map(np.asarray, state.result)),
        log=Log(*(np.asarray(column)[:steps] for column in state.log)) if log else None,
        end_s=float(end_s), refused=int(state.counters[REFUSED]), compiled=not use_plain,
        cpu_s=cpu_s, **{name: columns.field(state.device, name) for name in _ACCOUNTS},
    )  # fmt: skip
