"""``mmctl probe kernels``: where device time went, and which rank the others waited for."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mmctl.cli.app import common, note, output, to_write
from mmctl.cli.main import Exit
from mmctl.cli.render import emit, to_table
from mmctl.engine import profiles, recording
from mmctl.engine.records import SCHEMA

if TYPE_CHECKING:
    from mmctl.engine.access import flight_recorder, timeline
    from mmctl.engine.access.collectives import Imbalance
    from mmctl.engine.records import AnyRecord

Files = Annotated[list[Path], typer.Argument(metavar="FILE…", help="Files, or folders of them.")]


def kernels(
    files: Files,
    record: Annotated[Path | None, to_write("Write span and event records here.")] = None,
) -> int:
    """Time per stream and modality, overlap, waits and the late rank; missing members of dumps.

    FILE is a PyTorch profiler trace (json, gz), an Nsight Systems export (sqlite), a flight-
    recorder dump (json, pickle) or a recording; several ranks at once. Everything is measured,
    nothing modelled. overlap_ratio is defined as in HTA: the last profiler step is left out. A
    wait is a rank's time in the collective; the rank that waits least came last. -o ndjson gives
    the records. Exit 3 on an imbalance, a missing member, a mismatch or an empty dump.

    \b
    Examples:
      mmctl probe kernels rank*.pt.trace.json.gz
      mmctl probe kernels report.sqlite -o json
      mmctl probe kernels flight_recorder/ --record spans.ndjson
    """
    from mmctl.engine.access import collectives, flight_recorder, inputs
    from mmctl.engine.access import kernels as analysis

    wanted = output()
    profile = profiles.load(common().profile).profile
    threshold_s = profile.fingerprint.imbalance_s
    timelines, dumps = inputs.load(files, profile.modality, recording.read)
    ranks = [analysis.report(line) for line in timelines]
    matched = collectives.match(timelines)
    verdict = flight_recorder.judge(dumps, threshold_s) if dumps else None
    imbalance = collectives.imbalances(matched, threshold_s)
    if verdict:
        imbalance += verdict.imbalance
    document: dict[str, Any] = {
        "schema": SCHEMA,
        "basis": "measured",
        "ranks": ranks,
        "collectives": matched,
        "imbalance": imbalance,
        "imbalance_threshold_s": threshold_s,
    }
    if verdict:
        document |= {
            "missing": verdict.missing,
            "mismatches": verdict.mismatches,
            "suspects": verdict.suspects,
            "dumps": verdict.ranks,
            "notes": verdict.notes,
        }
    if record:
        _record(record, timelines, imbalance)
    if wanted == "ndjson":
        _stream(timelines, imbalance)
    else:
        emit(document, _rows(ranks, verdict), wanted, _table(ranks, imbalance, verdict))
    if len(timelines) == 1 and timelines[0].calls:
        note("one rank only: who came late to its collectives cannot be told")
    found = imbalance or (verdict and (verdict.missing or verdict.mismatches or verdict.suspects))
    return Exit.FINDING if found else Exit.DONE


def _rows(ranks: list[Any], verdict: flight_recorder.Verdict | None) -> list[dict[str, Any]]:
    rows = [
        {
            name: getattr(rank, name)
            for name in ("rank", "span_s", "kernel_s", "copy_s", "collective_s", "idle_s",
                         "overlap_ratio", "file")
        }
        for rank in ranks
    ]  # fmt: skip
    if verdict and not rows:
        rows = [{"rank": s.rank, "why": s.why} for s in verdict.suspects]
    return rows


def _table(
    ranks: list[Any], imbalance: list[Imbalance], verdict: flight_recorder.Verdict | None
) -> str:
    parts = []
    if ranks:
        parts.append(to_table(_rows(ranks, None)))
        streams = [
            {"rank": rank.rank, "device": s.device, "stream": s.stream, "modality": s.modality,
             "busy_s": s.busy_s, "kernels": s.kernels}
            for rank in ranks for s in rank.streams
        ]  # fmt: skip
        if streams:
            parts.append(to_table(streams))
        waits = [{"rank": r.rank, "call": w.call, "count": w.count, "blocked_s": w.blocked_s}
                 for r in ranks for w in r.waits[:3]]  # fmt: skip
        if waits:
            parts.append("Host calls that wait\n" + to_table(waits))
    for item in imbalance:
        waits_text = ", ".join(f"{rank}: {wait:.3f} s" for rank, wait in item.waits_s.items())
        parts.append(
            f"Rank {item.late_rank} came late to {item.collective} {item.sequence} of group "
            f"{item.group}; waits {waits_text}"
        )
    if verdict:
        parts += [
            f"{m.collective or 'collective'} {m.sequence} of group {m.group}: "
            f"missing {_list(m.ranks)}, waiting {_list(m.waiting)}"
            for m in verdict.missing
        ]
        parts += [
            f"Group {m.group} at {m.sequence}: the {m.what} differs: "
            + "; ".join(f"{value} on {_list(ranks)}" for value, ranks in m.ranks.items())
            for m in verdict.mismatches
        ]
        parts += [f"Look at rank {s.rank}: {s.why}" for s in verdict.suspects]
        parts += verdict.notes
        if not (verdict.missing or verdict.mismatches or verdict.suspects):
            parts.append(f"{len(verdict.ranks)} dumps: no member is missing, no call differs")
    parts += [f"Rank {rank.rank}: {text}" for rank in ranks for text in rank.notes]
    return "\n\n".join(parts)


def _list(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks))


def _records(timelines: list[timeline.Timeline], imbalance: list[Imbalance]) -> Iterator[AnyRecord]:
    """Spans and imbalance events, in order of time."""
    import heapq

    from mmctl.engine.access.timeline import KIND_NAMES, MODALITIES
    from mmctl.engine.records import Event, Span

    def spans(line: timeline.Timeline) -> Iterator[AnyRecord]:
        columns = (line.start_ns, line.end_ns, line.name, line.kind, line.stream, line.modality)
        for index, (start, end, name, kind, stream, modality) in enumerate(
            zip(*(column.tolist() for column in columns), strict=True)
        ):
            device, lane = line.streams[stream]
            yield Span(
                ts_ns=start, node=f"rank{line.rank}", device=f"gpu{device}", stream=lane,
                name=line.names[name], kind=KIND_NAMES[kind],  # type: ignore[arg-type]
                duration_ns=end - start, modality=MODALITIES[modality], op_id=index,  # type: ignore[arg-type]
            )  # fmt: skip

    events: list[AnyRecord] = [
        Event(
            ts_ns=item.ts_ns, what="imbalance", node=f"rank{item.late_rank}",
            message=f"rank {item.late_rank} came late to {item.collective}",
            evidence={"late_rank": item.late_rank, "waits_s": item.waits_s, "group": item.group,
                      "sequence": item.sequence, "collective": item.collective},
        )
        for item in imbalance
    ]  # fmt: skip
    return heapq.merge(*(spans(line) for line in timelines), sorted(events, key=_time), key=_time)


def _time(record: AnyRecord) -> int:
    return getattr(record, "ts_ns", 0)


def _record(path: Path, timelines: list[timeline.Timeline], imbalance: list[Imbalance]) -> None:
    name = profiles.load(common().profile).name
    head = recording.header("", name, _start(timelines))
    with recording.Writer(path, head) as writer:
        for item in _records(timelines, imbalance):
            writer.write(item)


def _stream(timelines: list[timeline.Timeline], imbalance: list[Imbalance]) -> None:
    import sys

    from mmctl.engine.records import encode

    name = profiles.load(common().profile).name
    out = sys.stdout.buffer
    out.write(encode(recording.header("", name, _start(timelines))) + b"\n")
    for item in _records(timelines, imbalance):
        out.write(encode(item) + b"\n")
    out.flush()


def _start(timelines: list[timeline.Timeline]) -> int:
    return min((int(line.start_ns[0]) for line in timelines if len(line)), default=0)
