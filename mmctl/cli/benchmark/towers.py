"""``mmctl benchmark towers``: an image and a text tower on two devices, bound into one pipeline."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Annotated, Any

import msgspec
import typer

from mmctl.cli.app import note, output
from mmctl.cli.benchmark.progress import Progress
from mmctl.cli.main import Exit
from mmctl.cli.render import emit, to_table
from mmctl.engine.errors import MissingExtraError
from mmctl.engine.records import SCHEMA
from mmctl.engine.units import show_bytes


def towers(
    devices: Annotated[
        str, typer.Option(metavar="IMAGE,TEXT", help="cpu, cuda:0, npu, openvino:NPU …")
    ] = "",
    quick: Annotated[
        bool, typer.Option("--quick", help="Fewer batches and rounds, within half a minute.")
    ] = False,
) -> int:
    """Image and text tower of a CLIP-style model on two devices: bound, run after run, unbound.

    Each device is a process; a CPU is one thread pinned to a core of its own. Bound, both follow
    one dependency graph: T0, the towers know nothing of each other; T1, one temperature lives
    with the text and is passed once. Only edges between devices synchronise, and a tower is at
    most two batches ahead. Run after run, one tower waits for the other. Unbound, both run
    freely, on any core, and their features are put together at the end.

    Without --devices: an accelerator of torch for the images and OpenVINO's NPU or GPU for the
    texts where there are any; on a CPU alone two pinned processes, and with OpenVINO (extra
    'openvino') a second pair in which it computes the texts. OpenVINO runs inference only.
    Everything is measured; logits and gradients are compared with a single process (1e-5). Exit
    1 when they differ by more.

    \b
    Examples:
      mmctl benchmark towers --quick
      mmctl benchmark towers --devices cuda:0,openvino:NPU -o json
    """
    wanted = output()
    if find_spec("torch") is None:
        raise MissingExtraError("benchmark towers", "torch")
    import torch

    from mmctl.benchmarks.environment import environment
    from mmctl.benchmarks.towers import measure

    torch.set_num_threads(1)
    where = environment()
    pairs, absent = measure.pairs(devices or None)
    rows: list[measure.Towers] = []
    with Progress("towers") as progress:
        for number, pair in enumerate(pairs):
            rows += measure.measure(
                pair, quick,
                lambda name, share, at=number: progress.tell(name, (at + share) / len(pairs)),  # type: ignore[misc]
            )  # fmt: skip
    found = [msgspec.to_builtins(row) for row in rows]
    remarks = list(where.remarks)
    if where.cores < 2:
        remarks.append("both towers share one core: nothing can overlap")
    document: dict[str, Any] = {
        "schema": SCHEMA, "benchmark": "towers", "environment": msgspec.to_builtins(where),
        "notes": remarks, "quick": quick, "tolerance": measure.TOLERANCE, "towers": found,
        "figures": measure.figures(rows), "absent": absent,
    }  # fmt: skip
    for remark in remarks:
        note(f"mmctl: {remark}")
    emit(document, found, wanted, _table(found, absent) if wanted == "table" else None)
    return Exit.DONE if all(measure.agrees(row) for row in rows) else Exit.FAILED


def _table(rows: list[dict[str, Any]], absent: dict[str, str]) -> str:
    shown = [
        {
            "devices": ", ".join(row["devices"]), "way": row["way"], "ms": row["time_ms"],
            "×": row["speedup_factor"], "95 %": "{:.2f} to {:.2f}".format(*row["speedup_ci"]),
            "image ms": row["image_ms"], "text ms": row["text_ms"],
            "overlap": f"{row['overlap_ratio']:.0%}", "drift ms": row["drift_ms"],
            "largest": row["largest_drift_ms"], "waiting": show_bytes(row["waiting_bytes"]),
            "crossings": row["crossings"], "logits off": f"{row['logits_error']:.1e}",
            "gradients": None if row["gradients_error"] is None
            else f"{row['gradients_error']:.1e}",
        }
        for row in rows
    ]  # fmt: skip
    first = rows[0]
    lines = [
        f"{first['batches']} batches of {first['batch_size']} images and texts (measured)",
        to_table(shown),
        "×: against run after run in the same round; drift: between the ends of both towers, "
        "per batch",
        *(f"{name}: {reason}" for name, reason in absent.items()),
    ]
    return "\n".join(lines)
