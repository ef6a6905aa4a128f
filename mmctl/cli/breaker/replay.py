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

File = Annotated[
    str, typer.Argument(metavar="RECORDING|CSV", help="A recording, a table or a log; - is stdin.")
]
MapOption = Annotated[
    str, typer.Option("--map", metavar="COLUMN=FIELD,…", help="What the columns of a CSV mean.")
]


def open_file(file: str, mapping: str, profile: profiles.Profile) -> Iterator[AnyRecord]:
    """The records of a recording, a table or anything else that the sources can read."""
    from mmctl.engine.breaker.foreign import open_foreign
    from mmctl.engine.recording import read

    table = open_foreign(file, mapping)
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

    The mode and the rules are those of the recording, changed where they were changed, unless
    a mode or a profile is given: that one then holds throughout. A recording made with the
    breaker off is decided in observe mode. What the worker answered is read from the
    recording, nothing is sent to anyone. A CSV becomes records by --map
    (ts=COLUMN names the time; a unit follows a star: free_mb=free_bytes*1MiB); kernel logs and
    memory-pressure traces are known by their content.

    \b
    Examples:
      mmctl breaker replay run.ndjson
      mmctl breaker replay smi.csv --map 'ts=time,temp=temperature_c,mem=used_bytes*1MiB'
      mmctl breaker replay run.ndjson.zst --profile paper --mode observe -o ndjson
    """
    from mmctl.engine.breaker.breaker import CHANGES, DECISIONS
    from mmctl.engine.breaker.loop import run, without_changes

    name = common().profile
    profile = profiles.load(name).profile
    begin, records = _peek(open_file(file, map_, profile))
    profile, chosen = _recorded(begin, profile, name is not None, mode_of(mode))
    if name is not None or mode:
        records = without_changes(_noted(records))
    first = last = None
    events: list[Event] = []
    for record in run(records, profile, chosen):
        if isinstance(record, Recording):
            continue
        first, last = first or record.ts_ns, record.ts_ns
        if isinstance(record, Event) and record.what in (DECISIONS | CHANGES) - {"breaker"}:
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


def _peek(records: Any) -> tuple[list[AnyRecord], Any]:
    """The header and the recorded beginning, both among the first records, and all records."""
    from itertools import chain, islice

    early: list[AnyRecord] = list(islice(records, 64))
    return early, chain(early, records)


def _recorded(
    early: list[AnyRecord], profile: profiles.Profile, given: bool, mode: profiles.Mode | None
) -> tuple[profiles.Profile, profiles.Mode]:
    """The rules and the mode to begin with: given, or those that the recording began with."""
    from mmctl.engine.breaker.reload import with_policy

    for record in early:
        if isinstance(record, Recording) and not given and record.profile in profiles.available():
            profile = profiles.load(record.profile).profile
        if isinstance(record, Event) and record.what == "breaker":
            if not given and "settings" in record.evidence:
                profile = with_policy(profile, record.evidence)
            if mode is None and record.mode == "off":
                note("recorded with the breaker off: what it would have done, in observe mode")
                return profile, "observe"
            return profile, mode or record.mode or "observe"
    return profile, mode or "observe"


def _noted(records: Iterator[AnyRecord]) -> Iterator[AnyRecord]:
    """``records``, with a note for the person where their rules or mode were changed."""
    for record in records:
        if isinstance(record, Event) and record.what in ("reload", "mode"):
            note(f"{line(record)} (in the recording; not here: a profile or a mode was given)")
        yield record
