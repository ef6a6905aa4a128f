"""Memory accesses as columns, and the files they come from."""

from __future__ import annotations

import gzip
import re
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from mmctl.engine.access.trace_events import open_binary
from mmctl.engine.errors import MmctlError
from mmctl.engine.records import Access, AnyRecord, Memory

Int = npt.NDArray[np.int64]
LINE_BYTES = 64
_LARGEST_FILE_BYTES = 2 << 30


@dataclass(frozen=True)
class Accesses:
    """Accesses in order: where, how many bytes, load or store, and whose they are.

    ``head``, ``layer``, ``token`` and ``pc`` are −1 and ``cycle`` is the position where the
    source tells nothing; ``stream`` indexes ``streams``.
    """

    name: str
    address: Int
    size_bytes: Int
    store: npt.NDArray[np.bool_]
    cycle: Int
    head: Int
    layer: Int
    token: Int
    pc: Int
    stream: Int
    streams: tuple[str, ...] = ("",)

    def __len__(self) -> int:
        return len(self.address)

    def where(self, keep: Any) -> Accesses:
        """The accesses that ``keep`` selects (a mask or positions)."""
        columns = ("address", "size_bytes", "store", "cycle", "head", "layer", "token", "pc",
                   "stream")  # fmt: skip
        return replace(self, **{column: getattr(self, column)[keep] for column in columns})


def make(
    name: str, address: Any, size_bytes: Any, store: Any, *, cycle: Any = None, head: Any = None,
    layer: Any = None, token: Any = None, pc: Any = None, stream: Any = None,
    streams: tuple[str, ...] = ("",),
) -> Accesses:  # fmt: skip
    """Columns from whatever sequences there are; the absent ones take their neutral value."""
    count = len(address)

    def column(values: Any, neutral: int) -> Int:
        if values is None:
            return np.full(count, neutral, np.int64)
        return np.asarray(values, np.int64)

    try:
        return Accesses(
            name,
            np.asarray(address, np.uint64).astype(np.int64),
            np.maximum(np.asarray(size_bytes, np.int64), 1),
            np.asarray(store, np.bool_),
            np.arange(count) if cycle is None else np.asarray(cycle, np.int64),
            column(head, -1),
            column(layer, -1),
            column(token, -1),
            column(pc, -1),
            column(stream, 0),
            streams,
        )
    except OverflowError:
        raise MmctlError(f"{name} holds a number beyond 64 bits") from None


def from_records(records: Iterable[AnyRecord], name: str) -> Accesses:
    """The access records among ``records``; ``ts_ns`` is the cycle of each.

    A source without any, such as the agent, still tells what it allocates: each allocation
    counts as the write that fills it, in a stream per modality.
    """
    found: list[Access] = []
    allocations: list[Memory] = []
    for record in records:
        if isinstance(record, Access):
            found.append(record)
        elif isinstance(record, Memory) and record.action == "alloc" and record.size_bytes > 0:
            allocations.append(record)
    if not found:
        found = [
            Access(
                ts_ns=made.ts_ns, address=made.address, size_bytes=made.size_bytes, kind="store",
                stream=made.modality,
            )
            for made in allocations
        ]  # fmt: skip
    streams: dict[str, int] = {}
    return make(
        name,
        [record.address for record in found],
        [record.size_bytes for record in found],
        [record.kind == "store" for record in found],
        cycle=[record.ts_ns for record in found],
        head=[_or_minus(record.head) for record in found],
        layer=[_or_minus(record.layer) for record in found],
        token=[_or_minus(record.token_id) for record in found],
        pc=[_or_minus(record.pc) for record in found],
        stream=[streams.setdefault(record.stream or "", len(streams)) for record in found],
        streams=tuple(streams) or ("",),
    )


def _or_minus(value: int | None) -> int:
    return -1 if value is None else value


def records(accesses: Accesses, node: str = "") -> Iterator[Access]:
    """Access records of the columns."""

    def known(value: int) -> int | None:
        return None if value < 0 else value

    rows = zip(
        *(column.tolist() for column in (
            accesses.address, accesses.size_bytes, accesses.store, accesses.cycle, accesses.head,
            accesses.layer, accesses.token, accesses.pc, accesses.stream,
        )), strict=True,
    )  # fmt: skip
    for address, size, store, cycle, head, layer, token, pc, stream in rows:
        yield Access(
            ts_ns=cycle, node=node, address=address, size_bytes=size,
            kind="store" if store else "load", stream=accesses.streams[stream] or None,
            head=known(head), layer=known(layer), token_id=known(token), pc=known(pc),
        )  # fmt: skip


def read(path: Path) -> Accesses:
    """Accesses of an NVBit dump (JSON, msgpack) or an Accel-Sim kernel trace, by content.

    Only global memory counts. Raises MmctlError for anything else.
    """
    try:
        with open_binary(path) as file:
            raw = file.read(_LARGEST_FILE_BYTES + 1)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise MmctlError(f"{path} is damaged or was cut: {error}") from None
    if len(raw) > _LARGEST_FILE_BYTES:
        raise MmctlError(f"{path} is larger than {_LARGEST_FILE_BYTES >> 30} GiB: cut it first")
    if not raw:
        raise MmctlError(f"{path} is empty")
    if raw.lstrip()[:1] == b"-" and b"kernel name" in raw[:4096]:
        return _accelsim(raw, path)
    try:
        content = (
            msgspec.json.decode(raw) if raw.lstrip()[:1] in (b"[", b"{")
            else msgspec.msgpack.decode(raw)
        )  # fmt: skip
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        # What is no text might be anything: only of JSON is it of use where it breaks.
        why = f": {error}" if raw.lstrip()[:1] in (b"[", b"{") else ""
        raise MmctlError(
            f"{path} is no access trace (NVBit as JSON or MessagePack, Accel-Sim){why}"
        ) from None
    return _nvbit(content, path)


