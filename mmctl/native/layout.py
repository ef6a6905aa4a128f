"""The files that the allocation hook shares with mmctl: layout and access (see ``hook.c``)."""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from mmctl.engine import folders
from mmctl.engine.errors import MmctlError

MAGIC = 0x4B484C54434D4D
VERSION = 2
INPUTS, RULES, INSTRUCTIONS, RING, SLOTS = 32, 4, 64, 16384, 65536
MODES = ("off", "observe", "enforce")
ACTIONS = {
    1: "segment_alloc", 2: "segment_free", 3: "map", 4: "unmap", 5: "oom", 6: "refused",
    7: "would_refuse",
}  # fmt: skip
# Inputs by place. The first three the hook knows itself; the others are written by mmctl.
SIGNALS = (
    "size_bytes", "reserved_bytes", "device_free_bytes", "fragmentation_ratio", "vision_tokens",
    "text_tokens", "free_bytes", "largest_free_bytes", "releasable_bytes", "capacity_bytes",
    "allocated_bytes", "vision_bytes", "text_bytes", "headroom_bytes", "conflict_ratio",
    "kv_ratio", "running", "waiting", "total_bytes", "used_bytes",
)  # fmt: skip

_HEAD = struct.Struct("<QIIIIII")
_INPUT = struct.Struct("<dq")
_RULE = struct.Struct("<40sIIqq")
_INSTRUCTION = struct.Struct("<BBHId")
_STATE = struct.Struct("<QIIq4Q4QQQqQQQ")
_EVENT = struct.Struct("<qQQQIiII")
_SEGMENT = struct.Struct("<QQiI")
_RULE_BYTES = _RULE.size + INSTRUCTIONS * _INSTRUCTION.size
_INPUTS_AT = _HEAD.size
_RULES_AT = _INPUTS_AT + INPUTS * _INPUT.size
CONTROL_BYTES = _RULES_AT + RULES * _RULE_BYTES
_HEAD_AT = _STATE.size - 8
_RING_AT = _STATE.size
_SEGMENTS_AT = _RING_AT + RING * _EVENT.size
STATE_BYTES = _SEGMENTS_AT + SLOTS * _SEGMENT.size

LAYOUT = (
    CONTROL_BYTES, _INPUTS_AT, _RULES_AT, _RULE_BYTES, _RULE.size, _INSTRUCTION.size,
    STATE_BYTES, _HEAD_AT, _RING_AT, _EVENT.size, _SEGMENTS_AT, _SEGMENT.size,
)  # fmt: skip


class Instruction(NamedTuple):
    """One step of a compiled rule; ``op`` and ``comparison`` as in ``hook.c``."""

    op: int
    comparison: int = 0
    input: int = 0
    jump: int = 0
    constant: float = 0.0


class HookRule(NamedTuple):
    """A compiled rule with its name, its own mode and the age beyond which input is unknown."""

    name: str
    mode: str
    max_age_s: float
    code: tuple[Instruction, ...]


class HookEvent(NamedTuple):
    """Something that the hook saw."""

    ts_ns: int
    address: int
    size_bytes: int
    stream: int
    action: str
    device: int
    rule: int


class Counters(NamedTuple):
    """What the hook has counted since the process's first CUDA call."""

    pid: int
    started_ns: int
    calls: int
    refused_calls: int
    trips: int
    would_trips: int
    reserved_bytes: int
    peak_bytes: int
    segments: int
    segments_lost: int
    total_bytes: int
    free_bytes: int
    free_ts_ns: int
    pool_reserved_bytes: int
    pool_used_bytes: int
    head: int


def folder() -> Path:
    """Where hooks put their state: shared memory, or the runtime folder."""
    return folders.runtime() / "hook"


class Control:
    """The control file, written by mmctl and read by every hooked process of a run."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            os.ftruncate(descriptor, CONTROL_BYTES)
            self._map = mmap.mmap(descriptor, CONTROL_BYTES)
        finally:
            os.close(descriptor)
        self._generation = 0
        _HEAD.pack_into(self._map, 0, MAGIC, 0, 0, 0, 0, 0, 0)

    def write(self, mode: str, rules: Sequence[HookRule]) -> None:
        """New mode and rules at once: a reader sees the old ones or these."""
        if len(rules) > RULES:
            raise MmctlError(f"the hook takes {RULES} rules, not {len(rules)}")
        self._generation += 1
        struct.pack_into("<I", self._map, 8, self._generation)
        struct.pack_into("<II", self._map, 12, MODES.index(mode), len(rules))
        for place, rule in enumerate(rules):
            if len(rule.code) > INSTRUCTIONS:
                raise MmctlError(f"rule '{rule.name}' is too long for the hook")
            at = _RULES_AT + place * _RULE_BYTES
            name = rule.name.encode()[:39]
            _RULE.pack_into(
                self._map, at, name, MODES.index(rule.mode), len(rule.code),
                round(rule.max_age_s * 1e9), 0,
            )  # fmt: skip
            for number, instruction in enumerate(rule.code):
                _INSTRUCTION.pack_into(
                    self._map, at + _RULE.size + number * _INSTRUCTION.size, *instruction
                )
        self._generation += 1
        struct.pack_into("<I", self._map, 8, self._generation)

    def give(self, signal: str, value: float, ts_ns: int) -> None:
        """A new value of an input that the hook does not know itself."""
        _INPUT.pack_into(self._map, _INPUTS_AT + SIGNALS.index(signal) * _INPUT.size, value, ts_ns)

    def close(self) -> None:
        """Delete the file; processes that have it mapped keep its last rules."""
        self._map.close()
        self.path.unlink(missing_ok=True)


class StateFile:
    """A hooked process as its hook describes it; reading changes nothing."""

    def __init__(self, path: Path) -> None:
        try:
            with open(path, "rb") as file:
                self._map = mmap.mmap(file.fileno(), STATE_BYTES, access=mmap.ACCESS_READ)
        except FileNotFoundError:
            raise
        except (OSError, ValueError) as error:
            raise MmctlError(f"{path} is no state of a hook: {error}") from None
        if _STATE.unpack_from(self._map)[:2] != (MAGIC, VERSION):
            raise MmctlError(f"{path} is no state of a hook of this version")

    def counters(self) -> Counters:
        """The counters as they are now."""
        _, _, pid, *rest = _STATE.unpack_from(self._map)
        return Counters(pid, *rest)

    def events(self, since: int) -> tuple[list[HookEvent], int, int]:
        """Events from number ``since`` on, the next number, and how many were overwritten."""
        (head,) = struct.unpack_from("<Q", self._map, _HEAD_AT)
        first = max(since, head - RING)
        found = [self._event(number) for number in range(first, head)]
        (now,) = struct.unpack_from("<Q", self._map, _HEAD_AT)
        torn = max(0, now - RING - first + 1) if now > head else 0
        return found[torn:], head, first + torn - since

    def _event(self, number: int) -> HookEvent:
        at = _RING_AT + number % RING * _EVENT.size
        ts_ns, address, size, stream, action, device, rule, _ = _EVENT.unpack_from(self._map, at)
        return HookEvent(ts_ns, address, size, stream, ACTIONS.get(action, "?"), device, rule)

    def segments(self) -> Iterator[tuple[int, int, int]]:
        """(address, bytes, device) of every live segment."""
        for address, size, device, _ in _SEGMENT.iter_unpack(self._map[_SEGMENTS_AT:]):
            if address:
                yield address, size, device

    def close(self) -> None:
        """Let go of the mapping."""
        self._map.close()
