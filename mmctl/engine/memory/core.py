"""The rules of PyTorch's caching allocator, exact, on columns of integers.

The source of every rule is ``c10/cuda/CUDACachingAllocator.cpp``. Nothing here knows tensors,
tags or files: a block is a row number, an *arena* is one set of blocks that may stand in for
each other (one pool, one stream, small or large requests).

The same functions run in two ways. As imported, the columns are Python lists: no dependency,
quick to start and to copy. ``compiled.load()`` runs this file a second time through numba's
compiler with the columns as NumPy arrays, for traces of a million entries. What differs between
the two are the primitives in ``rows``, and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

from mmctl.engine.memory import rows

MIB = 1 << 20
MIN_BLOCK = 512
SMALL_LIMIT = MIB
SMALL_SEGMENT = 2 * MIB
LARGE_SEGMENT = 20 * MIB
MIN_LARGE = 10 * MIB
ROUND_LARGE = 2 * MIB
UNLIMITED = 1 << 62

# States of a block.
FREE, ALLOCATED, PENDING, UNMAPPED, DEAD = range(5)

# Columns of blocks.
ADDRESS, SIZE, REQUESTED, STATE, PREVIOUS, NEXT, ARENA, EXPANDABLE, TAG, AGE = range(10)
BLOCK_COLUMNS = 10

# Columns of arenas; CALLS counts searches per pool and is kept in the pool's first arena.
POOL, SMALL, FREE_COUNT, UNMAPPED_COUNT, FIRST, CALLS, HELD = range(7)
ARENA_COLUMNS = 7

# Rows per arena, each sorted: free blocks by (size, address), unmapped ones by address.
KEY_SIZE, KEY_ADDRESS, KEY_BLOCK = range(3)

# Columns of spans of address space in use: plain segments and expandable reservations.
START, END = range(2)

# Scalars: settings first, then counters.
(
    EXPANDABLE_SEGMENTS, MAX_SPLIT, ROUNDING_SLACK, LARGE_SEGMENT_SIZE, COLLECT_ABOVE, LIMIT,
    CAPACITY, RESERVATION, PLACEMENT,
    RESERVED, PEAK_RESERVED, DEVICE_ALLOCS, DEVICE_FREES, RETRIES, SPARE, SPANS, GIVEN, RANDOM,
    LOGGED, COLLECTED, ARENAS, RECYCLES,
) = range(22)  # fmt: skip
SCALARS = 22

# Kinds of logged device events.
SEGMENT_ALLOC, SEGMENT_FREE, MAP, UNMAP = range(4)

# Where the address of a new segment comes from.
LOWEST, HIGHEST, SCATTERED = range(3)

F = TypeVar("F", bound=Callable[..., Any])

# ``compiled.load()`` puts its own primitives here before it runs this file.
_primitives: Any = globals().get("primitives") or rows
jit: Callable[[F], F] = _primitives.jit
insert: Any = _primitives.insert
remove: Any = _primitives.remove
bisect_left: Any = _primitives.bisect_left
bisect_right: Any = _primitives.bisect_right


class Columns(NamedTuple):
    """A whole allocator: lists of lists, or NumPy arrays of int64 of the same shape."""

    blocks: Any  # [BLOCK_COLUMNS][block]
    arenas: Any  # [ARENA_COLUMNS][arena]
    free: Any  # [KEY_SIZE, KEY_ADDRESS, KEY_BLOCK][arena] -> row sorted by (size, address)
    unmapped: Any  # [KEY_ADDRESS, KEY_BLOCK][arena] (rows 0 and 1) sorted by address
    spans: Any  # [START, END] -> rows sorted by address
    spare: Any  # stack of unused block numbers, scalars[SPARE] of them
    log: Any  # [kind, address, size] of device events, scalars[LOGGED] of them
    scalars: Any


# The return of a function that found nothing.
NONE = -1


@jit
def segment_size(c: Columns, size: int) -> int:
    """What a request of ``size`` (rounded) takes from the device as a plain segment."""
    if size <= SMALL_LIMIT:
        return SMALL_SEGMENT
    if size < MIN_LARGE:
        return c.scalars[LARGE_SEGMENT_SIZE]
    return ROUND_LARGE * ((size + ROUND_LARGE - 1) // ROUND_LARGE)


@jit
def crowded(c: Columns) -> bool:
    """Whether the next operation might run out of rows: a release cuts every free block in three
    at most, so that two unused rows per used one are enough."""
    slots = len(c.spare)
    return 3 * c.scalars[SPARE] < 2 * slots + 24


@jit
def new_row(c: Columns, address: int, size: int, arena: int, expandable: int) -> int:
    """A free, unlinked block that is in no index yet."""
    s, blocks = c.scalars, c.blocks
    s[SPARE] -= 1
    block = c.spare[s[SPARE]]
    blocks[ADDRESS][block] = address
    blocks[SIZE][block] = size
    blocks[REQUESTED][block] = 0
    blocks[STATE][block] = FREE
    blocks[PREVIOUS][block] = NONE
    blocks[NEXT][block] = NONE
    blocks[ARENA][block] = arena
    blocks[EXPANDABLE][block] = expandable
    blocks[TAG][block] = 0
    return block


@jit
def drop_row(c: Columns, block: int) -> None:
    """Mark a block dead and keep its row for the next one."""
    c.blocks[STATE][block] = DEAD
    c.spare[c.scalars[SPARE]] = block
    c.scalars[SPARE] += 1


@jit
def index_free(c: Columns, block: int) -> None:
    """Make a free block findable."""
    blocks, arenas = c.blocks, c.arenas
    arena = blocks[ARENA][block]
    size = blocks[SIZE][block]
    address = blocks[ADDRESS][block]
    sizes = c.free[KEY_SIZE][arena]
    addresses = c.free[KEY_ADDRESS][arena]
    count = arenas[FREE_COUNT][arena]
    low = bisect_left(sizes, size, 0, count)
    high = bisect_right(sizes, size, low, count)
    position = bisect_left(addresses, address, low, high)
    insert(sizes, count, position, size)
    insert(addresses, count, position, address)
    insert(c.free[KEY_BLOCK][arena], count, position, block)
    arenas[FREE_COUNT][arena] = count + 1
    blocks[AGE][block] = arenas[CALLS][arenas[FIRST][arena]]


@jit
def drop_free_at(c: Columns, arena: int, position: int) -> None:
    """Take the free block at ``position`` out of the index by size."""
    count = c.arenas[FREE_COUNT][arena]
    remove(c.free[KEY_SIZE][arena], count, position)
    remove(c.free[KEY_ADDRESS][arena], count, position)
    remove(c.free[KEY_BLOCK][arena], count, position)
    c.arenas[FREE_COUNT][arena] = count - 1


@jit
def drop_free(c: Columns, block: int) -> None:
    """Take a free block out of the index."""
    arena = c.blocks[ARENA][block]
    size = c.blocks[SIZE][block]
    sizes = c.free[KEY_SIZE][arena]
    count = c.arenas[FREE_COUNT][arena]
    low = bisect_left(sizes, size, 0, count)
    high = bisect_right(sizes, size, low, count)
    address = c.blocks[ADDRESS][block]
    drop_free_at(c, arena, bisect_left(c.free[KEY_ADDRESS][arena], address, low, high))


@jit
def index_unmapped(c: Columns, block: int) -> None:
    """Enter an unmapped range of an expandable segment in the index by address."""
    arena = c.blocks[ARENA][block]
    address = c.blocks[ADDRESS][block]
    count = c.arenas[UNMAPPED_COUNT][arena]
    position = bisect_left(c.unmapped[0][arena], address, 0, count)
    insert(c.unmapped[0][arena], count, position, address)
    insert(c.unmapped[1][arena], count, position, block)
    c.arenas[UNMAPPED_COUNT][arena] = count + 1


@jit
def drop_unmapped(c: Columns, block: int) -> None:
    """Take an unmapped range out of the index."""
    arena = c.blocks[ARENA][block]
    count = c.arenas[UNMAPPED_COUNT][arena]
    position = bisect_left(c.unmapped[0][arena], c.blocks[ADDRESS][block], 0, count)
    remove(c.unmapped[0][arena], count, position)
    remove(c.unmapped[1][arena], count, position)
    c.arenas[UNMAPPED_COUNT][arena] = count - 1


@jit
def link_after(c: Columns, block: int, before: int) -> None:
    """Put ``block`` behind ``before`` in its segment."""
    previous, following = c.blocks[PREVIOUS], c.blocks[NEXT]
    after = following[before]
    previous[block] = before
    following[block] = after
    following[before] = block
    if after != NONE:
        previous[after] = block


@jit
def coalesce(c: Columns, block: int) -> None:
    """Merge the free (or unmapped) neighbours of ``block`` into it; it is in no index."""
    blocks = c.blocks
    state, previous, following = blocks[STATE], blocks[PREVIOUS], blocks[NEXT]
    kind = state[block]
    before = previous[block]
    if before != NONE and state[before] == kind:
        if kind == FREE:
            drop_free(c, before)
        else:
            drop_unmapped(c, before)
        blocks[ADDRESS][block] = blocks[ADDRESS][before]
        blocks[SIZE][block] += blocks[SIZE][before]
        previous[block] = previous[before]
        if previous[block] != NONE:
            following[previous[block]] = block
        drop_row(c, before)
    after = following[block]
    if after != NONE and state[after] == kind:
        if kind == FREE:
            drop_free(c, after)
        else:
            drop_unmapped(c, after)
        blocks[SIZE][block] += blocks[SIZE][after]
        following[block] = following[after]
        if following[block] != NONE:
            previous[following[block]] = block
        drop_row(c, after)


@jit
def log_event(c: Columns, kind: int, address: int, size: int) -> None:
    """Note a device event (segment or map) while there is room for it."""
    count = c.scalars[LOGGED]
    if count < len(c.log[0]):
        c.log[0][count] = kind
        c.log[1][count] = address
        c.log[2][count] = size
        c.scalars[LOGGED] = count + 1


@jit
def account(c: Columns, kind: int, address: int, size: int) -> None:
    """Count and log what was taken from the device or given back."""
    s = c.scalars
    if kind in (SEGMENT_ALLOC, MAP):
        s[RESERVED] += size
        s[DEVICE_ALLOCS] += 1
        if s[RESERVED] > s[PEAK_RESERVED]:
            s[PEAK_RESERVED] = s[RESERVED]
    else:
        s[RESERVED] -= size
        s[DEVICE_FREES] += 1
    log_event(c, kind, address, size)


# Address space.


@jit
def place(c: Columns, size: int) -> int:
    """An address for ``size`` new bytes, which become a span; 2 MiB aligned.

    The driver's own choice is not known; the placement decides which of two equally large free
    blocks is the lower one, and nothing else.
    """
    s = c.scalars
    count = s[SPANS]
    starts, ends = c.spans[START], c.spans[END]
    address = s[GIVEN]
    position = 0
    if address != NONE:
        position = bisect_left(starts, address, 0, count)
    elif s[PLACEMENT] == LOWEST:
        address = SMALL_SEGMENT
        while position < count and starts[position] - address < size:
            address = align(ends[position])
            position += 1
    elif s[PLACEMENT] == HIGHEST:
        position = count
        address = (1 << 46) - align(size)
        while position > 0 and ends[position - 1] > address:
            position -= 1
            address = starts[position] - align(size)
    else:
        # A linear congruential step; the slots are wider than any segment, so none overlaps.
        taken = True
        while taken:
            s[RANDOM] = (s[RANDOM] * 1103515245 + 12345) & 0x7FFFFFFF
            address = (s[RANDOM] & 0xFFFFF) << 42
            position = bisect_left(starts, address, 0, count)
            taken = position < count and starts[position] == address
    insert(starts, count, position, address)
    insert(ends, count, position, address + size)
    s[SPANS] = count + 1
    return address


@jit
def align(size: int) -> int:
    """``size`` bytes rounded up to whole small segments (2 MiB)."""
    return (size + SMALL_SEGMENT - 1) // SMALL_SEGMENT * SMALL_SEGMENT


@jit
def drop_span(c: Columns, address: int) -> None:
    """Give the address range that begins at ``address`` back to the device."""
    count = c.scalars[SPANS]
    position = bisect_left(c.spans[START], address, 0, count)
    if position < count and c.spans[START][position] == address:
        remove(c.spans[START], count, position)
        remove(c.spans[END], count, position)
        c.scalars[SPANS] = count - 1


# The search for a free block.


@jit
def stretch(c: Columns, block: int) -> int:
    """The size that a block of an expandable segment can grow to in place."""
    after = c.blocks[NEXT][block]
    size = c.blocks[SIZE][block]
    if after != NONE and c.blocks[STATE][after] == UNMAPPED:
        size += c.blocks[SIZE][after]
    return size


@jit
def find_free(c: Columns, arena: int, size: int) -> int:
    """Best fit: the smallest free block of the arena that holds ``size``, then the lowest.

    The block found is taken out of the index; NONE where the rules reject all.
    """
    s, blocks = c.scalars, c.blocks
    if s[COLLECT_ABOVE] >= 0:
        c.arenas[CALLS][c.arenas[FIRST][arena]] += 1
    count = c.arenas[FREE_COUNT][arena]
    ids = c.free[KEY_BLOCK][arena]
    position = bisect_left(c.free[KEY_SIZE][arena], size, 0, count)
    if position == count:
        return NONE
    if blocks[EXPANDABLE][ids[position]]:
        if s[EXPANDABLE_SEGMENTS]:
            after = position + 1
            while (
                after < count
                and blocks[EXPANDABLE][ids[position]]
                and stretch(c, ids[after]) < stretch(c, ids[position])
            ):
                position = after
                after += 1
        else:
            while position < count and blocks[EXPANDABLE][ids[position]]:
                position += 1
            if position == count:
                return NONE
    block = ids[position]
    found = blocks[SIZE][block]
    if size < s[MAX_SPLIT] <= found:
        return NONE
    if size >= s[MAX_SPLIT] and found >= size + s[ROUNDING_SLACK]:
        return NONE
    drop_free_at(c, arena, position)
    return block


# New memory from the device.


@jit
def room(c: Columns, size: int) -> bool:
    """Whether the device has ``size`` more bytes."""
    return c.scalars[CAPACITY] < 0 or c.scalars[RESERVED] + size <= c.scalars[CAPACITY]


@jit
def new_segment(c: Columns, arena: int, size: int) -> int:
    """A plain segment of ``size`` bytes as one block that is in no index."""
    address = place(c, size)
    account(c, SEGMENT_ALLOC, address, size)
    return new_row(c, address, size, arena, 0)


@jit
def from_device(c: Columns, arena: int, size: int) -> int:
    """A block from new device memory, or NONE where limit or capacity forbids it."""
    s = c.scalars
    need = segment_size(c, size)
    if s[LIMIT] >= 0 and s[RESERVED] + need > s[LIMIT]:
        return NONE
    if s[EXPANDABLE_SEGMENTS]:
        return grow_expandable(c, arena, size)
    if not room(c, need):
        return NONE
    return new_segment(c, arena, need)


@jit
def handle_size(c: Columns, arena: int) -> int:
    """Bytes of one physical handle that the arena maps: 2 MiB, or a large page."""
    if c.arenas[SMALL][arena] or c.scalars[RECYCLES]:
        return SMALL_SEGMENT
    return c.scalars[LARGE_SEGMENT_SIZE]


@jit
def find_expandable(c: Columns, arena: int, size: int) -> int:
    """The first block, lowest address first, from which ``size`` free and unmapped bytes follow;
    NONE where a new reservation is needed."""
    blocks = c.blocks
    state = blocks[STATE]
    for i in range(c.arenas[UNMAPPED_COUNT][arena]):
        start = c.unmapped[1][arena][i]
        before = blocks[PREVIOUS][start]
        if before != NONE and state[before] == FREE:
            start = before
        total = 0
        block = start
        while total < size and block != NONE and (state[block] in (FREE, UNMAPPED)):
            total += blocks[SIZE][block]
            block = blocks[NEXT][block]
        if total >= size:
            return start
    return NONE


@jit
def new_reservation(c: Columns, arena: int, size: int) -> int:
    """Address space of ``size`` bytes with nothing mapped, as one block in the index."""
    block = new_row(c, place(c, size), size, arena, 1)
    c.blocks[STATE][block] = UNMAPPED
    index_unmapped(c, block)
    return block


@jit
def map_block(c: Columns, block: int, size: int) -> bool:
    """Map whole handles for the first ``size`` bytes of an unmapped block and merge it.

    Returns False, with nothing changed, when the device has too little left.
    """
    blocks = c.blocks
    handle = handle_size(c, blocks[ARENA][block])
    mapped = min((size + handle - 1) // handle * handle, blocks[SIZE][block])
    if not room(c, mapped):
        return False
    drop_unmapped(c, block)
    blocks[STATE][block] = FREE
    rest = blocks[SIZE][block] - mapped
    address = blocks[ADDRESS][block]
    if rest > 0:
        remaining = new_row(c, address + mapped, rest, blocks[ARENA][block], 1)
        blocks[STATE][remaining] = UNMAPPED
        link_after(c, remaining, block)
        index_unmapped(c, remaining)
        blocks[SIZE][block] = mapped
    coalesce(c, block)
    index_free(c, block)
    account(c, MAP, address, mapped)
    return True


@jit
def grow_expandable(c: Columns, arena: int, size: int) -> int:
    """A free block of at least ``size`` bytes in an expandable segment, mapping what it lacks."""
    blocks = c.blocks
    block = find_expandable(c, arena, size)
    if block == NONE:
        handle = handle_size(c, arena)
        wanted = max(c.scalars[RESERVATION], size)
        block = new_reservation(c, arena, (wanted + handle - 1) // handle * handle)
    if blocks[STATE][block] == UNMAPPED and not map_block(c, block, min(blocks[SIZE][block], size)):
        return NONE
    while blocks[SIZE][block] < size:
        more = blocks[NEXT][block]
        if not map_block(c, more, min(size - blocks[SIZE][block], blocks[SIZE][more])):
            return NONE
        block = more
    drop_free(c, block)
    return block


# Memory back to the device.


@jit
def release_segment(c: Columns, block: int) -> None:
    """Give a wholly free plain segment back."""
    drop_free(c, block)
    forget_segment(c, block)


@jit
def forget_segment(c: Columns, block: int) -> None:
    """Give back a plain segment whose only block is in no index."""
    address = c.blocks[ADDRESS][block]
    account(c, SEGMENT_FREE, address, c.blocks[SIZE][block])
    drop_span(c, address)
    drop_row(c, block)


@jit
def whole_handles(c: Columns, block: int) -> tuple[int, int]:
    """From where to where whole handles lie inside an expandable block; none where not less."""
    blocks = c.blocks
    handle = handle_size(c, blocks[ARENA][block])
    base = reservation_start(c, block)
    address, size = blocks[ADDRESS][block], blocks[SIZE][block]
    begin = base + (address - base + handle - 1) // handle * handle
    return begin, base + (address + size - base) // handle * handle


@jit
def unmap_block(c: Columns, block: int) -> None:
    """Unmap the whole handles inside a free expandable block."""
    begin, end = whole_handles(c, block)
    if begin < end:
        unmap_range(c, block, begin, end)


@jit
def reservation_start(c: Columns, block: int) -> int:
    """The address that an expandable segment's pages are counted from."""
    count = c.scalars[SPANS]
    at = bisect_right(c.spans[START], c.blocks[ADDRESS][block], 0, count)
    return c.spans[START][at - 1]


