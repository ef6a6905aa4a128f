"""The emulated pool by row numbers: the allocator's integer core without an object per block.

A virtual run makes millions of allocations. Here a live block is its row in the allocator's
columns, which stays the same until the block is freed, in a copy of the pool too.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

from mmctl.demo.plan import Tape
from mmctl.engine.memory import compiled, core, tape
from mmctl.engine.memory.allocator import EVENTS, Allocator, DeviceEvent, Figures, grow
from mmctl.engine.memory.allocator import OutOfMemory as OutOfMemory
from mmctl.engine.records import Modality

BASE_ADDRESS = 0x7F10_0000_0000
SLOTS = 1024  # rows at the start, so that few copies have to grow


class Entries(NamedTuple):
    """A tape in columns, for the loop that plays it: lists, or arrays where it is compiled."""

    slots: Any
    sizes: Any
    makes: int  # slots


class Rows:
    """A pool of ``capacity_bytes`` on one stream; ``changes`` counts what was done to it."""

    def __init__(
        self, capacity_bytes: int, weights: Sequence[int], fast: bool | None = None
    ) -> None:
        """``fast`` runs the tapes compiled; None where they are compiled already."""
        self.capacity_bytes = capacity_bytes
        self.fast = compiled.ready("tape.play") if fast is None else fast
        allocator = Allocator(capacity_bytes=capacity_bytes)
        arenas = [allocator.arena(size, 0, (0, 0)) for size in (core.SMALL_LIMIT + 1, 1)]
        self.columns: Any = allocator.columns
        grow(self.columns, SLOTS)
        self.loop: Any = tape
        if self.fast:
            self.loop = compiled.tape()
            self.columns = compiled.arrays(self.columns)
        self.arenas = self.integers(arenas)
        self.held: dict[Modality, int] = {"vision": 0, "text": 0, "other": 0}
        self.changes = 0
        self.refused_bytes = 0
        for size_bytes in weights:
            self.malloc(size_bytes, "other")

    def integers(self, values: Sequence[int]) -> Any:
        """``values`` as the loop takes them."""
        if not self.fast:
            return list(values)
        import numpy as np

        return np.array(values, np.int64)

    def _filled(self, count: int, value: int) -> Any:
        if not self.fast:
            return [value] * count
        import numpy as np

        return np.full(count, value, np.int64)

    def copy(self) -> Rows:
        """An independent pool in the same state, with the same row numbers."""
        twin = Rows.__new__(Rows)
        twin.__dict__.update(self.__dict__)
        twin.held = dict(self.held)
        c = self.columns
        if self.fast:
            twin.columns = type(c)(*(array.copy() for array in c))
        else:
            twin.columns = core.Columns(
                blocks=[column[:] for column in c.blocks],
                arenas=[column[:] for column in c.arenas],
                free=[[row[:] for row in rows] for rows in c.free],
                unmapped=[[row[:] for row in rows] for rows in c.unmapped],
                spans=[row[:] for row in c.spans],
                spare=c.spare[:],
                log=[row[:] for row in c.log],
                scalars=c.scalars[:],
            )
        return twin

    def malloc(self, size_bytes: int, modality: Modality) -> int:
        """The row of a new block; raises OutOfMemory."""
        found = self.play(((0, size_bytes),), (), modality)
        if found is None:
            raise OutOfMemory(self.figures())
        return found[0]

    def free(self, row: int, modality: Modality) -> None:
        """Free a live block of ``modality``."""
        self.play(((-1, 0),), (row,), modality)

    def play(
        self, steps: Tape | Sequence[tuple[int, int]], existing: Sequence[int], modality: Modality
    ) -> list[int] | None:
        """Run a tape; the rows that it leaves, in the order they were made.

        ``existing`` are the rows (NONE where there is none) that the tape may free and did not
        make: that of slot -1 first, then -2 and so on. None where the pool refuses: what came
        before is done, and ``figures`` tells why.
        """
        self.changes += 1
        # An allocation takes a row for its rest and one for a new segment, a release none.
        while self.columns.scalars[core.SPARE] < 2 * len(steps) + 24:
            self._grow()
        entries = self._entries(steps)
        made, held = self._filled(entries.makes, core.NONE), self._filled(1, 0)
        place = self.loop.play(
            self.columns, entries.slots, entries.sizes, self.integers(existing or (core.NONE,)),
            made, self.arenas, held,
        )  # fmt: skip
        self.held[modality] += int(held[0])
        if place != core.NONE:
            size = int(entries.sizes[place])
            self.refused_bytes = -(-size // core.MIN_BLOCK) * core.MIN_BLOCK
            return None
        rows: list[int] = made if not self.fast else made.tolist()
        return [row for row in rows if row != core.NONE]

    def _entries(self, steps: Tape | Sequence[tuple[int, int]]) -> Entries:
        if len(steps) < 2:
            return self._columns_of(steps)
        # By identity: the tapes are made once and kept, and hashing one costs as much as a run.
        known = _known(self.fast)
        found = known.get(id(steps))
        if found is None or found[0] is not steps:
            found = known[id(steps)] = (steps, self._columns_of(steps))
        return found[1]

    def _columns_of(self, steps: Tape | Sequence[tuple[int, int]]) -> Entries:
        slots = [slot for slot, _ in steps]
        sizes = [size for _, size in steps]
        return Entries(self.integers(slots), self.integers(sizes), max(*slots, 0) + 1)

    def _grow(self) -> None:
        c = compiled.lists(self.columns) if self.fast else self.columns
        grow(c, len(c.spare))
        self.columns = compiled.arrays(c) if self.fast else c

    def admits(self, allocations: Sequence[tuple[int, int]]) -> bool:
        """Whether further allocations fit; those that did are kept."""
        return self.play(allocations, (), "other") is not None

    def requested_bytes(self, row: int) -> int:
        """What was asked for where ``row`` was given."""
        return int(self.columns.blocks[core.REQUESTED][row])

    def free_figures(self) -> tuple[int, int, int]:
        """Free bytes inside what is held, the largest free block, and what would go back."""
        found = self.integers((0, 0, 0))
        self.loop.figures(self.columns, found)
        free, largest, releasable = (int(value) for value in found)
        return free, largest, releasable

    def figures(self) -> Figures:
        """What the request that was refused last found."""
        free, largest, releasable = self.free_figures()
        return Figures(
            need_bytes=self.refused_bytes,
            segment_bytes=int(core.segment_size(self.columns, self.refused_bytes)),
            free_bytes=free, all_free_bytes=free, pending_bytes=0,
            device_free_bytes=self.capacity_bytes - self.reserved_bytes, other_process_bytes=0,
            releasable_bytes=releasable, largest_free_bytes=largest,
        )  # fmt: skip

    @property
    def reserved_bytes(self) -> int:
        """Held of the device."""
        return int(self.columns.scalars[core.RESERVED])

    def device_events(self) -> list[DeviceEvent]:
        """What was taken from the device and given back since this was last asked."""
        kinds, addresses, sizes = self.columns.log
        count = int(self.columns.scalars[core.LOGGED])
        self.columns.scalars[core.LOGGED] = 0
        return [
            DeviceEvent(EVENTS[kinds[i]], int(addresses[i]) + BASE_ADDRESS, int(sizes[i]))
            for i in range(count)
        ]


@cache
def _known(fast: bool) -> dict[int, tuple[Any, Entries]]:
    """Tapes in columns; the tape is kept beside, so that no identity is used twice."""
    return {}
