"""Flight-recorder dumps as what each rank knows of each group."""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

from mmctl.engine.access.dump_file import is_dump
from mmctl.engine.errors import MmctlError

PAIR = re.compile(r"(send|recv)\s+(\d+)\s*(->|<-)\s*(\d+)")


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
    if entry.get("is_p2p") or PAIR.search(str(entry.get("profiling_name", ""))):
        member.pairs.append(entry)
        return
    sequence = entry.get("collective_seq_id", entry.get("seq_id"))
    if not isinstance(sequence, int):
        return
    member.entries.setdefault(sequence, entry)
    member.entered = max(sequence, member.entered or sequence)
    if not pending(entry):
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


def pending(entry: dict[str, Any]) -> bool:
    """Whether a collective was begun here and never completed nor retired."""
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
