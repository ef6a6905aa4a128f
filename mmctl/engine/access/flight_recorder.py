"""Flight-recorder dumps of all ranks: who is missing, who lags, whose calls do not match.

Real dumps have neither start nor end of a collective: what counts is who entered it. Three
signs point at a rank: it has nothing to tell (an empty dump, or none), its peers wait in a
collective that it never entered, or it is still in one that its peers have left.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import msgspec

from mmctl.engine.access.collectives import Imbalance
from mmctl.engine.access.dumps import PAIR, Dump, Member, pending

# Calls whose sizes may rightly differ between ranks.
_UNEVEN = re.compile(r"all_?to_?all|:(gather|scatter|reduce)$|send|recv|coalesced|broadcast")
_FEW_RANKS = 4  # so many can be looked at one by one
_STUCK_NS = 20_000_000  # steps of one group start closer together than this


class Missing(msgspec.Struct, frozen=True, kw_only=True):
    """A collective that some members wait in and others never entered."""

    group: str
    sequence: int
    ranks: list[int]
    waiting: list[int]
    collective: str | None = None


class Mismatch(msgspec.Struct, frozen=True, kw_only=True):
    """The same place in a group's sequence, yet not the same call on all ranks."""

    group: str
    sequence: int
    what: str
    ranks: dict[str, list[int]]


class Suspect(msgspec.Struct, frozen=True, kw_only=True):
    """A rank to look at, and why."""

    rank: int
    why: str


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """What the dumps of one job tell together."""

    ranks: list[int]
    groups: int
    missing: list[Missing]
    mismatches: list[Mismatch]
    suspects: list[Suspect]
    imbalance: list[Imbalance]
    notes: list[str]


def judge(dumps: Sequence[Dump], threshold_s: float) -> Verdict:
    """All findings of one job's dumps; arrivals further apart than ``threshold_s`` count."""
    by_rank = {dump.rank: dump for dump in dumps}
    members = _membership(dumps)
    notes: list[str] = []
    why: dict[int, list[str]] = defaultdict(list)
    silent = {rank for rank, dump in by_rank.items() if dump.empty}
    for rank in sorted(silent):
        why[rank].append("its dump is empty: it could not tell what it was doing")
    absent = {rank for group in members.values() for rank in group} - set(by_rank)
    if absent and len(absent) < len(by_rank):
        for rank in sorted(absent):
            why[rank].append("there is no dump of it")
        silent |= absent
    elif absent:
        notes.append(f"dumps of {len(absent)} ranks were not given: they are not judged")
    missing, waits_for = _missing(members, by_rank, silent)
    _pairs(members, by_rank, silent, waits_for)
    blamed = {rank for item in missing for rank in item.ranks}
    for rank in sorted(blamed - silent):
        if not _held_up(rank, waits_for, blamed):
            first = next(item for item in missing if rank in item.ranks)
            why[rank].append(
                f"it never entered {first.collective or 'the collective'} {first.sequence} of "
                f"group {first.group}, where {_listed(first.waiting)} "
                f"wait{'s' if len(first.waiting) == 1 else ''}"
            )
    fronts = {rank: _front(dump) for rank, dump in by_rank.items()}
    awaited = {(item.group, item.sequence) for item in missing}
    for rank, group, behind in _laggards(members, by_rank):
        if fronts[rank] in awaited:
            continue  # it waits where a member never came: that member is to blame
        why[rank].append(
            f"in group {group} it is still in a collective that its peers left "
            f"{behind} collective{'s' if behind > 1 else ''} ago"
        )
    explained = {item.group for item in missing}
    for rank, group, older_s in _oldest(members, by_rank):
        explained.add(group)
        if rank not in why:
            why[rank].append(
                f"its oldest pending operation was made {older_s:.3f} s before those of its peers "
                f"in group {group}"
            )
    mismatches = _mismatches(members, by_rank)
    for item in mismatches:
        explained.add(item.group)
        fewest = min(item.ranks.values(), key=len)
        for rank in fewest:
            why[rank].append(f"its {item.what} differs in group {item.group} at {item.sequence}")
    for (group, sequence), inside in _stuck(members, fronts).items():
        if group not in explained:
            told, ranks = _endless(group, sequence, inside, by_rank)
            for rank in ranks:
                why[rank].append(told)
            if not ranks:
                notes.append(told)
    return Verdict(
        ranks=sorted(by_rank),
        groups=len(members),
        missing=missing,
        mismatches=mismatches,
        suspects=[Suspect(rank=r, why="; ".join(why[r])) for r in sorted(why, key=_weight(why))],
        imbalance=_imbalances(members, by_rank, threshold_s),
        notes=notes,
    )


