"""``mmctl benchmark detector``: a detector of memory conflicts, learned, exported and served."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from mmctl.cli.app import common, note, output, seconds, to_write
from mmctl.cli.benchmark.progress import Progress
from mmctl.cli.main import Exit
from mmctl.cli.render import emit, to_table
from mmctl.engine import profiles
from mmctl.engine.errors import MissingExtraError
from mmctl.engine.records import SCHEMA
from mmctl.engine.units import show_bytes

if TYPE_CHECKING:
    from mmctl.benchmarks.detector.measure import Take
    from mmctl.benchmarks.detector.windows import Series


def detector(
    files: Annotated[
        list[str] | None,
        typer.Argument(metavar="[RECORDING]...", help="Learn from these, not from the demo's."),
    ] = None,
    out: Annotated[Path | None, to_write("Write the model files there.", metavar="FOLDER")] = None,
    held: Annotated[
        str, typer.Option(metavar="FAMILY,…", help="Families of the demo to hold back whole.")
    ] = "",
    horizon: Annotated[
        str, typer.Option(metavar="TIME", help="How far ahead out-of-memory is looked for.")
    ] = "1s",
    seed: Annotated[int, typer.Option(metavar="N", help="Seed of the training.")] = 0,
    quick: Annotated[
        bool, typer.Option("--quick", help="Fewer recordings and rounds, within half a minute.")
    ] = False,
) -> int:
    """A small detector of memory conflicts: learned, exported to ONNX, and what serving it costs.

    Learns from windows of 64 readings of a pool and its engine whether an exact rule (fits,
    headroom, false_free) holds now, and whether memory runs out within the horizon; the dry
    run's answer is no input. Recordings come from the demo in virtual time (basis modelled), of
    a server that drops what does not fit and goes on, or are given: every third of those is held
    back, of a single one its last third. Agreement is of recordings that were not learned from,
    seeds never seen and whole families (calm burst fragmentation leak, and each at another pace
    of images, such as burst:4); beside it stands what one would reach that never warns. A
    scenario unlike all that was learned is hardly seen (--held fragmentation shows it): the
    detector stands in for the exact rules where its own node's recordings taught it.

    Served by onnxruntime (measured): one call per request against batches of up to 32 on
    memory bound once, one thread for the model each, 32 clients in a closed loop, then both at
    one open load. FP16 on a CPU without such arithmetic is computed in FP32 between casts that
    onnxruntime inserts: they are counted. --out writes ONNX files, a Triton repository and
    what TensorRT needs to build from them.

    \b
    Examples:
      mmctl benchmark detector --quick
      mmctl benchmark detector --out models -o json
      mmctl benchmark detector --held fragmentation
      mmctl benchmark detector night.ndjson morning.ndjson evening.ndjson --horizon 5s
    """
    wanted = output()
    horizon_s = seconds("--horizon", horizon)
    for module, extra in (("torch", "torch"), ("onnx", "onnx"), ("onnxruntime", "onnx")):
        if find_spec(module) is None:
            raise MissingExtraError("benchmark detector", extra)
    import torch

    from mmctl.benchmarks.detector import measure
    from mmctl.benchmarks.environment import environment

    torch.set_num_threads(1)
    where = environment()
    profile = profiles.load(common().profile).profile
    with Progress("detector") as progress:
        if files:
            learned, judged = measure.divided(_read(files, profile, horizon_s))
        else:
            families = [name.strip() for name in held.split(",") if name.strip()] or measure.HELD
            learned, judged = _made(
                measure.takes(families, quick), profile, horizon_s,
                lambda name, share: progress.tell(name, 0.3 * share),
            )  # fmt: skip
        found = measure.run(
            learned, judged, quick, out, seed,
            lambda name, share: progress.tell(name, 0.3 + 0.7 * share),
        )  # fmt: skip
    document: dict[str, Any] = {
        "schema": SCHEMA, "benchmark": "detector", "environment": msgspec.to_builtins(where),
        "notes": list(where.remarks), "quick": quick,
        "recordings": "given" if files else "modelled", "horizon_s": horizon_s, **found,
    }  # fmt: skip
    for remark in where.remarks:
        note(f"mmctl: {remark}")
    rows = [
        {"section": section, **row}
        for section in ("agreement", "serving")
        for row in document[section]
    ]
    emit(document, rows, wanted, _table(document) if wanted == "table" else None)
    return Exit.DONE


def _read(files: Sequence[str], profile: profiles.Profile, horizon_s: float) -> list[Series]:
    from mmctl.benchmarks.detector.windows import series
    from mmctl.cli.breaker.replay import open_file

    return [
        one
        for file in files
        for one in series(open_file(file, "", profile), profile, horizon_s, file, Path(file).name)
    ]


def _made(
    takes: Sequence[Take], profile: profiles.Profile, horizon_s: float,
    tell: Callable[[str, float], None],
) -> tuple[list[Series], list[Series]]:  # fmt: skip
    """The demo's recordings: those to learn from, and those held back."""
    from mmctl.benchmarks.detector.measure import STEPS
    from mmctl.benchmarks.detector.windows import series
    from mmctl.demo.recorded import recorded

    learned: list[Series] = []
    judged: list[Series] = []
    for number, take in enumerate(takes):
        tell(f"recording {take.family}, seed {take.seed}", number / len(takes))
        records = recorded(take.scenario, take.seed, profile, take.image_every, STEPS)
        name = f"{take.family} {take.seed}"
        (judged if take.held else learned).extend(
            series(records, profile, horizon_s, name, take.family)
        )
    return learned, judged


