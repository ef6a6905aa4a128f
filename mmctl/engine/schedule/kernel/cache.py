"""What a device still holds of earlier work: blocks of known content, and encoded images.

A free block is lost once the blocks ahead of it in the free list were taken. Instead of that
list each content keeps the number of taken blocks at which it is lost: exact for the order in
which blocks became free, and blind to what later hits take out of the middle.
"""

from __future__ import annotations

from mmctl.engine.schedule.layout import BLOCK_TOKENS, PREFIX_BLOCKS, PREFIX_TOKENS

from . import jit


@jit
def known_prefix(f, s, d, r):  # type: ignore[no-untyped-def]
    """Tokens at the head of ``r``'s prompt whose blocks ``d`` holds, used or not yet taken."""
    base = d * (len(s.prefix_held) // len(f.device))
    at = s.job[r].prefix_at
    for j in range(s.job[r].prefix_count):
        k = base + s.prefix_id[at + j]
        if s.prefix_held[k] == 0 and s.prefix_reach[k] <= s.device[d].taken:
            return j * PREFIX_TOKENS
    return s.job[r].prefix_count * PREFIX_TOKENS


@jit
def shared_blocks(f, s, d, r):  # type: ignore[no-untyped-def]
    """Blocks of ``r``'s prompt that other requests on ``d`` hold now: not needed again."""
    base = d * (len(s.prefix_held) // len(f.device))
    at = s.job[r].prefix_at
    count = 0
    for j in range(s.job[r].prefix_count):
        if s.prefix_held[base + s.prefix_id[at + j]] > 0:
            count += 1
    return count * PREFIX_BLOCKS


@jit
def hold_prefix(f, s, d, r):  # type: ignore[no-untyped-def]
    """``r`` is admitted: the content of its prompt is held by one more."""
    base = d * (len(s.prefix_held) // len(f.device))
    at = s.job[r].prefix_at
    for j in range(s.job[r].prefix_count):
        s.prefix_held[base + s.prefix_id[at + j]] += 1


@jit
def give_back(f, s, d, r, blocks):  # type: ignore[no-untyped-def]
    """``r`` leaves ``blocks`` free, less those of its prompt that others still hold."""
    count = s.job[r].prefix_count
    s.device[d].free += blocks - count * PREFIX_BLOCKS
    base = d * (len(s.prefix_held) // len(f.device))
    at = s.job[r].prefix_at
    for j in range(count - 1, -1, -1):
        k = base + s.prefix_id[at + j]
        s.prefix_held[k] -= 1
        if s.prefix_held[k] == 0:
            s.prefix_reach[k] = s.device[d].taken + s.device[d].free
            s.device[d].free += PREFIX_BLOCKS


@jit
def reused(f, s, d, r, whole):  # type: ignore[no-untyped-def]
    """Tokens of ``r``'s prompt that need not be computed again: known content, and what a
    preempted one had computed whose blocks nobody has taken yet.

    Free blocks are taken oldest first, and those of one request from its end on, so that what
    is left of it is a prefix. The last token is always computed.
    """
    found = 0
    if f.device[d].prefix and s.job[r].cached_blocks > 0:
        lost = max(0, s.device[d].taken - s.job[r].cached_from)
        found = max(0, s.job[r].cached_blocks - lost) * BLOCK_TOKENS
    if s.job[r].prefix_count > 0:
        found = max(found, known_prefix(f, s, d, r))
    return min(found, (whole - 1) // BLOCK_TOKENS * BLOCK_TOKENS)


@jit
def known_images(f, s, d, r):  # type: ignore[no-untyped-def]
    """How many of ``r``'s images ``d`` has encoded and still keeps."""
    base = d * (len(s.image_reach) // len(f.device))
    at = s.job[r].image_at
    count = 0
    for j in range(s.job[r].images_named):
        if s.image_reach[base + s.image_id[at + j]] > s.device[d].embedded:
            count += 1
    return count


@jit
def keep_images(f, s, d, r):  # type: ignore[no-untyped-def]
    """The named images of ``r`` go into the encoder's cache of ``d``, the oldest out of it."""
    base = d * (len(s.image_reach) // len(f.device))
    at = s.job[r].image_at
    each = s.job[r].vision // max(s.job[r].images, 1)
    for j in range(s.job[r].images_named):
        k = base + s.image_id[at + j]
        if s.image_reach[k] <= s.device[d].embedded:
            s.device[d].embedded += each
        s.image_reach[k] = s.device[d].embedded + f.device[d].image_tokens - each
