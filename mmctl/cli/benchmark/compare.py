"""``mmctl benchmark compare``: what changed between two results beyond their noise."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from mmctl.cli.app import note, output, quantity
from mmctl.cli.main import Exit
from mmctl.cli.render import emit, to_table
from mmctl.engine.errors import UsageError


def compare(
    before: Annotated[Path, typer.Argument(metavar="BEFORE", help="An earlier result (JSON).")],
    after: Annotated[Path, typer.Argument(metavar="AFTER", help="A later one.")],
    threshold: Annotated[
        str, typer.Option(metavar="SHARE", help="Smaller changes are no finding.")
    ] = "5%",
) -> int:
    """Compare two results of one benchmark: every figure, its change and the interval of it.

    A figure is worse or better where the 95 % interval of the quotient (bootstrap over the
    blocks of both runs) leaves 1 out and the change is larger than the threshold. What differs
    of machine, versions, threads and load is said. Exit code 3 when something got worse.

    \b
    Examples:
      mmctl benchmark device -o json > monday.json
      mmctl benchmark compare monday.json friday.json
      mmctl benchmark compare monday.json friday.json --threshold 10% -o csv
    """
    wanted = output()
    share = quantity("--threshold", threshold, "ratio")
    if share < 0:
        raise UsageError(f"--threshold must not be negative: {threshold}")
    from mmctl.benchmarks.compare import compare as compared

    document = compared(before, after, share)
    for remark in document["notes"]:
        note(f"mmctl: {remark}")
    emit(document, document["figures"], wanted, _table(document) if wanted == "table" else None)
    return Exit.FINDING if document["regressions"] else Exit.DONE


def _table(document: dict[str, Any]) -> str:
    rows = [
        {
            "figure": row["figure"], "before": row["before"], "after": row["after"],
            "×": row["change_factor"], "from": row["change_factor_low"],
            "to": row["change_factor_high"], "verdict": row["verdict"],
        }
        for row in sorted(document["figures"], key=lambda row: row["verdict"] != "worse")
    ]  # fmt: skip
    lines = [
        to_table(rows),
        f"{document['regressions']} worse, {document['improvements']} better, "
        f"{len(rows) - document['regressions'] - document['improvements']} the same within their "
        f"intervals or {document['threshold_ratio']:.0%}",
    ]
    for name, where in (("only_before", "before"), ("only_after", "after")):
        if document[name]:
            lines.append(f"only {where}: {', '.join(document[name])}")
    return "\n\n".join(lines)
