"""Files of any kind that ``probe kernels`` takes, told apart by what they hold."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from mmctl.engine.access import dump_file, dumps, kineto, nsys
from mmctl.engine.access import timeline as tl
from mmctl.engine.access.trace_events import open_binary
from mmctl.engine.errors import MmctlError, UsageError
from mmctl.engine.profiles import ModalityPatterns
from mmctl.engine.records import AnyRecord, Span

_LARGEST_DUMP_BYTES = 256 << 20
_NO_DATA = (".log", ".txt", ".md")  # what lies beside the files of a folder
_SPAN_KINDS = {"kernel": tl.COMPUTE, "npu_op": tl.COMPUTE, "copy": tl.COPY,
               "collective": tl.COLLECTIVE}  # fmt: skip


def load(
    paths: Sequence[Path],
    patterns: ModalityPatterns,
    read_records: Callable[[Path], Iterable[AnyRecord]],
) -> tuple[list[tl.Timeline], list[dumps.Dump]]:
    """Timelines and flight-recorder dumps of the files; a folder stands for the files in it.

    ``read_records`` opens a recording. Ranks that two files share are told apart by the order
    given.
    Raises MmctlError for a file that is none of the known kinds.
    """
    timelines: list[tl.Timeline] = []
    found: list[dumps.Dump] = []
    for index, path in enumerate(_files(paths)):
        kind, content = _kind(path)
        if kind == "nsys":
            timelines += nsys.timelines(path, patterns)
        elif kind == "records":
            timelines += _spans(path, read_records(path))
        elif kind == "dump":
            rank = dump_file.rank_of(path, index)
            found.append(dumps.parse(content, rank, str(path)))
        else:
            timelines.append(kineto.timeline(path, index, patterns))
    return _distinct(timelines), found


def _files(paths: Sequence[Path]) -> list[Path]:
    files: list[Path] = []
    for path in paths:
        if path.is_dir():
            inside = sorted(
                p for p in path.iterdir()
                if p.is_file() and p.suffix not in _NO_DATA and not p.name.startswith(".")
            )  # fmt: skip
            if not inside:
                raise UsageError(f"{path} holds no files")
            files += inside
        else:
            files.append(path)
    return files


def _kind(path: Path) -> tuple[str, Any]:
    with open_binary(path) as file:
        try:
            head = file.read(4096)
        except (EOFError, OSError, ValueError) as error:
            raise MmctlError(f"{path} is damaged: {error}") from None
    if not head:
        raise MmctlError(f"{path} is empty")
    if head.startswith(b"SQLite format 3\0"):
        return "nsys", None
    if head[:1] == b"\x80" or head[:2] in (b"(d", b"(l"):
        return "dump", dump_file.read_pickle(path)
    start = head.lstrip()
    if start[:1] not in (b"{", b"["):
        raise MmctlError(f"{path} is no profiler trace, Nsight export, dump or recording")
    if b'"traceEvents"' in head or start[:1] == b"[":
        return "trace", None
    first = head.split(b"\n", 1)[0]
    if b'"type"' in first and first.rstrip().endswith(b"}"):
        return "records", None
    return _json_dump(path)


def _json_dump(path: Path) -> tuple[str, Any]:
    """A dump written as JSON, or a trace whose other keys come first."""
    with open_binary(path) as file:
        raw = file.read(_LARGEST_DUMP_BYTES)
    if b'"traceEvents"' in raw:
        return "trace", None
    return "dump", dump_file.read_json(raw, path)


def _spans(path: Path, records: Iterable[AnyRecord]) -> list[tl.Timeline]:
    """Span records of a recording, one Timeline per node."""
    by_node: dict[str, list[Span]] = {}
    for record in records:
        if isinstance(record, Span) and record.kind in _SPAN_KINDS:
            by_node.setdefault(record.node, []).append(record)
    if not by_node:
        raise MmctlError(f"{path} holds no span of device work")
    return [_span_timeline(path, rank, spans)
            for rank, (_, spans) in enumerate(sorted(by_node.items()))]  # fmt: skip


def _span_timeline(path: Path, rank: int, spans: list[Span]) -> tl.Timeline:
    names: dict[str, int] = {}
    streams: dict[tuple[str, str], int] = {}
    start = np.array([span.ts_ns for span in spans], np.int64)
    rows = {
        "start_ns": start,
        "end_ns": start + np.array([span.duration_ns for span in spans], np.int64),
        "name": np.array([names.setdefault(s.name, len(names)) for s in spans], np.int64),
        "kind": np.array([_SPAN_KINDS[span.kind] for span in spans], np.int64),
        "stream": np.array(
            [streams.setdefault((s.device, s.stream), len(streams)) for s in spans], np.int64
        ),
        "modality": np.array([tl.MODALITIES.index(span.modality) for span in spans], np.int64),
        "launch_ns": np.full(len(spans), -1, np.int64),
        "names": list(names),
        "streams": list(streams),
    }
    calls = [
        tl.Call(span.name, "default", span.ts_ns, span.duration_ns)
        for span in spans
        if span.kind == "collective"
    ]
    return tl.build(str(path), rank, rows, calls=calls)


def _distinct(timelines: list[tl.Timeline]) -> list[tl.Timeline]:
    """Every timeline with a rank of its own."""
    if len({line.rank for line in timelines}) == len(timelines):
        return sorted(timelines, key=lambda line: line.rank)
    return [
        replace(line, rank=index, notes=(*line.notes, f"the file says rank {line.rank}"))
        if line.rank != index
        else line
        for index, line in enumerate(timelines)
    ]
