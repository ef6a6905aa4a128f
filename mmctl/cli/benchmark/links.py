"""``mmctl benchmark links``: what a transfer costs, by size and link class."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from mmctl.cli.app import common, note, output
from mmctl.cli.benchmark.progress import Progress
from mmctl.cli.main import Exit
from mmctl.cli.render import emit, to_table
from mmctl.engine import profiles
from mmctl.engine.errors import MissingExtraError, UsageError


def links(
    files: Annotated[
        list[str] | None,
        typer.Argument(metavar="[FILE]...", help="Measurements; without one, measures here."),
    ] = None,
    operation: Annotated[
        str | None, typer.Option(metavar="NAME", help="Only this collective, such as alltoall.")
    ] = None,
    ranks: Annotated[
        list[int] | None,
        typer.Option(metavar="N", min=1, max=64, help="Ranks to measure (2 and 4), or of a file."),
    ] = None,
    backend: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="nccl, hccl or gloo; by default the first there is."),
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Fewer runs, within half a minute.")
    ] = False,
) -> int:
    """Fit what transfers cost, from files or measured here between processes.

    Files are known by content: logs of nccl-tests, superbench's results, Parquet or CSV tables
    (message_size in elements, latency in ms), p2pBandwidthLatencyTest and nvbandwidth matrices,
    and a topology (nvidia-smi topo -m) that names the class of each link.

    Each system, collective, data type and number of ranks gets its own regimes by size, fitted
    by relative error; their number is chosen on sizes kept out (held out). Beside them stands
    the published formula (a · hops + b · crosses NUMA + c · size) by least squares, and with its
    published constants where the hops are known.

    Without a file, all-to-all runs between processes here (NCCL, HCCL, else gloo): [links] runs
    of each size in blocks that take turns, warm-up dropped, trimmed, the median; intervals are
    bootstrapped over blocks.

    \b
    Examples:
      mmctl benchmark links --quick
      mmctl benchmark links nccl_perf.parquet
      mmctl benchmark links alltoall.log topo.txt -o json
      mmctl benchmark links p2p.txt topo.txt
    """
    wanted = output()
    from mmctl.benchmarks import links as benchmark

    profile = profiles.load(common().profile).profile
    if files:
        document = benchmark.from_files(files, profile, operation, ranks[0] if ranks else None)
    else:
        try:
            import torch  # noqa: F401
        except ImportError:
            raise MissingExtraError("measuring links", "torch") from None
        if operation is not None:
            raise UsageError("--operation chooses among timings in files; alltoall is measured")
        if any(count < 2 for count in ranks or ()):
            raise UsageError("an all-to-all needs two ranks at least")
        with Progress("links") as progress:
            document = benchmark.measured(profile, ranks or (2, 4), backend, quick, progress.tell)
    for remark in document["notes"]:
        note(f"mmctl: {remark}")
    emit(document, document["fits"], wanted, _table(document) if wanted == "table" else None)
    return Exit.DONE


def _table(document: dict[str, Any]) -> str:
    parts = []
    if points := document.get("points"):
        parts.append(
            f"All-to-all by {document['backend']} (measured)\n"
            + to_table(
                {"ranks": row["ranks"], "KiB": row["size_bytes"] // 1024, "µs": row["latency_us"],
                 "from": row["latency_us_low"], "to": row["latency_us_high"], "runs": row["runs"]}
                for row in points
            )
        )  # fmt: skip
    fits = [
        {
            "system": fit["system"], "operation": fit["operation"], "type": fit["dtype"],
            "class": fit["link_class"], "ranks": fit["ranks"], "µs": fit["intercept_us"],
            "µs/KiB": fit["us_per_kib"], "NUMA µs": fit["numa_us"],
            "regimes": len(fit["regimes"]), "R²": fit["r2"], "error": _percent(fit["mape"]),
            "≤256 KiB": _percent(fit["mape_small"]), "held out": _percent(fit["mape_held_out"]),
        }
        for fit in document["fits"]
    ]  # fmt: skip
    parts.append(to_table(fits))
    if document["operations"]:
        operations = [
            {
                "system": row["system"], "operation": row["operation"], "R²": row["r2"],
                "error": _percent(row["mape"]), "≤256 KiB": _percent(row["mape_small"]),
                "held out": _percent(row["mape_held_out"]),
                "least squares R²": row["least_squares_r2"],
                "its error": _percent(row["least_squares_mape"]),
            }
            for row in document["operations"]
        ]  # fmt: skip
        parts.append(to_table(operations))
    if document["outliers"]:
        worst = [_outlier(row) for row in document["outliers"][:10]]
        more = len(document["outliers"]) - len(worst)
        parts.append(
            "Far from their fit" + (f" ({more} more in -o json)" if more else "") + ":\n"
            + to_table(worst)
        )  # fmt: skip
    published = document["published"]
    line = f"Published formula by least squares: R² {_figure(published['r2'])}, error "
    line += f"{_percent(published['mape']) or '–'}"
    if published.get("constants_mape") is not None:
        line += f"; with its published constants error {_percent(published['constants_mape'])}"
    parts.append(line)
    return "\n\n".join(parts)


def _outlier(row: dict[str, Any]) -> dict[str, Any]:
    if "a" in row:
        return {**row, "error": _percent(row["error"])}
    return {
        "system": row["system"], "operation": row["operation"], "type": row["dtype"],
        "ranks": row["ranks"], "bytes": int(row["size_bytes"]), "measured µs": row["latency_us"],
        "modelled µs": row["modelled_us"], "error": _percent(row["error"]),
    }  # fmt: skip


def _percent(value: float | None) -> str | None:
    return None if value is None else f"{value:.1%}"


def _figure(value: float | None) -> str:
    return "–" if value is None else f"{value:.4f}"
