"""Bandwidth contention between attention heads.

Two figures carry the name BWI: the share of active cycles in which more than one head accesses
memory, and the share of active arbitration windows (32 cycles) in which more than one does.
Both are given, also over all cycles and windows, and beside each what heads would show that
access memory just as often but independently of each other: with rates r, of active windows
1 − Σ rᵢ Π_{j≠i}(1 − rⱼ) / (1 − Π(1 − rⱼ)).

A pair of heads contends when its accesses meet in windows more often than by chance, or meet on
the same lines. Within a layer that is two modalities on one range of keys and values; across
layers it is a cascade, an upper layer's writes meeting a lower layer's reads.
"""

from __future__ import annotations

from typing import Literal

import msgspec
import numpy as np
import numpy.typing as npt

from mmctl.engine.access.accesses import LINE_BYTES, Accesses, Int
from mmctl.engine.errors import MmctlError

WINDOW_CYCLES = 32
CLOSE_CYCLES = 4
BANKS = 32
_CHANCE = 1e-6  # that any pair of independent heads is named
_FEWEST_MEETINGS = 5
_MOST_PAIRS = 50
_MOST_RANGES = 4
Float = npt.NDArray[np.float64]


class Head(msgspec.Struct, frozen=True, kw_only=True):
    """An attention head; absent where the records do not name it."""

    layer: int | None
    head: int | None
    stream: str | None


class Range(msgspec.Struct, frozen=True, kw_only=True):
    """Lines that both heads of a pair touch in the same windows."""

    address: int
    size_bytes: int


class Pair(msgspec.Struct, frozen=True, kw_only=True):
    """Two heads that meet: in how many windows, against how many by chance, and where."""

    heads: tuple[Head, Head]
    mode: Literal["same_layer", "cross_layer", "unknown"]
    windows: int
    expected_windows: float
    excess_ratio: float
    shared_lines: int
    writer: Head | None
    ranges: list[Range]
    banks: list[int]


class Contention(msgspec.Struct, frozen=True, kw_only=True):
    """BWI of a trace and the pairs behind it.

    ``independent_ratio`` and ``excess_ratio`` go with ``bwi_cycles_ratio``; the ones with
    ``windows`` in their name with ``bwi_windows_ratio``.
    """

    heads: int
    accesses: int
    cycles: int
    window_cycles: int
    bwi_cycles_ratio: float
    bwi_windows_ratio: float
    bwi_all_cycles_ratio: float
    bwi_all_windows_ratio: float
    independent_ratio: float
    independent_windows_ratio: float
    excess_ratio: float
    excess_windows_ratio: float
    pairs: list[Pair]
    modes: dict[str, int]