@jit
def unmap_range(c: Columns, block: int, begin: int, end: int) -> None:
    """Unmap ``begin`` to ``end`` inside a free expandable block that is in the index."""
    blocks = c.blocks
    arena = blocks[ARENA][block]
    address, size = blocks[ADDRESS][block], blocks[SIZE][block]
    drop_free(c, block)
    if begin > address:
        before = new_row(c, address, begin - address, arena, 1)
        old = blocks[PREVIOUS][block]
        blocks[PREVIOUS][before] = old
        blocks[NEXT][before] = block
        blocks[PREVIOUS][block] = before
        if old != NONE:
            blocks[NEXT][old] = before
        index_free(c, before)
    if end < address + size:
        after = new_row(c, end, address + size - end, arena, 1)
        link_after(c, after, block)
        index_free(c, after)
    blocks[ADDRESS][block] = begin
    blocks[SIZE][block] = end - begin
    blocks[STATE][block] = UNMAPPED
    coalesce(c, block)
    index_unmapped(c, block)
    account(c, UNMAP, begin, end - begin)


@jit
def whole_segment(c: Columns, block: int) -> bool:
    """Whether the block is its segment: nothing before it, nothing behind."""
    return c.blocks[PREVIOUS][block] == NONE and c.blocks[NEXT][block] == NONE


