"""A memory snapshot's objects turned into columns, inside the limited child process.

Entries are let go as their columns are filled, so that the two never exist whole together.
Imports only what a process with little memory can afford.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import repeat
from operator import itemgetter
from typing import Any, BinaryIO

import msgspec

from mmctl.engine.untrusted import Limits, RefusedError

ACTIONS = (
    "alloc", "free_requested", "free_completed", "segment_alloc", "segment_free", "segment_map",
    "segment_unmap", "oom", "snapshot", "other",
)  # fmt: skip
STATES = {
    "inactive": 0, "active_allocated": 1, "active_pending_free": 2, "active_awaiting_free": 2,
}  # fmt: skip
CHUNK = 8192
LONGEST = 300  # characters kept of a name or a path

# Newest first: the torch version that brought a key into the file.
_ERAS = (
    ("forward_frames", "2.13"), ("user_metadata", "2.11"), ("compile_context", "2.9"),
    ("external_annotations", "2.6"), ("allocator_settings", "2.4"), ("time_us", "2.2"),
)  # fmt: skip


class Header(msgspec.Struct):
    """What precedes the arrays: everything that is no column, and where each column is."""

    era: str
    settings: dict[str, Any]
    bare: bool
    devices: list[int]
    pools: list[tuple[int, int]]
    strings: list[str]
    arrays: list[tuple[str, str, int]]


def write(objects: Any, limits: Limits, options: bytes, out: BinaryIO) -> None:
    """Write ``objects`` as a header and columns; RefusedError if they are no snapshot."""
    try:
        header, arrays = _Columns(limits).snapshot(objects)
    except (TypeError, KeyError, ValueError, AttributeError, IndexError) as error:
        detail = f"{type(error).__name__}: {error}"[:120]
        raise RefusedError(f"it is a pickle, but no memory snapshot ({detail})") from None
    encoded = msgspec.msgpack.encode(header)
    out.write(len(encoded).to_bytes(8, "little"))
    out.write(encoded)
    for column in arrays:
        out.write(column)


class _Columns:
    """The tables shared by all columns: strings, frames, stacks and pools by number."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.entries = 0
        self.strings: dict[str, int] = {"": 0}
        self.pools: dict[Any, int] = {(0, 0): 0}
        self.frames: dict[int, int] = {}  # id of a frame's dict -> number
        self.frame_columns = tuple(array("i") for _ in range(3))
        self.frame_numbers: dict[tuple[int, int, int], int] = {}
        self.stacks: dict[tuple[int, ...], int] = {(): 0}
        self.stack_frames = array("i")
        self.stack_starts = array("q", [0, 0])
        self.known: dict[int, int] = {}  # id of a list of frames -> stack
        self.seen: set[str] = set()
        self.names: list[tuple[str, str, int]] = []
        self.arrays: list[Any] = []

    def snapshot(self, objects: Any) -> tuple[Header, list[Any]]:
        bare = isinstance(objects, list)
        segments = objects if bare else objects["segments"]
        traces = [] if bare else objects.get("device_traces", [])
        settings = {} if bare else objects.get("allocator_settings") or {}
        if not isinstance(segments, list) or not isinstance(traces, list):
            raise TypeError("segments and device_traces must be lists")
        if not bare:
            self.seen.update(key for key in objects if isinstance(key, str))
        self._segments(segments)
        if bare:
            objects.clear()
        else:
            objects["segments"] = None
        del segments
        devices = []
        for device, trace in enumerate(traces):
            if trace:
                devices.append(device)
                self._trace(device, trace)
        self._add("stack_frames", self.stack_frames)
        self._add("stack_starts", self.stack_starts)
        for name, column in zip(
            ("frame_name", "frame_file", "frame_line"), self.frame_columns, strict=True
        ):
            self._add(name, column)
        header = Header(
            era=self._era(),
            settings=_plain_settings(settings),
            bare=bare,
            devices=devices,
            pools=[_pool(pool) for pool in self.pools],
            strings=list(self.strings),
            arrays=self.names,
        )
        return header, self.arrays

    def _era(self) -> str:
        if "history" in self.seen:
            return "2.0"
        return next((era for key, era in _ERAS if key in self.seen), "2.1")

    def _add(self, name: str, column: array[int]) -> None:
        self.names.append((name, column.typecode, len(column)))
        self.arrays.append(column)

    def _count(self, more: int) -> None:
        self.entries += more
        if self.entries > self.limits.max_entries:
            raise RefusedError(
                f"it has more than {self.limits.max_entries} entries: raise --max-entries"
            )

    def _segments(self, segments: list[Any]) -> None:
        names = (
            "device", "address", "size", "stream", "small", "pool", "expandable", "blocks", "stack",
        )  # fmt: skip
        table = {name: array("q") for name in names}
        blocks = {name: array("q") for name in ("address", "size", "requested", "state", "stack")}
        if segments and isinstance(segments[0], dict):
            self.seen.update(segments[0])
        for segment in sorted(segments, key=itemgetter("device", "address")):
            self._count(1 + len(segment["blocks"]))
            row = (
                segment["device"], segment["address"], segment["total_size"],
                segment.get("stream", 0), int(segment.get("segment_type") == "small"),
                self._pool(segment.get("segment_pool_id", (0, 0))),
                int(bool(segment.get("is_expandable", False))), len(segment["blocks"]),
                self._stack(segment.get("frames") or ()),
            )  # fmt: skip
            for name, value in zip(names, row, strict=True):
                table[name].append(value)
            self._blocks(segment, blocks)
        for name, column in table.items():
            self._add(f"segment_{name}", column)
        for name, column in blocks.items():
            self._add(f"block_{name}", column)

    def _blocks(self, segment: dict[str, Any], columns: dict[str, array[int]]) -> None:
        at = segment["address"]
        total = 0
        for block in segment["blocks"]:
            history = block.get("history")
            frames = block.get("frames")
            if history:
                frames = history[0].get("frames")
            if "history" in block:
                self.seen.add("history")
            size = block["size"]
            if size <= 0:
                raise ValueError("a block without bytes")
            columns["address"].append(block.get("address", at + total))
            columns["size"].append(size)
            columns["requested"].append(block.get("requested_size", size))
            columns["state"].append(STATES[block["state"]])
            columns["stack"].append(self._stack(frames or ()))
            total += size
        if total != segment["total_size"]:
            raise ValueError(f"the blocks of segment {segment['address']:#x} do not add up")

    def _trace(self, device: int, trace: list[Any]) -> None:
        self._count(len(trace))
        self.seen.update(key for key in trace[0] if isinstance(key, str))
        names = ("action", "address", "size", "stream", "time_us", "stack", "metadata", "pool")
        table = {name: array("q") for name in names}
        table["action"], table["stack"] = array("B"), array("i")
        table["metadata"], table["pool"] = array("i"), array("i")
        for start in range(0, len(trace), CHUNK):
            part = trace[start : start + CHUNK]
            trace[start : start + CHUNK] = repeat(None, len(part))
            for name, values in zip(names, self._chunk(part), strict=True):
                table[name].extend(values)
        for name, column in table.items():
            self._add(f"trace{device}_{name}", column)

    def _chunk(self, part: list[Any]) -> Sequence[Sequence[int]]:
        """The columns of some entries. Most files have one shape of entry: the quick way
        takes it by ``itemgetter``; entries of another shape (an ``oom``) are made to fit."""
        optional = ("time_us", "frames", "user_metadata", "pool_id")
        first = part[0]
        present = [key for key in optional if key in first]
        keys = ("action", "addr", "size", "stream", *present)
        take = itemgetter(*keys)
        try:
            rows = list(map(take, part))
        except KeyError:
            rows = [_row(entry, keys) for entry in part]
            self.seen.update(key for entry in part for key in entry if isinstance(key, str))
        columns: dict[str, Any] = dict(zip(keys, zip(*rows, strict=True), strict=True))
        zeros = bytes(len(part))
        return (
            bytes([_ACTION.get(action, _OTHER) for action in columns["action"]]),
            columns["addr"],
            columns["size"],
            columns["stream"],
            columns.get("time_us", zeros),
            self._stacks(columns["frames"]) if "frames" in columns else zeros,
            [self._string(text) for text in columns["user_metadata"]]
            if "user_metadata" in columns
            else zeros,
            [self._pool(pool) for pool in columns["pool_id"]]
            if "pool_id" in columns
            else array("i", [-1]) * len(part),
        )

    def _stacks(self, lists: Sequence[Any]) -> list[int]:
        found = list(map(self.known.get, map(id, lists)))
        if None in found:
            found = [
                self._stack(frames) if number is None else number
                for number, frames in zip(found, lists, strict=True)
            ]
        return found  # type: ignore[return-value]

    def _stack(self, frames: Any) -> int:
        """The number of a stack. The objects of the file all exist from the start, so that no
        two lists or frames of it ever share an id, even after one was let go."""
        number = self.known.get(id(frames))
        if number is not None:
            return number
        key = tuple(map(id, frames))
        number = self.stacks.get(key)
        if number is None:
            if len(key) > self.limits.max_depth:
                raise RefusedError(
                    f"it has a stack of {len(key)} frames: raise --max-depth to read it"
                )
            self._count(len(key))
            number = self.stacks[key] = len(self.stacks)
            self.stack_frames.extend([self._frame(frame) for frame in frames])
            self.stack_starts.append(len(self.stack_frames))
        if isinstance(frames, list):
            self.known[id(frames)] = number
        return number

    def _frame(self, frame: dict[str, Any]) -> int:
        number = self.frames.get(id(frame))
        if number is None:
            key = (
                self._string(frame["name"]), self._string(frame["filename"]), int(frame["line"]),
            )  # fmt: skip
            number = self.frame_numbers.get(key)
            if number is None:
                number = self.frame_numbers[key] = len(self.frame_numbers)
                for column, value in zip(self.frame_columns, key, strict=True):
                    column.append(value)
            self.frames[id(frame)] = number
        return number

    def _string(self, text: Any) -> int:
        if not isinstance(text, str):
            text = "" if text is None else str(text)[:LONGEST]
        number = self.strings.get(text)
        if number is None:
            number = self.strings.setdefault(text[:LONGEST], len(self.strings))
        return number

    def _pool(self, pool: Any) -> int:
        if isinstance(pool, list):
            pool = tuple(pool)
        number = self.pools.get(pool)
        if number is None:
            _pool(pool)
            number = self.pools[pool] = len(self.pools)
        return number