def _weight(why: dict[int, list[str]]) -> Any:
    return lambda rank: (-len(why[rank]), rank)


def _listed(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:8]))
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}{' …' if len(ranks) > 8 else ''}"


def _membership(dumps: Sequence[Dump]) -> dict[str, tuple[int, ...]]:
    """Group → its ranks, from the configurations, else from who has entries in it."""
    seen: dict[str, set[int]] = defaultdict(set)
    named: dict[str, tuple[int, ...]] = {}
    for dump in dumps:
        named |= {group: ranks for group, ranks in dump.groups.items() if ranks}
        for group in dump.members:
            seen[group].add(dump.rank)
    return {group: named.get(group) or tuple(sorted(ranks))
            for group, ranks in {**{g: set() for g in named}, **seen}.items()}  # fmt: skip


def _missing(
    members: dict[str, tuple[int, ...]], by_rank: dict[int, Dump], silent: set[int]
) -> tuple[list[Missing], dict[int, set[int]]]:
    found: list[Missing] = []
    waits_for: dict[int, set[int]] = defaultdict(set)
    for group, ranks in members.items():
        inside = {r: by_rank[r].members[group] for r in ranks
                  if r in by_rank and group in by_rank[r].members}  # fmt: skip
        waiting: dict[int, list[int]] = defaultdict(list)
        for rank, member in inside.items():
            for sequence, entry in member.entries.items():
                if pending(entry):
                    waiting[sequence].append(rank)
        for sequence in sorted(waiting):
            late = [
                r for r in ranks
                if _not_entered(inside.get(r), sequence, r in silent)
            ]  # fmt: skip
            if not late:
                continue
            entry = by_rank[waiting[sequence][0]].members[group].entries[sequence]
            found.append(
                Missing(
                    group=group, sequence=sequence, ranks=late, waiting=sorted(waiting[sequence]),
                    collective=entry.get("profiling_name"),
                )
            )  # fmt: skip
            for rank in waiting[sequence]:
                waits_for[rank].update(late)
            break  # later ones of the group follow from the first
    return found, waits_for


def _not_entered(member: Member | None, sequence: int, silent: bool) -> bool:
    if member is None or member.entered is None:
        return silent
    return member.entered < sequence


def _pairs(
    members: dict[str, tuple[int, ...]], by_rank: dict[int, Dump], silent: set[int],
    waits_for: dict[int, set[int]],
) -> None:  # fmt: skip
    """A pending send or receive whose peer has not posted its half waits for that peer."""
    posted: dict[tuple[str, int, int, str], int] = defaultdict(int)
    waiting: list[tuple[str, int, int, str]] = []
    for rank, dump in by_rank.items():
        for group, member in dump.members.items():
            ranks = members.get(group, ())
            for entry in member.pairs:
                found = PAIR.search(str(entry.get("profiling_name", "")))
                peer = int(found[4]) if found else -1
                if not found or not pending(entry) or not 0 <= peer < len(ranks):
                    continue
                key = (group, rank, ranks[peer], found[1])
                posted[key] += 1
                waiting.append(key)
    for group, rank, peer, kind in waiting:
        other = "send" if kind == "recv" else "recv"
        if peer in silent or not posted[(group, peer, rank, other)]:
            waits_for[rank].add(peer)