_WIDTH = re.compile(r"\.(?:[USB]?(8|16|32|64|128))\b")


def _width(opcode: str) -> int:
    """Bytes per thread of a SASS load or store: 4 unless the opcode says otherwise."""
    found = _WIDTH.search(opcode)
    return int(found[1]) // 8 if found else 4


def _nvbit(content: Any, path: Path) -> Accesses:
    items = content.get("accesses", content.get("trace")) if isinstance(content, dict) else content
    if not isinstance(items, list):
        raise MmctlError(f"{path} is no NVBit trace: it is not a list of accesses")
    address: list[int] = []
    size: list[int] = []
    store: list[bool] = []
    pc: list[int] = []
    cycle: list[int] = []
    launch: list[Any] = []
    for position, item in enumerate(items):
        access = _nvbit_item(item)
        if access is None:
            continue
        opcode, offset, is_store, addresses = access
        width = _width(opcode)
        kernel = item.get("grid_launch_id", 0) if isinstance(item, dict) else 0
        for value in addresses:
            if value:
                launch.append(kernel)
                address.append(value)
                size.append(width)
                store.append(is_store)
                pc.append(offset)
                cycle.append(position)
    if not address:
        raise MmctlError(f"{path} holds no access to global memory")
    kernels = {kernel: number for number, kernel in enumerate(dict.fromkeys(launch))}
    return make(
        path.name, address, size, store, pc=pc, cycle=cycle,
        stream=[kernels[kernel] for kernel in launch],
        streams=tuple(f"kernel {kernel}" for kernel in kernels) if len(kernels) > 1 else ("",),
    )  # fmt: skip


_STORES = ("ST", "RED", "ATOM")


def _nvbit_item(item: Any) -> tuple[str, int, bool, list[int]] | None:
    """Opcode, offset, store and addresses of one warp instruction, or None.

    Arrays hold the same fields in orders that differ between tracers: the opcode is the first
    text, its offset follows, the next text is the memory space, and the addresses are the first
    list behind it that holds any.
    """
    if isinstance(item, list):
        at = next((i for i, value in enumerate(item) if isinstance(value, str)), None)
        if at is None or len(item) < at + 4 or not isinstance(item[at + 1], int):
            return None
        rest = item[at + 2 :]
        space_at = next((i for i, value in enumerate(rest) if isinstance(value, str)), len(rest))
        lists = [value for value in rest[space_at + 1 :] if isinstance(value, list)]
        item = {
            "instr_opcode": item[at],
            "instr_offset": item[at + 1],
            "instr_mem_space": rest[space_at] if space_at < len(rest) else "None",
            "addrs": next((value for value in lists if _are_addresses(value)), None),
        }
    if not isinstance(item, dict) or not isinstance(item.get("addrs"), list):
        return None
    if str(item.get("instr_mem_space", "Global")).lower() not in ("global", "generic"):
        return None
    opcode = str(item.get("instr_opcode", ""))
    offset = item.get("instr_offset")
    return (
        opcode,
        offset if isinstance(offset, int) else -1,
        opcode.startswith(_STORES) or bool(item.get("instr_is_store")),
        [a for a in item["addrs"] if isinstance(a, int)],
    )


def _are_addresses(values: list[Any]) -> bool:
    return any(isinstance(value, int) and value > 1 << 16 for value in values)


def _accelsim(raw: bytes, path: Path) -> Accesses:
    """Warp instructions: ``PC mask dests [regs] opcode srcs [regs] width mode addresses``."""
    address: list[int] = []
    size: list[int] = []
    store: list[bool] = []
    pcs: list[int] = []
    cycle: list[int] = []
    has_line_numbers = b"-enable lineinfo = 1" in raw
    for position, line in enumerate(raw.decode("utf-8", "replace").splitlines()):
        words = line.split()
        if len(words) < 6 or not re.fullmatch(r"[0-9a-f]+", words[0]):
            continue
        try:
            found = _accelsim_line(words[1:] if has_line_numbers else words)
        except (ValueError, IndexError):
            continue
        if found is None:
            continue
        pc, width, is_store, addresses = found
        for value in addresses:
            address.append(value)
            size.append(width)
            store.append(is_store)
            pcs.append(pc)
            cycle.append(position)
    if not address:
        raise MmctlError(f"{path} holds no access to global memory")
    return make(path.name, address, size, store, pc=pcs, cycle=cycle)


def _accelsim_line(words: list[str]) -> tuple[int, int, bool, list[int]] | None:
    pc, mask = int(words[0], 16), int(words[1], 16)
    at = 3 + int(words[2])
    opcode = words[at]
    at += 1
    at += 1 + int(words[at])
    width = int(words[at])
    if width == 0 or not re.match(r"(LD|ST|LDG|STG|RED|ATOM|ATOMG)(\.|$)", opcode):
        return None
    mode, rest = int(words[at + 1]), words[at + 2 :]
    active = [lane for lane in range(32) if mask >> lane & 1]
    if mode == 0:  # every address
        values = [int(word, 16) for word in rest[: len(active)]]
    elif mode == 1:  # first address and one stride
        first, stride = int(rest[0], 16), int(rest[1])
        values = [first + stride * index for index in range(len(active))]
    else:  # first address and the difference to each next
        values = [int(rest[0], 16)]
        for word in rest[1 : len(active)]:
            values.append(values[-1] + int(word))
    return pc, width, opcode.startswith(("ST", "RED")), values
