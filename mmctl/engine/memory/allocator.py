"""A device's caching allocator as an exact model: malloc, free, copy, and views to read.

The rules are ``core``'s; here are the caller's nouns: sizes as asked, streams, private pools,
tags. Nothing is imported beyond the standard library and msgspec.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import msgspec

from mmctl.engine.memory import core
from mmctl.engine.memory.settings import Settings, round_size
from mmctl.engine.records import Modality

PoolId = tuple[int, int]
DEFAULT_POOL: PoolId = (0, 0)
GIB = 1 << 30
STATES = ("inactive", "active_allocated", "active_pending_free")
EVENTS = ("segment_alloc", "segment_free", "map", "unmap")


class Tag(NamedTuple):
    """Whose bytes a block holds: the modality, and a name that an operator recognises."""

    modality: Modality = "other"
    holder: str = ""


UNTAGGED = Tag()


class Block(NamedTuple):
    """A block as it was when looked at. Sizes in bytes; ``requested_size`` is 0 when free."""

    address: int
    size: int
    requested_size: int
    state: str
    stream: int
    pool: PoolId
    tag: Tag


class Segment(NamedTuple):
    """A contiguous mapped range, with its blocks in order of address."""

    address: int
    size: int
    stream: int
    pool: PoolId
    small: bool
    expandable: bool
    blocks: tuple[Block, ...]


class DeviceEvent(NamedTuple):
    """What the allocator took from the device or gave back: one of ``EVENTS``."""

    action: str
    address: int
    size: int


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """What is known where a request is refused; the letters are those of the cause definitions.

    ``device_free_bytes`` and ``other_process_bytes`` are None where nothing tells them.
    """

    need_bytes: int
    segment_bytes: int
    free_bytes: int  # F: free in the request's own pool and stream
    all_free_bytes: int  # F*: free in all pools and streams
    pending_bytes: int  # P
    device_free_bytes: int | None  # D
    other_process_bytes: int | None  # O
    releasable_bytes: int  # R
    largest_free_bytes: int  # L
    stream: int = 0
    pool: PoolId = DEFAULT_POOL


class OutOfMemory(Exception):
    """The request cannot be served even after the cache was released."""

    def __init__(self, figures: Figures) -> None:
        super().__init__(f"no memory for {figures.need_bytes} bytes")
        self.figures = figures


class Allocator:
    """The memory of one device behind the caching allocator's rules.

    ``capacity_bytes`` is what the device can give (None: without limit), of which
    ``other_process_bytes`` are held by others. Device events since the last call of
    ``device_events`` are kept, at most a thousand.
    """

    def __init__(
        self,
        settings: Settings | None = None,
        capacity_bytes: int | None = None,
        other_process_bytes: int = 0,
        placement: int = core.LOWEST,
        base_address: int = 0,
    ) -> None:
        self.settings = settings or Settings()
        self.capacity_bytes = capacity_bytes
        self.other_process_bytes = other_process_bytes
        self.base_address = base_address
        self.columns = new_columns(self.settings, self.available_bytes, placement)
        self._arenas: dict[tuple[PoolId, int, bool, str], int] = {}
        self.keys: list[tuple[PoolId, int, bool, str]] = []
        self._live: dict[int, int] = {}
        self._tags: list[Tag] = [UNTAGGED]
        self._tag_numbers: dict[Tag, int] = {UNTAGGED: 0}

    @property
    def available_bytes(self) -> int | None:
        """What the device can give to this allocator in all."""
        if self.capacity_bytes is None:
            return None
        return max(self.capacity_bytes - self.other_process_bytes, 0)

    @property
    def reserved_bytes(self) -> int:
        """What segments hold now, used or cached."""
        return self.columns.scalars[core.RESERVED]

    @property
    def peak_reserved_bytes(self) -> int:
        """The most that segments ever held."""
        return self.columns.scalars[core.PEAK_RESERVED]

    @property
    def device_free_bytes(self) -> int | None:
        """What the device, or the allowance if that is less, still has."""
        available = self.available_bytes
        limit = self.columns.scalars[core.LIMIT]
        if limit >= 0:
            available = limit if available is None else min(available, limit)
        return None if available is None else max(available - self.reserved_bytes, 0)

    def set_other_process_bytes(self, count: int) -> None:
        """Change what others hold of the device."""
        self.other_process_bytes = count
        self.columns.scalars[core.CAPACITY] = _or_none(self.available_bytes)

    def lift_capacity(self) -> None:
        """From now on, give without limit."""
        self.capacity_bytes = None
        self.columns.scalars[core.CAPACITY] = core.NONE
        self.columns.scalars[core.LIMIT] = core.NONE

    def malloc(
        self,
        size: int,
        stream: int = 0,
        pool: PoolId = DEFAULT_POOL,
        tag: Tag = UNTAGGED,
        lifetime: str = "",
    ) -> Block:
        """A block for ``size`` bytes; raises OutOfMemory with the figures of the moment.

        ``lifetime`` names a class of like lifetime; it matters with ``Settings.lifetime_pool``.
        """
        rounded = round_size(size, self.settings.roundup_power2_divisions)
        arena = self.arena(rounded, stream, pool, tag, lifetime)
        c = self.columns
        if core.crowded(c):
            grow(c, len(c.spare))
        row = core.malloc(c, arena, rounded, size)
        if row == core.NONE:
            raise OutOfMemory(self.figures(rounded, arena))
        c.blocks[core.TAG][row] = self._tag_number(tag)
        address = c.blocks[core.ADDRESS][row]
        self._live[address] = row
        return self._block(row)

    def hold(self, row: int, block: Block) -> None:
        """Take what was laid at ``row`` for a live block that was found (see ``adopt``)."""
        c = self.columns
        c.blocks[core.REQUESTED][row] = block.requested_size
        c.blocks[core.TAG][row] = self._tag_number(block.tag)
        self._live[c.blocks[core.ADDRESS][row]] = row

    def free(self, block: Block | int, pending: bool = False) -> None:
        """Free a live block, given itself or by address; KeyError for any other.

        ``pending``: other streams still use it, so that its bytes stay unusable until it is
        freed once more.
        """
        address = block if isinstance(block, int) else block.address
        c = self.columns
        if pending:
            c.blocks[core.STATE][self._live[address - self.base_address]] = core.PENDING
            return
        row = self._live.pop(address - self.base_address)
        if core.crowded(c):
            grow(c, len(c.spare))
        core.free(c, row)

    def release_cached(self) -> None:
        """Give everything that is wholly free back to the device (``empty_cache``)."""
        if core.crowded(self.columns):
            grow(self.columns, len(self.columns.spare))
        core.release_cached(self.columns)

    def copy(self) -> Allocator:
        """An independent allocator in the same state."""
        twin = Allocator.__new__(Allocator)
        twin.__dict__.update(self.__dict__)
        twin.columns = core.Columns(
            blocks=[column[:] for column in self.columns.blocks],
            arenas=[column[:] for column in self.columns.arenas],
            free=[[row[:] for row in rows] for rows in self.columns.free],
            unmapped=[[row[:] for row in rows] for rows in self.columns.unmapped],
            spans=[row[:] for row in self.columns.spans],
            spare=self.columns.spare[:],
            log=[row[:] for row in self.columns.log],
            scalars=self.columns.scalars[:],
        )
        twin._arenas = dict(self._arenas)
        twin.keys = self.keys[:]
        twin._live = dict(self._live)
        twin._tags = self._tags[:]
        twin._tag_numbers = dict(self._tag_numbers)
        return twin

    def device_events(self) -> list[DeviceEvent]:
        """What was taken from the device and given back since this was last asked."""
        kinds, addresses, sizes = self.columns.log
        count = self.columns.scalars[core.LOGGED]
        self.columns.scalars[core.LOGGED] = 0
        return [
            DeviceEvent(EVENTS[kinds[i]], addresses[i] + self.base_address, sizes[i])
            for i in range(count)
        ]

    def live(self, address: int) -> Block | None:
        """The live (allocated or pending) block at an address."""
        row = self._live.get(address - self.base_address)
        return None if row is None else self._block(row)

    def blocks(self) -> Iterator[Block]:
        """Every mapped block by address."""
        for segment in self.segments():
            yield from segment.blocks

    def segments(self) -> list[Segment]:
        """Every contiguous mapped range by address."""
        return mapped_ranges(self.columns, self.keys, self._block)

    def figures(self, need: int, arena: int) -> Figures:
        """What a request of ``need`` (rounded) in ``arena`` finds: the letters of the causes."""
        c = self.columns
        states, sizes = c.blocks[core.STATE], c.blocks[core.SIZE]
        rows = c.free[core.KEY_SIZE]
        everything = sum(sum(row) for row in rows)
        own = [rows[a] for a, key in enumerate(self.keys) if key[:2] == self.keys[arena][:2]]
        pool, stream = self.keys[arena][:2]
        return Figures(
            need_bytes=need,
            segment_bytes=need
            if c.scalars[core.EXPANDABLE_SEGMENTS]
            else core.segment_size(c, need),
            free_bytes=sum(sum(row) for row in own),
            all_free_bytes=everything,
            pending_bytes=sum(
                size for size, state in zip(sizes, states, strict=True) if state == core.PENDING
            ),
            device_free_bytes=self.device_free_bytes,
            other_process_bytes=self.other_process_bytes,
            releasable_bytes=releasable_bytes(c),
            largest_free_bytes=max((row[-1] for row in own if row), default=0),
            stream=stream,
            pool=pool,
        )

    def arena(
        self, rounded: int, stream: int, pool: PoolId, tag: Tag = UNTAGGED, lifetime: str = ""
    ) -> int:
        """The number of the arena that serves a request; made when it is the first."""
        small = rounded <= core.SMALL_LIMIT
        kind: str = tag.modality if self.settings.pool_per_modality else ""
        if self.settings.lifetime_pool and lifetime:
            kind = f"{kind}/{lifetime}"
        key = (pool, stream, small, kind)
        number = self._arenas.get(key)
        if number is None:
            number = self._arenas[key] = len(self.keys)
            self.keys.append(key)
            add_arena(self.columns, pool_number(self.keys, pool), small)
        return number

    def _tag_number(self, tag: Tag) -> int:
        number = self._tag_numbers.get(tag)
        if number is None:
            number = self._tag_numbers[tag] = len(self._tags)
            self._tags.append(tag)
        return number

    def _block(self, row: int) -> Block:
        blocks = self.columns.blocks
        pool, stream, _, _ = self.keys[blocks[core.ARENA][row]]
        state = blocks[core.STATE][row]
        return Block(
            blocks[core.ADDRESS][row] + self.base_address,
            blocks[core.SIZE][row],
            blocks[core.REQUESTED][row],
            STATES[state],
            stream,
            pool,
            self._tags[blocks[core.TAG][row]] if state != core.FREE else UNTAGGED,
        )


def mapped_ranges(
    c: core.Columns, keys: Sequence[tuple[PoolId, int, bool, str]], view: Callable[[int], Block]
) -> list[Segment]:
    """Every contiguous mapped range by address; ``view`` makes a block of its row."""
    states, previous, following = c.blocks[core.STATE], c.blocks[core.PREVIOUS], c.blocks[core.NEXT]
    found = []
    for head, state in enumerate(states):
        if state >= core.UNMAPPED:
            continue
        before = previous[head]
        if before != core.NONE and states[before] != core.UNMAPPED:
            continue
        rows = []
        row = head
        while row != core.NONE and states[row] != core.UNMAPPED:
            rows.append(view(row))
            row = following[row]
        pool, stream, small, _ = keys[c.blocks[core.ARENA][head]]
        start, end = rows[0].address, rows[-1].address + rows[-1].size
        expandable = bool(c.blocks[core.EXPANDABLE][head])
        found.append(Segment(start, end - start, stream, pool, small, expandable, tuple(rows)))
    found.sort()
    return found


def _or_none(count: int | None) -> int:
    return core.NONE if count is None else count


def new_columns(
    settings: Settings, capacity_bytes: int | None, placement: int = core.LOWEST, slots: int = 64
) -> core.Columns:
    """The columns of an allocator that holds nothing yet, as lists."""
    scalars = [0] * core.SCALARS
    limit = core.NONE
    if settings.memory_fraction is not None and capacity_bytes is not None:
        limit = int(settings.memory_fraction * capacity_bytes)
    collect = core.NONE
    if settings.garbage_collection_threshold > 0 and limit >= 0:
        collect = int(settings.garbage_collection_threshold * limit)
    split = settings.max_split_bytes
    # The lifetime pool grows each of its classes in a reserved range of its own, in the smallest
    # pages there are, which move from class to class.
    grows = settings.expandable_segments or settings.lifetime_pool
    scalars[core.EXPANDABLE_SEGMENTS] = int(grows)
    scalars[core.RECYCLES] = int(settings.lifetime_pool)
    scalars[core.MAX_SPLIT] = core.UNLIMITED if split is None else split
    scalars[core.ROUNDING_SLACK] = settings.max_non_split_rounding_bytes
    scalars[core.LARGE_SEGMENT_SIZE] = settings.large_segment_bytes
    scalars[core.COLLECT_ABOVE] = collect
    scalars[core.LIMIT] = limit
    scalars[core.CAPACITY] = _or_none(capacity_bytes)
    # torch reserves 1 1/8 of the device; with no capacity known, of the largest one sold.
    scalars[core.RESERVATION] = (capacity_bytes or 256 * GIB) * 9 // 8
    scalars[core.PLACEMENT] = placement
    scalars[core.GIVEN] = core.NONE
    scalars[core.RANDOM] = 1
    c = core.Columns(
        blocks=[[] for _ in range(core.BLOCK_COLUMNS)],
        arenas=[[] for _ in range(core.ARENA_COLUMNS)],
        free=[[], [], []],
        unmapped=[[], []],
        spans=[[], []],
        spare=[],
        log=[[0] * 1000 for _ in range(3)],
        scalars=scalars,
    )
    grow(c, slots)
    return c


def grow(c: core.Columns, count: int) -> None:
    """``count`` more block slots."""
    start = len(c.spare)
    for number, column in enumerate(c.blocks):
        column.extend([core.DEAD if number == core.STATE else 0] * count)
    c.spare.extend([0] * count)
    spare = c.scalars[core.SPARE]
    c.spare[spare : spare + count] = range(start + count - 1, start - 1, -1)
    c.scalars[core.SPARE] += count


def add_arena(c: core.Columns, pool: int, small: bool) -> None:
    """One more arena of list columns, in pool number ``pool`` (0 is the default pool)."""
    values = {
        core.POOL: pool, core.SMALL: int(small), core.HELD: int(pool != 0),
        core.FIRST: next(
            (
                a for a in range(len(c.arenas[core.POOL]))
                if c.arenas[core.POOL][a] == pool and c.arenas[core.SMALL][a] == small
            ),
            len(c.arenas[core.POOL]),
        ),
    }  # fmt: skip
    for column, row in enumerate(c.arenas):
        row.append(values.get(column, 0))
    for rows in (*c.free, *c.unmapped):
        rows.append([])
    c.scalars[core.ARENAS] += 1


def pool_number(keys: list[tuple[PoolId, int, bool, str]], pool: PoolId) -> int:
    """0 for the default pool, else a number by first appearance."""
    private = list(dict.fromkeys(key[0] for key in keys if key[0] != DEFAULT_POOL))
    return 0 if pool == DEFAULT_POOL else private.index(pool) + 1


def releasable_bytes(c: core.Columns) -> int:
    """Wholly free plain segments and whole pages inside free expandable blocks."""
    blocks = c.blocks
    total = 0
    for arena in range(c.scalars[core.ARENAS]):
        if c.arenas[core.HELD][arena]:
            continue
        for row in c.free[core.KEY_BLOCK][arena]:
            size = blocks[core.SIZE][row]
            if not blocks[core.EXPANDABLE][row]:
                total += size if core.whole_segment(c, row) else 0
                continue
            handle = core.handle_size(c, arena)
            start = blocks[core.ADDRESS][row] - core.reservation_start(c, row)
            total += max((start + size) // handle * handle - -(-start // handle) * handle, 0)
    return total
