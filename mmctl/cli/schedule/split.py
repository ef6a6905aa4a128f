"""``mmctl schedule split``: where a model's graph could be cut over two devices."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from mmctl.cli import completion
from mmctl.cli.app import common, note, output, quantity, to_write
from mmctl.cli.main import Exit
from mmctl.cli.render import emit, to_table
from mmctl.engine import atomic, profiles, units
from mmctl.engine.errors import MmctlError, UsageError
from mmctl.engine.records import SCHEMA


def split(
    graph: Annotated[
        Path | None, typer.Argument(metavar="[GRAPH.json]", help="A graph as JSON, or -.")
    ] = None,
    module: Annotated[
        str,
        typer.Option(
            metavar="FILE.py:FUNCTION",
            help="file.py:function that gives (torch module, inputs). It is run.",
        ),
    ] = "",
    device: Annotated[
        str,
        typer.Option(
            metavar="DEVICE|FILE",
            autocompletion=completion.devices,
            help="Device whose peaks count, or a result of it.",
        ),
    ] = "h100_sxm",
    budget: Annotated[
        str,
        typer.Option(
            metavar="TIME", help="Budget of a step, such as 50ms; by default the graph's own sum."
        ),
    ] = "",
    threshold: Annotated[
        float | None,
        typer.Option(metavar="RATIO", help="Share of the budget; by default it adapts from 0.15."),
    ] = None,
    out: Annotated[Path | None, to_write("Write a picture: .dot or .svg.")] = None,
) -> int:
    """Nodes of a model with flops and bytes, and where a cut over devices would pay.

    A candidate passes max(flops / peak, bytes / bandwidth) > threshold of the step's budget; the
    vision | language boundary is always told, with what its transfer costs. Flops and bytes are
    exact for the exported shapes, seconds modelled from the device's peaks: published ones, or what
    a result of mmctl benchmark device says.

    \b
    Examples:
      mmctl schedule split graph.json --device l40s
      mmctl schedule split --module model.py:build --out split.svg
    """
    from mmctl.engine.schedule import fleet, split

    form = output()
    if (graph is None) == (not module):
        raise UsageError("name a graph as JSON or --module file.py:function, one of them")
    peaks = fleet.peaks_of(device)
    budget_s = quantity("--budget", budget, "seconds") if budget else None
    patterns = profiles.load(common().profile).profile.modality
    if graph is not None:
        nodes = split.from_json(_read(graph), str(graph))
    else:
        nodes = split.from_torch(_builder(module), patterns)
    found = split.plan(nodes, peaks, budget_s=budget_s, threshold=threshold)
    if out is not None:
        draw = {".dot": split.to_dot, ".svg": split.to_svg}.get(out.suffix)
        if draw is None:
            raise UsageError(f"--out {out}: a picture ends in .dot or .svg")
        atomic.write(out, draw(found))
        note(f"wrote {out}")
    rows: list[dict[str, Any]] = [
        {
            "node": cut.node, "why": cut.why, "cost_ratio": cut.cost_ratio, "flops": cut.flops,
            "bytes": cut.bytes, "crossing_bytes": cut.crossing_bytes,
            "transfer_s": cut.transfer_s, "before_s": cut.before_s, "after_s": cut.after_s,
            "bottleneck_s": cut.bottleneck_s,
        }
        for cut in found.cuts
    ]  # fmt: skip
    document = {
        "schema": SCHEMA, "basis": "modelled", "device": device, "budget_s": found.budget_s,
        "threshold_ratio": found.threshold_ratio, "cuts": rows,
        "nodes": [
            {"node": n.name, "op": n.op, "modality": n.modality, "flops": n.flops,
             "bytes": n.bytes, "output_bytes": n.output_bytes, "seconds": s}
            for n, s in zip(found.nodes, found.seconds, strict=True)
        ],
    }  # fmt: skip
    shown = [
        {
            "cut before": row["node"], "why": row["why"], "share": row["cost_ratio"],
            "GFLOP": row["flops"] / 1e9, "crossing": units.show_bytes(row["crossing_bytes"]),
            "transfer": units.show_seconds(row["transfer_s"]),
            "before": units.show_seconds(row["before_s"]),
            "after": units.show_seconds(row["after_s"]),
        }
        for row in rows
    ]  # fmt: skip
    tail = (
        f"\n{len(nodes)} nodes, {units.show_seconds(sum(found.seconds))} modelled on {device}, "
        f"threshold {found.threshold_ratio:.3g} of the budget"
    )
    emit(document, rows, form, table=to_table(shown) + tail)
    return Exit.DONE


def _builder(text: str) -> Callable[[], Any]:
    """The function of ``file.py:function``: the user's own code, named to be run."""
    import importlib.util

    file, colon, name = text.rpartition(":")
    if not colon or not Path(file).is_file():
        raise UsageError(f"--module '{text}' is not an existing file.py:function")
    spec = importlib.util.spec_from_file_location("mmctl_split_module", file)
    if spec is None or spec.loader is None:
        raise UsageError(f"--module: {file} is no Python file")
    loaded = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(loaded)
    except Exception as error:
        raise MmctlError(f"{file} cannot be loaded: {type(error).__name__}: {error}") from None
    found = getattr(loaded, name, None)
    if not callable(found):
        raise UsageError(f"--module: {file} has no function '{name}'")
    return found  # type: ignore[no-any-return]


def _read(path: Path) -> bytes:
    """The file, or all of standard input for ``-``."""
    if str(path) == "-":
        return sys.stdin.buffer.read()
    try:
        return path.read_bytes()
    except OSError as error:
        raise MmctlError(f"cannot read {path}: {error.strerror}") from None
