"""Access paths of tokens, rebuilt from trace records and joined to what lies at the addresses.

Records are kept as columns throughout: grouping by token is one stable sort of small integers,
and a path is the runs of records in which instruction and region stay the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from mmctl.engine.access.accesses import Accesses, Int
from mmctl.engine.access.ptx import SPACES, Site
from mmctl.engine.errors import MmctlError

RECORD = np.dtype([("token", "<u8"), ("pc", "<u4"), ("kind", "<u4"), ("address", "<u8")])


class Region(msgspec.Struct, frozen=True, kw_only=True):
    """A tensor, block or segment: where it lies and what it is called."""

    address: int
    size_bytes: int
    name: str
    modality: str | None = None


class Step(msgspec.Struct, frozen=True, kw_only=True):
    """A run of accesses by one instruction to one region."""

    pc: int
    kind: str
    region: str | None
    accesses: int
    size_bytes: int
    first_address: int
    last_address: int
    instruction: str | None = None
    source: str | None = None


class Token(msgspec.Struct, frozen=True, kw_only=True):
    """One token: totals, the regions it touched in order of first touch, and its steps."""

    token_id: int
    accesses: int
    loads: int
    stores: int
    size_bytes: int
    regions: list[str]
    steps: list[Step]
    steps_left_out: int


ACCESS_BYTES = (1, 2, 4, 8, 16, 32)
"""What one load, store or atomic of PTX moves."""


class Columns(msgspec.Struct, frozen=True, kw_only=True):
    """Records as columns, in order of time; ``shared`` marks addresses of shared memory."""

    token: Int
    pc: npt.NDArray[Any]
    store: npt.NDArray[np.bool_]
    shared: npt.NDArray[np.bool_]
    size_bytes: npt.NDArray[Any]
    address: Int


def read_ring(path: Path, count: int | None = None) -> tuple[Columns, int]:
    """Records of a dumped ring, oldest first, and how many were lost to newer ones.

    ``count`` is the module's ``mmctl_count``; without it the ring is taken to have just been
    filled once. Raises MmctlError for a file that is no whole number of records.
    """
    size = path.stat().st_size
    if size == 0 or size % RECORD.itemsize:
        raise MmctlError(
            f"{path} is no ring of records: its {size} bytes are no multiple of {RECORD.itemsize}"
        )
    records = np.fromfile(path, RECORD)
    strange = np.flatnonzero(~np.isin(records["kind"] >> 8, ACCESS_BYTES))
    if len(strange):
        first = int(strange[0])
        raise MmctlError(
            f"{path} is no ring of records: record {first} would be an access of "
            f"{int(records['kind'][first]) >> 8} bytes"
        )
    lost = 0
    if count is not None and count > len(records):
        lost = count - len(records)
        start = count % len(records)
        records = np.concatenate((records[start:], records[:start]))
    elif count is not None:
        records = records[:count]
    kind = records["kind"]
    return Columns(
        token=records["token"].view(np.int64),
        pc=records["pc"],
        store=(kind & 3) != 0,
        shared=(kind & 12) == SPACES.index("shared") << 2,
        size_bytes=kind >> 8,
        address=records["address"].view(np.int64),
    ), lost


def from_accesses(accesses: Accesses) -> Columns:
    """The columns of access records."""
    return Columns(
        token=accesses.token, pc=accesses.pc, store=accesses.store,
        shared=np.zeros(len(accesses), np.bool_), size_bytes=accesses.size_bytes,
        address=accesses.address,
    )  # fmt: skip


def group(token: Int) -> tuple[Int, Int, Int]:
    """(order, first position of each token in it, the tokens); order within a token is kept."""
    low = int(token.min())
    small: Any = token - low
    if int(token.max()) - low < 1 << 16:  # a stable sort of 16-bit numbers is linear
        small = small.astype(np.uint16)
    order = np.argsort(small, kind="stable")
    ordered = token[order]
    first = np.flatnonzero(np.concatenate(([True], ordered[1:] != ordered[:-1])))
    return order, first, ordered[first]


def rebuild(
    columns: Columns,
    regions: Sequence[Region] = (),
    sites: Sequence[Site] = (),
    tokens: Sequence[int] = (),
    most_tokens: int = 100,
    most_steps: int = 200,
) -> tuple[list[Token], dict[str, int]]:
    """Paths of ``tokens`` (else of the first ``most_tokens``), and totals of all.

    Accesses to addresses in no region have none; those to shared memory have region "shared".
    """
    if len(columns.token) == 0:
        raise MmctlError("there are no records")
    order, first, present = group(columns.token)
    last = np.append(first[1:], len(order))
    totals = {
        "records": len(order), "tokens": len(present), "stores": int(columns.store.sum()),
        "size_bytes": int(columns.size_bytes.sum(dtype=np.int64)),
    }  # fmt: skip
    wanted = (
        np.flatnonzero(np.isin(present, np.asarray(tokens, np.int64)))
        if len(tokens)
        else np.arange(min(most_tokens, len(present)))
    )
    by_address = sorted(regions, key=lambda region: region.address)
    by_pc = {site.pc: site for site in sites}
    found = [
        _token(columns, order[first[i] : last[i]], int(present[i]), by_address, by_pc, most_steps)
        for i in wanted.tolist()
    ]
    return found, totals


def locate(address: Int, shared: npt.NDArray[np.bool_], regions: Sequence[Region]) -> Int:
    """The number of each address's region, −1 for none and −2 for shared memory."""
    if not regions:
        return np.where(shared, -2, -1)
    start = np.array([region.address for region in regions], np.int64)
    end = start + np.array([region.size_bytes for region in regions], np.int64)
    place = np.searchsorted(start, address, side="right") - 1
    inside = (place >= 0) & (address < end[np.maximum(place, 0)])
    return np.where(shared, -2, np.where(inside, place, -1))