@jit
def release_arena(c: Columns, arena: int) -> None:
    """Release every unsplit plain block and every whole page of the free expandable ones."""
    ids = c.free[KEY_BLOCK][arena]
    found = [ids[i] for i in range(c.arenas[FREE_COUNT][arena])]
    for block in found:
        if not c.blocks[EXPANDABLE][block]:
            if whole_segment(c, block):
                release_segment(c, block)
            continue
        unmap_block(c, block)
        if c.blocks[STATE][block] == UNMAPPED and whole_segment(c, block):
            drop_unmapped(c, block)
            drop_span(c, c.blocks[ADDRESS][block])
            drop_row(c, block)


@jit
def release_cached(c: Columns) -> None:
    """Give back all that can be: large pools, then small ones; held private pools keep theirs."""
    for small in range(2):
        for arena in range(c.scalars[ARENAS]):
            if c.arenas[SMALL][arena] == small and not c.arenas[HELD][arena]:
                release_arena(c, arena)


@jit
def release_available(c: Columns, arena: int, size: int) -> bool:
    """Give back oversize blocks until ``size`` bytes went (only with a split limit)."""
    s = c.scalars
    if s[MAX_SPLIT] >= UNLIMITED:
        return False
    wanted = max(size, s[MAX_SPLIT])
    sizes, ids = c.free[KEY_SIZE][arena], c.free[KEY_BLOCK][arena]
    count = c.arenas[FREE_COUNT][arena]
    position = bisect_left(sizes, wanted, 0, count)
    if position < count and not c.blocks[EXPANDABLE][ids[position]]:
        release_segment(c, ids[position])
        return True
    position -= 1
    released = 0
    while position >= 0 and released < wanted and sizes[position] >= s[MAX_SPLIT]:
        block = ids[position]
        if not c.blocks[EXPANDABLE][block]:
            released += c.blocks[SIZE][block]
            release_segment(c, block)
        position -= 1
    return released >= wanted


