"""The emulated pool by row numbers: the allocator's integer core without an object per block.

A virtual run makes millions of allocations. Here a live block is its row in the allocator's
columns, which stays the same until the block is freed, in a copy of the pool too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from mmctl.demo.plan import Tape
from mmctl.engine.memory import core
from mmctl.engine.memory.allocator import Allocator, OutOfMemory, grow, releasable_bytes
from mmctl.engine.records import Modality

BASE_ADDRESS = 0x7F10_0000_0000


class Rows:
    """A pool of ``capacity_bytes`` on one stream; ``changes`` counts what was done to it."""

    def __init__(self, capacity_bytes: int, weights: Sequence[int]) -> None:
        self.allocator = Allocator(capacity_bytes=capacity_bytes, base_address=BASE_ADDRESS)
        self.arenas = tuple(
            self.allocator.arena(size, 0, (0, 0)) for size in (core.SMALL_LIMIT + 1, 1)
        )
        self.held: dict[Modality, int] = {"vision": 0, "text": 0, "other": 0}
        self.changes = 0
        for size_bytes in weights:
            self.malloc(size_bytes, "other")

    def copy(self) -> Rows:
        """An independent pool in the same state, with the same row numbers."""
        twin = Rows.__new__(Rows)
        twin.allocator, twin.arenas = self.allocator.copy(), self.arenas
        twin.held, twin.changes = dict(self.held), self.changes
        return twin

    def malloc(self, size_bytes: int, modality: Modality) -> int:
        """The row of a new block; raises OutOfMemory."""
        (row,) = self.play(((0, size_bytes),), lambda slot: None, modality)
        return row

    def free(self, row: int, modality: Modality) -> None:
        """Free a live block of ``modality``."""
        self.changes += 1
        columns = self.allocator.columns
        self.held[modality] -= columns.blocks[core.SIZE][row]
        core.free(columns, row)

    def play(
        self,
        tape: Tape | Sequence[tuple[int, int]],
        existing: Callable[[int], int | None],
        modality: Modality,
    ) -> list[int]:
        """Run a tape; the rows that it leaves, in the order they were made.

        ``existing`` gives the row, or None, of a slot that the tape frees and did not make.
        Raises OutOfMemory where the pool refuses, with what came before it done.
        """
        self.changes += 1
        columns = self.allocator.columns
        # An allocation takes a row for its rest and one for a new segment, a release none.
        while columns.scalars[core.SPARE] < 2 * len(tape) + 24:
            grow(columns, len(columns.spare))
        large, small = self.arenas
        sizes = columns.blocks[core.SIZE]
        made: dict[int, int] = {}
        bytes_held = self.held[modality]
        for slot, size_bytes in tape:
            if size_bytes:
                rounded = -(-size_bytes // core.MIN_BLOCK) * core.MIN_BLOCK
                arena = small if rounded <= core.SMALL_LIMIT else large
                row = core.malloc(columns, arena, rounded, size_bytes)
                if row == core.NONE:
                    raise OutOfMemory(self.allocator.figures(rounded, arena))
                made[slot] = row
                bytes_held += sizes[row]
                continue
            freed = made.pop(slot) if slot in made else existing(slot)
            if freed is not None:
                bytes_held -= sizes[freed]
                core.free(columns, freed)
        self.held[modality] = bytes_held
        return list(made.values())

    def admits(self, allocations: Sequence[tuple[int, int]]) -> bool:
        """Whether further allocations fit; those that did are kept."""
        try:
            self.play(allocations, lambda slot: None, "other")
        except OutOfMemory:
            return False
        return True

    def requested_bytes(self, row: int) -> int:
        """What was asked for where ``row`` was given."""
        return int(self.allocator.columns.blocks[core.REQUESTED][row])

    @property
    def reserved_bytes(self) -> int:
        """Held of the device."""
        return self.allocator.reserved_bytes

    @property
    def free_bytes(self) -> int:
        """Free inside what is held."""
        return sum(map(sum, self.allocator.columns.free[core.KEY_SIZE]))

    @property
    def largest_free_bytes(self) -> int:
        """The largest free block."""
        return max(
            (row[-1] for row in self.allocator.columns.free[core.KEY_SIZE] if row), default=0
        )

    @property
    def releasable_bytes(self) -> int:
        """What would go back to the device."""
        return releasable_bytes(self.allocator.columns)