def _token(
    columns: Columns, rows: Int, token: int, regions: Sequence[Region], sites: dict[int, Site],
    most_steps: int,
) -> Token:  # fmt: skip
    address, pc, store = columns.address[rows], columns.pc[rows], columns.store[rows]
    size = columns.size_bytes[rows].astype(np.int64)
    where = locate(address, columns.shared[rows], regions)
    change = (pc[1:] != pc[:-1]) | (where[1:] != where[:-1]) | (store[1:] != store[:-1])
    begin = np.flatnonzero(np.concatenate(([True], change)))
    end = np.append(begin[1:], len(rows))
    sums = np.add.reduceat(size, begin)
    names = [_name(number, regions) for number in where[begin].tolist()]
    steps = [
        Step(
            pc=int(pc[b]), kind="store" if store[b] else "load", region=name,
            accesses=int(e - b), size_bytes=int(total), first_address=int(address[b]),
            last_address=int(address[e - 1]), **_source(sites.get(int(pc[b]))),
        )
        for b, e, total, name in zip(
            begin[:most_steps].tolist(), end[:most_steps].tolist(), sums.tolist(), names,
            strict=False,
        )
    ]  # fmt: skip
    stores = int(store.sum())
    return Token(
        token_id=token,
        accesses=len(rows),
        loads=len(rows) - stores,
        stores=stores,
        size_bytes=int(size.sum()),
        regions=list(dict.fromkeys(name for name in names if name)),
        steps=steps,
        steps_left_out=max(0, len(begin) - most_steps),
    )


def _name(number: int, regions: Sequence[Region]) -> str | None:
    return "shared" if number == -2 else None if number < 0 else regions[number].name


def _source(site: Site | None) -> dict[str, str | None]:
    if site is None:
        return {}
    source = f"{site.source_file}:{site.source_line}" if site.source_file else None
    return {"instruction": site.instruction, "source": source}
