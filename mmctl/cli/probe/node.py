"""``mmctl probe``: one reading of every source, or a stream of them."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from mmctl.cli.app import common, note, output, seconds, to_read
from mmctl.cli.listen import Wait, opened
from mmctl.cli.main import Exit
from mmctl.cli.recorded import KEEP, Keep, Record, Rotate, rotate_bytes
from mmctl.cli.render import emit, to_csv, to_json, to_table
from mmctl.engine import profiles, recording
from mmctl.engine.devices.score import Score, Scores
from mmctl.engine.devices.shares import with_non_torch
from mmctl.engine.errors import UsageError
from mmctl.engine.records import (
    DEVICE_KINDS,
    SCHEMA,
    AnyRecord,
    Device,
    Event,
    Host,
    Link,
    Pool,
    Recording,
    Serving,
    encode,
)  # fmt: skip
from mmctl.engine.sources import is_file
from mmctl.engine.sources.host import node_name
from mmctl.engine.streams import Summary, Windows

KINDS: dict[type, tuple[str, tuple[str, ...]]] = {
    Device: ("devices", ("node", "device")),
    Host: ("hosts", ("node",)),
    Serving: ("serving", ("node", "engine", "instance")),
    Pool: ("pools", ("node", "device", "pool")),
    Link: ("links", ("node", "a", "b")),
}
"""What a reading holds: the key in the document, and the fields that tell its entries apart."""

_COLUMNS = list(
    dict.fromkeys(
        field.encode_name
        for kind in (Device, Host, Serving)
        for field in msgspec.structs.fields(kind)
    )
)


def node(
    sources: Annotated[list[str] | None, to_read()] = None,
    interval: Annotated[
        str | None, typer.Option(metavar="TIME", help="Read again and again, so far apart.")
    ] = None,
    count: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Stop after so many readings.")
    ] = None,
    duration: Annotated[
        str | None, typer.Option(metavar="TIME", help="Stop after so long, such as 30s or 5min.")
    ] = None,
    wait: Wait = "",
    record: Record = None,
    rotate: Rotate = "",
    keep: Keep = KEEP,
    window: Annotated[
        str | None, typer.Option(metavar="TIME", help="Sum up in windows of event time.")
    ] = None,
) -> int:
    """Read every device and engine of this node, once or on a schedule.

    A rate or a share of time needs two readings: a single probe takes two, one sampling
    interval apart, and shows the second. What a source does not give is null, with the reason
    in absent. Of files, ndjson and csv give every record, table and json the last of each. A stream
    that ends (--count, --duration, a file) is one document in json.

    --window gives statistics by window of event time; a reading that comes late enters its own
    window, whose corrected result follows. --rotate keeps an always-on recording small; on a
    full disk its oldest file goes and the stream lives.

    \b
    Examples:
      mmctl probe
      mmctl probe -o json
      mmctl probe nvml: http://127.0.0.1:8000/metrics --interval 1s
      mmctl probe http://127.0.0.1:8000/metrics --wait 30s
      mmctl probe nvml: --interval 1s --count 3 -o ndjson
      mmctl probe --record node.ndjson --rotate 64MiB --keep 8
      mmctl probe node.ndjson --window 10s -o csv
    """
    profile = profiles.load(common().profile).profile
    if interval is not None:
        interval_s = max(seconds("--interval", interval), 0.01)
        sampling = msgspec.structs.replace(profile.sampling, interval_s=interval_s)
        profile = msgspec.structs.replace(profile, sampling=sampling)
    size = rotate_bytes(rotate, record)
    live = (interval, count, duration, record, window)
    once = all(option is None for option in live)
    stop = threading.Event()
    if duration is not None:
        timer = threading.Timer(seconds("--duration", duration), stop.set)
        timer.daemon = True
        timer.start()
    form = output()
    finite = count or duration or (sources and all(map(is_file, sources)))
    if form == "json" and not once and not finite:
        raise UsageError("a stream without an end has no json form: use -o ndjson, or --count N")
    records = opened(sources or [], profile, stop, wait, 2 if once else count)
    try:
        if once and form in ("ndjson", "csv") and sources and all(map(is_file, sources)):
            _show_file(records, form)
            return Exit.DONE
        if once:
            return _show_once(records, form, profile)
        if record is not None:
            records = _recorded(records, record, size, keep)
            if common().output is None:
                for _ in records:
                    pass
                return Exit.DONE
        if window is not None:
            _show_windows(records, Windows(seconds("--window", window),
                                           profile.sampling.watermark_s), form)  # fmt: skip
            return Exit.DONE
        _show_stream(records, form)
    finally:
        stop.set()
    return Exit.DONE


def _recorded(
    records: Iterator[AnyRecord], path: Path, size: int | None, keep: int
) -> Iterator[AnyRecord]:
    head = recording.header(node_name(), common().profile or profiles.selected()[0])
    with recording.Rotating(path, head, size, keep, note) as writer:
        note(f"recording to {path}; Ctrl-C ends it")
        for record in records:
            if not isinstance(record, Recording):
                writer.write(record)
            yield record


def _show_once(records: Iterator[AnyRecord], form: str, profile: profiles.Profile) -> int:
    """The last reading of everything, and the resource scores it comes to: one document."""
    latest: dict[tuple[str, ...], AnyRecord] = {}
    events: list[Event] = []
    following = Scores(profile.devices)
    scores: dict[tuple[str, str], Score] = {}
    for record in records:
        score = following.step(record)
        if score is not None:
            scores[score.node, score.device] = score
        if isinstance(record, Event):
            events.append(record)
        elif type(record) in KINDS:
            latest[key(record)] = record
    pools = [record for record in latest.values() if isinstance(record, Pool)]
    shown = sorted(
        (with_non_torch(r, pools) if isinstance(r, Device) else r for r in latest.values()),
        key=_rank,
    )
    errors = [
        {"source": event.evidence.get("uri"), "message": event.message}
        for event in events
        if event.what == "source" and event.state == "down"
    ]
    for error in errors:
        note(f"mmctl: {error['source']} gives nothing: {error['message']}")
    document: dict[str, Any] = {"schema": SCHEMA, "node": node_name(), "ts_ns": time.time_ns()}
    for kind, (name, _) in KINDS.items():
        document[name] = [
            msgspec.to_builtins(record) for record in shown if isinstance(record, kind)
        ]
    document["scores"] = [
        msgspec.to_builtins(score)
        for score in scores.values()
        if score.device != "cpu0" or score.fragmentation_ratio is not None
    ]
    document["events"] = [msgspec.to_builtins(event) for event in events]
    document["errors"] = errors
    happened: list[AnyRecord] = [event for event in events if event.what != "source"]
    rows = [msgspec.to_builtins(record) for record in [*shown, *happened]]
    if form == "csv":
        rows = [_flat(row) for row in rows]
    text = _text([*shown, *happened], scores.values()) if form == "table" else None
    emit(document, rows, form, table=text)
    return Exit.DONE


def _text(records: list[AnyRecord], scores: Iterable[Score]) -> str:
    from mmctl.cli.probe.tables import tables

    known = [
        {"device": score.device, "score": score.score_ratio, "smoothed": score.smoothed_ratio}
        for score in scores
        if score.score_ratio is not None
    ]
    return (tables(records) or "(nothing)") + (f"\n\n{to_table(known)}" if known else "")


def key(record: AnyRecord) -> tuple[str, ...]:
    """What a record is a reading of: a later one of the same key replaces it."""
    name, fields = KINDS[type(record)]
    return (name, *(str(getattr(record, field)) for field in fields))


def _rank(record: AnyRecord) -> int:
    """Devices by their kind, then what is no device."""
    return DEVICE_KINDS.index(record.kind) if isinstance(record, Device) else len(DEVICE_KINDS)


def _show_file(records: Iterator[AnyRecord], form: str) -> None:
    """Every record of files: as they come, or in one table with all their columns."""
    if form == "ndjson":
        _show_stream(records, form)
    else:
        rows = (msgspec.to_builtins(r) for r in records if not isinstance(r, Recording))
        emit({}, [_flat(row) for row in rows], form)


def _flat(row: dict[str, Any]) -> dict[str, Any]:
    """A row with the columns that every reading has, then its own."""
    return {"type": row["type"], **dict.fromkeys(_COLUMNS), **row}


def _show_stream(records: Iterator[AnyRecord], form: str) -> None:
    """Every record as it comes; ``json`` is one document at the end."""
    if form == "json":
        kept = [r for r in records if not isinstance(r, Recording)]
        emit({"schema": SCHEMA, "node": node_name(), "records": kept}, [], form)
        return
    headed = False
    for record in records:
        if isinstance(record, Recording):
            continue
        if form == "ndjson":
            print(encode(record).decode(), flush=True)
        elif form == "csv" and type(record) in (Device, Host, Serving):
            text = to_csv([_flat(msgspec.to_builtins(record))])
            print(text if not headed else text.split("\r\n", 1)[1], end="", flush=True)
            headed = True
        elif form == "table":
            print(_text([record], ()), flush=True)


def _show_windows(records: Iterator[AnyRecord], windows: Windows, form: str) -> None:
    """Every result as its window ends, and again when it is corrected; ``json`` is one document."""
    headed = False
    summaries = chain(chain.from_iterable(map(windows.step, records)), _at_end(windows))
    if form == "json":
        emit({"schema": SCHEMA, "node": node_name(), "windows": list(summaries)}, [], form)
    for summary in summaries:
        if form == "ndjson":
            print(to_json(summary), flush=True)
            continue
        rows = [
            {"window": summary.ts_ns, "subject": summary.subject, "signal": signal,
             "count": summary.count, **statistics, "corrected": summary.corrected,
             "reopened": summary.reopened}
            for signal, statistics in summary.signals.items()
        ]  # fmt: skip
        if form == "csv":
            text = to_csv(rows)
            print(text if not headed else text.split("\r\n", 1)[-1], end="", flush=True)
            headed = True
        else:
            print(to_table(rows), end="\n\n", flush=True)
    if windows.lost:
        note(f"{windows.lost} readings were older than every window that is kept")


def _at_end(windows: Windows) -> Iterator[Summary]:
    yield from windows.flush()
