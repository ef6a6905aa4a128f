"""Out-of-memory errors in a recorded trace: rewound to, explained, with what warned before."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from mmctl.engine.memory import walk
from mmctl.engine.memory.allocator import Figures, Segment, Tag
from mmctl.engine.memory.causes import cause, explain, short_bytes
from mmctl.engine.memory.core import MIN_LARGE, SMALL_LIMIT
from mmctl.engine.memory.messages import Message
from mmctl.engine.memory.program import Program
from mmctl.engine.memory.state import stream_figures
from mmctl.engine.units import show_bytes

# A release burst: at least this share of what was reserved, in one run of device frees.
BURST_RATIO = 0.01
BURSTS_KEPT = 5


class Warned(msgspec.Struct, frozen=True, kw_only=True):
    """Something that came before an error and announced it."""

    kind: str
    entry: int
    events: int
    bytes: int
    allocations_before: int
    message: str


class Holder(msgspec.Struct, frozen=True, kw_only=True):
    """Who held memory: a stack's own place in the code, or what torch does not manage.

    ``bytes`` is None, with the reason, where nothing tells it.
    """

    holder: str
    modality: str | None
    bytes: int | None
    blocks: int | None = None
    absent: str | None = None


class Oom(msgspec.Struct, frozen=True, kw_only=True):
    """One error with its one cause."""

    device: int | None
    entry: int | None
    requested_bytes: int
    device_free_bytes: int | None
    free_bytes: int | None
    largest_free_bytes: int | None
    all_free_bytes: int | None
    pending_bytes: int | None
    releasable_bytes: int | None
    other_process_bytes: int | None
    cause: str
    short_bytes: int | None
    avoided_by: list[str]
    warnings: list[Warned]
    holders: list[Holder]
    explanation: str
    absent: dict[str, str] = {}


def oom_events(program: Program) -> list[int]:
    """The events of a program that are errors."""
    import numpy as np

    return [int(event) for event in np.flatnonzero(program.rows[walk.OP] == walk.OOM)]


def figures_at(
    program: Program, event: int, segments: Sequence[Segment], capacity_bytes: int | None
) -> Figures:
    """What the refused request found. ``capacity_bytes`` (the whole device) tells what others
    hold, this process's own memory beside torch included."""
    need = int(program.rows[walk.SIZE][event])
    device_free = int(program.rows[walk.ADDRESS][event])
    pool, stream, _ = program.arenas[int(program.rows[walk.ARENA][event])]
    found = stream_figures(segments)
    mine = [one for one in found if (one.pool, one.stream) == (pool, stream)]
    reserved = sum(one.reserved_bytes for one in found)
    others = None if capacity_bytes is None else max(capacity_bytes - reserved - device_free, 0)
    return Figures(
        need_bytes=need,
        segment_bytes=segment_bytes(program, need),
        free_bytes=sum(one.free_bytes for one in mine),
        all_free_bytes=sum(one.free_bytes for one in found),
        pending_bytes=sum(one.pending_bytes for one in found),
        device_free_bytes=device_free,
        other_process_bytes=others,
        releasable_bytes=sum(one.releasable_bytes for one in found),
        largest_free_bytes=max((one.largest_free_bytes for one in mine), default=0),
        stream=stream,
        pool=pool,
    )


