"""A workload on a fleet under a policy: the loop's columns made, run, and summed up."""

from __future__ import annotations

import time
from array import array
from collections.abc import Sequence
from functools import cache
from typing import Any

import msgspec
import numpy as np

from mmctl.engine.errors import MmctlError, UsageError
from mmctl.engine.schedule import compiled, kernel
from mmctl.engine.schedule.costs import SEQUENCES_MOST, TOKENS_MOST, Model
from mmctl.engine.schedule.fleet import Device, Engine
from mmctl.engine.schedule.layout import (
    BLOCK_TOKENS,
    DECODE,
    DEVICE,
    ENCODE,
    FREE,
    JOB,
    LIMITS,
    PREFILL,
    QUEUE,
    REFUSED,
    SEED,
    Fleet,
    Jobs,
    Result,
    Rule,
    State,
)
from mmctl.engine.schedule.workload import Workload

# Requests under way at once that the loop begins with; it is given more when it needs them.
RECORDS = 4096

_ACCOUNTS = ("encode_busy_s", "prefill_busy_s", "decode_busy_s", "blocking_s", "steps")


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """What a simulation gave, by request (seconds; -1 where it never came) and by device."""

    workload: Workload
    devices: tuple[Device, ...]
    policy: str
    arrival_s: Any
    seen_s: Any
    encoded_s: Any
    started_s: Any
    first_s: Any
    finish_s: Any
    encoder: Any
    device: Any
    preempted: Any
    cost_s: Any
    second: Any
    second_s: Any
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
    policy: str = "", receipts: bool = False, plain: bool | None = None,
) -> Run:  # fmt: skip
    """Simulate ``workload``; compiled where numba is installed and the work is worth it."""
    for stage, name in ((PREFILL, "prefill (P)"), (DECODE, "decode (D)"), (ENCODE, "encode (E)")):
        needed = stage != ENCODE or bool((workload.images > 0).any())
        if needed and not any(device.role & stage for device in devices):
            raise UsageError(f"no device does {name}: give one that stage, such as 'h100_sxm@EPD'")
    use_plain = plain
    if use_plain is None:
        use_plain = not compiled.worth(workload.requests)
    loop = kernel if use_plain else compiled.load("kernel")
    jobs = _jobs(workload, use_plain)
    fleet = _fleet(devices, model, engine, use_plain)
    ring = int(workload.output_tokens.max()) + 3
    if ring * len(devices) > 1 << 27:
        raise MmctlError(f"a request of {ring - 3} output tokens is beyond what is simulated")
    rule = rule._replace(receipts=int(receipts))
    state = _state(workload.requests, devices, ring, rule, use_plain)
    started = time.process_time()
    end_s = loop.run(jobs, fleet, rule, state, ring)
    while end_s < 0:
        state = _with_more(state, len(devices), use_plain)
        end_s = loop.run(jobs, fleet, rule, state, ring)
    cpu_s = time.process_time() - started
    columns: dict[str, Any] = {
        name: np.asarray(column) for name, column in state.result._asdict().items()
    }
    columns |= {name: _field(state.device, name) for name in _ACCOUNTS}
    return Run(
        workload=workload, devices=tuple(devices), policy=policy, arrival_s=workload.arrival_s,
        end_s=float(end_s), refused=int(state.counters[REFUSED]), compiled=not use_plain,
        cpu_s=cpu_s, **columns,
    )  # fmt: skip


def _column(values: Any, kind: str, plain: bool) -> Any:
    found = np.ascontiguousarray(values, kind)
    return found.tolist() if plain else found


def _compact(values: Any, kind: str, plain: bool) -> Any:
    """A column as long as the trace: an array in both cases, the one that Python reads faster."""
    found = np.ascontiguousarray(values, kind)
    return array(_TYPECODES[kind], found.tobytes()) if plain else found


_TYPECODES = {"f8": "d", "i4": "i", "i2": "h"}


def _jobs(workload: Workload, plain: bool) -> Jobs:
    return Jobs(
        arrival_s=_compact(workload.arrival_s, "f8", plain),
        text=_compact(workload.text_tokens, "i4", plain),
        vision=_compact(workload.vision_tokens, "i4", plain),
        images=_compact(workload.images, "i4", plain),
        patches=_compact(workload.patches, "i4", plain),
        output=_compact(workload.output_tokens, "i4", plain),
    )


