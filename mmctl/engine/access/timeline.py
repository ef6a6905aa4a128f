"""Device work on a timeline, and arithmetic on intervals.

Every reader (profiler traces, Nsight exports, records) gives a ``Timeline``; every analysis
takes one. Times are integer nanoseconds since the epoch, or since an unknown start where the
file does not tell.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

Int = npt.NDArray[np.int64]
Flag = npt.NDArray[np.bool_]
Float = npt.NDArray[np.float64]

COMPUTE, COPY, COLLECTIVE, OTHER = 0, 1, 2, 3
KIND_NAMES = ("kernel", "copy", "collective", "kernel")

# HTA 0.5.0 tells communication by '^nccl.*Kernel'; the other libraries it does not know.
COLLECTIVE_NAME = re.compile(
    r"^(nccl.*Kernel|rccl|hccl|hcom_|oneccl|xccl|mccl|msccl|void msccl)", re.IGNORECASE
)
COPY_NAME = re.compile(r"Memcpy|^(hip)?Memset|^(dma|MEMCPY_ASYNC|SDMA)")
WAIT_NAME = re.compile(r"Sync|^(Notify_Wait|EVENT_WAIT|EVENT_RECORD|Notify_Record|NOTIFY)")


def kind_of(name: str) -> int:
    """What a piece of device work is, by its name."""
    if COLLECTIVE_NAME.match(name):
        return COLLECTIVE
    if COPY_NAME.match(name):
        return COPY
    return OTHER if WAIT_NAME.search(name) else COMPUTE


@dataclass(frozen=True)
class Call:
    """One call of a collective on one rank."""

    name: str
    group: str
    start_ns: int
    duration_ns: int
    sequence: int | None = None
    members: tuple[int, ...] = ()


@dataclass(frozen=True)
class Timeline:
    """What one rank did: device work as columns, and the host events that explain it.

    The columns ``start_ns``, ``end_ns``, ``name`` (index into ``names``), ``kind``, ``stream``
    (index into ``streams``), ``modality`` (index into ``MODALITIES``) and ``launch_ns`` (start
    of the launching call, −1 where it is unknown) have one entry per piece of device work, in
    order of start.
    """

    file: str
    rank: int
    start_ns: Int
    end_ns: Int
    name: Int
    kind: Int
    stream: Int
    modality: Int
    launch_ns: Int
    names: list[str]
    streams: list[tuple[str, str]]
    calls: list[Call] = field(default_factory=list)
    waits: dict[str, tuple[int, int]] = field(default_factory=dict)
    steps: list[tuple[int, int, str]] = field(default_factory=list)
    world_size: int | None = None
    dropped_last_step: int = 0
    dropped_no_launch: int = 0
    notes: tuple[str, ...] = ()
    fractional_us: bool = False

    def __len__(self) -> int:
        return len(self.start_ns)


MODALITIES = (None, "vision", "text", "other")


def merge(start: Int, end: Int) -> tuple[Int, Int]:
    """The union of intervals as sorted, disjoint intervals; touching ones become one."""
    if len(start) == 0:
        return start, end
    order = np.argsort(start, kind="stable")
    start, end = start[order], np.maximum.accumulate(end[order])
    first = np.concatenate(([True], start[1:] > end[:-1]))
    last = np.concatenate((first[1:], [True]))
    return start[first], end[last]


def length(start: Int, end: Int) -> int:
    """Time covered by intervals, each moment once."""
    start, end = merge(start, end)
    return int((end - start).sum())


def intersection(a: tuple[Int, Int], b: tuple[Int, Int]) -> int:
    """Time in which both of two merged sets of intervals are busy."""
    if len(a[0]) == 0 or len(b[0]) == 0:
        return 0
    total = length(np.concatenate((a[0], b[0])), np.concatenate((a[1], b[1])))
    return int((a[1] - a[0]).sum() + (b[1] - b[0]).sum()) - total


def whole_us(start: Int, end: Int) -> tuple[Int, Int]:
    """Intervals in whole microseconds as HTA rounds them: starts up, ends down (in ns)."""
    return -(-start // 1000) * 1000, end // 1000 * 1000


def to_ns(us: Float, base_ns: int = 0) -> Int:
    """Microseconds to nanoseconds without losing what a float of that size still holds."""
    whole = np.floor(us)
    result: Int = whole.astype(np.int64) * 1000 + np.rint((us - whole) * 1000).astype(np.int64)
    return result + base_ns


def build(file: str, rank: int, rows: dict[str, Any], **more: Any) -> Timeline:
    """A Timeline with its columns in order of start."""
    order = np.argsort(rows["start_ns"], kind="stable")
    columns: dict[str, Any] = {
        column: np.asarray(rows[column])[order]
        for column in ("start_ns", "end_ns", "name", "kind", "stream", "modality", "launch_ns")
    }
    return Timeline(
        file=file,
        rank=rank,
        names=rows["names"],
        streams=rows["streams"],
        **columns,
        **more,
    )
