"""``mmctl doctor``: what can be read here, what cannot, and why."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Annotated

import typer

from mmctl.cli.app import common, note, output, to_read, to_write
from mmctl.cli.main import Exit
from mmctl.cli.render import emit, hanging
from mmctl.engine.errors import NoSourceError
from mmctl.engine.records import SCHEMA
from mmctl.engine.sources import bundle as bundles
from mmctl.engine.sources.doctor import checks, versions

_REMEDIES = {"problem": "fix", "absent": "to have it"}
_SIGNS = {"ok": "ok     ", "problem": "PROBLEM", "absent": "absent "}


def doctor(
    sources: Annotated[list[str] | None, to_read("Sources to try as well.")] = None,
    bundle: Annotated[Path | None, to_write("Write a .tar.gz for a colleague.")] = None,
    recording: Annotated[
        list[Path] | None,
        typer.Option(metavar="FILE", help="A recording for the bundle (repeatable)."),
    ] = None,
) -> int:
    """Check what can be read here, what cannot, and why; exit 3 when there is a problem.

    A problem is something that is here and does not work, with its fix; what this node does not
    have is absent, which is no problem. The ids of the checks stay the same. --bundle packs what
    an incident needs: checks, versions, a reading, the topology, the profile, recent recordings
    and the audit log, with secrets and prompts redacted.

    \b
    Examples:
      mmctl doctor
      mmctl doctor http://127.0.0.1:8000/metrics -o json
      mmctl doctor --bundle incident.tar.gz --recording node.ndjson
    """
    for path in recording or ():
        if not path.is_file():
            raise NoSourceError(f"no such file: {path}")
    found = list(checks(sources or [], common().profile))
    rows = [check._asdict() for check in found]
    problems = sum(check.state == "problem" for check in found)
    lines = []
    for check in found:
        # A source's id ends in the colon of its URI.
        told = f"{_SIGNS[check.state]}  {check.id.rstrip(':')}: {check.detail}"
        lines.append(hanging(told, 9))
        if check.fix and check.state != "ok":
            lines.append(hanging(f"         {_REMEDIES[check.state]}: {check.fix}", 9))
    states = Counter(check.state for check in found)
    lines.append(
        f"\n{len(found)} checks: {states['ok']} ok, {states['absent']} absent, {problems} "
        + ("problem" if problems == 1 else "problems")
    )
    document = {"schema": SCHEMA, "problems": problems, "versions": versions(), "checks": rows}
    emit(document, rows, output(), table="\n".join(lines))
    if bundle is not None:
        names = bundles.write(bundle, found, sources or [], recording or [], common().profile)
        note(f"wrote {bundle}: {', '.join(names)}")
    return Exit.FINDING if problems else Exit.DONE
