"""Out-of-memory errors as torch prints them, parsed into the figures that explain them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import msgspec

from mmctl.engine.memory.allocator import Figures

LONGEST = 1500  # characters of a message, over all its lines
_SIZE = r"([\d.]+)\s*(bytes|B|[KMGT]i?B)"
_UNITS = {"bytes": 1, "B": 1} | {
    f"{prefix}{middle}B": 1 << (10 * power)
    for power, prefix in enumerate("KMGT", 1)
    for middle in ("", "i")
}
_MESSAGE = re.compile(
    r"out of memory\b.{0,60}?Tried to allocate\s+" + _SIZE, re.IGNORECASE | re.DOTALL
)
_PARTS = {
    "capacity_bytes": (rf"total capacity of {_SIZE}", rf"{_SIZE} total capacity"),
    "device_free_bytes": (rf"of which {_SIZE} is free", rf"; {_SIZE} free"),
    "allowed_bytes": (rf"{_SIZE} allowed",),
    "process_bytes": (rf"this process has {_SIZE} memory in use",),
    "allocated_bytes": (
        rf"allocated memory {_SIZE} is allocated by PyTorch", rf"{_SIZE} is allocated by PyTorch",
        rf"{_SIZE} already allocated",
    ),
    "private_bytes": (rf"with {_SIZE} allocated in private pools",),
    "unallocated_bytes": (rf"{_SIZE} is reserved by PyTorch but unallocated",),
    "reserved_bytes": (rf"{_SIZE} reserved in total by PyTorch",),
}  # fmt: skip
_DEVICE = re.compile(r"(?:GPU|NPU|XPU|device)\s+(\d+)", re.IGNORECASE)
_OTHER = re.compile(rf"Process (\d+) has {_SIZE} memory in use")


class Message(msgspec.Struct, frozen=True, kw_only=True):
    """One message. What it does not say is None; sizes are as precise as it prints them."""

    line: int
    device: int | None
    need_bytes: int
    capacity_bytes: int | None = None
    device_free_bytes: int | None = None
    allowed_bytes: int | None = None
    process_bytes: int | None = None
    allocated_bytes: int | None = None
    private_bytes: int | None = None
    unallocated_bytes: int | None = None
    other_processes: tuple[tuple[int, int], ...] = ()

    @property
    def reserved_bytes(self) -> int | None:
        """What torch held: allocated, and reserved but unallocated; None unless both are told."""
        if self.allocated_bytes is None or self.unallocated_bytes is None:
            return None
        return self.allocated_bytes + self.unallocated_bytes

    @property
    def non_torch_bytes(self) -> int | None:
        """What this process holds beside torch: context, graphs, communication buffers."""
        if self.process_bytes is None or self.reserved_bytes is None:
            return None
        return max(self.process_bytes - self.reserved_bytes, 0)

    @property
    def other_bytes(self) -> int | None:
        """What other processes hold, by the list of them or by what is left of the device."""
        if self.other_processes:
            return sum(size for _, size in self.other_processes)
        if None in (self.capacity_bytes, self.device_free_bytes, self.process_bytes):
            return None
        used = (self.device_free_bytes or 0) + (self.process_bytes or 0)
        return max((self.capacity_bytes or 0) - used, 0)

    def figures(self) -> Figures:
        """The figures of the causes. Blocks, streams and pending bytes are not in a message:
        what is reserved but unallocated counts as free, in blocks smaller than the request."""
        free = self.unallocated_bytes or 0
        left = self.device_free_bytes
        if self.allowed_bytes is not None and self.reserved_bytes is not None:
            allowance = max(self.allowed_bytes - self.reserved_bytes, 0)
            left = allowance if left is None else min(left, allowance)
        others = self.other_bytes
        if others is None and None not in (self.capacity_bytes, left, self.reserved_bytes):
            # At most this much is others'; the rest of it is this process's own, beside torch.
            beyond = (self.capacity_bytes or 0) - (left or 0) - (self.reserved_bytes or 0)
            others = 0 if self.need_bytes > free + (left or 0) + max(beyond, 0) else None
        return Figures(
            need_bytes=self.need_bytes,
            segment_bytes=self.need_bytes,
            free_bytes=free,
            all_free_bytes=free,
            pending_bytes=0,
            device_free_bytes=left,
            other_process_bytes=others,
            releasable_bytes=0,
            largest_free_bytes=0,
        )


def find(text: str) -> list[Message]:
    """Every out-of-memory message in a text: a log, or JSON lines of its figures."""
    return list(_find(text))


def _find(text: str) -> Iterator[Message]:
    for number, row in enumerate(text.splitlines(), 1):
        if row.lstrip().startswith("{") and (message := _from_json(number, row)):
            yield message
    places = [found.start() for found in _MESSAGE.finditer(text)]
    line, last = 1, 0
    for start, following in pairwise([*places, len(text)]):
        line += text.count("\n", last, start)
        last = start
        yield _parse(text[start : min(following, start + LONGEST)], line)


def _bytes(found: re.Match[str], group: int = 1) -> int:
    return round(float(found[group]) * _UNITS[found[group + 1]])


def _parse(text: str, line: int) -> Message:
    flat = " ".join(text.split())
    asked = _MESSAGE.search(flat)
    assert asked is not None
    values: dict[str, int] = {}
    for name, patterns in _PARTS.items():
        for pattern in patterns:
            if found := re.search(pattern, flat):
                values[name] = _bytes(found)
                break
    reserved = values.pop("reserved_bytes", None)
    if reserved is not None and "allocated_bytes" in values:
        values.setdefault("unallocated_bytes", max(reserved - values["allocated_bytes"], 0))
    device = _DEVICE.search(flat)
    others = [(int(one[1]), _bytes(one, 2)) for one in _OTHER.finditer(flat)]
    fields: dict[str, Any] = {
        "line": line, "device": int(device[1]) if device else None,
        "need_bytes": _bytes(asked), "other_processes": others, **values,
    }  # fmt: skip
    return msgspec.convert(fields, Message)


_JSON = {
    "need_bytes": ("tried", "need", "requested"), "capacity_bytes": ("capacity", "total"),
    "device_free_bytes": ("free",), "allocated_bytes": ("allocated",),
    "unallocated_bytes": ("reserved_unallocated", "unallocated"),
    "process_bytes": ("process", "in_use"),
}  # fmt: skip


def _from_json(number: int, line: str) -> Message | None:
    try:
        fields: Any = json.loads(line)
    except ValueError:
        return None
    if not isinstance(fields, dict):
        return None
    values: dict[str, int] = {}
    for name, keys in _JSON.items():
        for key in keys:
            size = re.fullmatch(_SIZE, str(fields.get(key, "")).strip())
            if size:
                values[name] = _bytes(size)
                break
    if "need_bytes" not in values or len(values) < 2:
        return None
    return msgspec.convert({"line": number, "device": None, **values}, Message)