@jit
def recycle(c: Columns, arena: int, size: int) -> None:
    """Unmap the free pages that a request of ``size`` lacks and no more: those of other arenas
    first, and smallest blocks first, so that large ones stay whole.

    A rule of the lifetime pool, not of torch: there, a request that finds no memory empties the
    whole cache, which the next requests then have to map again.
    """
    s, blocks = c.scalars, c.blocks
    grown = find_expandable(c, arena, size)
    missing = size
    if grown != NONE and blocks[STATE][grown] == FREE:
        missing -= blocks[SIZE][grown]
    ceiling = s[LIMIT] if s[LIMIT] >= 0 else s[CAPACITY]
    lacking = align(missing) - (ceiling - s[RESERVED])
    for offset in range(1, s[ARENAS] + 1):
        other = (arena + offset) % s[ARENAS]
        if c.arenas[HELD][other]:
            continue
        ids = c.free[KEY_BLOCK][other]
        count = c.arenas[FREE_COUNT][other]
        found = [ids[i] for i in range(count)]
        for block in found:
            if lacking > 0 and block != grown and blocks[EXPANDABLE][block]:
                begin, end = whole_handles(c, block)
                begin = max(begin, end - align(lacking))
                if begin < end:
                    lacking -= end - begin
                    unmap_range(c, block, begin, end)


