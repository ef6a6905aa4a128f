"""``mmctl probe align``: launches, submissions and scheduling delays on one clock."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from mmctl.cli.app import common, note, output, seconds, to_write
from mmctl.cli.main import Exit
from mmctl.cli.render import emit, to_table
from mmctl.engine import profiles, recording, units
from mmctl.engine.errors import MmctlError, NoSourceError, UsageError
from mmctl.engine.records import SCHEMA, encode


def align(
    command: Annotated[
        list[str] | None, typer.Argument(metavar="[-- COMMAND]...", help="Run this and watch it.")
    ] = None,
    launch: Annotated[
        str | None,
        typer.Option(
            metavar="LIB[:SYMBOL]", help="Launches to trace; by default of cudaLaunchKernel."
        ),
    ] = None,
    npu: Annotated[
        str | None,
        typer.Option(
            metavar="LIB[:SYMBOL]", help="Submissions to trace; by default of aclrtLaunchKernel."
        ),
    ] = None,
    pid: Annotated[int | None, typer.Option(metavar="PID", help="Watch this process only.")] = None,
    duration: Annotated[
        str | None, typer.Option(metavar="TIME", help="Stop after so long; 10s without COMMAND.")
    ] = None,
    read: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Align a bpftrace log made before.")
    ] = None,
    record: Annotated[Path | None, to_write("Write span records here.")] = None,
) -> int:
    """Kernel launches, NPU submissions and scheduling delays by eBPF, joined by time and thread.

    bpftrace is the engine and needs root; its clock is CLOCK_BOOTTIME, and times are given on
    the epoch's. Each launch carries the time its thread waited for a processor since the one
    before. A probe costs each call what cost_per_event_ns says, measured here on a function of
    libc; where that is too much, the allocation hook (hook:PID) costs tens of nanoseconds.
    Without the privilege: exit 4, naming what is missing.

    \b
    Examples:
      mmctl probe align --launch /usr/lib/libcudart.so.13 --pid 4242 --duration 5s
      mmctl probe align --launch ./libstub.so:cudaLaunchKernel -o ndjson -- ./server
      mmctl probe align --read bpftrace.log -o json
    """
    from mmctl.engine.access import align as engine

    wanted = output()
    cost_ns: float | None = None
    if read is not None:
        try:
            lines, lost = engine.parse(read.read_text("utf-8", "replace").splitlines())
        except OSError as error:
            raise MmctlError(f"cannot read {read}: {error.strerror}") from None
    else:
        from mmctl.engine.access import bpftrace

        if launch is None and npu is None:
            raise UsageError("name what to watch: --launch LIB[:SYMBOL] or --npu LIB[:SYMBOL]")
        if (reason := engine.missing()) is not None:
            raise NoSourceError(f"cannot probe the kernel: {reason}")
        probes = [
            bpftrace.locate(engine.parse_probe(text, symbol), pid) if text else None
            for text, symbol in ((launch, engine.LAUNCH), (npu, engine.NPU))
        ]
        most_s = seconds("--duration", duration) if duration else None if command else 10.0
        lines, lost, cost_ns = bpftrace.run(probes[0], probes[1], pid, command or [], most_s, note)
    found = engine.join(lines, engine.boottime_offset_ns(), lost)
    if record:
        _record(record, found.spans)
    absent = {} if cost_ns is not None else {"cost_per_event_ns": "not measured for a log"}
    document: dict[str, Any] = {
        "schema": SCHEMA, "basis": "measured", "clock": "epoch, from CLOCK_BOOTTIME",
        "launches": sum(w.launches for w in found.windows),
        "npu_ops": sum(w.npu_ops for w in found.windows), "lost": found.lost,
        "cost_per_event_ns": cost_ns, "windows": found.windows, "records": found.spans,
        "absent": absent,
    }  # fmt: skip
    if wanted == "ndjson":
        for span in found.spans:
            sys.stdout.buffer.write(encode(span) + b"\n")
        sys.stdout.buffer.flush()
    else:
        emit(document, _rows(found.spans), wanted, _text(document))
    return Exit.DONE


def _record(path: Path, spans: list[Any]) -> None:
    name = profiles.load(common().profile).name
    with recording.Writer(path, recording.header("", name, spans[0].ts_ns)) as writer:
        for span in spans:
            writer.write(span)


def _rows(spans: list[Any]) -> list[dict[str, Any]]:
    names = ("ts_ns", "kind", "pid", "stream", "op_id", "sched_delay_ns", "duration_ns")
    return [{name: getattr(span, name) for name in names} for span in spans]


def _text(document: dict[str, Any]) -> str:
    rows = [
        {"second": w.ts_ns // 10**9, "launches": w.launches, "npu_ops": w.npu_ops,
         "sched_delays": w.sched_delays, "sched_delay_p99": _time(w.sched_delay_p99_ns),
         "late": w.late}
        for w in document["windows"]
    ]  # fmt: skip
    cost = _time(document["cost_per_event_ns"])
    return (
        f"{document['launches']} launches, {document['npu_ops']} submissions, "
        f"{document['lost']} lost; a probe costs {cost} per event\n{to_table(rows)}"
    )


def _time(ns: float | None) -> str:
    return units.show_seconds(None if ns is None else ns / 1e9)
