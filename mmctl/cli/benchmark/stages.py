"""``mmctl benchmark stages``: what each stage of a request costs, and how many images at once."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Annotated, Any

import typer

from mmctl.cli.app import common, note, output
from mmctl.cli.benchmark.progress import Progress
from mmctl.cli.main import Exit
from mmctl.cli.render import emit, to_table
from mmctl.engine import profiles
from mmctl.engine.errors import MissingExtraError, UsageError


def stages(
    files: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[FILE]...", help="Tables of encoder attention; without one, measures here."
        ),
    ] = None,
    device: Annotated[
        str, typer.Option(metavar="DEVICE", help="cpu, cuda, cuda:1, xpu, npu, mps.")
    ] = "cpu",
    threads: Annotated[int, typer.Option(metavar="N", min=1, help="Threads of torch.")] = 1,
    batch: Annotated[
        int | None,
        typer.Option(
            metavar="N", min=1, help="Largest vision batch; by default [schedule] vision_batch."
        ),
    ] = None,
    heads: Annotated[
        int, typer.Option(metavar="N", min=1, help="Heads of the tower to advise for.")
    ] = 16,
    head_dim: Annotated[
        int, typer.Option(metavar="N", min=1, help="Features of a head of it.")
    ] = 72,
    hold_out: Annotated[
        str | None,
        typer.Option(
            metavar="N,N…", help="Head counts kept out of the fit; by default every other one."
        ),
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Fewer shapes, within half a minute.")
    ] = False,
) -> int:
    """Cost of vision_encode, alignment, cross_attn_fusion and text_decode_step by shape.

    Measures the demo's model and the projection 768 → 4096 on one device: flops by torch's
    counter, bytes that its operators move, time in rounds that take turns. Each stage gets
    overhead + max(flops / rate, bytes / bandwidth), fitted to half of the points; its error is
    of the other half. Advice says how many images to encode at once, by patches, and what
    limits a stage.

    With files (Parquet or CSV with batch_size, isl, num_heads, head_dim, latency in ms), fits
    encoder attention on half of the head counts and gives the error on the others.

    \b
    Examples:
      mmctl benchmark stages --quick
      mmctl benchmark stages --device cuda -o json
      mmctl benchmark stages encoder_attention_perf.parquet
    """
    wanted = output()
    from mmctl.benchmarks import stages as benchmark

    most = batch or profiles.load(common().profile).profile.schedule.vision_batch
    if files:
        with Progress("stages") as progress:
            progress.tell("fitting", 0.1)
            document = benchmark.from_files(files, heads, head_dim, most, _heads(hold_out))
    else:
        if find_spec("torch") is None:
            raise MissingExtraError("measuring stages", "torch")
        from mmctl.benchmarks.environment import check_torch_device

        check_torch_device(device)
        with Progress("stages") as progress:
            document = benchmark.measured(device, threads, quick, most, progress.tell)
    for remark in document["notes"]:
        note(f"mmctl: {remark}")
    rows = [point for stage in document["stages"] for point in stage["points"]]
    emit(document, rows, wanted, _table(document) if wanted == "table" else None)
    return Exit.DONE


def _heads(text: str | None) -> list[int] | None:
    if text is None:
        return None
    try:
        return [int(word) for word in text.split(",")]
    except ValueError:
        raise UsageError(f"--hold-out '{text}' is no list of head counts such as 5,14") from None


def _table(document: dict[str, Any]) -> str:
    parts = []
    rows = []
    for stage in document["stages"]:
        model = stage["model"]
        row = {
            "stage": stage["stage"], "system": stage["system"], "points": len(stage["points"]),
            "error": None if stage["mape"] is None else f"{stage['mape']:.1%}",
        }  # fmt: skip
        if "overhead_s" in model:
            rate, bandwidth = model["flops_per_s"], model["bandwidth_bytes_per_s"]
            row |= {
                "overhead µs": model["overhead_s"] * 1e6,
                "Gflop/s": None if rate is None else rate / 1e9,
                "GB/s": None if bandwidth is None else bandwidth / 1e9,
                "bound by": stage["bound"],
            }
        rows.append(row)
    parts.append(to_table(rows) + "\nerror: of points that the model was not fitted to")
    batching = [row for row in document["advice"] if "batch" in row]
    if batching:
        parts.append(
            "Images to encode at once\n"
            + to_table(
                {
                    "system": row["system"], "patches": row["patches"], "batch": row["batch"],
                    "× images/s": row["throughput_factor"],
                    "largest": row["batch_most"], "× there": row["throughput_factor_most"],
                    "basis": row["basis"],
                }
                for row in batching
            )
        )  # fmt: skip
    parts += [
        f"{row['stage']} on {row['system']}: {row['says']}"
        for row in document["advice"] if "says" in row
    ]  # fmt: skip
    return "\n\n".join(parts)
