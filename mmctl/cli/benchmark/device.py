"""``mmctl benchmark device``: what each device reaches, beside what is published of it."""

from __future__ import annotations

import os
from typing import Annotated, Any

import typer

from mmctl.cli.app import note, output
from mmctl.cli.benchmark.progress import Progress
from mmctl.cli.main import Exit
from mmctl.cli.render import emit, to_table
from mmctl.engine.errors import MissingExtraError


def device(
    devices: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[DEVICE]...", help="cpu0, gpu0, npu0, openvino:CPU …; by default all."
        ),
    ] = None,
    threads: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help="Threads on processors; by default all cores."),
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Smaller and fewer, within half a minute.")
    ] = False,
    published: Annotated[
        bool, typer.Option("--published", help="Print the table of published figures instead.")
    ] = False,
) -> int:
    """Matrix throughput by precision, memory bandwidth, launches, energy and tokens, measured.

    For every device that torch reaches (cpu, cuda, npu, xpu, mps) and every one of OpenVINO.
    A precision that has no kernel of its own is absent with the reason: no conversion is timed.
    Bandwidth is the triad's, as STREAM counts it; energy comes from RAPL, NVML or the NPU's
    power. Joules per token are of the demo's decoder. The peak is published (see --published
    for every figure's source) or, for a processor, modelled from its clock and instruction
    sets; the achieved share stands beside it.

    \b
    Examples:
      mmctl benchmark
      mmctl benchmark device gpu0 -o json
      mmctl benchmark device --quick
      mmctl benchmark device --published
    """
    wanted = output()
    if published:
        from mmctl.benchmarks.device import published as table

        document = table()
        emit(document, document["devices"], wanted, _published(document["devices"]))
        return Exit.DONE
    # Threads that wait sleep: spinning ones slow each other down on a machine with other work.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    try:
        import torch  # noqa: F401
    except ImportError:
        raise MissingExtraError("benchmark device", "torch") from None
    from mmctl.benchmarks.device import measure
    from mmctl.benchmarks.environment import usable_cores

    with Progress("device") as progress:
        document = measure(devices or (), threads or usable_cores(), quick, progress.tell)
    for remark in document["notes"]:
        note(f"mmctl: {remark}")
    emit(document, document["devices"], wanted, _table(document) if wanted == "table" else None)
    return Exit.DONE


def _table(document: dict[str, Any]) -> str:
    rows = document["devices"]
    products = [
        {
            "device": row["device"], "name": row["name"], "precision": row["precision"],
            "Gop/s": _scaled(row["flops_per_s"], 1e9), "from": _scaled(row["flops_per_s_low"], 1e9),
            "to": _scaled(row["flops_per_s_high"], 1e9),
            "peak": _scaled(row["peak_flops_per_s"], 1e9), "peak is": row["peak_basis"],
            "achieved": None if row["achieved_ratio"] is None else f"{row['achieved_ratio']:.0%}",
            "W": row["power_w"], "TOPS/W": row["tops_per_w"],
        }
        for row in rows
    ]  # fmt: skip
    parts = [to_table(products)]
    shared = {row["device"]: row for row in rows if row["bandwidth_bytes_per_s"] is not None}
    if shared:
        parts.append(
            to_table(
                {
                    "device": row["device"], "triad GB/s": row["bandwidth_bytes_per_s"] / 1e9,
                    "copy GB/s": row["copy_bytes_per_s"] / 1e9, "launch µs": row["launch_s"] * 1e6,
                    "frame ms": row["frame_s"] * 1e3,
                    **{f"tokens/s at {t['batch']}": t["tokens_per_s"] for t in row["tokens_per_s"]},
                    **{f"J/token at {t['batch']}": t["joules_per_token"]
                       for t in row["joules_per_token"]},
                }
                for row in shared.values()
            )
        )  # fmt: skip
    reasons = dict.fromkeys(
        f"{row['device']} {row['precision']}: {row['absent']['flops_per_s']}"
        for row in rows if "flops_per_s" in row["absent"]
    )  # fmt: skip
    energy = dict.fromkeys(
        f"{row['device']}: no energy, {row['absent']['power_w']}"
        for row in rows if row["flops_per_s"] is not None and "power_w" in row["absent"]
    )  # fmt: skip
    others = [f"{name}: {reason}" for name, reason in document["absent"].items()]
    if lines := [*reasons, *energy, *others]:
        parts.append("Absent\n" + "\n".join(f"  {line}" for line in lines))
    return "\n\n".join(parts)


def _published(rows: list[dict[str, Any]]) -> str:
    figures = to_table(
        {
            "device": row["device"], "precision": row["precision"],
            "Top/s": row["peak_flops_per_s"] / 1e12,
            "GB/s": row["peak_bandwidth_bytes_per_s"] / 1e9, "W": row["power_w"],
            "TOPS/W": row["peak_tops_per_w"],
            "claimed Top/s": _scaled(row["claimed_flops_per_s"], 1e12),
            "claimed TOPS/W": row["claimed_tops_per_w"],
        }
        for row in rows
    )  # fmt: skip
    sources = {(row["device"], row["source"]): None for row in rows}
    told = to_table({"device": device, "source": source} for device, source in sources)
    return f"{figures}\n\n{told}"


def _scaled(value: float | None, unit: float) -> float | None:
    return None if value is None else value / unit
