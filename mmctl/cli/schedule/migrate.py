"""``mmctl schedule migrate --check``: could what runs on one device run on another?"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mmctl.cli.app import output
from mmctl.cli.main import Exit
from mmctl.cli.render import emit, to_table
from mmctl.engine import units
from mmctl.engine.errors import UsageError
from mmctl.engine.records import SCHEMA


def migrate(
    source: Annotated[str, typer.Argument(metavar="FROM", help="here, a device, or a JSON file.")],
    target: Annotated[str, typer.Argument(metavar="TO", help="As FROM.")],
    check: Annotated[bool, typer.Option("--check", help="Only say whether it could.")] = False,
    code: Annotated[
        list[Path] | None, typer.Option(help="A binary or wheel that the load runs.")
    ] = None,
    needs: Annotated[str, typer.Option(help="CPU features it uses: avx512f,amx_bf16.")] = "",
    dtypes: Annotated[str, typer.Option(help="Types it uses: bfloat16,int8.")] = "",
    memory: Annotated[str, typer.Option(help="Memory it holds: 12GiB.")] = "",
) -> int:
    """Whether a load could move from one device to another, with reasons.

    Compared are code objects (cubins and PTX of a fat binary, ELF machines), CPU features, page,
    image and segment alignment, address ranges, data types and memory. What a description does
    not say is unknown and told so. Exit code 3 when something blocks it.

    \b
    Examples:
      mmctl schedule migrate --check a100_sxm h100_sxm --code libkernels.so
      mmctl schedule migrate --check here arm.json -o json
    """
    from mmctl.engine.schedule import code_objects, migratable

    form = output()
    if not check:
        raise UsageError("only the check is made here: add --check")
    held: dict[code_objects.CodeObject, int] | None = None
    for path in code or ():
        held = held or {}
        for found, count in code_objects.read(path).items():
            held[found] = held.get(found, 0) + count
    try:
        memory_bytes = int(units.parse(memory, "bytes")) if memory else None
    except ValueError as error:
        raise UsageError(f"--memory: {error}") from None
    a, b = migratable.place(source), migratable.place(target)
    verdict, reasons = migratable.check(
        a, b,
        migratable.Needs(
            code=held, cpu_features=_words(needs), dtypes=_words(dtypes), memory_bytes=memory_bytes
        ),
    )  # fmt: skip
    rows = [{"check": r.check, "verdict": r.verdict, "why": r.why} for r in reasons]
    document = {
        "schema": SCHEMA, "from": a, "to": b, "verdict": verdict, "reasons": rows,
        "code": [
            {"kind": c.kind, "target": c.target, "count": n} for c, n in (held or {}).items()
        ],
    }  # fmt: skip
    emit(document, rows, form, table=f"{a.name} → {b.name}: {verdict}\n\n" + to_table(rows))
    return Exit.FINDING if verdict == "not_migratable" else Exit.DONE


def _words(text: str) -> tuple[str, ...] | None:
    return tuple(part.strip() for part in text.split(",") if part.strip()) or None