@jit
def collect_garbage(c: Columns) -> None:
    """Give back unsplit large blocks of at least the mean age, until enough bytes went."""
    s, blocks, arenas = c.scalars, c.blocks, c.arenas
    if s[RESERVED] <= s[COLLECT_ABOVE]:
        return
    target = s[RESERVED] - s[COLLECT_ABOVE]
    ages = 0
    count = 0
    for arena in range(s[ARENAS]):
        if arenas[POOL][arena] == 0 and not arenas[SMALL][arena]:
            for i in range(arenas[FREE_COUNT][arena]):
                block = c.free[KEY_BLOCK][arena][i]
                if whole_segment(c, block):
                    ages += arenas[CALLS][arenas[FIRST][arena]] - blocks[AGE][block]
                    count += 1
    collected = 0
    released = True
    while collected < target and released and count > 0:
        threshold = ages / count
        released = False
        for arena in range(s[ARENAS]):
            if arenas[POOL][arena] != 0 or arenas[SMALL][arena]:
                continue
            position = 0
            while position < arenas[FREE_COUNT][arena]:
                block = c.free[KEY_BLOCK][arena][position]
                age = arenas[CALLS][arenas[FIRST][arena]] - blocks[AGE][block]
                if whole_segment(c, block) and not blocks[EXPANDABLE][block] and age >= threshold:
                    released = True
                    collected += blocks[SIZE][block]
                    ages -= age
                    count -= 1
                    release_segment(c, block)
                else:
                    position += 1
    s[COLLECTED] += collected


