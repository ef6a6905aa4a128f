"""What a transfer costs: regimes by size for each link class, fitted by relative error.

The published formula, a · hops + b · crosses NUMA + c · size by least squares, reaches R² 0.997
on measured collectives and is wrong by thousands of percent at small sizes. Here each class,
operation and number of ranks has regimes of its own (see ``regimes``); beside every R² stands
the mean relative error, over all sizes and by size.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from mmctl.engine.devices import regimes, table
from mmctl.engine.devices.collectives import Timing
from mmctl.engine.records import Basis, Link

KIB = 1024
SMALL_BYTES = 256 * KIB
"""Messages up to here are small: their error is reported by itself."""

BUCKETS = (KIB, 16 * KIB, 256 * KIB, 4 * KIB**2, 64 * KIB**2)
"""Upper ends of the size buckets in bytes; the last bucket is open."""

PUBLISHED = {"hops_us": 2.1, "numa_us": 0.8, "us_per_kib": 0.012, "r2": 0.987}
"""The published constants; the unit of the last is not stated, KiB is the likeliest."""

_OUTLIER_ERROR = 0.2
_OUTLIER_FACTOR = 5
"""A point is an outlier when it is this far off, and this many times the fit's median error."""


class Regime(msgspec.Struct, frozen=True, kw_only=True):
    """``intercept_us`` + ``us_per_kib`` · KiB for messages from ``from_bytes`` on."""

    from_bytes: float
    intercept_us: float
    us_per_kib: float


class Fit(msgspec.Struct, frozen=True, kw_only=True):
    """One fit. ``intercept_us`` is what the smallest message costs, ``us_per_kib`` what each KiB
    costs in the end; between them the ``regimes`` tell. ``r2_trimmed`` leaves out named outliers,
    ``mape_held_out`` is of sizes that the fit had not seen. ``numa_us`` is what crossing NUMA
    adds within the class."""

    system: str
    operation: str
    dtype: str
    link_class: str
    link_class_basis: Basis | None = None
    ranks: int
    crosses_numa: bool | None
    intercept_us: float | None
    us_per_kib: float | None
    numa_us: float | None
    points: int
    r2: float | None
    r2_trimmed: float | None
    mape: float
    mape_small: float | None
    mape_held_out: float | None
    regimes: tuple[Regime, ...]
    basis: Basis = "measured"
    absent: dict[str, str] = {}


class Placed(msgspec.Struct, frozen=True, kw_only=True):
    """A timing and how its ranks are joined: the slowest class among them, hops on it."""

    timing: Timing
    link_class: str
    link_class_basis: Basis | None = None
    hops: int | None
    crosses_numa: bool | None


class Fits(msgspec.Struct, frozen=True, kw_only=True):
    """All fits of some timings, and how well they hold: over all, by operation, by size."""

    fits: list[Fit]
    mape: float
    mape_small: float | None
    r2: float | None
    operations: list[dict[str, Any]]
    buckets: list[dict[str, Any]]
    outliers: list[dict[str, Any]]
    published: dict[str, Any]


def time_us(fit: Fit, size_bytes: float) -> float:
    """What a message of ``size_bytes`` costs by ``fit``."""
    chosen = fit.regimes[0]
    for regime in fit.regimes:
        if regime.from_bytes <= size_bytes:
            chosen = regime
    return chosen.intercept_us + chosen.us_per_kib * size_bytes / KIB


def placed(timings: Sequence[Timing], links: Sequence[Link]) -> list[Placed]:
    """Each timing with the class that its ranks are joined by, ranks on the first devices.

    ``links`` is the topology; without one the class is that of the published table, where the
    system is in it, else ``unknown``.
    """
    published = {timing.system: table.find(timing.system) for timing in timings}
    slowest: dict[int, Link | None] = {}
    for ranks in {timing.ranks for timing in timings}:
        inside = [link for link in links if _number(link.a) < ranks and _number(link.b) < ranks]
        slowest[ranks] = max(inside, key=lambda link: link.hops or 0, default=None)
    result = []
    for timing in timings:
        link, device = slowest[timing.ranks], published[timing.system]
        by_table = device.link_class if device and not links else None
        result.append(
            Placed(
                timing=timing, link_class=link.link_class if link else by_table or "unknown",
                link_class_basis="measured" if link else "published" if by_table else None,
                hops=link.hops if link else None,
                crosses_numa=link.crosses_numa if link else None,
            )
        )  # fmt: skip
    return result


