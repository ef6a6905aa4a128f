"""What the state of a pool says: free but unusable, conflict per region, who pins whom.

Works on the segments of a live allocator and of a snapshot alike. All sizes in bytes.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, TypeAlias

import msgspec

from mmctl.engine.memory.allocator import Allocator, Block, PoolId, Segment
from mmctl.engine.memory.core import LARGE_SEGMENT, SMALL_SEGMENT
from mmctl.engine.records import Basis, Fits, Heat, Pool

PAGE = 4096
REGION = 20 << 20
REFERENCE = 16 << 20
NANOSECOND = 1e-9


class StreamFigures(msgspec.Struct, frozen=True, kw_only=True):
    """The figures of one pool and stream: what a request there can and cannot use."""

    pool: PoolId
    stream: int
    reserved_bytes: int
    allocated_bytes: int
    active_bytes: int
    pending_bytes: int
    free_bytes: int
    releasable_bytes: int
    largest_free_bytes: int
    fragmentation_ratio: float
    segments: int
    blocks: int


class Pages(msgspec.Struct, frozen=True, kw_only=True):
    """4 KiB pages of the reserved memory by state."""

    used: int
    partial: int
    free: int


class Region(NamedTuple):
    """What one region (a segment, or 20 MiB of a larger or expandable one) holds now.

    ``held_byte_ns`` is each held byte times how long it has been held. 4 KiB pages that are
    neither partly used nor free are wholly used.
    """

    address: int
    size: int
    vision_bytes: int
    text_bytes: int
    other_bytes: int
    free_bytes: int
    usable_free_bytes: int
    held_byte_ns: int
    partial_pages: int
    free_pages: int


def stream_figures(segments: Sequence[Segment]) -> list[StreamFigures]:
    """One entry per pool and stream, in order of pool and stream."""
    groups: dict[tuple[PoolId, int], list[Segment]] = {}
    for segment in segments:
        groups.setdefault((segment.pool, segment.stream), []).append(segment)
    return [_figures(pool, stream, groups[pool, stream]) for pool, stream in sorted(groups)]


def _figures(pool: PoolId, stream: int, segments: list[Segment]) -> StreamFigures:
    allocated = pending = free = largest = count = 0
    for segment in segments:
        count += len(segment.blocks)
        for block in segment.blocks:
            if block.state == "inactive":
                free += block.size
                largest = max(largest, block.size)
            elif block.state == "active_allocated":
                allocated += block.size
            else:
                pending += block.size
    return StreamFigures(
        pool=pool,
        stream=stream,
        reserved_bytes=allocated + pending + free,
        allocated_bytes=allocated,
        active_bytes=allocated + pending,
        pending_bytes=pending,
        free_bytes=free,
        releasable_bytes=releasable(segments),
        largest_free_bytes=largest,
        fragmentation_ratio=1 - largest / free if free else 0.0,
        segments=len(segments),
        blocks=count,
    )


def fragmentation(figures: Iterable[StreamFigures]) -> float:
    """The byte-weighted mean over pools and streams of 1 - largest free block / free bytes."""
    free = largest = 0
    for one in figures:
        free += one.free_bytes
        largest += one.largest_free_bytes
    return 1 - largest / free if free else 0.0


def releasable(segments: Iterable[Segment]) -> int:
    """Wholly free plain segments and whole pages inside free expandable blocks.

    Pages of an expandable segment count from its lowest mapped address of that pool and stream.
    """
    total = 0
    base: dict[tuple[PoolId, int, bool], int] = {}
    for segment in segments:
        if not segment.expandable:
            if len(segment.blocks) == 1 and segment.blocks[0].state == "inactive":
                total += segment.size
            continue
        page = SMALL_SEGMENT if segment.small else LARGE_SEGMENT
        start = base.setdefault((segment.pool, segment.stream, segment.small), segment.address)
        for block in segment.blocks:
            if block.state == "inactive":
                begin = -(-(block.address - start) // page) * page
                end = (block.address + block.size - start) // page * page
                total += max(end - begin, 0)
    return total


def pages(segments: Iterable[Segment]) -> Pages:
    """Reserved 4 KiB pages that are wholly used, partly used and free."""
    used = partial = total = 0
    for segment in segments:
        total += segment.size // PAGE
        last_partial = -1
        run = None
        for block in (*segment.blocks, None):
            if block is not None and block.state != "inactive":
                run = block.address if run is None else run
                end = block.address + block.size
                continue
            if run is None:
                continue
            used += max(end // PAGE - -(-run // PAGE), 0)
            for edge in (run, end):
                if edge % PAGE and edge // PAGE != last_partial:
                    partial += 1
                    last_partial = edge // PAGE
            run = None
    return Pages(used=used, partial=partial, free=total - used - partial)


def modality_bytes(segments: Iterable[Segment]) -> dict[str, int]:
    """Active bytes (allocated and pending) of ``vision``, ``text`` and ``other``."""
    held = {"vision": 0, "text": 0, "other": 0}
    for segment in segments:
        for block in segment.blocks:
            if block.state != "inactive":
                held[block.tag.modality] += block.size
    return held


def stranded(segments: Iterable[Segment], modality: str, reference: int = REFERENCE) -> int:
    """Free bytes that a request of ``reference`` cannot use now, but could if the blocks of
    ``modality`` in the same segment were gone: what that modality pins."""
    total = 0
    for segment in segments:
        run = pinned = 0
        for block in (*segment.blocks, None):
            if block is not None and block.state == "inactive":
                run += block.size
                pinned += block.size if block.size < reference else 0
            elif block is not None and block.tag.modality == modality:
                run += block.size
            else:
                total += pinned if run >= reference else 0
                run = pinned = 0
    return total


def pinning_blocks(
    segments: Iterable[Segment], reference: int = REFERENCE, most: int = 10
) -> list[tuple[Segment, Block, int]]:
    """Segments of which at least half is free and held by few blocks: (segment, largest block
    that pins it, free bytes pinned), most first."""
    found = []
    for segment in segments:
        held = [block for block in segment.blocks if block.state != "inactive"]
        free = segment.size - sum(block.size for block in held)
        if held and 2 * free >= segment.size and segment.size >= reference:
            found.append((segment, max(held, key=lambda block: block.size), free))
    found.sort(key=lambda entry: -entry[2])
    return found[:most]


BlockKey: TypeAlias = tuple[int, int]  # address, requested size


def regions(
    segments: Iterable[Segment],
    region: int = REGION,
    reference: int = REFERENCE,
    ts_ns: int = 0,
    since: Mapping[BlockKey, int] | None = None,
) -> list[Region]:
    """The regions of the mapped memory by address, each with what it holds now.

    ``since`` tells when a block was first seen; one that is not in it is new at ``ts_ns``.
    """
    found = []
    since = {} if since is None else since
    for segment in segments:
        if segment.expandable:
            start = segment.address // region * region
        else:
            start = segment.address
        step = region if segment.expandable or segment.size > region else segment.size
        cells: dict[int, list[int]] = {}
        last_partial = -1
        for block in segment.blocks:
            at, end = block.address, block.address + block.size
            free = block.state == "inactive"
            column = 3 if free else _COLUMN[block.tag.modality]
            usable = free and block.size >= reference
            age_ns = 0 if free else ts_ns - since.get((at, block.requested_size), ts_ns)
            while at < end:
                number = (at - start) // step
                until = min(end, start + (number + 1) * step)
                cell = cells.get(number)
                if cell is None:
                    cell = cells[number] = [0] * 8
                cell[column] += until - at
                if usable:
                    cell[4] += until - at
                if age_ns:
                    cell[5] += (until - at) * age_ns
                if free:
                    for edge in (at, until):
                        if edge % PAGE and edge // PAGE != last_partial:
                            last_partial = edge // PAGE
                            cell[6] += 1
                    cell[7] += max(until // PAGE - -(-at // PAGE), 0)
                at = until
        found += [
            Region(start + number * step, sum(cell[:4]), *cell) for number, cell in cells.items()
        ]
    return found


_COLUMN = {"vision": 0, "text": 1, "other": 2}


def conflict(vision: float, text: float, free: int, usable_free: int) -> float:
    """2 min(v, t) / (v + t) x (1 - usable free / free), in [0, 1]."""
    if vision + text <= 0:
        return 0.0
    balance = 2 * min(vision, text) / (vision + text)
    return balance * (1 - usable_free / free if free else 1.0)


class Window:
    """Residency per region over the last ``window_s`` seconds, sampled by ``update``.

    A block's age counts from the sample that first saw it. One that was freed and came back in
    the same place and size between two samples is taken for the same.
    """

    def __init__(self, window_s: float, region: int = REGION, reference: int = REFERENCE) -> None:
        self.window_s, self.region, self.reference = window_s, region, reference
        self._samples: deque[tuple[int, float, list[Region]]] = deque()
        self._totals: dict[int, list[float]] = {}
        self._last: tuple[int, list[Region]] | None = None
        self._since: dict[BlockKey, int] = {}

    def update(self, ts_ns: int, segments: Sequence[Segment]) -> list[tuple[Region, float]]:
        """Take a sample; every region that exists now, with its conflict over the window."""
        seen = self._since.get
        self._since = {
            key: seen(key, ts_ns)
            for segment in segments
            for block in segment.blocks
            if block.state != "inactive"
            for key in ((block.address, block.requested_size),)
        }
        now = regions(segments, self.region, self.reference, ts_ns, self._since)
        if self._last is not None and ts_ns > self._last[0]:
            self._add((ts_ns, (ts_ns - self._last[0]) * NANOSECOND, self._last[1]))
        self._last = (ts_ns, now)
        while self._samples and (ts_ns - self._samples[0][0]) * NANOSECOND >= self.window_s:
            self._drop()
        found = []
        for one in now:
            vision, text = self._totals.get(one.address, (0.0, 0.0))
            if vision + text <= 0:
                vision, text = one.vision_bytes, one.text_bytes
            found.append((one, conflict(vision, text, one.free_bytes, one.usable_free_bytes)))
        return found

    def _add(self, sample: tuple[int, float, list[Region]]) -> None:
        self._samples.append(sample)
        for one in sample[2]:
            if one.vision_bytes or one.text_bytes:
                total = self._totals.setdefault(one.address, [0.0, 0.0])
                total[0] += one.vision_bytes * sample[1]
                total[1] += one.text_bytes * sample[1]

    def _drop(self) -> None:
        _, duration, old = self._samples.popleft()
        for one in old:
            total = self._totals.get(one.address)
            if total is None:
                continue
            total[0] -= one.vision_bytes * duration
            total[1] -= one.text_bytes * duration
            # Sums of floats leave dust behind; less than a byte for a second is nothing.
            if total[0] < 1 and total[1] < 1:
                del self._totals[one.address]


def mean_conflict(found: Iterable[tuple[Region, float]]) -> float:
    """The byte-weighted mean over regions."""
    weight = total = 0.0
    for one, value in found:
        weight += one.size
        total += one.size * value
    return total / weight if weight else 0.0


def heat(
    found: Sequence[tuple[Region, float]],
    rows: int,
    base_address: int | None = None,
    span_bytes: int | None = None,
) -> Heat:
    """One column of the heatmap: ``rows`` rows of equal address range.

    ``base_address`` and ``span_bytes`` fix what the rows cover, so that columns of different
    moments fit each other; by default just what the regions span.
    """
    if base_address is None:
        base_address = min((one.address for one, _ in found), default=0)
    if span_bytes is None:
        span_bytes = max((one.address + one.size for one, _ in found), default=1) - base_address
    row_bytes = max(-(-span_bytes // (rows * SMALL_SEGMENT)) * SMALL_SEGMENT, SMALL_SEGMENT)
    cells: dict[int, list[float]] = {}
    for one, value in found:
        first = (one.address - base_address) // row_bytes
        last = (one.address + one.size - 1 - base_address) // row_bytes
        for row in range(max(first, 0), min(last, rows - 1) + 1):
            low = max(one.address, base_address + row * row_bytes)
            high = min(one.address + one.size, base_address + (row + 1) * row_bytes)
            share = (high - low) / one.size
            cell = cells.setdefault(row, [0.0] * 10)
            cell[0] += value * (high - low)
            cell[1] += high - low
            for column, size in enumerate(one[2:], 2):
                cell[column] += size * share
    drawn = [cells[row] for row in sorted(cells)]
    return Heat(
        base_address=base_address,
        row_bytes=row_bytes,
        row_count=rows,
        rows=tuple(sorted(cells)),
        cells=tuple(
            (
                round(cell[0] / cell[1], 4), int(cell[2]), int(cell[3]), int(cell[4]),
                int(cell[5]), int(cell[6]),
            )
            for cell in drawn
        ),
        age_s=tuple(map(_age_s, drawn)),
        pages=tuple(map(_pages, drawn)),
    )  # fmt: skip


def _age_s(cell: list[float]) -> float | None:
    held = sum(cell[2:5])
    return round(cell[7] / held * NANOSECOND, 2) if held else None


def _pages(cell: list[float]) -> tuple[int, int, int]:
    """Used, partial and free pages of a row; a region's share of a partial page counts whole."""
    partial, free = math.ceil(cell[8]), int(cell[9])
    return max(int(cell[1]) // PAGE - partial - free, 0), partial, free


def pool_record(
    allocator: Allocator,
    window: Window,
    *,
    ts_ns: int,
    node: str,
    device: str,
    rows: int = 0,
    base_address: int | None = None,
    span_bytes: int | None = None,
    basis: Basis = "measured",
    fits: Fits | None = None,
    headroom_bytes: int | None = None,
    vision_tokens: int | None = None,
    text_tokens: int | None = None,
) -> Pool:
    """The ``pool`` record of a live allocator; with ``rows`` a heat column as well."""
    segments = allocator.segments()
    figures = stream_figures(segments)
    found = window.update(ts_ns, segments)
    held = modality_bytes(segments)
    return Pool(
        ts_ns=ts_ns,
        node=node,
        device=device,
        reserved_bytes=sum(one.reserved_bytes for one in figures),
        allocated_bytes=sum(one.allocated_bytes for one in figures),
        free_bytes=sum(one.free_bytes for one in figures),
        largest_free_bytes=max((one.largest_free_bytes for one in figures), default=0),
        releasable_bytes=sum(one.releasable_bytes for one in figures),
        capacity_bytes=allocator.capacity_bytes,
        device_free_bytes=allocator.device_free_bytes,
        fragmentation_ratio=fragmentation(figures),
        vision_bytes=held["vision"],
        text_bytes=held["text"],
        other_bytes=held["other"],
        vision_stranded_bytes=stranded(segments, "vision", window.reference),
        text_stranded_bytes=stranded(segments, "text", window.reference),
        conflict_ratio=mean_conflict(found),
        fits=fits,
        headroom_bytes=headroom_bytes,
        vision_tokens=vision_tokens,
        text_tokens=text_tokens,
        heat=heat(found, rows, base_address, span_bytes) if rows else None,
        basis=basis,
    )
