"""``mmctl fingerprint streams``: one mixed stream, two, or two kept apart."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from mmctl.cli import completion
from mmctl.cli.app import output
from mmctl.cli.fingerprint import load
from mmctl.cli.main import Exit
from mmctl.cli.render import emit, to_table
from mmctl.engine.errors import UsageError
from mmctl.engine.records import SCHEMA


def streams(
    files: Annotated[
        list[str] | None,
        typer.Argument(metavar="[FILE]...", help="Two traces, one with two streams, or ncu CSV."),
    ] = None,
    module: Annotated[
        list[str] | None,
        typer.Option(metavar="FILE.py:FUNCTION", help="Trace a torch workload as a stream."),
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(
            metavar="NAME|SIZE",
            autocompletion=completion.caches,
            help="Device model: h100, l4, 32MiB …",
        ),
    ] = None,
) -> int:
    """Last-level cache misses and DRAM row conflicts of two streams under four schedules.

    Traces go through a model of the named device's cache, channels, banks and rows; its address
    mapping is our own, as vendors publish none, and it decides much: compare schedules, not
    devices. A CSV of ncu or nvprof is read instead, measured; there is no counter for DRAM bank
    conflicts. Each stream also stands alone as a baseline. Long traces are shrunk together with
    the cache (model.scale).

    \b
    Examples:
      mmctl fingerprint streams vision.ndjson text.ndjson --device a100
      mmctl fingerprint streams --module m.py:encode --module m.py:decode
      mmctl fingerprint streams metrics.csv -o json
    """
    from mmctl.engine.access import counters, memory_models, tasks, tracing
    from mmctl.engine.access import streams as engine

    wanted = output()
    profile = load.profile()
    names = files or []
    if len(names) == 1 and not module and _counters(names[0]):
        document = {"schema": SCHEMA, **counters.read(Path(names[0]))}
    else:
        parts = [part for name in names for part in tasks.by_stream(load.one(name, profile))]
        parts += [tracing.trace(tracing.load_workload(target), target) for target in module or []]
        if len(parts) != 2:
            raise UsageError(f"two streams are needed, {len(parts)} given: a file for each")
        model = memory_models.find(device or profile.fingerprint.cache)
        found = engine.simulate(parts, model)
        document = {
            "schema": SCHEMA,
            "basis": "modelled",
            **{name: getattr(found, name) for name in found.__struct_fields__},
        }
    rows = _rows(document)
    emit(document, rows, wanted, _text(document, rows))
    return Exit.DONE


def _counters(name: str) -> bool:
    from mmctl.engine.access import counters

    path = Path(name)
    if not path.is_file():
        return False
    with open(path, "rb") as file:
        return counters.looks_like(file.read(65536))


def _rows(document: dict[str, Any]) -> list[dict[str, Any]]:
    from msgspec import to_builtins

    rows = []
    for case in to_builtins(document["cases"]):
        rows.append({"schedule": case["schedule"], "stream": "all",
                     "l2_miss_ratio": case["l2_miss_ratio"],
                     "row_conflict_ratio": case["row_conflict_ratio"]})  # fmt: skip
        rows += [
            {"schedule": case["schedule"], **{k: s.get(k) for k in (
                "stream", "l2_miss_ratio", "row_conflict_ratio", "alone_l2_miss_ratio",
                "alone_row_conflict_ratio", "extra_misses_ratio")}}
            for s in case["streams"]
        ]  # fmt: skip
    return rows


def _text(document: dict[str, Any], rows: list[dict[str, Any]]) -> str:
    model = document["model"]
    lines = []
    if model:
        lines.append(
            f"{model['name']}, modelled: {model['l2_bytes'] / 2**20:.4g} MiB, "
            f"{model['ways']} ways, {model['channels']} channels, {model['banks']} banks, "
            f"scale 1/{model['scale']}"
        )
    lines.append(to_table(rows))
    lines += document["causes"]
    lines += [f"{name}: absent, {why}" for name, why in document["absent"].items()]
    return "\n".join(lines)
