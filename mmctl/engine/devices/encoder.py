"""Measured tables of encoder attention: a model that holds for head counts it has not seen.

A kernel gives each pair of image and head to the processors by itself, so for one number of
patches and head size the time depends on images × heads alone, in regimes: one wave, several,
all processors busy (see ``regimes``). The mean spread of equal products is 2 to 3 % in the
tables this was made for.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from mmctl.engine.devices import regimes
from mmctl.engine.devices.collectives import require, table_rows
from mmctl.engine.devices.stages import Point, Stage, batch_for, mape
from mmctl.engine.errors import MmctlError, UsageError

COLUMNS = ("batch_size", "isl", "num_heads", "head_dim", "latency")
_WIDTHS = {"float32": 4, "float16": 2, "half": 2, "bfloat16": 2, "fp8": 1, "float8_e4m3fn": 1}


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """One kernel call: ``images`` of ``patches`` each, ``heads`` of ``head_dim`` features."""

    images: int
    patches: int
    heads: int
    head_dim: int
    seconds: float
    width_bytes: int = 2


class Table(msgspec.Struct, frozen=True, kw_only=True):
    """Regimes by (patches, head_dim) over images × heads."""

    fits: dict[tuple[int, int], tuple[regimes.Regime, ...]]


def read(path: Path) -> tuple[str, list[Measured], list[str]]:
    """The system, its measurements and remarks, from Parquet or CSV (``latency`` in ms).

    Raises MmctlError for other columns or for no usable row.
    """
    rows = table_rows(path)
    require(path, rows, COLUMNS)
    found, skipped = [], 0
    for row in rows:
        measured = _row(row)
        if measured is None:
            skipped += 1
        else:
            found.append(measured)
    if not found:
        raise MmctlError(f"no row of {path} holds a shape and a time above zero")
    notes = [f"{path.name}: {skipped} rows without a usable time"] if skipped else []
    system = str(rows[0].get("device") or path.name.split("_encoder_attention")[0])
    return system, found, notes


def _row(row: dict[str, Any]) -> Measured | None:
    try:
        values = [int(float(row[name])) for name in COLUMNS[:4]]
        seconds = float(row["latency"]) / 1e3
    except (TypeError, ValueError, OverflowError):
        return None
    if min(values) < 1 or max(values) > 1e9 or not 0 < seconds < 1e6:
        return None
    images, patches, heads, head_dim = values
    width = _WIDTHS.get(str(row.get("attn_dtype", "bfloat16")).lower(), 2)
    return Measured(
        images=images, patches=patches, heads=heads, head_dim=head_dim, seconds=seconds,
        width_bytes=width,
    )  # fmt: skip


def flops(m: Measured) -> float:
    """Scores and weighted sum: 4 · images · heads · patches² · head_dim."""
    return 4.0 * m.images * m.heads * m.patches**2 * m.head_dim


def size_bytes(m: Measured) -> float:
    """Queries, keys, values and result once each."""
    return 4.0 * m.images * m.heads * m.patches * m.head_dim * m.width_bytes


def fit(measured: Sequence[Measured]) -> Table:
    """Regimes for every (patches, head_dim)."""
    groups: dict[tuple[int, int], list[Measured]] = defaultdict(list)
    for one in measured:
        groups[one.patches, one.head_dim].append(one)
    return Table(
        fits={
            key: regimes.fit(
                [m.images * m.heads for m in group], [m.seconds for m in group]
            ).regimes
            for key, group in sorted(groups.items())
        }
    )


def seconds(table: Table, images: int, patches: int, heads: int, head_dim: int) -> float:
    """The time by ``table``: at its nearest head size, between its patches by powers.

    Beyond the last patches attention grows with their square, below the first it is the first's.
    """
    sizes = sorted({size for _, size in table.fits})
    size = min(sizes, key=lambda known: abs(known - head_dim))
    known = sorted(patches_ for patches_, size_ in table.fits if size_ == size)
    times = [
        float(regimes.predict(table.fits[patches_, size], [images * heads])[0])
        for patches_ in known
    ]
    if patches > known[-1]:
        return times[-1] * (patches / known[-1]) ** 2
    return float(np.exp(np.interp(np.log(patches), np.log(known), np.log(times))))


def judged(
    system: str, measured: Sequence[Measured], hold_out: Collection[int] | None = None
) -> tuple[Stage, Table]:
    """The stage ``encoder_attention``: fitted without the head counts in ``hold_out`` (every
    other one, unless told), its error on them; and the table fitted to all.

    UsageError where that leaves nothing to fit or to hold out.
    """
    heads = sorted({m.heads for m in measured})
    out = set(heads[1::2] if hold_out is None else hold_out)
    seen = [m for m in measured if m.heads not in out]
    absent = {}
    if hold_out is not None and not out & set(heads):
        raise UsageError(f"head counts in the table are {', '.join(map(str, heads))}")
    if not seen:
        raise UsageError("no head count is left to fit: hold out fewer")
    half, whole = fit(seen), fit(measured)
    points = []
    for one in measured:
        key = (one.patches, one.head_dim)
        if key not in half.fits:
            continue
        points.append(
            Point(
                stage="encoder_attention", flops=flops(one), bytes=size_bytes(one),
                shape={"patches": one.patches, "batch": one.images, "heads": one.heads,
                       "head_dim": one.head_dim},
                seconds=one.seconds, fitted=one.heads not in out,
                modelled_s=float(regimes.predict(half.fits[key], [one.images * one.heads])[0]),
            )
        )  # fmt: skip
    kept_out = [p for p in points if not p.fitted]
    if not kept_out:
        absent["mape"] = "one head count only: none to keep out"
    model = {
        "kind": "regimes over batch · heads, for each number of patches and head size",
        "held_out_heads": sorted(out & set(heads)), "basis": "measured",
        "fits": [
            {"patches": patches, "head_dim": head_dim,
             "regimes": [_described(line, patches, head_dim) for line in lines]}
            for (patches, head_dim), lines in whole.fits.items()
        ],
    }  # fmt: skip
    return (
        Stage(
            stage="encoder_attention", system=system, points=points, model=model,
            mape=mape(kept_out) if kept_out else None,
            mape_fitted=mape([p for p in points if p.fitted]), bound=None,
            absent=absent,
        ),
        whole,
    )  # fmt: skip


def _described(line: regimes.Regime, patches: int, head_dim: int) -> dict[str, float | None]:
    """A regime in words of the device: what starts cost, and the rate it computes at."""
    work = 4.0 * patches**2 * head_dim
    return {
        "from_units": line.start, "overhead_s": line.intercept,
        "seconds_per_unit": line.slope, "flops_per_s": work / line.slope if line.slope else None,
    }  # fmt: skip


def advice(
    system: str, measured: Sequence[Measured], table: Table, heads: int, head_dim: int, most: int
) -> list[dict[str, Any]]:
    """How many images to encode at once, by their patches, for a tower of ``heads`` heads.

    Gains are images per second over one at a time: measured where the table holds the shape,
    else by the model; ``most`` is the largest batch to advise.
    """
    times = {(m.patches, m.images): m.seconds for m in measured
             if m.heads == heads and m.head_dim == head_dim}  # fmt: skip
    known = bool(times)
    batches = sorted({m.images for m in measured if m.images <= most} | {1, most})
    rows = []
    for patches in sorted({patches for patches, _ in table.fits}):
        gains, single = {}, _time(times, table, patches, 1, heads, head_dim)
        for batch in batches:
            gains[batch] = batch * single / _time(times, table, patches, batch, heads, head_dim)
        chosen = batch_for(gains, most)
        rows.append(
            {
                "stage": "encoder_attention", "system": system, "patches": patches,
                "heads": heads, "head_dim": head_dim, "batch": chosen,
                "throughput_factor": gains[chosen], "batch_most": most,
                "throughput_factor_most": gains[most], "pays": chosen == most,
                "basis": "measured" if known and (patches, most) in times else "modelled",
            }
        )  # fmt: skip
    return rows


def _time(
    times: dict[tuple[int, int], float], table: Table, patches: int, batch: int, heads: int,
    head_dim: int,
) -> float:  # fmt: skip
    return times.get((patches, batch)) or seconds(table, batch, patches, heads, head_dim)
