"""Will the next batch fit? Its allocations, replayed on a copy of the pool."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from mmctl.engine.memory.allocator import (
    DEFAULT_POOL,
    UNTAGGED,
    Allocator,
    Block,
    OutOfMemory,
    PoolId,
    Tag,
)
from mmctl.engine.memory.causes import cause
from mmctl.engine.records import Fits


class Step(NamedTuple):
    """One allocation of a batch; before it, the steps numbered in ``frees`` are freed, and the
    blocks at ``frees_addresses`` that the pool held before.

    ``size_bytes`` 0 only frees.
    """

    size_bytes: int
    frees: tuple[int, ...] = ()
    stream: int = 0
    pool: PoolId = DEFAULT_POOL
    tag: Tag = UNTAGGED
    lifetime: str = ""
    frees_addresses: tuple[int, ...] = ()


def dry_run(allocator: Allocator, steps: Sequence[Step], batch: str | None = None) -> Fits:
    """Whether ``steps`` fit; if not, the first allocation that failed and the cause.

    ``peak_bytes`` is the most that the pool had reserved on the way. The allocator is unchanged.
    """
    copy = allocator.copy()
    peak = copy.reserved_bytes
    failed = None
    done = 0
    held: dict[int, Block] = {}
    for number, step in enumerate(steps):
        for earlier in step.frees:
            copy.free(held.pop(earlier))
        for address in step.frees_addresses:
            copy.free(address)
        if not step.size_bytes:
            continue
        try:
            held[number] = copy.malloc(
                step.size_bytes, step.stream, step.pool, step.tag, step.lifetime
            )
        except OutOfMemory as error:
            failed = error.figures
            break
        done += 1
        peak = max(peak, copy.reserved_bytes)
    return Fits(
        fits=failed is None,
        allocations=done,
        peak_bytes=peak,
        need_bytes=None if failed is None else failed.need_bytes,
        cause=None if failed is None else cause(failed),
        batch=batch,
    )


def headroom(allocator: Allocator, steps: Sequence[Step]) -> int | None:
    """Device bytes left at the peak of ``steps`` on a copy whose cache was released.

    Negative where they do not fit; None where the capacity is unknown.
    """
    available = allocator.available_bytes
    if available is None:
        return None
    copy = allocator.copy()
    copy.release_cached()
    copy.lift_capacity()
    fits = dry_run(copy, steps)
    return available - fits.peak_bytes