_ACTION = {action: number for number, action in enumerate(ACTIONS)}
_OTHER = _ACTION["other"]
_DEFAULTS = {"stream": 0, "time_us": 0, "frames": [], "user_metadata": "", "pool_id": (0, 0)}


def _row(entry: dict[str, Any], keys: tuple[str, ...]) -> tuple[Any, ...]:
    """An entry that lacks a key; an ``oom`` has ``device_free`` in the place of an address."""
    address = entry.get("addr", entry.get("device_free", 0))
    return tuple(
        address if key == "addr" else entry.get(key, _DEFAULTS[key]) if key in _DEFAULTS
        else entry[key]
        for key in keys
    )  # fmt: skip


def _pool(pool: Any) -> tuple[int, int]:
    a, b = pool
    if not (isinstance(a, int) and isinstance(b, int)):
        raise TypeError("a pool's id is two numbers")
    return a, b


def _plain_settings(settings: dict[str, Any]) -> dict[str, Any]:
    """The settings that are plain values; the rest says nothing to the allocator's rules."""
    plain: dict[str, Any] = {}
    for key, value in settings.items():
        if isinstance(value, (str, int, float, bool)):
            plain[str(key)[:LONGEST]] = value[:LONGEST] if isinstance(value, str) else value
        elif isinstance(value, dict):
            plain[str(key)[:LONGEST]] = {
                str(name)[:LONGEST]: number
                for name, number in value.items()
                if isinstance(number, (int, float))
            }
    return plain
