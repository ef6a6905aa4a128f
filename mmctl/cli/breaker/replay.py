"""``mmctl breaker replay``: the same breaker over a recording: what tripped, or would have."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Annotated, Any

import typer

from mmctl.cli.app import common, note, output
from mmctl.cli.breaker.lines import line, row
from mmctl.cli.breaker.watch import ModeOption, mode_of
from mmctl.cli.main import Exit
from mmctl.cli.render import emit, to_table
from mmctl.engine import profiles
from mmctl.engine.errors import MmctlError
from mmctl.engine.records import SCHEMA, AnyRecord, Event, Recording

File = Annotated[str, typer.Argument(metavar="RECORDING|CSV")]
MapOption = Annotated[
    str, typer.Option("--map", metavar="COLUMN=FIELD,…", help="What a CSV's columns mean.")
]


def open_file(file: str, mapping: str, profile: profiles.Profile) -> Iterator[AnyRecord]:
    """The records of a recording, a table or anything else that the sources can read."""
    from mmctl.engine.breaker.tables import open_table
    from mmctl.engine.recording import read

    table = open_table(file, mapping)
    return _some(read(file), file) if table is None else table


def _some(records: Iterator[AnyRecord], file: str) -> Iterator[AnyRecord]:
    """``records``, or MmctlError when there is none: that a file is broken is no quiet night."""
    first = next(records, None)
    if first is None:
        raise MmctlError(f"{file} holds no record: give a recording, a CSV with --map or a log")
    yield first
    yield from records


def replay(file: File, mode: ModeOption = "", map_: MapOption = "") -> int:
    """Decide again over a recording: the same decisions at the same times; exit 3 on a trip.

    The mode and the profile are those of the recording unless given. What the worker answered
    is read from the recording, nothing is sent to anyone. A CSV becomes records by --map
    (ts=COLUMN names the time; a unit follows a star: free_mb=free_bytes*1MiB); kernel logs and
    memory-pressure traces are known by their content.

    \b
    Examples:
      mmctl breaker replay run.ndjson
      mmctl breaker replay smi.csv --map 'ts=time,temp=temperature_c,mem=used_bytes*1MiB'
      mmctl breaker replay run.ndjson.zst --profile paper --mode observe -o ndjson
    """
    from mmctl.engine.breaker.breaker import DECISIONS
    from mmctl.engine.breaker.loop import run

    name = common().profile
    head, recorded_mode, records = _peek(open_file(file, map_, profiles.load(name).profile))
    if name is None and head is not None and head.profile in profiles.available():
        name = head.profile
    profile = profiles.load(name).profile
    chosen = mode_of(mode) or recorded_mode or "observe"
    first = last = None
    events: list[Event] = []
    for record in run(records, profile, chosen):
        if isinstance(record, Recording):
            continue
        first, last = first or record.ts_ns, record.ts_ns
        if isinstance(record, Event) and record.what in DECISIONS - {"breaker"}:
            events.append(record)
    hours = ((last or 0) - (first or 0)) / 3.6e12
    trips = Counter(event.rule or "" for event in events if event.what == "trip")
    summary = [
        {
            "rule": rule.name,
            "trips": trips[rule.name],
            "per_hour": trips[rule.name] / hours if hours else None,
        }
        for rule in profile.breaker.rules
    ]
    document = {
        "schema": SCHEMA, "mode": chosen, "hours": hours, "rules": summary,
        "decisions": [row(event) for event in events],
    }  # fmt: skip
    # A table's samples may lie so far apart that every one of them is news after a silence.
    shown = [event for event in events if event.what != "state" or event.mode == "enforce"]
    table = "\n".join([*map(line, shown), "", to_table(summary)]).lstrip("\n")
    emit(document, [row(event) for event in events], output(), table=table)
    if chosen == "off":
        note("mode off: no rule was evaluated")
    return Exit.FINDING if trips else Exit.DONE


def _peek(records: Any) -> tuple[Recording | None, profiles.Mode | None, Any]:
    """The header and the recorded mode, both among the first records, and all records."""
    from itertools import chain, islice

    head: Recording | None = None
    mode: profiles.Mode | None = None
    early: list[AnyRecord] = list(islice(records, 64))
    for record in early:
        if isinstance(record, Recording):
            head = head or record
        elif isinstance(record, Event) and record.what == "breaker":
            mode = mode or record.mode
    return head, mode, chain(early, records)
