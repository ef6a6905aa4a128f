"""``mmctl benchmark pool``: what a lifetime-aware pool gains, and how exact the model is."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from mmctl.cli.app import output, quantity
from mmctl.cli.main import Exit
from mmctl.cli.render import emit, to_table
from mmctl.engine.records import SCHEMA
from mmctl.engine.units import show_bytes


def pool(
    files: Annotated[
        list[Path] | None, typer.Argument(metavar="[SNAPSHOT]...", help="Recorded traces as well.")
    ] = None,
    pairs: Annotated[
        int, typer.Option(metavar="N", min=100, help="Image and text pairs to serve.")
    ] = 1200,
    capacity: Annotated[
        str, typer.Option(metavar="SIZE", help="The device's memory for them.")
    ] = "800MiB",
    entries: Annotated[
        int | None,
        typer.Option(metavar="N", min=1000, help="Measure a trace of N entries, beside torch."),
    ] = None,
) -> int:
    """The default pool against the lifetime-aware one, and the model against a real card.

    Serves one load of a ViT and BERT pair by both pools in the same memory, in the largest
    batches that fit. Memory comes from the allocator's exact model; throughput is modelled
    from a published batching curve and the time that calls to the driver were measured to take
    on an A100 (1 ms for cudaMalloc and cudaFree is assumed). Beside it stands what the load
    would reach without fragmentation and without such calls; it is short of the published
    1.82 ×, because memory acts on throughput by the size of batches alone. The published peaks
    of settings that conflict (max_split_size_mb with expandable_segments) are reproduced.

    With --entries N, measures CPU and memory of explaining such a trace, next to torch's own
    viewer on the same file; with a snapshot, replays it under both pools.

    \b
    Examples:
      mmctl benchmark pool
      mmctl benchmark pool --capacity 500MiB
      mmctl benchmark pool dump.pickle -o json
      mmctl benchmark pool --entries 1000000
    """
    wanted = output()
    capacity_bytes = int(quantity("--capacity", capacity, "bytes"))
    from mmctl.benchmarks import long_trace
    from mmctl.benchmarks import pool as benchmark

    pools = benchmark.compare_pools(pairs, capacity_bytes)
    document: dict[str, Any] = {
        "schema": SCHEMA,
        "capacity_bytes": capacity_bytes,
        "pairs": pairs,
        "published": benchmark.published(),
        "lint": benchmark.conflict_remarks(),
        "pools": pools,
        "bound": benchmark.compare_bound(pairs, capacity_bytes, pools[0]),
        "snapshots": benchmark.compare_snapshots(files or []),
        "long_trace": long_trace.measure(entries) if entries else [],
    }
    rows = [
        {"section": section, **row}
        for section in ("published", "pools", "snapshots", "long_trace")
        for row in document[section]
    ]
    emit(document, rows, wanted, _table(document) if wanted == "table" else None)
    equal = all(row["equal"] for row in document["published"])
    return Exit.DONE if equal else Exit.FAILED


def _table(document: dict[str, Any]) -> str:
    pools = [
        {
            "pool": row["pool"],
            "largest contiguous free": show_bytes(row["largest_free_bytes"]),
            "×": row["largest_free_factor"],
            "device calls": row["device_calls"],
            "refused": row["refused"],
            "pairs/s": row["pairs_per_s"],
            "× ": row["pairs_factor"],
        }
        for row in document["pools"]
    ]
    bound = document["bound"]
    reach = (
        f"Without any fragmentation or call to the driver: {bound['pairs_per_s']:.1f} pairs/s, "
        f"{bound['pairs_factor']:.2f} × the default pool (modelled).\n"
        f"Published for a lifetime-aware pool: {bound['published_pairs_factor']} ×"
    )
    if bound["pairs_factor"] < bound["published_pairs_factor"]:
        reach += ", more than the default pool loses here by its smaller batches"
    parts = [
        f"{document['pairs']} pairs of ViT and BERT in {show_bytes(document['capacity_bytes'])} "
        f"(modelled)\n{to_table(pools)}",
        reach,
        f"Published peaks of max_split_size_mb:128,expandable_segments:True\n"
        f"{to_table(document['published'])}",
        *(f"lint: {remark}" for remark in document["lint"]),
    ]
    if document["snapshots"]:
        rows = [
            {
                "file": row["file"],
                "device": row["device"],
                "setting": row["setting"],
                "peak": show_bytes(row["peak_reserved_bytes"]),
                "largest free at peak": show_bytes(row["largest_free_at_peak_bytes"]),
                "device allocs": row["device_allocs"],
            }
            for row in document["snapshots"]
        ]
        parts.append(f"Recorded traces (modelled)\n{to_table(rows)}")
    if document["long_trace"]:
        rows = [
            {
                "program": row["program"],
                "CPU s": row["cpu_s"],
                "peak memory": show_bytes(row["peak_bytes"]),
            }
            for row in document["long_trace"]
        ]
        parts.append(f"A long trace (measured)\n{to_table(rows)}")
    return "\n\n".join(parts)