def analyse(
    accesses: Accesses, window_cycles: int = WINDOW_CYCLES, cycles: int | None = None
) -> Contention:
    """Contention of the heads in ``accesses`` over ``cycles`` cycles (their span by default).

    Raises MmctlError when no access names a head.
    """
    known = accesses.where((accesses.head >= 0) | (accesses.layer >= 0))
    if len(known) == 0:
        raise MmctlError(f"{accesses.name} names no head: contention needs records with head")
    heads, owner = _heads(known)
    cycle = known.cycle - known.cycle.min()
    total = max(int(cycle.max()) + 1, cycles or 0)
    line = known.address // LINE_BYTES
    window = cycle // window_cycles
    windows = -(-total // window_cycles)
    by_cycle = _occupancy(cycle, owner, len(heads), total)
    by_window = _occupancy(window, owner, len(heads), windows)
    pairs = _pairs(known, heads, owner, window, windows, line)
    independent = _independent(by_cycle.rates)
    independent_windows = _independent(by_window.rates)
    return Contention(
        heads=len(heads),
        accesses=len(known),
        cycles=total,
        window_cycles=window_cycles,
        bwi_cycles_ratio=by_cycle.of_active,
        bwi_windows_ratio=by_window.of_active,
        bwi_all_cycles_ratio=by_cycle.of_all,
        bwi_all_windows_ratio=by_window.of_all,
        independent_ratio=independent,
        independent_windows_ratio=independent_windows,
        excess_ratio=max(0.0, by_cycle.of_active - independent),
        excess_windows_ratio=max(0.0, by_window.of_active - independent_windows),
        pairs=pairs,
        modes={
            mode: sum(pair.mode == mode for pair in pairs)
            for mode in ("same_layer", "cross_layer", "unknown")
        },
    )


def _heads(accesses: Accesses) -> tuple[list[Head], Int]:
    """The distinct heads, and the number of the head behind each access."""
    rows = np.stack([accesses.layer, accesses.head, accesses.stream], axis=1)
    unique, owner = np.unique(rows, axis=0, return_inverse=True)
    heads = [
        Head(
            layer=None if layer < 0 else layer,
            head=None if head < 0 else head,
            stream=accesses.streams[stream] or None,
        )
        for layer, head, stream in unique.tolist()
    ]
    return heads, owner.reshape(-1).astype(np.int64)


class _Occupancy(msgspec.Struct, frozen=True):
    rates: Float
    of_active: float
    of_all: float


def _occupancy(slot: Int, owner: Int, heads: int, slots: int) -> _Occupancy:
    """How often each head is active, and how often more than one is, over ``slots`` slots."""
    cells = np.unique(slot * heads + owner)
    rates = np.bincount(cells % heads, minlength=heads) / slots
    _, active_heads = np.unique(cells // heads, return_counts=True)
    shared = int((active_heads > 1).sum())
    return _Occupancy(rates, shared / len(active_heads), shared / slots)


def _independent(rates: Float) -> float:
    """Share of active slots with more than one head, for independent heads of these rates."""
    idle = 1 - np.minimum(rates, 1 - 1e-12)
    none = float(np.prod(idle))
    one = none * float((rates / idle).sum())
    return max(0.0, 1 - one / (1 - none)) if none < 1 else 0.0


def _pairs(
    accesses: Accesses, heads: list[Head], owner: Int, window: Int, windows: int, line: Int
) -> list[Pair]:
    both, expected, surprise = _chance(window, owner, len(heads), windows)
    # Meetings within a few cycles stand out where whole windows are crowded.
    cycle = accesses.cycle - accesses.cycle.min()
    _, _, close = _chance(
        cycle // CLOSE_CYCLES, owner, len(heads), int(cycle.max()) // CLOSE_CYCLES + 1
    )
    same_line = _same_line(window, owner, line, len(heads))
    above = np.minimum(surprise, close) < np.log(_CHANCE / both.size)
    on_lines = same_line >= np.maximum(_FEWEST_MEETINGS, 0.1 * both)
    found = np.argwhere(np.triu(above | on_lines, 1))
    strength = (both - expected)[found[:, 0], found[:, 1]] + same_line[found[:, 0], found[:, 1]]
    return [
        _pair(accesses, heads, owner, window, line, i, j, both[i, j], expected[i, j], windows)
        for i, j in found[np.argsort(-strength, kind="stable")][:_MOST_PAIRS].tolist()
    ]


def _chance(slot: Int, owner: Int, heads: int, slots: int) -> tuple[Float, Float, Float]:
    """Per pair: slots with both, as many by chance, and the log of how unlikely that is."""
    cells = np.unique(slot * heads + owner)
    both = _meetings(cells, heads)
    rate = np.bincount(cells % heads, minlength=heads) / slots
    expected = np.outer(rate, rate) * slots
    surprise = np.where(both >= _FEWEST_MEETINGS, _log_tail(both, expected), 0.0)
    return both, expected, surprise


def _log_tail(count: Float, mean: Float) -> Float:
    """Chernoff's bound on the log of the chance that a Poisson count reaches ``count``."""
    mean = np.maximum(mean, 1e-9)
    bound = count - mean - count * np.log(np.maximum(count, 1e-9) / mean)
    result: Float = np.where(count > mean, bound, 0.0)
    return result


def _meetings(cells: Int, heads: int) -> Float:
    """Windows in which both of two heads are active, for all pairs."""
    found = np.zeros((heads, heads))
    slot, owner = cells // heads, cells % heads
    first = np.flatnonzero(np.concatenate(([True], slot[1:] != slot[:-1])))
    bounds = np.append(first, len(slot))
    for low in range(0, len(first), 4096):
        high = min(low + 4096, len(first))
        part = slice(bounds[low], bounds[high])
        _, row = np.unique(slot[part], return_inverse=True)
        active = np.zeros((high - low, heads), np.float32)
        active[row.reshape(-1), owner[part]] = 1
        found += active.T @ active
    return found


def _same_line(window: Int, owner: Int, line: Int, heads: int) -> Float:
    """How often two heads touch one line in one window, for all pairs."""
    rows = np.unique(np.stack([window, line, owner], axis=1), axis=0)
    change = np.any(rows[1:, :2] != rows[:-1, :2], axis=1)
    group = np.concatenate(([0], np.cumsum(change)))
    members = np.bincount(group)
    found = np.zeros((heads, heads))
    shared = members[group] > 1
    rows, group = rows[shared], group[shared]
    # Pairs of neighbours in a group, then of next but one, and so on: groups are small.
    for step in range(1, int(members.max()) if len(members) else 1):
        near = group[step:] == group[:-step] if step < len(group) else np.empty(0, np.bool_)
        if not near.any():
            break
        a, b = rows[:-step, 2][near], rows[step:, 2][near]
        np.add.at(found, (np.minimum(a, b), np.maximum(a, b)), 1)
    return found


def _pair(
    accesses: Accesses, heads: list[Head], owner: Int, window: Int, line: Int,
    i: int, j: int, both: float, expected: float, windows: int,
) -> Pair:  # fmt: skip
    mine, other = owner == i, owner == j
    met = np.intersect1d(window[mine], window[other])
    in_met = np.isin(window, met)
    lines = np.intersect1d(line[mine & in_met], line[other & in_met])
    banks = np.intersect1d(line[mine & in_met] % BANKS, line[other & in_met] % BANKS)
    writes = [float(accesses.store[owner == h].mean()) for h in (i, j)]
    writer = None
    if abs(writes[0] - writes[1]) > 0.25:
        writer = heads[i] if writes[0] > writes[1] else heads[j]
    a, b = heads[i], heads[j]
    return Pair(
        heads=(a, b),
        mode="unknown" if a.layer is None or b.layer is None
        else "same_layer" if a.layer == b.layer else "cross_layer",
        windows=int(both),
        expected_windows=float(expected),
        excess_ratio=max(0.0, float(both - expected) / windows),
        shared_lines=len(lines),
        writer=writer,
        ranges=_ranges(lines),
        banks=banks.tolist() if len(banks) <= BANKS // 4 else [],
    )  # fmt: skip


def _ranges(lines: Int) -> list[Range]:
    """Runs of neighbouring lines, the longest first."""
    if len(lines) == 0:
        return []
    breaks = np.flatnonzero(np.diff(lines) > 1)
    first = lines[np.concatenate(([0], breaks + 1))]
    last = lines[np.concatenate((breaks, [len(lines) - 1]))]
    order = np.argsort(first - last, kind="stable")[:_MOST_RANGES]
    return [
        Range(address=int(a) * LINE_BYTES, size_bytes=int(b - a + 1) * LINE_BYTES)
        for a, b in zip(first[order], last[order], strict=True)
    ]
