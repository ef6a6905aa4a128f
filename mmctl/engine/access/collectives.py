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
    for (group, name), kind in _by_kind(timelines).items():
        first = _first_numbers({rank: calls for rank, (_, calls) in kind.items()})
        for rank, (timeline, calls) in kind.items():
            warm, first_step = _warm(timeline), _first_step(timeline)
            for order, call in enumerate(calls):
                cold = (order == 0 and not warm) or call.start_ns < first_step
                sequence = call.sequence
                if sequence is None or sequence < 0:
                    sequence = order + first[rank]
                by_key[group, name, sequence].setdefault(rank, (call, cold))
    ranks = {timeline.rank for timeline in timelines}
    found = []
    for (group, name, sequence), taken in by_key.items():
        members = set(next(iter(taken.values()))[0].members) & ranks
        if len(taken) < 2 or (members and not members <= set(taken)):
            continue
        if not members and len(taken) < len(ranks) and group == "default":
            continue
        waits = {rank: call.duration_ns / 1e9 for rank, (call, _) in sorted(taken.items())}
        late = min(waits, key=lambda rank: waits[rank])
        found.append(
            Collective(
                name=name,
                group=group,
                sequence=sequence,
                wait_s={str(rank): wait for rank, wait in waits.items()},
                skew_s=max(waits.values()) - waits[late],
                late_rank=late,
                cold=any(cold for _, cold in taken.values()),
                ts_ns=min(call.start_ns for call, _ in taken.values()),
            )
        )
    return sorted(found, key=lambda c: c.ts_ns)


def _by_kind(
    timelines: Sequence[Timeline],
) -> dict[tuple[str, str], dict[int, tuple[Timeline, list[Call]]]]:
    """Calls by group and name, then by rank, in order of time; sends and receives left out."""
    found: dict[tuple[str, str], dict[int, tuple[Timeline, list[Call]]]] = defaultdict(dict)
    for timeline in timelines:
        for call in sorted(timeline.calls, key=lambda c: c.start_ns):
            if not _TWO_PARTIES.search(call.name):
                kind = (_group(call), call.name)
                found[kind].setdefault(timeline.rank, (timeline, []))[1].append(call)
    return found


def _first_numbers(by_rank: dict[int, list[Call]]) -> dict[int, int]:
    """The number of each rank's first call, where some traces begin later than others.

    All ranks leave a collective together, so with the calls matched rightly the ends of two
    ranks differ by a constant, whatever their clocks. The longest list sets the numbers; a
    shorter one is placed where those differences spread least.
    """
    longest = max(by_rank, key=lambda rank: len(by_rank[rank]))
    ends = [call.start_ns + call.duration_ns for call in by_rank[longest]]
    found = {}
    for rank, calls in by_rank.items():
        mine = [call.start_ns + call.duration_ns for call in calls]
        places = range(len(ends) - len(mine) + 1)
        found[rank] = min(places, key=lambda place: _spread(ends[place:], mine))
    return found


def _spread(a: Sequence[int], b: Sequence[int]) -> int:
    """How far apart the differences of two lists lie, over the shorter one's length."""
    differences = [x - y for x, y in zip(a, b, strict=False)]
    return max(differences) - min(differences) if len(b) > 1 else abs(differences[0])


def _warm(timeline: Timeline) -> bool:
    """Whether the trace shows that it began after the job's first steps."""
    if not timeline.steps:
        return False
    found = re.search(r"#\s*(\d+)", timeline.steps[0][2])
    return found is not None and int(found[1]) >= 2


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
