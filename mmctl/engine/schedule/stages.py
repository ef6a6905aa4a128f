"""Stage-level simulation: a request is three jobs in a row, each stage a queue with servers.

Encoding, prefill and decode take the seconds that the cost model gives a request alone or at a
nominal batch; nothing of a step's inside is simulated. It answers what closed forms answer
(M/M/c, M/D/1, M/G/1), for any arrivals and any times, at a small part of the cost.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from heapq import heapreplace
from typing import Any

import msgspec
import numpy as np

from mmctl.engine.schedule.costs import Model
from mmctl.engine.schedule.figures import spread
from mmctl.engine.schedule.fleet import Device, Engine
from mmctl.engine.schedule.layout import (
    CHUNKS,
    CONTEXTS,
    DECODE,
    ENCODE,
    PATCHES,
    PREFILL,
    SEQUENCES,
)  # fmt: skip
from mmctl.engine.schedule.workload import Workload


def serve(arrival_s: Any, service_s: Any, servers: int) -> np.ndarray:
    """When each job starts: one queue, first come, first served, ``servers`` alike.

    ``arrival_s`` is sorted. Each job goes to the server that is free first (Kiefer and
    Wolfowitz): exact for any arrivals and service times.
    """
    free = [0.0] * servers
    started = []
    for at, takes in zip(arrival_s.tolist(), service_s.tolist(), strict=True):
        begin = free[0] if free[0] > at else at
        heapreplace(free, begin + takes)
        started.append(begin)
    return np.array(started)


class Station(msgspec.Struct, frozen=True, kw_only=True):
    """One stage of a run: its servers, mean wait and share of their time in use."""

    stage: str
    servers: int
    jobs: int
    wait_s: dict[str, float] | None
    service_mean_s: float | None
    utilisation_ratio: float


class StageRun(msgspec.Struct, frozen=True, kw_only=True):
    """What a stage-level simulation gave, by request."""

    stations: tuple[Station, ...]
    ttft_s: Any
    e2e_s: Any
    end_s: float
    cpu_s: float


def run(
    workload: Workload, devices: Sequence[Device], model: Model, engine: Engine, *, batch: int = 16
) -> StageRun:
    """Send the workload through the three stages in turn.

    The servers of a stage are the devices that do it, at the mean of their costs; a decoder
    counts as ``batch`` servers, each as fast as a sequence in a batch of that size.
    """
    started = time.process_time()
    encode_s, prefill_s, token_s = _costs(workload, devices, model, engine, batch)
    count = workload.requests
    ready = np.asarray(workload.arrival_s, "f8")
    stations = []
    first = ready
    for stage, role, service, times in (
        ("vision_encode", ENCODE, encode_s, 1),
        ("cross_attn_fusion", PREFILL, prefill_s, 1),
        ("text_decode_step", DECODE, token_s * (workload.output_tokens - 1), batch),
    ):
        servers = times * sum(bool(device.role & role) for device in devices)
        members = np.flatnonzero(service > 0)
        done = ready.copy()
        wait = np.zeros(0)
        if servers and len(members):
            order = members[np.argsort(ready[members], kind="stable")]
            begun = serve(ready[order], service[order], servers)
            wait = begun - ready[order]
            done[order] = begun + service[order]
        span = float(done.max() - workload.arrival_s[0]) if count else 0.0
        stations.append(
            Station(
                stage=stage, servers=servers, jobs=len(members), wait_s=spread(wait),
                service_mean_s=float(service[members].mean()) if len(members) else None,
                utilisation_ratio=(
                    min(1.0, float(service[members].sum()) / (servers * span))
                    if servers and span > 0 else 0.0
                ),
            )
        )  # fmt: skip
        ready = done
        if role == PREFILL:
            first = done
    return StageRun(
        stations=tuple(stations), ttft_s=first - workload.arrival_s,
        e2e_s=ready - workload.arrival_s, end_s=float(ready.max()),
        cpu_s=time.process_time() - started,
    )  # fmt: skip


def _costs(
    workload: Workload, devices: Sequence[Device], model: Model, engine: Engine, batch: int
) -> tuple[np.ndarray, np.ndarray, float]:
    """Seconds of encoding and prefill by request, and of one decoded token."""

    def mean(role: int, of: Any) -> Any:
        found = [of(device.cost) for device in devices if device.role & role]
        return sum(found) / len(found) if found else 0.0 * of(devices[0].cost)

    whole = np.minimum(workload.text_tokens + workload.vision_tokens, 16384)
    dense = mean(PREFILL, lambda cost: cost.dense_s[whole])
    tables = mean(PREFILL, lambda cost: cost.attention_s)
    table = tables.reshape(len(CHUNKS), len(CONTEXTS), len(SEQUENCES), len(CONTEXTS))
    prefill = dense + np.interp(whole, CHUNKS, table[:, 0, 0, 0]) + engine.host_s
    encode = np.zeros(workload.requests)
    some = workload.images > 0
    if some.any():
        grid = mean(ENCODE, lambda cost: cost.encode_s)
        each = np.interp(workload.patches[some], PATCHES, grid[: len(PATCHES)])
        encode[some] = each * workload.images[some]
    context = float(np.mean(whole + workload.output_tokens / 2))
    decode = mean(DECODE, lambda cost: cost.attention_s).reshape(table.shape)[0, 0]
    at_context = np.array([np.interp(context, CONTEXTS, row) for row in decode])
    token_s = (
        float(mean(DECODE, lambda cost: cost.dense_s[batch]))
        + float(mean(DECODE, lambda cost: cost.head_s[batch]))
        + float(np.interp(batch, SEQUENCES, at_context))
        + engine.host_s
    )
    return encode, prefill, token_s
