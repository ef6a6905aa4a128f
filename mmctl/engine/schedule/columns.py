"""The columns and records that the loop works on, made of Python's lists or of numpy's arrays."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from functools import cache
from typing import Any

import msgspec
import numpy as np

from mmctl.engine.errors import MmctlError
from mmctl.engine.schedule.costs import SEQUENCES_MOST, TOKENS_MOST, Model
from mmctl.engine.schedule.fleet import Device, Engine
from mmctl.engine.schedule.layout import (
    BLOCK_TOKENS,
    COUNTERS,
    DEVICE,
    ENCODE,
    FREE,
    JOB,
    LIMITS,
    QUEUE,
    SEED,
    Fleet,
    Jobs,
    Log,
    Result,
    Rule,
    State,
)
from mmctl.engine.schedule.workload import Contents, Workload

# Requests under way at once that the loop begins with; it is given more when it needs them.
RECORDS = 4096
STEPS = 65536  # of the log, when it is kept
CONTENTS_MOST = 1 << 26


def _column(values: Any, kind: str, plain: bool) -> Any:
    found = np.ascontiguousarray(values, kind)
    return found.tolist() if plain else found


def _compact(values: Any, kind: str, plain: bool) -> Any:
    """A column as long as the trace: an array in both cases, the one that Python reads faster."""
    found = np.ascontiguousarray(values, kind)
    return array(_TYPECODES[kind], found.tobytes()) if plain else found


_TYPECODES = {"f8": "d", "i8": "q", "i4": "i", "i2": "h"}


def jobs(workload: Workload, plain: bool) -> Jobs:
    """The workload's requests by column: lists where ``plain``, arrays where compiled."""
    return Jobs(
        arrival_s=_compact(workload.arrival_s, "f8", plain),
        text=_compact(workload.text_tokens, "i4", plain),
        vision=_compact(workload.vision_tokens, "i4", plain),
        images=_compact(workload.images, "i4", plain),
        patches=_compact(workload.patches, "i4", plain),
        output=_compact(workload.output_tokens, "i4", plain),
        prefix_at=_compact(_starts(workload.prefixes), "i8", plain),
        image_at=_compact(_starts(workload.named_images), "i8", plain),
    )


def _starts(contents: Contents | None) -> Any:
    return contents.starts if contents else np.zeros(0)


def _ids(contents: Contents | None) -> tuple[Any, int]:
    """What the requests name, one after the other, and how many different ones there are."""
    return (contents.ids, contents.different) if contents else (np.zeros(0), 0)


def fleet(devices: Sequence[Device], model: Model, engine: Engine, plain: bool) -> Fleet:
    """Limits, links and cost tables of ``devices``, each distinct cost once.

    Raises MmctlError for an engine whose steps are beyond the cost tables.
    """
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
        limit.image_tokens = engine.image_tokens
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


def state(
    workload: Workload, devices: Sequence[Device], ring: int, rule: Rule, plain: bool
) -> State:
    """Everything that changes, at its start. MmctlError where it would need too much memory."""
    count, many = workload.requests, len(devices)
    prefix_ids, prefixes = _ids(workload.prefixes)
    image_ids, images = _ids(workload.named_images)
    if (prefixes + images) * many > CONTENTS_MOST:
        raise MmctlError(
            f"{prefixes + images} named prefixes and images on {many} devices are beyond what is "
            "simulated: take a part of the trace (--limit)"
        )

    def column(length: int, value: int, kind: str) -> Any:
        return _column(np.full(length, value, kind), kind, plain)

    of_devices = _records(DEVICE, many, plain)
    for own, device in zip(of_devices, devices, strict=True):
        own.free = device.blocks
    counters = column(COUNTERS, 0, "i8")
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
        prefix_id=_compact(prefix_ids, "i4", plain),
        prefix_held=_compact(np.zeros(many * prefixes), "i4", plain),
        prefix_reach=_compact(np.zeros(many * prefixes), "i8", plain),
        image_id=_compact(image_ids, "i4", plain),
        image_reach=_compact(np.zeros(many * images), "i8", plain),
        log=_log(STEPS if rule.log else 0, plain),
        result=Result(
            **{name: _compact(np.full(count, -1.0), "f8", plain)
               for name in ("seen_s", "encoded_s", "started_s", "first_s", "finish_s")},
            **{name: _compact(np.full(count, -1), "i2", plain)
               for name in ("encoder", "prefiller", "device")},
            reused=_compact(np.zeros(count), "i4", plain),
            reused_images=_compact(np.zeros(count), "i4", plain),
            preempted=_compact(np.zeros(count), "i2", plain),
            cost_s=_compact(np.full(kept, -1.0), "f8", plain),
            second=_compact(np.full(kept, -1), "i2", plain),
            second_s=_compact(np.full(kept, -1.0), "f8", plain),
        ),
    )  # fmt: skip
    return with_more(empty, many, plain)


def with_more(state: State, devices: int, plain: bool) -> State:
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


def with_longer_log(state: State, plain: bool) -> State:
    """Twice the room for steps."""
    added = _log(len(state.log.device), plain)
    both = zip(state.log, added, strict=True)
    return state._replace(
        log=Log(*((a + b if plain else np.append(a, b)) for a, b in both))
    )  # fmt: skip


_LOGGED = {
    "device": "i2", "start_s": "f8", "took_s": "f8", "encode_s": "f8", "images": "i4",
    "patches": "i4", "prompts": "i4", "chunk_tokens": "i4", "vision_tokens": "i4",
    "decoding": "i4", "free": "i8",
}  # fmt: skip


def _log(steps: int, plain: bool) -> Log:
    return Log(**{name: _compact(np.zeros(steps), kind, plain) for name, kind in _LOGGED.items()})


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


def field(records: Any, name: str) -> np.ndarray:
    """One field of all records, lists of objects or a structured array, as an array."""
    if isinstance(records, list):
        return np.array([getattr(record, name) for record in records])
    found: np.ndarray = records[name]
    return found
