"""A PyTorch memory snapshot: its columns, its settings, and whose memory is whose."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import msgspec

from mmctl.engine.memory.allocator import DEFAULT_POOL, STATES, Block, PoolId, Segment, Tag
from mmctl.engine.memory.columns import ACTIONS, Header
from mmctl.engine.memory.settings import Settings, from_snapshot
from mmctl.engine.modality import Matcher
from mmctl.engine.profiles import ModalityPatterns
from mmctl.engine.records import Modality
from mmctl.engine.untrusted import Limits, RefusedError, read_pickle

if TYPE_CHECKING:
    from numpy import int64
    from numpy.typing import NDArray

    Ints: TypeAlias = NDArray[int64]
else:
    Ints = Any


class Trace(NamedTuple):
    """The history of one device, a column per field; ``pool`` is -1 where it is not recorded."""

    action: Ints
    address: Ints
    size: Ints
    stream: Ints
    time_us: Ints
    stack: Ints
    metadata: Ints
    pool: Ints


class Snapshot(NamedTuple):
    """What a file holds. ``segments`` and ``blocks`` are columns; a segment has ``blocks`` rows
    of the latter, in order."""

    file: str
    era: str
    settings: Settings
    settings_recorded: bool
    pools: list[PoolId]
    strings: list[str]
    segments: dict[str, Ints]
    blocks: dict[str, Ints]
    traces: dict[int, Trace]
    stack_frames: Ints
    stack_starts: Ints
    frames: tuple[Ints, Ints, Ints]  # name, file (numbers of strings), line

    def devices(self) -> list[int]:
        """Every device that has memory or a history."""
        return sorted({*map(int, self.segments["device"]), *self.traces})

    def stack(self, number: int) -> list[tuple[str, str, int]]:
        """The frames (name, file, line) of a stack, most recent first."""
        start, end = self.stack_starts[number], self.stack_starts[number + 1]
        name, file, line = self.frames
        return [
            (self.strings[name[f]], self.strings[file[f]], int(line[f]))
            for f in self.stack_frames[start:end]
        ]


def read(path: Path, limits: Limits | None = None) -> Snapshot:
    """The snapshot in ``path``, opened as a stranger's file; RefusedError for anything else."""
    import numpy as np

    data = read_pickle(path, "mmctl.engine.memory.columns:write", limits or Limits())
    length = int.from_bytes(data[:8], "little")
    header = msgspec.msgpack.decode(data[8 : 8 + length], type=Header)
    columns: dict[str, Ints] = {}
    at = 8 + length
    for name, code, count in header.arrays:
        kind = np.dtype(code)
        columns[name] = np.frombuffer(data, kind, count, at)
        at += count * kind.itemsize
    segments = _named(columns, "segment_")
    blocks = _named(columns, "block_")
    if len(segments["address"]) and int(segments["address"].min()) < 0:
        raise RefusedError(f"{path} holds addresses below zero: no snapshot of torch's")
    traces = {device: Trace(**_named(columns, f"trace{device}_")) for device in header.devices}
    mapped = ACTIONS.index("segment_map")
    expandable = bool(segments["expandable"].any()) or any(
        bool((trace.action == mapped).any()) for trace in traces.values()
    )
    return Snapshot(
        file=str(path),
        era=header.era,
        settings=from_snapshot(header.settings, expandable),
        settings_recorded=bool(header.settings),
        pools=header.pools,
        strings=header.strings,
        segments=segments,
        blocks=blocks,
        traces=traces,
        stack_frames=columns["stack_frames"],
        stack_starts=columns["stack_starts"],
        frames=(columns["frame_name"], columns["frame_file"], columns["frame_line"]),
    )  # fmt: skip


def _named(columns: dict[str, Ints], prefix: str) -> dict[str, Ints]:
    return {
        name[len(prefix) :]: column for name, column in columns.items() if name.startswith(prefix)
    }


def segments_of(snapshot: Snapshot, device: int, tags: Sequence[Tag]) -> list[Segment]:
    """The final segments of a device as views; ``tags`` by stack (see ``stack_tags``)."""
    found = []
    table = {name: column.tolist() for name, column in snapshot.segments.items()}
    blocks = list(
        zip(
            *(snapshot.blocks[name].tolist() for name in ("address", "size", "requested", "state",
            "stack")), strict=True,
        )
    )  # fmt: skip
    at = 0
    for i, owner in enumerate(table["device"]):
        start, at = at, at + table["blocks"][i]
        if owner != device:
            continue
        stream, pool = table["stream"][i], snapshot.pools[table["pool"][i]]
        rows = tuple(
            Block(
                address, size, requested if state else 0, STATES[state], stream, pool,
                tags[stack] if state else Tag(),
            )
            for address, size, requested, state, stack in blocks[start:at]
        )  # fmt: skip
        found.append(
            Segment(
                table["address"][i], table["size"][i], stream, pool, bool(table["small"][i]),
                bool(table["expandable"][i]), rows,
            )
        )  # fmt: skip
    return found


# Whose bytes.


def stack_tags(snapshot: Snapshot, patterns: ModalityPatterns) -> list[Tag]:
    """The tag of every stack: vision if any of its frames is, else text, else other; the holder
    is the innermost Python frame outside torch itself."""
    matcher = Matcher(patterns)
    kinds: dict[int, Modality | None] = {}
    labels: dict[int, tuple[int, str]] = {}
    tags = []
    name, file, line = (column.tolist() for column in snapshot.frames)
    frames, starts = snapshot.stack_frames.tolist(), snapshot.stack_starts.tolist()
    for first, last in pairwise(starts):
        found: Modality = "other"
        best = (9, "")
        for number in frames[first:last]:
            if number not in kinds:
                path = snapshot.strings[file[number]].replace("\\", "/")
                function = snapshot.strings[name[number]]
                near = "/".join(path.split("/")[-3:])
                kinds[number] = matcher.modality(f"{near} {function}") if path != "??" else None
                labels[number] = _label(function, path, line[number])
            kind = kinds[number]
            if kind == "vision" or (kind == "text" and found == "other"):
                found = kind
            if labels[number][0] < best[0]:
                best = labels[number]
        tags.append(Tag(found, best[1]))
    return tags


def _label(function: str, path: str, line: int) -> tuple[int, str]:
    """A rank (the user's Python code first) and how a holder is called."""
    if path.endswith(".py"):
        parts = path.split("/")
        inside = "torch" in parts[:-1]
        return (1 if inside else 0), f"{'/'.join(parts[-2:])}:{line} {function}"
    recorder = any(word in function for word in ("unwind", "CapturedTraceback", "gather_with_cpp"))
    if path in ("", "??") or recorder:
        known = function and not recorder
        return (3 if known else 4), function[:80] if known else ""
    return 2, f"{path.split('/')[-1]}:{line} {function[:80]}"


def metadata_tags(snapshot: Snapshot, patterns: ModalityPatterns) -> list[Modality | None]:
    """What each string, taken as the user's metadata of an allocation, says of its modality."""
    matcher = Matcher(patterns)
    used = {int(n) for trace in snapshot.traces.values() for n in set(trace.metadata.tolist())}
    return [
        matcher.modality(text) if number in used else None
        for number, text in enumerate(snapshot.strings)
    ]


def pool_name(pool: PoolId) -> str:
    """How a pool is shown: ``default`` or its two numbers."""
    return "default" if pool == DEFAULT_POOL else f"{pool[0]}.{pool[1]}"
