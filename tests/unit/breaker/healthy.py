"""Telemetry of healthy training, serving and hosts, with the flaws that real recordings have.

Made by seed: shapes and spreads after public recordings (utilisation repeats at 10 Hz, power caps
most of the time, host memory that a load takes and gives back). ``damaged`` adds what files have:
gaps, absent values, times that repeat, rows that come late.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from random import Random

import msgspec

from mmctl.engine.records import AnyRecord, Device, Host, Request, Serving

GIB = 1 << 30
START_NS = 1_750_000_000 * 10**9


def training(seed: int, rate_hz: float = 10.0, minutes: float = 20.0) -> Iterator[AnyRecord]:
    """Eight devices through start, steps, an evaluation, a checkpoint, steps again."""
    random = Random(seed)
    step_s, used = random.uniform(0.3, 2.0), 0.0
    warm = [random.uniform(28, 40) for _ in range(8)]
    for number in range(round(minutes * 60 * rate_hz)):
        at = number / rate_hz
        pause = at < 40 or 400 < at < 430 or 700 < at < 720
        used = min(1.0, used + 0.02 / rate_hz * 2) if at > 20 else 0.02
        for rank in range(8):
            phase = (at / step_s + rank * 0.01) % 1
            busy = 0.0 if pause else (0.97 if phase < 0.85 else random.uniform(0.1, 0.7))
            warm[rank] += (30 + 46 * busy - warm[rank]) * 0.02 / rate_hz * 10
            capped = busy > 0.9 and random.random() < 0.9
            yield Device(
                ts_ns=_ns(at), node="n", device=f"gpu{rank}", kind="gpu", sm_ratio=busy,
                bandwidth_ratio=min(0.78, busy * random.uniform(0.3, 0.8)),
                total_bytes=80 * GIB, used_bytes=round(78 * GIB * used),
                temperature_c=round(warm[rank]), power_w=90 + 600 * busy + random.gauss(0, 8),
                throttle=("sw_power_cap",) if capped else (), recovery_action="none",
            )  # fmt: skip


def serving(seed: int, rate_hz: float = 1.0, minutes: float = 40.0) -> Iterator[AnyRecord]:
    """A metrics page and the requests behind it: idle, steady, a peak with a queue, idle again."""
    random = Random(seed)
    kv, wait = 0.1, 0.0
    for number in range(round(minutes * 60 * rate_hz)):
        at = number / rate_hz
        load = 0.0 if at < 60 else 0.5 + 0.3 * math.sin(at / 300) + random.gauss(0, 0.05)
        peak = 1200 < at < 1230
        load = 1.2 if peak else load
        load = 0.0 if 1700 < at < 1800 else load
        kv += (min(0.93, 0.8 * load) - kv) * min(1.0, 0.1 / rate_hz)
        waiting = round(max(0.0, random.gauss(12 if peak else 0, 2))) if load > 0.6 else 0
        wait = 0.8 * waiting / 12 if waiting else 0.0
        tokens = 4000 * min(load, 1.0) * random.uniform(0.8, 1.1)
        yield Serving(
            ts_ns=_ns(at), node="n", engine="vllm", instance="i", running=round(40 * load),
            waiting=waiting, kv_ratio=kv, queue_wait_s=wait, generation_tokens_per_s=tokens,
            prompt_tokens_per_s=3 * tokens, ttft_p50_s=0.2 + wait,
            ttft_p95_s=(0.5 + 2 * wait) * random.uniform(0.7, 1.4) if load else None,
        )  # fmt: skip
        for request in range(round(load * 30 / rate_hz)):
            latency = math.exp(random.gauss(0, 0.5)) * (1.0 + 0.15 * math.sin(at / 300))
            yield Request(
                ts_ns=_ns(at), node="n", id=f"{number}.{request}", state="completed",
                images=int(random.random() < 0.3), stages={"e2e_s": latency},
            )  # fmt: skip


def host(seed: int, rate_hz: float = 2.0, minutes: float = 40.0) -> Iterator[AnyRecord]:
    """A host that loads a model, works, and has caches that come and go."""
    random = Random(seed)
    total, used = 512 * GIB, 0.06
    for number in range(round(minutes * 60 * rate_hz)):
        at = number / rate_hz
        if 60 < at < 300:
            used += 0.45 / 240 / rate_hz  # weights, then shared memory of the workers
        sway = 0.04 * math.sin(at / 120 + seed) + 0.002 * random.random()
        stalled = 0.02 * random.random() if at < 300 else 0.002 * random.random()
        yield Host(
            ts_ns=_ns(at), node="n", total_bytes=total,
            available_bytes=round(total * (1 - used - abs(sway))),
            memory_pressure_ratio=2 * stalled, memory_full_pressure_ratio=stalled,
        )  # fmt: skip


def damaged(records: Iterator[AnyRecord], seed: int) -> Iterator[AnyRecord]:
    """The same with gaps of up to a minute, values missing or not a number, times that repeat,
    and rows that come late."""
    random = Random(seed)
    gap_until, held = 0, None
    for record in records:
        now: int = record.ts_ns  # type: ignore[union-attr]
        if now < gap_until:
            continue
        if random.random() < 1e-4:
            gap_until = now + round(random.uniform(1, 60) * 1e9)
        if random.random() < 0.02:
            names = [
                name
                for name in record.__struct_fields__
                if isinstance(getattr(record, name), float)
            ]
            absent = {name: random.choice((None, math.nan)) for name in names}
            record = msgspec.structs.replace(record, **absent)
        if random.random() < 0.01:
            record = msgspec.structs.replace(record, ts_ns=now - now % 10**9)
        if held is None and random.random() < 0.005:
            held = record
            continue
        yield record
        if held is not None and random.random() < 0.2:
            yield held
            held = None
        if random.random() < 0.005:
            yield record


def _ns(at: float) -> int:
    return START_NS + round(at * 1e9)