def _held_up(rank: int, waits_for: dict[int, set[int]], blamed: set[int]) -> bool:
    """Whether ``rank`` itself waits, over any number of others, for a blamed rank beyond it.

    A ring of ranks that wait for each other holds no one up: all of them stay suspects.
    """
    reached, todo = set(), [rank]
    while todo:
        for other in waits_for.get(todo.pop(), ()):
            if other not in reached:
                reached.add(other)
                todo.append(other)
    return rank not in reached and bool((reached & blamed) - {rank})


def _laggards(
    members: dict[str, tuple[int, ...]], by_rank: dict[int, Dump]
) -> list[tuple[int, str, int]]:
    """(rank, group, collectives behind) of those furthest behind in each group, worst first.

    A rank is behind when a peer has left a collective that it is still in.
    """
    worst: dict[int, tuple[str, int]] = {}
    for group, ranks in members.items():
        left = {}
        for rank in ranks:
            member = by_rank[rank].members.get(group) if rank in by_rank else None
            if member is None or member.pairs:
                continue
            waiting = [s for s, entry in member.entries.items() if pending(entry)]
            at = min(waiting) - 1 if waiting else member.left
            if at is not None:
                left[rank] = (at, bool(waiting))
        if len(left) < 2:
            continue
        furthest = max(at for at, _ in left.values())
        for rank, (at, waiting_here) in left.items():
            if waiting_here and at < furthest and furthest - at > worst.get(rank, ("", 0))[1]:
                worst[rank] = (group, furthest - at)
    most = max((behind for _, behind in worst.values()), default=0)
    return [
        (rank, group, behind)
        for rank, (group, behind) in sorted(worst.items(), key=lambda item: -item[1][1])
        if 2 * behind >= most
    ]


def _front(dump: Dump) -> tuple[str, int] | None:
    """The collective that a rank is held up in: its oldest pending one, unless that is a pair."""
    oldest: tuple[int, int, tuple[str, int] | None] | None = None
    for group, member in dump.members.items():
        for sequence, entry in member.entries.items():
            if pending(entry):
                candidate = (_made(entry), sequence, (group, sequence))
                oldest = min(oldest, candidate, key=lambda c: c[:2]) if oldest else candidate
        for entry in member.pairs:
            if pending(entry) and (oldest is None or _made(entry) < oldest[0]):
                oldest = (_made(entry), 0, None)
    return oldest[2] if oldest else None


def _made(entry: dict[str, Any]) -> int:
    at = entry.get("time_created_ns")
    return at if isinstance(at, int) else 0


def _stuck(
    members: dict[str, tuple[int, ...]], fronts: dict[int, tuple[str, int] | None]
) -> dict[tuple[str, int], list[int]]:
    """Collectives in which every member is held up: nothing else keeps them from ending."""
    inside: dict[tuple[str, int], list[int]] = defaultdict(list)
    for rank, front in fronts.items():
        if front is not None:
            inside[front].append(rank)
    return {
        front: sorted(ranks)
        for front, ranks in inside.items()
        if len(ranks) > 1 and set(ranks) == set(members[front[0]])
    }


def _endless(
    group: str, sequence: int, inside: list[int], by_rank: dict[int, Dump]
) -> tuple[str, list[int]]:
    """In words, a collective that all entered and that does not end, and the ranks to look at."""
    told = f"collective {sequence} of group {group}, entered by all its ranks, does not end"
    unstarted = _unstarted(group, sequence, inside, by_rank)
    if unstarted:
        return f"{told}: it has not started, its peers have", unstarted
    return told, inside if len(inside) <= _FEW_RANKS else []


def _unstarted(group: str, sequence: int, ranks: list[int], by_rank: dict[int, Dump]) -> list[int]:
    """Those whose device has not begun a collective that the others' devices have begun."""
    begun = {r: by_rank[r].members[group].entries[sequence].get("state") for r in ranks}
    waiting = [rank for rank, state in begun.items() if state != "started"]
    return waiting if 0 < len(waiting) < len(ranks) else []