# Requests.


@jit
def should_split(c: Columns, block: int, size: int) -> bool:
    """Whether a block of which ``size`` bytes are wanted is split, by the allocator's rules."""
    remaining = c.blocks[SIZE][block] - size
    if c.arenas[SMALL][c.blocks[ARENA][block]] or c.scalars[EXPANDABLE_SEGMENTS]:
        return remaining >= MIN_BLOCK
    return size < c.scalars[MAX_SPLIT] and remaining > SMALL_LIMIT


@jit
def take(c: Columns, block: int, size: int, requested: int, split: bool) -> int:
    """Hand out the first ``size`` bytes of a free block that is in no index."""
    blocks = c.blocks
    if split:
        rest = new_row(
            c, blocks[ADDRESS][block] + size, blocks[SIZE][block] - size, blocks[ARENA][block],
            blocks[EXPANDABLE][block],
        )  # fmt: skip
        blocks[SIZE][block] = size
        link_after(c, rest, block)
        index_free(c, rest)
    blocks[STATE][block] = ALLOCATED
    blocks[REQUESTED][block] = requested
    return block


@jit
def malloc(c: Columns, arena: int, size: int, requested: int) -> int:
    """A block for a rounded ``size``, in the allocator's order of attempts; NONE is an OOM."""
    block = find_free(c, arena, size)
    if block == NONE:
        if c.scalars[COLLECT_ABOVE] >= 0:
            collect_garbage(c)
        block = from_device(c, arena, size)
    if block == NONE and release_available(c, arena, size):
        block = from_device(c, arena, size)
    if block == NONE and c.scalars[RECYCLES]:
        recycle(c, arena, size)
        block = from_device(c, arena, size)
    if block == NONE:
        release_cached(c)
        c.scalars[RETRIES] += 1
        block = from_device(c, arena, size)
    if block == NONE:
        return NONE
    return take(c, block, size, requested, should_split(c, block, size))


@jit
def free(c: Columns, block: int) -> None:
    """Return an allocated or pending block to its arena and coalesce."""
    c.blocks[STATE][block] = FREE
    c.blocks[REQUESTED][block] = 0
    coalesce(c, block)
    index_free(c, block)
