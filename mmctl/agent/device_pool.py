"""The memory pool of a real device: its own caching allocator, labelled by a tracker.

Allocation and refusal are the device's; what lies where is read from its snapshot. Storages get
their label by address, so that blocks of the snapshot carry modality and holder.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, TypeAlias

import torch

from mmctl.agent.pool import LIVE_BYTES, EmulatedPool
from mmctl.agent.tracker import Label, Tracker
from mmctl.engine.memory.adopt import adopt, from_torch
from mmctl.engine.memory.allocator import UNTAGGED, Allocator, Tag
from mmctl.engine.memory.settings import Settings
from mmctl.engine.records import AnyRecord, Basis, Memory, MemoryAction

FRESH_S = 0.005
"""A snapshot this young is still used: one step asks for the allocator several times."""


class DevicePool:
    """The sink of a tracker on ``cuda``, with the same face as an emulated pool.

    ``capacity_bytes`` is the allowance of this process on the device. ``listed`` lists the
    segments of the device (``torch.cuda.memory_snapshot``).
    """

    basis: Basis = "measured"
    torch_device = "cuda"

    def __init__(
        self,
        capacity_bytes: int,
        device: str,
        node: str,
        emit: Callable[[AnyRecord], None],
        *,
        every_allocation: bool = False,
        listed: Callable[[], Any] = torch.cuda.memory_snapshot,
    ) -> None:
        self.capacity_bytes, self.device, self.node, self.emit = capacity_bytes, device, node, emit
        self.least_bytes = 0 if every_allocation else LIVE_BYTES
        self.tick: Callable[[], None] = lambda: None
        self.addresses: dict[int, int] = {}
        self.bytes_of: dict[str, int] = {"vision": 0, "text": 0, "other": 0}
        self._held: dict[int, tuple[int, Label]] = {}
        self._listed = listed
        self._allocator: Allocator | None = None
        self._seen = 0.0

    @property
    def allocator(self) -> Allocator:
        """The device's allocator as its snapshot shows it now, to be read and tried on."""
        if self._allocator is None or time.monotonic() - self._seen > FRESH_S:
            segments = from_torch(self._listed(), self._tag)
            expandable = any(segment.expandable for segment in segments)
            settings = Settings(expandable_segments=expandable)
            self._allocator = adopt(segments, settings, self.capacity_bytes)
            self._seen = time.monotonic()
        return self._allocator

    @property
    def allocated_bytes(self) -> int:
        """Bytes of live storages that the tracker has seen."""
        return sum(self.bytes_of.values())

    @property
    def reserved_bytes(self) -> int:
        """Bytes that the allocator has taken from the device."""
        return self.allocator.reserved_bytes

    def alloc(self, key: int, size_bytes: int, label: Label, address: int = 0) -> None:
        """A storage was made by the device's allocator."""
        self._allocator = None
        self.addresses[key] = address
        self._held[address] = (size_bytes, label)
        self.bytes_of[label.modality] += size_bytes
        if size_bytes >= self.least_bytes:
            self._memory("alloc", address, size_bytes, label, Tracker.references(key))
        self.tick()

    def free(self, key: int) -> None:
        """A storage was released."""
        self._allocator = None
        address = self.addresses.pop(key)
        size_bytes, label = self._held.pop(address)
        self.bytes_of[label.modality] -= size_bytes
        if size_bytes >= self.least_bytes:
            self._memory("free", address, size_bytes, label, 0)

    def release_cached(self) -> None:
        """Give what is wholly free back to the device."""
        torch.cuda.empty_cache()
        self._allocator = None

    def _tag(self, address: int) -> Tag:
        held = self._held.get(address)
        return UNTAGGED if held is None else Tag(held[1].modality, held[1].holder)

    def _memory(
        self, action: MemoryAction, address: int, size: int, label: Label, uses: int
    ) -> None:
        self.emit(
            Memory(
                ts_ns=time.time_ns(), node=self.node, device=self.device, action=action,
                address=address, size_bytes=size, modality=label.modality, references=uses,
            )
        )  # fmt: skip


AgentPool: TypeAlias = EmulatedPool | DevicePool
"""Either pool: what a publisher reads and a server gives memory back to."""