def _fleet(devices: Sequence[Device], model: Model, engine: Engine, plain: bool) -> Fleet:
    if engine.batched_tokens > TOKENS_MOST or engine.sequences > SEQUENCES_MOST:
        raise MmctlError(
            f"a step of more than {TOKENS_MOST} tokens or {SEQUENCES_MOST} sequences "
            "is beyond the cost tables"
        )
    costs = list({id(device.cost): device.cost for device in devices}.values())
    place = {id(cost): i for i, cost in enumerate(costs)}
    width = engine.batched_tokens + 1

    limits = _records(LIMITS, len(devices), plain)
    for limit, device in zip(limits, devices, strict=True):
        limit.role = device.role
        limit.model = place[id(device.cost)]
        limit.blocks = device.blocks
        limit.lag = int(engine.asynchronous and device.role != ENCODE)
        limit.prefix = int(engine.prefix_caching)
        limit.host_s = engine.host_s
        limit.sequences = engine.sequences
        limit.budget = engine.batched_tokens
        limit.latency_s = device.link_latency_s
        limit.kv_s = model.kv_bytes_per_token / device.link_bytes_per_s
        limit.embedding_s = model.hidden * model.bytes_per_value / device.link_bytes_per_s
    return Fleet(
        device=_array(limits),
        dense_s=_column(np.concatenate([c.dense_s[:width] for c in costs]), "f8", plain),
        head_s=_column(
            np.concatenate([c.head_s[: engine.sequences + 1] for c in costs]), "f8", plain
        ),
        attention_s=_column(np.concatenate([c.attention_s for c in costs]), "f8", plain),
        encode_s=_column(np.concatenate([c.encode_s for c in costs]), "f8", plain),
        dense_width=width,
        head_width=engine.sequences + 1,
    )


def _state(count: int, devices: Sequence[Device], ring: int, rule: Rule, plain: bool) -> State:
    many = len(devices)

    def column(length: int, value: int, kind: str) -> Any:
        return _column(np.full(length, value, kind), kind, plain)

    of_devices = _records(DEVICE, many, plain)
    for state, device in zip(of_devices, devices, strict=True):
        state.free = device.blocks
    counters = column(8, 0, "i8")
    counters[SEED] = (rule.seed * 2654435761 + 12345) & 0x7FFFFFFF
    counters[FREE] = -1
    kept = count if rule.receipts else 0
    empty = State(
        job=_array(_records(JOB, 0, plain)),
        queue=_array(_records(QUEUE, 2 * many, plain)),
        device=_array(of_devices),
        due_head=_compact(np.full(many * ring, -1), "i4", plain),
        growth=column(many * BLOCK_TOKENS, 0, "i8"),
        heap_s=column(many, 0, "f8"),
        heap_order=column(many, 0, "i8"),
        heap_what=column(many, 0, "i8"),
        counters=counters,
        result=Result(
            **{name: _compact(np.full(count, -1.0), "f8", plain)
               for name in ("seen_s", "encoded_s", "started_s", "first_s", "finish_s")},
            **{name: _compact(np.full(count, -1), "i2", plain) for name in ("encoder", "device")},
            preempted=_compact(np.zeros(count), "i2", plain),
            cost_s=_compact(np.full(kept, -1.0), "f8", plain),
            second=_compact(np.full(kept, -1), "i2", plain),
            second_s=_compact(np.full(kept, -1.0), "f8", plain),
        ),
    )  # fmt: skip
    return _with_more(empty, many, plain)


def _with_more(state: State, devices: int, plain: bool) -> State:
    """Twice as many records of requests under way, and room for their events."""
    before = len(state.job)
    more = max(before, RECORDS)
    added = _records(JOB, more, plain)
    # The new ones are a list of free records, ahead of what was free before (nothing).
    for i, record in enumerate(added, before):
        record.queue_next = i + 1 if i + 1 < before + more else state.counters[FREE]
    state.counters[FREE] = before
    room = before + more + devices + 2

    def longer(column: Any, kind: str) -> Any:
        rest = room - len(column)
        return [*column, *([0] * rest)] if plain else np.append(column, np.zeros(rest, kind))

    return state._replace(
        job=state.job + added if plain else np.append(state.job, _array(added)),
        heap_s=longer(state.heap_s, "f8"),
        heap_order=longer(state.heap_order, "i8"),
        heap_what=longer(state.heap_what, "i8"),
    )


@cache
def _struct(fields: tuple[tuple[str, str, Any], ...]) -> Any:
    return msgspec.defstruct("Fields", [(n, type(v), v) for n, _, v in fields], gc=False)


