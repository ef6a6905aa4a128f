"""Flight-recorder dumps of all ranks: who is missing, who lags, whose calls do not match.

Real dumps have neither start nor end of a collective: what counts is who entered it. Three
signs point at a rank: it has nothing to tell (an empty dump, or none), its peers wait in a
collective that it never entered, or it is still in one that its peers have left.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from mmctl.engine.access.collectives import Imbalance
from mmctl.engine.access.dump_file import is_dump
from mmctl.engine.errors import MmctlError

# Calls whose sizes may rightly differ between ranks.
_UNEVEN = re.compile(r"all_?to_?all|:(gather|scatter|reduce)$|send|recv|coalesced|broadcast")
_STUCK_NS = 20_000_000  # steps of one group start closer together than this
_PAIR = re.compile(r"(send|recv)\s+(\d+)\s*(->|<-)\s*(\d+)")


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


@dataclass
class Member:
    """What one rank knows of one group: last entered, last left, and its entries."""

    entered: int | None = None
    left: int | None = None
    entries: dict[int, dict[str, Any]] = field(default_factory=dict)
    pairs: list[dict[str, Any]] = field(default_factory=list)


@dataclass
class Dump:
    """One rank's dump; ``members`` by the group's name."""

    rank: int
    empty: bool
    groups: dict[str, tuple[int, ...]]
    members: dict[str, Member]


def parse(content: Any, rank: int, name: str) -> Dump:
    """The dump in plain values; MmctlError where they are none."""
    if not is_dump(content):
        raise MmctlError(f"{name} is no flight-recorder dump: it has neither entries nor pg_config")
    entries = [e for e in content.get("entries") or [] if isinstance(e, dict)]
    groups = {}
    config = content.get("pg_config")
    for key, value in (config if isinstance(config, dict) else {}).items():
        if isinstance(value, dict):
            groups[str(value.get("name", key))] = _ranks(value.get("ranks"))
    members: dict[str, Member] = defaultdict(Member)
    group_of_id: dict[str, str] = {}
    for entry in entries:
        group = _group(entry)
        group_of_id[str(entry.get("pg_id", group))] = group
        _enter(members[group], entry)
    _apply_status(content.get("pg_status"), groups, group_of_id, members)
    return Dump(rank, not entries, groups, dict(members))


def _enter(member: Member, entry: dict[str, Any]) -> None:
    if entry.get("is_p2p") or _PAIR.search(str(entry.get("profiling_name", ""))):
        member.pairs.append(entry)
        return
    sequence = entry.get("collective_seq_id", entry.get("seq_id"))
    if not isinstance(sequence, int):
        return
    member.entries.setdefault(sequence, entry)
    member.entered = max(sequence, member.entered or sequence)
    if not _pending(entry):
        member.left = max(sequence, member.left or sequence)


def _apply_status(
    status: Any, groups: dict[str, tuple[int, ...]], known: dict[str, str],
    members: dict[str, Member],
) -> None:  # fmt: skip
    """What each group's counters tell beyond the entries; they go by local group ids."""
    if not isinstance(status, dict):
        return
    status = {str(key): counters for key, counters in status.items()}
    mapping = dict(known)
    # Ids and names both count up as groups are made: one to one, where all entries agree.
    if len(status) == len(groups) and all(key.isdigit() for key in (*status, *groups)):
        guess = dict(zip(sorted(status, key=int), sorted(groups, key=int), strict=True))
        if all(guess.get(key) == name for key, name in known.items()):
            mapping = guess
    for key, counters in status.items():
        group = mapping.get(key)
        if group is None or not isinstance(counters, dict):
            continue
        member = members[group]
        if member.pairs:
            continue  # with point-to-point calls among them the counters are no sequence
        entered = counters.get("last_enqueued_collective")
        left = counters.get("last_completed_collective")
        if isinstance(entered, int) and entered >= 0:
            member.entered = max(entered, member.entered or 0)
        if isinstance(left, int) and left >= 0:
            member.left = left


def _pending(entry: dict[str, Any]) -> bool:
    return entry.get("state") != "completed" and not entry.get("retired")


def _group(entry: dict[str, Any]) -> str:
    process_group = entry.get("process_group")
    if isinstance(process_group, (list, tuple)) and process_group:
        return str(process_group[0])
    return str(entry.get("pg_name", entry.get("pg_id", "0")))


def _ranks(value: Any) -> tuple[int, ...]:
    if isinstance(value, str):
        return tuple(int(number) for number in re.findall(r"\d+", value))
    if isinstance(value, (list, tuple)):
        return tuple(rank for rank in value if isinstance(rank, int))
    return ()


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
    for rank, group, behind in _laggards(members, by_rank):
        why[rank].append(
            f"in group {group} it is still in a collective that its peers left "
            f"{behind} collective{'s' if behind > 1 else ''} ago"
        )
    for rank, group, older_s in _oldest(members, by_rank):
        if rank not in why:
            why[rank].append(
                f"its oldest pending operation was made {older_s:.3f} s before those of its peers "
                f"in group {group}"
            )
    mismatches = _mismatches(members, by_rank)
    for item in mismatches:
        fewest = min(item.ranks.values(), key=len)
        for rank in fewest if len(item.ranks) > 1 else []:
            why[rank].append(f"its {item.what} differs in group {item.group} at {item.sequence}")
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
                if _pending(entry):
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
    pending: list[tuple[str, int, int, str]] = []
    for rank, dump in by_rank.items():
        for group, member in dump.members.items():
            ranks = members.get(group, ())
            for entry in member.pairs:
                found = _PAIR.search(str(entry.get("profiling_name", "")))
                peer = int(found[4]) if found else -1
                if not found or not _pending(entry) or not 0 <= peer < len(ranks):
                    continue
                key = (group, rank, ranks[peer], found[1])
                posted[key] += 1
                pending.append(key)
    for group, rank, peer, kind in pending:
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
            waiting = [s for s, entry in member.entries.items() if _pending(entry)]
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
            any(_pending(e) for e in dump.members[group].entries.values())
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
        if _pending(entry) and isinstance(entry.get("time_created_ns"), int)
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