def _table(document: dict[str, Any]) -> str:
    model = document["model"]
    sizes = ", ".join(
        f"{name.upper()} {show_bytes(size)}" for name, size in model["size_bytes"].items()
    )
    casts = model["inserted_casts"]["fp16"]
    lines = [
        f"{model['parameters']:,} parameters, {model['flops'] / 1e6:.2f} Mflop a window of "
        f"{model['window'][0]} readings × {model['window'][1]} features; {sizes}",
        f"learned {model['learned_windows']:,} windows ({', '.join(model['learned'])}), "
        f"held back {model['held_windows']:,} ({', '.join(model['held'])})",
    ]
    if casts:
        lines.append(f"FP16 is computed in FP32 here, between {casts} casts put in by onnxruntime")
    shown = [
        {
            "says": "a rule holds" if row["target"] == "rules"
            else f"OOM within {document['horizon_s']:g} s",
            "": row["precision"], "family": row["family"], "recordings": row["recordings"],
            "agreement": f"{row['agreement_ratio']:.2%}",
            "95 %": "{:.2%} to {:.2%}".format(*row["agreement_ci_ratio"]),
            "never": f"{row['never_ratio']:.2%}", "recall": _percent(row["recall_ratio"]),
            "false": _percent(row["false_ratio"]), "points": round(row["points_from_fp32"], 2),
        }
        for row in document["agreement"]
        if row["family"] == "all" or row["precision"] == "fp32"
    ]  # fmt: skip
    served = [
        {
            "load": row["load"], "serving": row["serving"], "": row["precision"],
            "queries/s": round(row["queries_per_s"]), "p50 ms": row["p50_ms"],
            "P99 ms": row["p99_ms"], "queries ×": row["queries_factor"],
            "95 %": "{:.2f} to {:.2f}".format(*row["queries_factor_ci"]),
            "P99 ×": row["p99_factor"], "95 % ": "{:.2f} to {:.2f}".format(*row["p99_factor_ci"]),
            "of same": row["same_queries_factor"], "batch": row["mean_batch"],
        }
        for row in document["serving"]
    ]  # fmt: skip
    published = document["published"]
    parts = [
        "\n".join(lines),
        f"Held-back recordings ({document['recordings']})\n{to_table(shown)}",
        f"Serving, against one FP32 call per request (measured)\n{to_table(served)}",
        f"published on another device: {published['queries_factor']} × queries/s, "
        f"{published['p99_factor']} × P99 ({published['device']})",
    ]
    if document["files"]:
        parts.append("written: " + ", ".join(document["files"]))
    return "\n\n".join(parts)


def _percent(value: float | None) -> str | None:
    return None if value is None else f"{value:.1%}"
