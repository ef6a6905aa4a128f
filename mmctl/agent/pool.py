"""A device pool of a set capacity, emulated by the caching allocator's rules on real storages.

On a CPU there is no device allocator to run short: this one takes every allocation and release
that a tracker reports, and refuses with torch.OutOfMemoryError where a device of that capacity
would. The allocations are measured; where they lie is modelled.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import cast

import torch

from mmctl.agent.tracker import Label, Tracker
from mmctl.engine.memory.allocator import Allocator, OutOfMemory, Tag
from mmctl.engine.records import AnyRecord, Basis, Memory, MemoryAction
from mmctl.engine.units import show_bytes

LIVE_BYTES = 2**20
"""Allocations from here on are published while they happen; smaller ones only on request."""


class EmulatedPool:
    """The sink of a tracker. ``emit`` receives ``memory`` records; ``tick`` is called after every
    allocation, so that a publisher can show a step in its middle."""

    basis: Basis = "modelled"
    torch_device = "cpu"

    def __init__(
        self,
        capacity_bytes: int,
        device: str,
        node: str,
        emit: Callable[[AnyRecord], None],
        *,
        every_allocation: bool = False,
        base_address: int = 0x7F10_0000_0000,
    ) -> None:
        self.allocator = Allocator(capacity_bytes=capacity_bytes, base_address=base_address)
        self.device, self.node, self.emit = device, node, emit
        self.least_bytes = 0 if every_allocation else LIVE_BYTES
        self.tick: Callable[[], None] = lambda: None
        self.addresses: dict[int, int] = {}
        self.bytes_of: dict[str, int] = {"vision": 0, "text": 0, "other": 0}
        self._sizes: dict[int, tuple[int, Label]] = {}

    @property
    def allocated_bytes(self) -> int:
        """Bytes of live storages, as asked for."""
        return sum(self.bytes_of.values())

    @property
    def reserved_bytes(self) -> int:
        """Bytes that the pool has taken from the device."""
        return self.allocator.reserved_bytes

    def alloc(self, key: int, size_bytes: int, label: Label, address: int = 0) -> None:
        """A storage was made; the pool gives it a place of its own.

        Raises torch.OutOfMemoryError when the device has no room.
        """
        try:
            block = self.allocator.malloc(size_bytes, tag=Tag(label.modality, label.holder))
        except OutOfMemory as error:
            self._segment_events()
            figures = error.figures
            self._memory("oom", 0, figures.need_bytes, label, None)
            raise torch.OutOfMemoryError(
                f"emulated device out of memory: tried to allocate {show_bytes(size_bytes)}; "
                f"{show_bytes(figures.device_free_bytes)} of the device and "
                f"{show_bytes(figures.free_bytes)} of the pool are free, the largest block has "
                f"{show_bytes(figures.largest_free_bytes)}"
            ) from error
        self._segment_events()
        self.addresses[key] = block.address
        self._sizes[key] = (size_bytes, label)
        self.bytes_of[label.modality] += size_bytes
        if size_bytes >= self.least_bytes:
            self._memory("alloc", block.address, size_bytes, label, Tracker.references(key))
        self.tick()

    def free(self, key: int) -> None:
        """A storage was released."""
        address = self.addresses.pop(key)
        size_bytes, label = self._sizes.pop(key)
        self.allocator.free(address)
        self.bytes_of[label.modality] -= size_bytes
        if size_bytes >= self.least_bytes:
            self._memory("free", address, size_bytes, label, 0)

    def release_cached(self) -> None:
        """Give what is wholly free back to the device."""
        self.allocator.release_cached()
        self._segment_events()

    def _segment_events(self) -> None:
        for event in self.allocator.device_events():
            self._memory(cast(MemoryAction, event.action), event.address, event.size, None, None)

    def _memory(
        self, action: MemoryAction, address: int, size: int, label: Label | None, uses: int | None
    ) -> None:
        self.emit(
            Memory(
                ts_ns=time.time_ns(), node=self.node, device=self.device, action=action,
                address=address, size_bytes=size, stream=0, references=uses,
                modality=label.modality if label else "other",
            )
        )  # fmt: skip
