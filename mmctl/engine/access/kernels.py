"""What one rank did with its device: busy, idle, overlap, concurrency, launch delay."""

from __future__ import annotations

import msgspec
import numpy as np

from mmctl.engine.access import timeline as tl


class Stream(msgspec.Struct, frozen=True, kw_only=True):
    """One stream; ``modality`` is what most of its work is for, absent where none is told."""

    stream: str
    device: str
    modality: str | None
    busy_s: float
    kernels: int


class Concurrency(msgspec.Struct, frozen=True, kw_only=True):
    """Vision and text work on one device: each one's time, and the time of both at once.

    ``concurrency_ratio`` is the time of both over the shorter of the two.
    """

    vision_s: float
    text_s: float
    both_s: float
    concurrency_ratio: float


class Wait(msgspec.Struct, frozen=True, kw_only=True):
    """A host call that waits for the device or makes it wait."""

    call: str
    count: int
    blocked_s: float


class LaunchDelay(msgspec.Struct, frozen=True, kw_only=True):
    """From the launching call to the start on the device."""

    p50_s: float
    p95_s: float
    max_s: float


class Rounded(msgspec.Struct, frozen=True, kw_only=True):
    """The same figures over whole microseconds, starts up and ends down, as HTA rounds them."""

    span_s: float
    kernel_s: float
    idle_s: float


class Rank(msgspec.Struct, frozen=True, kw_only=True):
    """The figures of one rank.

    ``span_s`` runs from the first to the last device work, ``idle_s`` is the part without any.
    ``overlap_ratio`` is communication hidden behind computation as HTA 0.5.0 defines it, over
    whole microseconds; ``overlap_unrounded_ratio`` the same without its rounding. ``hta`` gives
    its other figures where the trace is finer than that, and is absent where they are the same.
    """

    rank: int
    file: str
    span_s: float | None
    kernel_s: float | None
    copy_s: float | None
    collective_s: float | None
    idle_s: float | None
    overlap_ratio: float | None
    overlap_unrounded_ratio: float | None
    hta: Rounded | None
    modality_s: dict[str, float]
    streams: list[Stream]
    concurrency: Concurrency | None
    launch_delay: LaunchDelay | None
    waits: list[Wait]
    dropped_last_step: int
    dropped_no_launch: int
    notes: list[str]
    absent: dict[str, str]


def report(line: tl.Timeline) -> Rank:
    """All figures of one timeline; what it cannot tell is absent, with the reason."""
    waits = [
        Wait(call=name, count=count, blocked_s=blocked / 1e9)
        for name, (count, blocked) in sorted(line.waits.items(), key=lambda item: -item[1][1])
    ]
    notes = list(line.notes)
    if line.dropped_last_step:
        notes.append(
            f"{line.dropped_last_step} pieces of work of the last, unfinished profiler step left "
            "out, as HTA does"
        )
    if line.dropped_no_launch:
        notes.append(f"{line.dropped_no_launch} pieces of work without a recorded launch left out")
    absent: dict[str, str] = {}
    if len(line) == 0:
        reason = "the trace holds no device work"
        names = ("span_s", "kernel_s", "copy_s", "collective_s", "idle_s", "overlap_ratio")
        return Rank(
            rank=line.rank, file=line.file, span_s=None, kernel_s=None, copy_s=None,
            collective_s=None, idle_s=None, overlap_ratio=None, overlap_unrounded_ratio=None,
            hta=None,
            modality_s={}, streams=[], concurrency=None, launch_delay=None, waits=waits,
            dropped_last_step=line.dropped_last_step, dropped_no_launch=line.dropped_no_launch,
            notes=notes, absent=dict.fromkeys(names, reason),
        )  # fmt: skip
    span = int(line.end_ns.max() - line.start_ns.min())
    busy = {kind: _of(line, line.kind == kind) for kind in (tl.COMPUTE, tl.COPY, tl.COLLECTIVE)}
    if not (line.kind == tl.COLLECTIVE).any():
        absent["overlap_ratio"] = "the trace holds no collective"
    streams = _streams(line)
    if not any(stream.modality for stream in streams):
        absent["modality"] = "no module, annotation or range names a modality"
    concurrency = _concurrency(line)
    if concurrency is None:
        absent["concurrency"] = "needs work of both vision and text"
    delay = _launch_delay(line)
    if delay is None:
        absent["launch_delay"] = "the trace holds no launches"
    return Rank(
        rank=line.rank,
        file=line.file,
        span_s=span / 1e9,
        kernel_s=_seconds(busy[tl.COMPUTE]),
        copy_s=_seconds(busy[tl.COPY]),
        collective_s=_seconds(busy[tl.COLLECTIVE]),
        idle_s=(span - tl.length(line.start_ns, line.end_ns)) / 1e9,
        overlap_ratio=_overlap(line, rounded=True),
        overlap_unrounded_ratio=_overlap(line, rounded=False),
        hta=_rounded(line) if line.fractional_us else None,
        modality_s={
            tl.MODALITIES[m] or "unknown": _seconds(_of(line, line.modality == m))
            for m in np.unique(line.modality).tolist()
        },
        streams=streams,
        concurrency=concurrency,
        launch_delay=delay,
        waits=waits,
        dropped_last_step=line.dropped_last_step,
        dropped_no_launch=line.dropped_no_launch,
        notes=notes,
        absent=absent,
    )


