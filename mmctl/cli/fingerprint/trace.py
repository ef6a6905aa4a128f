"""``mmctl fingerprint trace``: 64 bits and a reuse signature per task."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mmctl.cli import completion
from mmctl.cli.app import output, to_write
from mmctl.cli.fingerprint import load
from mmctl.cli.main import Exit
from mmctl.cli.render import emit, to_json
from mmctl.engine.errors import UsageError
from mmctl.engine.records import SCHEMA

if TYPE_CHECKING:
    from mmctl.engine.access.accesses import Accesses
    from mmctl.engine.access.tasks import Task

Algorithm = Annotated[
    str,
    typer.Option(
        metavar="NAME",
        autocompletion=completion.words("locality", "classic"),
        help="locality or classic.",
    ),
]


def trace(
    sources: Annotated[
        list[str] | None,
        typer.Argument(metavar="[FILE|SOURCE]...", help="Traces, or agent:PATH."),
    ] = None,
    module: Annotated[
        list[str] | None,
        typer.Option(metavar="FILE.py:FUNCTION", help="Trace a torch workload by running it."),
    ] = None,
    algorithm: Algorithm = "locality",
    by_stream: Annotated[
        bool, typer.Option("--by-stream", help="One fingerprint per stream or kernel.")
    ] = False,
    record: Annotated[Path | None, to_write("Write the accesses as records.")] = None,
) -> int:
    """A 64-bit fingerprint and a reuse signature of each task's memory accesses.

    FILE is an NVBit dump (json, msgpack), an Accel-Sim kernel trace or a recording with access
    records. --module runs your function under a tracing dispatch mode: each operator's sweeps of
    its tensors are seen, what happens inside an operator is not. The fingerprint is made from
    measured accesses; predictions made from it are modelled. A live agent is listened to for
    [fingerprint] live (5 s); it tells allocations, each taken as the write that fills it, in a
    stream per modality (--by-stream).

    \b
    Examples:
      mmctl fingerprint trace kernel.traceg
      mmctl fingerprint trace --module bench.py:decode_step -o ndjson
      mmctl fingerprint trace agent:/run/engine.sock --by-stream
      mmctl fingerprint trace a.json --algorithm classic
    """
    wanted = output()
    profile = load.profile()
    found = load.tasks(sources or [], algorithm, profile, split=by_stream)
    traced: list[Accesses] = []
    for target in module or []:
        from mmctl.engine.access import tasks as engine
        from mmctl.engine.access import tracing

        accesses = tracing.trace(tracing.load_workload(target), target)
        traced.append(accesses)
        found += [engine.of(part, algorithm) for part in load.parts(accesses, split=by_stream)]
    if not found:
        raise UsageError("nothing to fingerprint: name a FILE, a SOURCE or --module")
    if record:
        _record(record, traced + [load.one(name, profile) for name in sources or []])
    if wanted == "ndjson":
        for task in found:
            print(to_json(task), flush=True)
    else:
        document = {"schema": SCHEMA, "basis": "measured", "tasks": found}
        emit(document, [_row(task) for task in found], wanted)
    return Exit.DONE


def _row(task: Task) -> dict[str, object]:
    names = ("name", "algorithm", "fingerprint", "accesses", "traffic_bytes", "footprint_bytes")
    return {name: getattr(task, name) for name in names}


def _record(path: Path, traced: list[Accesses]) -> None:
    from mmctl.engine import recording
    from mmctl.engine.access import accesses

    with recording.Writer(path, recording.header("", "default")) as writer:
        for one in traced:
            for item in accesses.records(one):
                writer.write(item)
