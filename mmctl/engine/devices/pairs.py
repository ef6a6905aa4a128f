"""Link classes from matrices of pairs: what the first byte costs, each KiB, and crossing NUMA.

p2pBandwidthLatencyTest and nvbandwidth give one latency and one bandwidth a pair. Within a class
the constants are the medians by relative error; ``numa_us`` is told where pairs of one class
both cross and do not cross NUMA. Crossing is sometimes faster: no sign is assumed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np

from mmctl.engine.devices.links import KIB, PUBLISHED, Fit, Fits, Regime, mape, r2
from mmctl.engine.errors import MmctlError
from mmctl.engine.records import Link

_JUMP = 1.5
"""Links of one class do not differ by more than this factor to the next."""

_FAR = 0.3
"""A pair this far off its class is named."""


def fit(links: Sequence[Link], system: str) -> Fits:
    """A fit for each class in ``links``; pairs that nothing was measured of are left out."""
    groups: dict[str, list[Link]] = defaultdict(list)
    for link in links:
        if link.latency_us is not None or link.bandwidth_bytes_per_s is not None:
            groups[link.link_class].append(link)
    if "unknown" in groups:
        groups |= _clusters(groups.pop("unknown"))
    if not groups:
        raise MmctlError("no link is measured: give a matrix of latencies or bandwidths as well")
    fits = [_fitted(system, name, group) for name, group in sorted(groups.items())]
    rows = [
        (found, link, *values)
        for found, (_, group) in zip(fits, sorted(groups.items()), strict=True)
        for link in group
        for values in _compared(found, link)
    ]
    return _judged(fits, rows, list(links))


def _clusters(links: list[Link]) -> dict[str, list[Link]]:
    """Links of no known class, parted where the measured figure jumps.

    By bandwidth where every pair has one, else by latency; a class is named by its middle.
    """
    by_rate = all(link.bandwidth_bytes_per_s for link in links)

    def figure(link: Link) -> float:
        return (link.bandwidth_bytes_per_s if by_rate else link.latency_us) or 0.0

    parts: list[list[Link]] = []
    for link in sorted(links, key=figure):
        if not parts or figure(link) > _JUMP * figure(parts[-1][-1]):
            parts.append([])
        parts[-1].append(link)
    named = {}
    for part in parts:
        middle = figure(part[len(part) // 2])
        tag = f"{middle / 1e9:.3g} GB/s" if by_rate else f"{middle:.3g} µs"
        named["unknown" if len(parts) == 1 else f"unknown ({tag})"] = part
    return named


def _fitted(system: str, name: str, group: list[Link]) -> Fit:
    absent = {"r2": "constants of one class explain no variance within it"}
    latencies = [link.latency_us for link in group if link.latency_us]
    rates = [link.bandwidth_bytes_per_s for link in group if link.bandwidth_bytes_per_s]
    intercept = numa = slope = None
    crossing = {link.crosses_numa for link in group}
    if latencies:
        inside = [k.latency_us for k in group if k.latency_us and not k.crosses_numa]
        across = [k.latency_us for k in group if k.latency_us and k.crosses_numa]
        intercept = _centre(inside or across)
        if inside and across:
            numa = _centre(across) - intercept
    else:
        absent["intercept_us"] = "no latency was measured"
    if numa is None:
        absent["numa_us"] = (
            "no topology tells which pairs cross" if crossing == {None}
            else "all pairs of this class do the same; it is in the intercept"
        )  # fmt: skip
    if rates:
        slope = _centre([KIB / rate * 1e6 for rate in rates])
    else:
        absent["us_per_kib"] = "no bandwidth was measured"
    if name.startswith("unknown"):
        absent["link_class"] = "matrices do not tell it; give the topology beside them"
    found = Fit(
        system=system, operation="pair", dtype="bytes", link_class=name, ranks=2,
        crosses_numa=crossing.pop() if len(crossing) == 1 else None, intercept_us=intercept,
        us_per_kib=slope, numa_us=numa, points=len(group), r2=None, r2_trimmed=None, mape=0.0,
        mape_small=None, mape_held_out=_held_out(latencies) if latencies else None,
        regimes=(Regime(from_bytes=0.0, intercept_us=intercept or 0.0, us_per_kib=slope or 0.0),),
        absent=absent,
    )  # fmt: skip
    return _with_errors(found, group)


def _with_errors(found: Fit, group: list[Link]) -> Fit:
    import msgspec

    pairs = [values for link in group for values in _compared(found, link)]
    small = [(ours, real) for kind, ours, real in pairs if kind == "latency_us"]
    return msgspec.structs.replace(
        found,
        mape=mape(*np.array([(ours, real) for _, ours, real in pairs], float).T),
        mape_small=mape(*np.array(small, float).T) if small else None,
    )


def _centre(values: list[float]) -> float:
    """The value of least summed relative error: the median weighted by one over the value."""
    ordered = np.sort(np.array(values, float))
    weights = np.cumsum(1 / ordered)
    return float(ordered[int(np.searchsorted(weights, weights[-1] / 2))])


def _held_out(latencies: list[float]) -> float | None:
    """Mean relative error of each pair against the others of its class."""
    if len(latencies) < 3:
        return None
    errors = [
        abs(_centre(latencies[:n] + latencies[n + 1 :]) / value - 1)
        for n, value in enumerate(latencies)
    ]
    return float(np.mean(errors))


def _compared(found: Fit, link: Link) -> list[tuple[str, float, float]]:
    """Modelled and measured latency, and time of a KiB, where the pair has them."""
    rows = []
    if link.latency_us and found.intercept_us is not None:
        ours = found.intercept_us + (found.numa_us or 0.0) * bool(link.crosses_numa)
        rows.append(("latency_us", ours, link.latency_us))
    if link.bandwidth_bytes_per_s and found.us_per_kib is not None:
        rows.append(("us_per_kib", found.us_per_kib, KIB / link.bandwidth_bytes_per_s * 1e6))
    return rows


def _judged(fits: list[Fit], rows: list[tuple[Any, ...]], links: list[Link]) -> Fits:
    buckets: list[dict[str, Any]] = []
    outliers: list[dict[str, Any]] = []
    for kind in ("latency_us", "us_per_kib"):
        pairs = [(ours, real) for _, _, name, ours, real in rows if name == kind]
        if pairs:
            ours, real = np.array(pairs, float).T
            buckets.append(
                {"figure": kind, "points": len(pairs), "mape": mape(ours, real),
                 "r2": r2(ours, real)}
            )  # fmt: skip
    for found, link, kind, ours, real in rows:
        if abs(ours / real - 1) > _FAR:
            outliers.append(
                {"a": link.a, "b": link.b, "link_class": found.link_class, "figure": kind,
                 "measured": real, "modelled": ours, "error": ours / real - 1}
            )  # fmt: skip
    small: dict[str, Any] = next((row for row in buckets if row["figure"] == "latency_us"), {})
    everything = np.array([(ours, real) for *_, ours, real in rows], float).T
    return Fits(
        fits=fits, mape=mape(*everything), mape_small=small.get("mape"),
        r2=small.get("r2"), operations=[], buckets=buckets,
        outliers=sorted(outliers, key=lambda row: -abs(row["error"])), published=_published(links),
    )  # fmt: skip


def _published(links: list[Link]) -> dict[str, Any]:
    """a · hops + b · crosses NUMA on the latencies: refitted by least squares, and as published."""
    known = [k for k in links if k.latency_us and k.hops is not None]
    document: dict[str, Any] = {
        "formula": "a · hops + b · crosses NUMA, by least squares over all classes",
        "constants": PUBLISHED, "r2": None, "mape": None, "constants_mape": None,
        "constants_r2": None,
    }  # fmt: skip
    if not known:
        document["absent"] = {"r2": "no latency of a pair whose hops are known"}
        return document
    columns = np.array([(k.hops, bool(k.crosses_numa)) for k in known], float)
    real = np.array([k.latency_us for k in known], float)
    refitted = columns @ np.linalg.lstsq(columns, real, rcond=None)[0]
    as_published = columns @ np.array([PUBLISHED["hops_us"], PUBLISHED["numa_us"]])
    return document | {
        "r2": r2(refitted, real), "mape": mape(refitted, real),
        "constants_r2": r2(as_published, real), "constants_mape": mape(as_published, real),
    }  # fmt: skip
