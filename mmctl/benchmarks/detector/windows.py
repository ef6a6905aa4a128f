"""Recordings → windows of features, with what the exact rules said and what then happened.

A window is the last 64 readings of a pool, each with the newest reading of the engine that it
serves. The dry run's own answer (``fits``) is no feature: it is what the detector stands in for
where an engine gives no allocation lists.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from mmctl.engine.breaker.evaluate import observe
from mmctl.engine.profiles import Profile
from mmctl.engine.records import AnyRecord, Event, Memory, Pool, Serving

SAMPLES = 64
RULES = ("fits", "headroom", "false_free")
"""The exact rules: those that say that the next work finds no room, by a dry run or by bytes."""

FEATURES = (
    "allocated_ratio", "free_ratio", "largest_free_ratio", "releasable_ratio",
    "device_free_ratio", "fragmentation_ratio", "vision_ratio", "text_ratio", "other_ratio",
    "vision_tokens", "text_tokens", "running", "waiting", "queue_wait_s",
    "generation_tokens_per_s", "known_ratio",
)  # fmt: skip
"""A reading's features. Bytes are shares of the pool's capacity; ``known_ratio`` is the share
of the others that the recording has."""

ABSENT = -1.0
"""In the place of a reading that a recording does not have: no feature is negative."""


class Series(NamedTuple):
    """One pool of one recording.

    ``values`` is ``[samples + 63, features]``: the first reading stands 63 times before it.
    ``conflict`` and ``oom`` ``[samples]`` say of each reading whether an exact rule held, and
    whether memory ran out within the horizon after it.
    """

    name: str
    family: str
    values: NDArray[np.float32]
    conflict: NDArray[np.bool_]
    oom: NDArray[np.bool_]

    def windows(self) -> NDArray[np.float32]:
        """``[samples, 64, features]``, a view."""
        rolled = np.lib.stride_tricks.sliding_window_view(self.values, SAMPLES, 0)
        windows: NDArray[np.float32] = rolled.transpose(0, 2, 1)
        return windows


def series(
    records: Iterable[AnyRecord], profile: Profile, horizon_s: float, name: str, family: str
) -> list[Series]:
    """Every pool of a recording that has a reading of it."""
    kept = list(records)
    rules = tuple(rule for rule in profile.breaker.rules if rule.name in RULES)
    breaker = msgspec.structs.replace(profile.breaker, rules=rules)
    alarms = observe(kept, msgspec.structs.replace(profile, breaker=breaker)).alarms
    rows: dict[tuple[str, str, str], list[list[float]]] = {}
    times: dict[tuple[str, str, str], list[int]] = {}
    ooms: list[tuple[str | None, int]] = []
    serving: dict[str, Serving] = {}
    for record in kept:
        if isinstance(record, Serving):
            serving[record.node] = record
        elif isinstance(record, Pool):
            key = (record.node, record.device, record.pool)
            rows.setdefault(key, []).append(reading(record, serving.get(record.node)))
            times.setdefault(key, []).append(record.ts_ns)
        elif (isinstance(record, Event) and record.what == "oom") or (
            isinstance(record, Memory) and record.action == "oom"
        ):
            ooms.append((record.device, record.ts_ns))
    found = []
    for key, read in rows.items():
        at = np.array(times[key])
        device = key[1]
        conflict = np.zeros(len(at), np.bool_)
        for alarm in alarms:
            if alarm.device in (None, device):
                open_end = alarm.end_ns >= at[-1]
                conflict |= (at >= alarm.start_ns) & (open_end | (at < alarm.end_ns))
        oom = np.zeros(len(at), np.bool_)
        for where, when in ooms:
            if where in (None, device):
                oom |= (at < when) & (at >= when - round(horizon_s * 1e9))
        values = np.array(read, np.float32)
        padded = np.concatenate([np.repeat(values[:1], SAMPLES - 1, 0), values])
        title = name if len(rows) == 1 else f"{name} {'/'.join(part for part in key if part)}"
        found.append(Series(title, family, padded, conflict, oom))
    return found


def reading(pool: Pool, serving: Serving | None) -> list[float]:
    """The features of one reading."""
    held = pool.reserved_bytes + (pool.device_free_bytes or 0)
    capacity = pool.capacity_bytes or held or 1
    engine = serving if serving is not None else Serving(ts_ns=0, engine="", instance="")
    known: Sequence[float | None] = (
        pool.allocated_bytes / capacity, pool.free_bytes / capacity,
        pool.largest_free_bytes / capacity, pool.releasable_bytes / capacity,
        None if pool.device_free_bytes is None else pool.device_free_bytes / capacity,
        pool.fragmentation_ratio, pool.vision_bytes / capacity, pool.text_bytes / capacity,
        pool.other_bytes / capacity, _scaled(pool.vision_tokens, 4096),
        _scaled(pool.text_tokens, 32768), _scaled(engine.running, 16), _scaled(engine.waiting, 16),
        _log(engine.queue_wait_s), _log(engine.generation_tokens_per_s),
    )  # fmt: skip
    share = sum(value is not None for value in known) / len(known)
    return [*(ABSENT if value is None else value for value in known), share]


def _scaled(count: int | None, unit: int) -> float | None:
    return None if count is None else count / unit


def _log(value: float | None) -> float | None:
    return None if value is None else math.log1p(max(value, 0.0))