def _number(device: str) -> float:
    """The number of ``gpu3`` or ``npu3``; beyond all ranks for what is no such device."""
    plain = device.lower()
    digits = plain[3:] if plain[:3] in ("gpu", "npu") else ""
    return int(digits) if digits.isdigit() else float("inf")


def fit(points: Sequence[Placed]) -> Fits:
    """Fits of every system, operation, data type, class and number of ranks in ``points``."""
    groups: dict[tuple[Any, ...], list[Placed]] = defaultdict(list)
    for point in points:
        t = point.timing
        groups[t.system, t.operation, t.dtype, point.link_class, t.ranks].append(point)
    fits, modelled = [], []
    for key, group in sorted(groups.items(), key=lambda item: item[0]):
        found, times = _fitted(key, group)
        fits.append(found)
        modelled += list(zip(group, times, strict=True))
    return _judged(fits, modelled)


def _fitted(key: tuple[Any, ...], group: list[Placed]) -> tuple[Fit, np.ndarray]:
    system, operation, dtype, link_class, ranks = key
    sizes = np.array([p.timing.size_bytes for p in group])
    times = np.array([p.timing.latency_us for p in group])
    found = regimes.fit(sizes.tolist(), times.tolist())
    modelled = regimes.predict(found.regimes, sizes)
    lines = tuple(
        Regime(from_bytes=line.start, intercept_us=line.intercept, us_per_kib=line.slope * KIB)
        for line in found.regimes
    )
    small = sizes <= SMALL_BYTES
    kept = ~_outlying(modelled, times)
    one_size = len(np.unique(sizes)) < 2
    absent = {"numa_us": "ranks on the same devices at every size: crossing NUMA is in all of it"}
    if one_size:
        absent["us_per_kib"] = absent["r2"] = "one size only"
    if found.held_out_error is None:
        absent["mape_held_out"] = "too few sizes to keep some out"
    if link_class == "unknown":
        absent["link_class"] = "timings do not tell it; give the topology beside them"
    fit_ = Fit(
        system=system, operation=operation, dtype=dtype, link_class=link_class,
        link_class_basis=group[0].link_class_basis, ranks=ranks,
        crosses_numa=group[0].crosses_numa, intercept_us=lines[0].intercept_us,
        us_per_kib=None if one_size else lines[-1].us_per_kib, numa_us=None, points=len(group),
        r2=r2(modelled, times), r2_trimmed=r2(modelled[kept], times[kept]),
        mape=mape(modelled, times),
        mape_small=mape(modelled[small], times[small]) if small.any() else None,
        mape_held_out=found.held_out_error, regimes=lines, absent=absent,
    )  # fmt: skip
    return fit_, modelled


def _outlying(modelled: np.ndarray, times: np.ndarray) -> np.ndarray:
    errors = np.abs(modelled / times - 1)
    limit = max(_OUTLIER_ERROR, _OUTLIER_FACTOR * float(np.median(errors)))
    return np.asarray(errors > limit)


def mape(modelled: np.ndarray, times: np.ndarray) -> float:
    """Mean absolute relative error."""
    return float(np.mean(np.abs(modelled / times - 1)))


def r2(modelled: np.ndarray, times: np.ndarray) -> float | None:
    """Share of the variance explained; None where there is none."""
    spread = float(np.sum((times - times.mean()) ** 2)) if len(times) else 0.0
    if spread <= 0:
        return None
    return 1 - float(np.sum((modelled - times) ** 2)) / spread


