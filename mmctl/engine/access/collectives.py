"""Collectives matched across ranks: who waited, and for whom.

A rank's call lasts from its own arrival to the common end, so the rank whose call is shortest
arrived last: it is the one that the others waited for. That needs no common clock.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence

import msgspec

from mmctl.engine.access.timeline import Call, Timeline

_TWO_PARTIES = re.compile(r"\b(send|recv)\b", re.IGNORECASE)


class Collective(msgspec.Struct, frozen=True, kw_only=True):
    """One collective over all its ranks; ``wait_s`` is each rank's time in the call."""

    name: str
    group: str
    sequence: int
    wait_s: dict[str, float]
    skew_s: float
    late_rank: int
    cold: bool
    ts_ns: int


class Imbalance(msgspec.Struct, frozen=True, kw_only=True):
    """A collective in which ranks waited longer than allowed for one that came late."""

    late_rank: int
    wait_s: float
    collective: str
    group: str
    sequence: int
    waits_s: dict[str, float]
    ts_ns: int


def match(timelines: Sequence[Timeline]) -> list[Collective]:
    """Collectives seen on two ranks or more, in order of time.

    Calls are matched by group and name, and by the sequence number that the trace carries or,
    without one, by their order. A call of which a member is missing here is left out.
    """
    if len(timelines) < 2:
        return []
    by_key: dict[tuple[str, str, int], dict[int, tuple[Call, bool]]] = defaultdict(dict)
    for timeline in timelines:
        counts: dict[tuple[str, str], int] = defaultdict(int)
        first_step = _first_step(timeline)
        for call in sorted(timeline.calls, key=lambda c: c.start_ns):
            if _TWO_PARTIES.search(call.name):
                continue
            kind = (_group(call), call.name)
            order = counts[kind]
            counts[kind] += 1
            cold = order == 0 or call.start_ns < first_step
            sequence = call.sequence if call.sequence is not None and call.sequence >= 0 else order
            by_key[kind[0], kind[1], sequence].setdefault(timeline.rank, (call, cold))
    ranks = {timeline.rank for timeline in timelines}
    found = []
    for (group, name, sequence), calls in by_key.items():
        members = set(next(iter(calls.values()))[0].members) & ranks
        if len(calls) < 2 or (members and not members <= set(calls)):
            continue
        if not members and len(calls) < len(ranks) and group == "default":
            continue
        waits = {rank: call.duration_ns / 1e9 for rank, (call, _) in sorted(calls.items())}
        late = min(waits, key=lambda rank: waits[rank])
        found.append(
            Collective(
                name=name,
                group=group,
                sequence=sequence,
                wait_s={str(rank): wait for rank, wait in waits.items()},
                skew_s=max(waits.values()) - waits[late],
                late_rank=late,
                cold=any(cold for _, cold in calls.values()),
                ts_ns=min(call.start_ns for call, _ in calls.values()),
            )
        )
    return sorted(found, key=lambda c: c.ts_ns)


def _group(call: Call) -> str:
    return f"{call.group}:{','.join(map(str, call.members))}" if call.members else call.group


def _first_step(timeline: Timeline) -> int:
    """The end of step 0 where the trace shows it and steps after it, else the beginning."""
    if len(timeline.steps) > 1 and timeline.steps[0][2].endswith("#0"):
        return timeline.steps[0][1]
    return -1 << 62


def imbalances(collectives: Sequence[Collective], threshold_s: float) -> list[Imbalance]:
    """Warm collectives in which the late rank kept another waiting longer than ``threshold_s``."""
    return [
        Imbalance(
            late_rank=c.late_rank,
            wait_s=max(c.wait_s.values()),
            collective=c.name,
            group=c.group,
            sequence=c.sequence,
            waits_s=c.wait_s,
            ts_ns=c.ts_ns,
        )
        for c in collectives
        if not c.cold and c.skew_s > threshold_s
    ]
