"""Hardware counters of ncu and nvprof: the measured side of the streams model."""

from __future__ import annotations

import csv
import io
from collections import defaultdict
from pathlib import Path
from typing import Any

from mmctl.engine.errors import MmctlError

# Names differ by tool and version: the first that is there is taken. Percent of sectors that hit.
HIT_RATES = (
    "lts__t_sector_hit_rate.pct", "lts__average_t_sector_hit_rate.pct",
    "lts__request_total_sectors_hitrate_pct", "l2_tex_hit_rate", "L2 Hit Rate",
)  # fmt: skip
HITS = ("lts__t_sectors_lookup_hit.sum", "lts__t_sectors_lookup_hit")
MISSES = ("lts__t_sectors_lookup_miss.sum", "lts__t_sectors_lookup_miss")
SECTORS = (
    "lts__t_sectors.sum", "lts__t_sectors", "lts__request_total_sectors",
    "l2_tex_read_transactions",
)  # fmt: skip
NO_BANKS = (
    "ncu and nvprof have no counter for DRAM bank conflicts (their bank conflicts are those of "
    "shared memory)"
)


def read(path: Path) -> dict[str, Any]:
    """Miss ratio per stream of a CSV export; ``cases`` and ``absent`` of the streams document.

    Raises MmctlError for a file without any of the known counters.
    """
    kernels = _kernels(path.read_text("utf-8", "replace"), path)
    by_stream: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for stream, values in kernels:
        found = _misses(values)
        if found:
            by_stream[stream].append(found)
    if not by_stream:
        raise MmctlError(
            f"{path} has no last-level cache counter: collect {HIT_RATES[0]} "
            "(ncu --section MemoryWorkloadAnalysis)"
        )
    streams: list[dict[str, Any]] = []
    for stream, rows in sorted(by_stream.items()):
        weight = sum(sectors for sectors, _ in rows)
        missed = sum(sectors * ratio for sectors, ratio in rows)
        streams.append(
            {"stream": stream, "kernels": len(rows), "l2_miss_ratio": missed / weight,
             "sectors": round(weight), "row_conflict_ratio": None}
        )  # fmt: skip
    total = sum(row["sectors"] for row in streams)
    return {
        "basis": "measured",
        "model": {},
        "cases": [
            {
                "schedule": "as_recorded",
                "l2_miss_ratio": sum(s["l2_miss_ratio"] * s["sectors"] for s in streams) / total,
                "row_conflict_ratio": None,
                "streams": streams,
            }
        ],
        "causes": [],
        "absent": {"row_conflict_ratio": NO_BANKS},
    }


def looks_like(start: bytes) -> bool:
    """Whether a file's beginning is that of a counter export."""
    words = (b"==PROF==", b"== NVPROF", b'"Kernel Name"', b'"Metric Name"', b"lts__",
             b"Kernel Name,")  # fmt: skip
    return any(word in start for word in words)


def _kernels(text: str, path: Path) -> list[tuple[str, dict[str, float]]]:
    lines = [line for line in text.splitlines() if line and not line.startswith("==")]
    rows = list(csv.reader(io.StringIO("\n".join(lines))))
    if len(rows) < 2:
        raise MmctlError(f"{path} holds no counters")
    header, body = rows[0], [row for row in rows[1:] if len(row) == len(rows[0])]
    column = {name: index for index, name in enumerate(header)}
    stream_at = column.get("Stream")

    def stream(row: list[str]) -> str:
        return row[stream_at] if stream_at is not None and row[stream_at] else "?"

    if "Metric Name" in column and "Metric Value" in column:
        grouped: dict[tuple[str, str], dict[str, float]] = defaultdict(dict)
        for row in body:
            value = _number(row[column["Metric Value"]])
            if value is not None:
                key = (row[column["ID"]] if "ID" in column else "", stream(row))
                grouped[key][row[column["Metric Name"]]] = value
        return [(key[1], values) for key, values in grouped.items()]
    found = []
    for row in body:
        values = {name: number for name, index in column.items()
                  if (number := _number(row[index])) is not None}  # fmt: skip
        if values:
            found.append((stream(row), values))
    return found


def _number(text: str) -> float | None:
    try:
        return float(text.replace(",", ""))
    except ValueError:
        return None


def _misses(values: dict[str, float]) -> tuple[float, float] | None:
    """(sectors, share that missed) of one kernel."""
    hits, missed = _first(values, HITS), _first(values, MISSES)
    if hits is not None and missed is not None and hits + missed > 0:
        return hits + missed, missed / (hits + missed)
    rate = _first(values, HIT_RATES)
    if rate is None or not 0 <= rate <= 100:
        return None
    return max(_first(values, SECTORS) or 1.0, 1.0), 1 - rate / 100


def _first(values: dict[str, float], names: tuple[str, ...]) -> float | None:
    return next((values[name] for name in names if name in values), None)