def _judged(fits: list[Fit], modelled: list[tuple[Placed, float]]) -> Fits:
    """Errors of all fits together; the published formula on the same points."""
    least = _least_squares([point for point, _ in modelled])
    sizes = np.array([point.timing.size_bytes for point, _ in modelled])
    times = np.array([point.timing.latency_us for point, _ in modelled])
    ours = np.array([time for _, time in modelled])
    formula = np.array([_as_published(point) for point, _ in modelled])
    where = [(point.timing.system, point.timing.operation) for point, _ in modelled]
    operations, buckets = [], []
    for system, operation in sorted(set(where)):
        here = np.array([pair == (system, operation) for pair in where])
        small = here & (sizes <= SMALL_BYTES)
        sure = here & ~_outlying(ours, times)
        held = [f for f in fits if (f.system, f.operation) == (system, operation)]
        known = [(f.mape_held_out, f.points) for f in held if f.mape_held_out is not None]
        operations.append(
            {
                "system": system, "operation": operation, "points": int(here.sum()),
                "mape": mape(ours[here], times[here]),
                "mape_small": mape(ours[small], times[small]) if small.any() else None,
                "mape_held_out": sum(e * n for e, n in known) / sum(n for _, n in known)
                if known else None,
                "r2": r2(ours[here], times[here]), "r2_trimmed": r2(ours[sure], times[sure]),
                "least_squares_r2": r2(least[here], times[here]),
                "least_squares_mape": mape(least[here], times[here]),
            }
        )  # fmt: skip
        for low, high in zip((0, *BUCKETS), (*BUCKETS, float("inf")), strict=True):
            inside = here & (sizes > low) & (sizes <= high)
            if inside.any():
                buckets.append(
                    {
                        "system": system, "operation": operation, "above_bytes": low,
                        "up_to_bytes": None if high == float("inf") else high,
                        "points": int(inside.sum()), "mape": mape(ours[inside], times[inside]),
                        "least_squares_mape": mape(least[inside], times[inside]),
                    }
                )  # fmt: skip
    small = sizes <= SMALL_BYTES
    known_hops = ~np.isnan(formula)
    published = {
        "formula": "a · hops + b · crosses NUMA + c · size, by least squares for each fit",
        "r2": r2(least, times), "mape": mape(least, times),
        "mape_small": mape(least[small], times[small]) if small.any() else None,
        "constants": PUBLISHED, "constants_unit": "µs, µs, µs/KiB (the unit of c is not stated)",
        "constants_mape": mape(formula[known_hops], times[known_hops])
        if known_hops.any() else None,
        "constants_r2": r2(formula[known_hops], times[known_hops]) if known_hops.any() else None,
    }  # fmt: skip
    return Fits(
        fits=fits, mape=mape(ours, times),
        mape_small=mape(ours[small], times[small]) if small.any() else None,
        r2=r2(ours, times), operations=operations, buckets=buckets,
        outliers=_named(modelled), published=published,
    )  # fmt: skip


def _named(modelled: list[tuple[Placed, float]]) -> list[dict[str, Any]]:
    """The points that their fit misses by far, the worst first."""
    groups: dict[tuple[Any, ...], list[tuple[Placed, float]]] = defaultdict(list)
    for point, time in modelled:
        t = point.timing
        groups[t.system, t.operation, t.dtype, point.link_class, t.ranks].append((point, time))
    found = []
    for group in groups.values():
        times = np.array([point.timing.latency_us for point, _ in group])
        ours = np.array([time for _, time in group])
        for number in np.flatnonzero(_outlying(ours, times)):
            timing = group[number][0].timing
            found.append(
                {
                    **msgspec.to_builtins(timing), "link_class": group[number][0].link_class,
                    "modelled_us": float(ours[number]),
                    "error": float(ours[number] / times[number] - 1),
                }
            )  # fmt: skip
    return sorted(found, key=lambda row: -abs(row["error"]))


def _least_squares(points: list[Placed]) -> np.ndarray:
    """What plain least squares makes of the same fits: a constant and a slope by size each, the
    published formula where hops and NUMA are the same within a fit."""
    times = np.array([point.timing.latency_us for point in points])
    sizes = np.array([point.timing.size_bytes for point in points])
    keys = [
        (p.timing.system, p.timing.operation, p.timing.dtype, p.link_class, p.timing.ranks)
        for p in points
    ]
    modelled = np.empty(len(points))
    for key in set(keys):
        here = np.array([k == key for k in keys])
        columns = np.stack([np.ones(int(here.sum())), sizes[here]], axis=1)
        found = np.linalg.lstsq(columns, times[here], rcond=None)[0]
        modelled[here] = columns @ found
    return modelled


def _as_published(point: Placed) -> float:
    """The published constants on a point; not a number where the hops are unknown."""
    if point.hops is None:
        return float("nan")
    return (
        PUBLISHED["hops_us"] * point.hops
        + PUBLISHED["numa_us"] * bool(point.crosses_numa)
        + PUBLISHED["us_per_kib"] * point.timing.size_bytes / KIB
    )