def _records(fields: tuple[tuple[str, str, Any], ...], count: int, plain: bool) -> Any:
    """``count`` records at their start: structs of Python, or rows of an array."""
    if plain:
        struct = _struct(fields)
        return [struct() for _ in range(count)]
    found = np.empty(count, np.dtype([(name, kind) for name, kind, _ in fields], align=True))
    for name, _, value in fields:
        found[name] = value
    return found.view(np.recarray)


def _array(records: Any) -> Any:
    """Rows as numba takes them."""
    return records if isinstance(records, list) else records.view(np.ndarray)


def _field(records: Any, name: str) -> np.ndarray:
    if isinstance(records, list):
        return np.array([getattr(record, name) for record in records])
    found: np.ndarray = records[name]
    return found


QUANTILES = (("p50", 50.0), ("p95", 95.0), ("p99", 99.0))


def spread(values: np.ndarray) -> dict[str, float] | None:
    """Mean and quantiles; absent of nothing."""
    if not len(values):
        return None
    found = np.percentile(values, [q for _, q in QUANTILES])
    return {
        "mean": float(values.mean()),
        **{name: float(v) for (name, _), v in zip(QUANTILES, found, strict=True)},
    }


def latencies(run: Run, since: Any = None) -> dict[str, np.ndarray]:
    """By finished request: seconds to first token, per token after it, and end to end.

    ``since`` is the moment counted from, the arrival unless told.
    """
    done = run.finish_s >= 0
    begun = (run.arrival_s if since is None else since)[done]
    output = run.workload.output_tokens[done]
    first, last = run.first_s[done], run.finish_s[done]
    several = output > 1
    return {
        "ttft_s": first - begun,
        "itl_s": ((last - first)[several]) / (output[several] - 1),
        "e2e_s": last - begun,
    }


def summary(run: Run, *, ttft_slo_s: float, itl_slo_s: float) -> dict[str, Any]:
    """The figures of one policy, as the output contract names them.

    Goodput counts requests whose first token and mean time per token keep the objective.
    Joules are modelled: power while busy, idle power else; absent where no power is known.
    """
    work = run.workload
    done = run.finish_s >= 0
    vision = work.images > 0
    first = run.first_s - run.arrival_s
    per_token = (run.finish_s - run.first_s) / np.maximum(work.output_tokens - 1, 1)
    good = done & (first <= ttft_slo_s) & (per_token <= itl_slo_s)
    hours = len(run.devices) * run.end_s / 3600.0
    busy = run.encode_busy_s + run.prefill_busy_s + run.decode_busy_s
    energy = _energy(run, busy)
    count = int(done.sum())

    def of(mask: np.ndarray) -> dict[str, Any]:
        picked = mask & done
        several = picked & (work.output_tokens > 1)
        return {
            "requests": int(mask.sum()),
            "ttft_s": spread(first[picked]),
            "itl_s": spread(per_token[several]),
            "e2e_s": spread((run.finish_s - run.arrival_s)[picked]),
            "slo_ratio": float(good[mask].mean()) if mask.any() else None,
        }

    span = max(run.end_s, 1e-12)
    return {
        "policy": run.policy,
        "modalities": {"vision": of(vision), "text": of(~vision)},
        "goodput_per_device_hour": float(good.sum()) / hours if hours > 0 else None,
        "slo_ratio": float(good.mean()),
        "hol_blocking_s": float(run.blocking_s.sum()),
        "utilisation_ratio": {
            **{
                stage: float(np.mean(column) / span)
                for stage, column in (
                    ("vision_encode", run.encode_busy_s),
                    ("cross_attn_fusion", run.prefill_busy_s),
                    ("text_decode_step", run.decode_busy_s),
                )
            },
            **{d.name: min(float(busy[i]) / span, 1.0) for i, d in enumerate(run.devices)},
        },
        "joules_per_request": energy / count if energy is not None and count else None,
        "device_hours": hours,
        "preemptions": int(run.preempted.sum()),
        "steps": int(run.steps.sum()),
        "makespan_s": run.end_s,
        "lost": work.requests - count,
        "refused": run.refused,
    }


def _energy(run: Run, busy: np.ndarray) -> float | None:
    total = 0.0
    for device, seconds in zip(run.devices, busy, strict=True):
        if device.power_w is None:
            return None
        idle = device.idle_w if device.idle_w is not None else 0.0
        total += device.power_w * float(seconds) + idle * max(0.0, run.end_s - float(seconds))
    return total


def stages(device: Device) -> str:
    """``E``, ``PD``, ``EPD`` …: the stages a device does."""
    return "".join(
        letter
        for letter, bit in (("E", ENCODE), ("P", PREFILL), ("D", DECODE))
        if device.role & bit
    )