def _oldest(
    members: dict[str, tuple[int, ...]], by_rank: dict[int, Dump]
) -> list[tuple[int, str, float]]:
    """(rank, group, seconds older) of ranks stuck since before their peers in a group.

    Counted in groups of three or more in which every dump has a collective pending.
    """
    found = []
    for group, ranks in members.items():
        inside = [by_rank[r] for r in ranks if r in by_rank]
        waiting = [
            any(pending(e) for e in dump.members[group].entries.values())
            for dump in inside
            if group in dump.members
        ]
        if len(ranks) < 3 or len(waiting) < 3 or not all(waiting):
            continue
        since = {dump.rank: at for dump in inside if (at := _since(dump)) is not None}
        for rank, at in since.items():
            others = sorted(other for r, other in since.items() if r != rank)
            if len(others) >= 2 and others[len(others) // 2] - at > _STUCK_NS:
                found.append((rank, group, (others[len(others) // 2] - at) / 1e9))
    return found


def _since(dump: Dump) -> int | None:
    """When the oldest operation was made that the rank still has pending."""
    times = [
        entry["time_created_ns"]
        for member in dump.members.values()
        for entry in (*member.entries.values(), *member.pairs)
        if pending(entry) and isinstance(entry.get("time_created_ns"), int)
    ]
    return min(times, default=None)


def _mismatches(members: dict[str, tuple[int, ...]], by_rank: dict[int, Dump]) -> list[Mismatch]:
    found = []
    for group, ranks in members.items():
        rows: dict[int, dict[int, dict[str, Any]]] = defaultdict(dict)
        for rank in ranks:
            member = by_rank[rank].members.get(group) if rank in by_rank else None
            for sequence, entry in (member.entries if member else {}).items():
                rows[sequence][rank] = entry
        for sequence in sorted(rows):
            if len(rows[sequence]) > 1 and (item := _mismatch(group, sequence, rows[sequence])):
                found.append(item)
                break  # after the first, the sequences have slipped
    return found


def _mismatch(group: str, sequence: int, entries: dict[int, dict[str, Any]]) -> Mismatch | None:
    name = str(next(iter(entries.values())).get("profiling_name", ""))
    checks = [("call", "profiling_name"), ("input type", "input_dtypes")]
    if not _UNEVEN.search(name):
        checks.append(("input size", "input_sizes"))
    for what, key in checks:
        values: dict[str, list[int]] = defaultdict(list)
        for rank, entry in entries.items():
            if entry.get(key) is not None:
                values[str(entry[key])].append(rank)
        if len(values) > 1:
            return Mismatch(group=group, sequence=sequence, what=what, ranks=dict(values))
    return None


def _imbalances(
    members: dict[str, tuple[int, ...]], by_rank: dict[int, Dump], threshold_s: float
) -> list[Imbalance]:
    """Collectives that every member entered, at moments further apart than the threshold.

    The first of each group is left out: it pays for setting the group up.
    """
    found = []
    for group, ranks in members.items():
        if len(ranks) < 2 or any(r not in by_rank for r in ranks):
            continue
        entered: dict[int, dict[int, tuple[int, str]]] = defaultdict(dict)
        for rank in ranks:
            member = by_rank[rank].members.get(group)
            for sequence, entry in (member.entries if member else {}).items():
                at = entry.get("time_created_ns")
                if isinstance(at, int) and at > 0:
                    entered[sequence][rank] = (at, str(entry.get("profiling_name", "")))
        whole = sorted(s for s, arrivals in entered.items() if len(arrivals) == len(ranks))
        seen: set[str] = set()
        for sequence in whole:
            arrivals = entered[sequence]
            name = next(iter(arrivals.values()))[1]
            cold = name not in seen and sequence <= 2
            seen.add(name)
            last = max(arrivals, key=lambda rank: arrivals[rank][0])
            waits = {str(r): (arrivals[last][0] - at) / 1e9 for r, (at, _) in arrivals.items()}
            if not cold and max(waits.values()) > threshold_s:
                found.append(
                    Imbalance(
                        late_rank=last, wait_s=max(waits.values()), collective=name, group=group,
                        sequence=sequence, waits_s=waits,
                        ts_ns=min(at for at, _ in arrivals.values()),
                    )
                )  # fmt: skip
    return sorted(found, key=lambda item: item.ts_ns)