def _of(line: tl.Timeline, where: tl.Flag) -> tuple[tl.Int, tl.Int]:
    return tl.merge(line.start_ns[where], line.end_ns[where])


def _seconds(merged: tuple[tl.Int, tl.Int]) -> float:
    return int((merged[1] - merged[0]).sum()) / 1e9


def _overlap(line: tl.Timeline, *, rounded: bool) -> float | None:
    parts = []
    for kind in (tl.COLLECTIVE, tl.COMPUTE):
        start, end = line.start_ns[line.kind == kind], line.end_ns[line.kind == kind]
        if rounded:
            start, end = tl.whole_us(start, end)
            start, end = start[end > start], end[end > start]
        parts.append(tl.merge(start, end))
    communication = int((parts[0][1] - parts[0][0]).sum())
    return tl.intersection(parts[0], parts[1]) / communication if communication else None


def _rounded(line: tl.Timeline) -> Rounded:
    start, end = tl.whole_us(line.start_ns, line.end_ns)
    keep = end > start
    compute = keep & (line.kind == tl.COMPUTE)
    span = int(end.max() - start.min())
    return Rounded(
        span_s=span / 1e9,
        kernel_s=tl.length(start[compute], end[compute]) / 1e9,
        idle_s=(span - tl.length(start[keep], end[keep])) / 1e9,
    )


def _streams(line: tl.Timeline) -> list[Stream]:
    found = []
    length = line.end_ns - line.start_ns
    for index, (device, stream) in enumerate(line.streams):
        here = line.stream == index
        if not here.any():
            continue
        shares = np.bincount(line.modality[here], weights=length[here], minlength=4)
        best = int(shares[1:].argmax()) + 1
        found.append(
            Stream(
                stream=stream,
                device=device,
                modality=tl.MODALITIES[best] if 2 * shares[best] > shares.sum() else None,
                busy_s=_seconds(_of(line, here)),
                kernels=int((here & (line.kind != tl.COPY)).sum()),
            )
        )
    return sorted(found, key=lambda s: -s.busy_s)


def _concurrency(line: tl.Timeline) -> Concurrency | None:
    vision, text = _of(line, line.modality == 1), _of(line, line.modality == 2)
    shorter = min(_seconds(vision), _seconds(text))
    if not shorter:
        return None
    both = tl.intersection(vision, text) / 1e9
    return Concurrency(
        vision_s=_seconds(vision),
        text_s=_seconds(text),
        both_s=both,
        concurrency_ratio=both / shorter,
    )


def _launch_delay(line: tl.Timeline) -> LaunchDelay | None:
    known = line.launch_ns >= 0
    if not known.any():
        return None
    delay = (line.start_ns[known] - line.launch_ns[known]) / 1e9
    p50, p95 = np.percentile(delay, [50, 95]).tolist()
    return LaunchDelay(p50_s=p50, p95_s=p95, max_s=float(delay.max()))