def segment_bytes(program: Program, need: int) -> int:
    """What a request takes from the device at once."""
    if program.settings.expandable_segments:
        return need
    if need <= SMALL_LIMIT:
        return 2 << 20
    if need < MIN_LARGE:
        return program.settings.large_segment_bytes
    return -(-need // (2 << 20)) * (2 << 20)


def describe(
    program: Program,
    event: int,
    segments: Sequence[Segment],
    capacity_bytes: int | None,
    avoided_by: Sequence[str] = (),
    tried: Sequence[str] = (),
) -> Oom:
    """The error at ``event``, whose exact state is ``segments``."""
    figures = figures_at(program, event, segments, capacity_bytes)
    why = cause(figures)
    held: dict[str, int] = {"vision": 0, "text": 0, "other": 0}
    for segment in segments:
        for block in segment.blocks:
            if block.state != "inactive":
                held[block.tag.modality] += block.size
    reserved = sum(segment.size for segment in segments)
    warned = warnings(program, event, reserved)
    said = explain(figures, why, program.settings, held, avoided_by, tried)
    if warned:
        said = f"{warned[-1].message}; {said[0].lower()}{said[1:]}"
    absent = {}
    if figures.other_process_bytes is None:
        absent["other_process_bytes"] = "not recorded in a snapshot: give --capacity"
    return Oom(
        device=program.device,
        entry=int(program.entry[event]),
        requested_bytes=figures.need_bytes,
        device_free_bytes=figures.device_free_bytes,
        free_bytes=figures.free_bytes,
        largest_free_bytes=figures.largest_free_bytes,
        all_free_bytes=figures.all_free_bytes,
        pending_bytes=figures.pending_bytes,
        releasable_bytes=figures.releasable_bytes,
        other_process_bytes=figures.other_process_bytes,
        cause=why,
        short_bytes=short_bytes(figures, why),
        avoided_by=list(avoided_by),
        warnings=warned,
        holders=holders(segments, figures.other_process_bytes),
        explanation=said,
        absent=absent,
    )


def warnings(program: Program, event: int, reserved: int) -> list[Warned]:
    """Bursts of memory given back to the device before ``event``: the cache was emptied because
    a request found none. The last few, in order of time."""
    import numpy as np

    ops = program.rows[walk.OP][:event]
    released = np.flatnonzero((ops == walk.SEGMENT_FREE) | (ops == walk.UNMAP))
    if not len(released):
        return []
    requests = np.cumsum((ops == walk.ALLOC) | (ops == walk.OOM))
    # Releases with no request between them belong to one burst.
    group = requests[released]
    found = []
    for number in np.unique(group)[-BURSTS_KEPT:]:
        events = released[group == number]
        size = int(program.rows[walk.SIZE][events].sum())
        if size < BURST_RATIO * reserved:
            continue
        before = int(requests[-1] - number)
        what = "right" if before == 0 else (
            "one allocation" if before == 1 else f"{before} allocations"
        )  # fmt: skip
        found.append(
            Warned(
                kind="release_burst",
                entry=int(program.entry[events[0]]),
                events=len(events),
                bytes=size,
                allocations_before=before,
                message=f"A release burst ({len(events)} segments or mappings, "
                f"{show_bytes(size)}) came {what} before the error",
            )
        )
    return found


def holders(segments: Sequence[Segment], other_bytes: int | None, most: int = 10) -> list[Holder]:
    """Who held most, by place in the code; then what torch does not manage."""
    totals: dict[Tag, list[int]] = {}
    for segment in segments:
        for block in segment.blocks:
            if block.state != "inactive":
                entry = totals.setdefault(block.tag, [0, 0])
                entry[0] += block.size
                entry[1] += 1
    ranked = sorted(totals.items(), key=lambda item: -item[1][0])
    found = [
        Holder(
            holder=tag.holder or "(no stack recorded)", modality=tag.modality, bytes=size,
            blocks=count,
        )
        for tag, (size, count) in ranked[:most]
    ]  # fmt: skip
    rest = ranked[most:]
    if rest:
        found.append(
            Holder(
                holder=f"({len(rest)} other places)", modality=None,
                bytes=sum(size for _, (size, _) in rest),
                blocks=sum(count for _, (_, count) in rest),
            )
        )  # fmt: skip
    found.append(
        Holder(
            holder="other processes and memory outside torch", modality=None, bytes=other_bytes,
            absent=None if other_bytes is not None else "not recorded: give --capacity",
        )
    )  # fmt: skip
    return found


def from_message(message: Message) -> Oom:
    """The error that a message tells of; what a message does not say is None."""
    figures = message.figures()
    why = cause(figures)
    absent = dict.fromkeys(
        ("largest_free_bytes", "pending_bytes", "releasable_bytes"), "not in the message"
    )
    if message.unallocated_bytes is None:
        absent["free_bytes"] = "not in the message"
    if figures.device_free_bytes is None:
        absent["device_free_bytes"] = "not in the message"
    held = [
        Holder(holder=f"process {pid}", modality=None, bytes=size)
        for pid, size in message.other_processes
    ]
    if message.allocated_bytes is not None:
        held.insert(0, Holder(holder="torch", modality=None, bytes=message.allocated_bytes))
    if message.private_bytes is not None:
        held.append(
            Holder(holder="private pools (graphs), of torch's", modality=None,
                   bytes=message.private_bytes)
        )  # fmt: skip
    if message.non_torch_bytes is not None:
        held.append(
            Holder(holder="this process outside torch", modality=None,
                   bytes=message.non_torch_bytes)
        )  # fmt: skip
    others = message.other_bytes
    if others is None:
        absent["other_process_bytes"] = "not in the message"
    return Oom(
        device=message.device,
        entry=message.line,
        requested_bytes=message.need_bytes,
        device_free_bytes=figures.device_free_bytes,
        free_bytes=message.unallocated_bytes,
        largest_free_bytes=None,
        all_free_bytes=message.unallocated_bytes,
        pending_bytes=None,
        releasable_bytes=None,
        other_process_bytes=others,
        cause=why,
        short_bytes=short_bytes(figures, why),
        avoided_by=[],
        warnings=[],
        holders=held,
        explanation=explain(figures, why, None, non_torch_bytes=message.non_torch_bytes),
        absent=absent,
    )
