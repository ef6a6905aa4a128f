"""A set-associative, least-recently-used cache fed with blocks: the ground that predictions
are checked against."""

from __future__ import annotations

import numpy as np

from mmctl.engine.access.accesses import Int
from mmctl.engine.access.compiled import compiled


@compiled
def misses(blocks: Int, owner: Int, sets: int, ways: int, skip: int) -> Int:
    """Misses of each of two owners behind the first ``skip`` touches.

    The set of a block is a hash of its number, as last-level caches have it, so that strides do
    not fall on few sets.
    """
    tags = np.full(sets * ways, -1, np.int64)
    age = np.zeros(sets * ways, np.int64)
    found = np.zeros(2, np.int64)
    for at in range(len(blocks)):
        block = blocks[at]
        mixed = ((block ^ (block >> 15)) & 0x7FFFFFFF) * 0x2C1B3C6D
        mixed = (mixed ^ (mixed >> 12)) & 0x7FFFFFFF
        base = (mixed % sets) * ways
        oldest = base
        hit = False
        for way in range(base, base + ways):
            if tags[way] == block:
                age[way] = at + 1
                hit = True
                break
            if age[way] < age[oldest]:
                oldest = way
        if not hit:
            tags[oldest] = block
            age[oldest] = at + 1
            if at >= skip:
                found[owner[at]] += 1
    return found


def extra_misses(a: Int, b: Int, cache_blocks: int, ways: int = 16) -> tuple[float, float, float]:
    """(extra, alone, together) misses over the traffic of both, in steady state.

    The tasks take turns block by block; the shorter begins again until the longer has run
    twice, the first run warming the cache. Their blocks are distinct.
    """
    length = max(len(a), len(b))
    sets = max(1, cache_blocks // ways)
    first = np.resize(a, 2 * length)
    second = np.resize(b, 2 * length) + (int(a.max()) + 1)
    none = np.zeros(2 * length, np.int64)
    alone = 0
    for sequence in (first, second):
        alone += int(misses(sequence, none, sets, ways, length).sum())
    mixed = np.empty(4 * length, np.int64)
    mixed[0::2], mixed[1::2] = first, second
    owner = np.tile(np.array([0, 1]), 2 * length)
    together = int(misses(mixed, owner, sets, ways, 2 * length).sum())
    return (together - alone) / (2 * length), alone / (2 * length), together / (2 * length)
