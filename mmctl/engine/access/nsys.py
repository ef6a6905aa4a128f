"""Nsight Systems exports (SQLite) as one Timeline per GPU.

Tables and columns differ between schema versions: only those present are asked for, and a
missing one is named in the notes.
"""

from __future__ import annotations

import sqlite3
from collections import defaultdict
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np

from mmctl.engine.access import kineto
from mmctl.engine.access import timeline as tl
from mmctl.engine.errors import MmctlError
from mmctl.engine.modality import Matcher
from mmctl.engine.profiles import ModalityPatterns

KERNELS = ("CUPTI_ACTIVITY_KIND_KERNEL", "CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL")
GRAPHS = "CUPTI_ACTIVITY_KIND_GRAPH_TRACE"
COPIES = ("CUPTI_ACTIVITY_KIND_MEMCPY", "CUPTI_ACTIVITY_KIND_MEMCPY2", "CUPTI_ACTIVITY_KIND_MEMSET")
RUNTIMES = ("CUPTI_ACTIVITY_KIND_RUNTIME", "CUPTI_ACTIVITY_KIND_DRIVER")
NAME_COLUMNS = ("demangledName", "shortName", "name", "nameId")
NVTX_RANGES = (59, 60, 70, 71, 75, 76)  # push/pop and start/end, with domains and payloads


def timelines(path: Path, patterns: ModalityPatterns) -> list[tl.Timeline]:
    """One Timeline per GPU of the export; ``rank`` is the GPU's number.

    Raises MmctlError for a file that is no such export.
    """
    try:
        connection = sqlite3.connect(f"file:{quote(str(path))}?mode=ro&immutable=1", uri=True)
        try:
            return _read(connection, path, patterns)
        finally:
            connection.close()
    except sqlite3.Error as error:
        raise MmctlError(f"cannot read {path} as an Nsight Systems export: {error}") from None


def _read(db: sqlite3.Connection, path: Path, patterns: ModalityPatterns) -> list[tl.Timeline]:
    db.text_factory = lambda raw: raw.decode("utf-8", "replace")
    tables = {name for (name,) in db.execute("SELECT name FROM sqlite_master WHERE type='table'")}
    kernels = [table for table in (*KERNELS, GRAPHS) if table in tables]
    copies = [table for table in COPIES if table in tables]
    if not kernels and not copies:
        raise MmctlError(f"{path} holds no GPU work: export with 'nsys export --type sqlite'")
    strings: dict[int, str] = {}
    if "StringIds" in tables:
        strings = {i: text or "" for i, text in db.execute("SELECT id, value FROM StringIds")}
    base = _epoch(db, tables)
    launches, waits = _launches(db, [t for t in RUNTIMES if t in tables], strings)
    named = _ranges(db, tables, strings, patterns)
    work: dict[int, list[tuple[Any, ...]]] = defaultdict(list)
    for table in kernels:
        for row in _rows(db, table, ("start", "end", "deviceId", "streamId", "correlationId",
                                     "globalPid"), NAME_COLUMNS):  # fmt: skip
            start, end, device, stream, correlation, process, name = row
            text = "CUDA graph" if table == GRAPHS else strings.get(name, str(name))
            work[device or 0].append((start, end, stream, correlation, process, text, False))
    for table in copies:
        label = "Memset" if table.endswith("SET") else "Memcpy"
        for row in _rows(db, table, ("start", "end", "deviceId", "streamId", "correlationId",
                                     "globalPid"), ("copyKind",)):  # fmt: skip
            start, end, device, stream, correlation, process, _ = row
            work[device or 0].append((start, end, stream, correlation, process, label, True))
    notes = tuple(
        f"the export has no table {table}" for table in ("StringIds",) if table not in tables
    )
    return [
        _timeline(path, gpu, rows, launches, named, base, notes, waits)
        for gpu, rows in sorted(work.items())
    ]


def _columns(db: sqlite3.Connection, table: str) -> set[str]:
    return {row[1] for row in db.execute(f'PRAGMA table_info("{table}")')}


def _rows(
    db: sqlite3.Connection, table: str, columns: tuple[str, ...], one_of: tuple[str, ...]
) -> sqlite3.Cursor:
    """The columns asked for (NULL where the schema has none) and the first present of a choice."""
    have = _columns(db, table)
    chosen = [f'"{c}"' if c in have else "NULL" for c in columns]
    chosen.append(next((f'"{c}"' for c in one_of if c in have), "NULL"))
    return db.execute(f'SELECT {", ".join(chosen)} FROM "{table}" WHERE start IS NOT NULL')


def _epoch(db: sqlite3.Connection, tables: set[str]) -> int:
    """What to add to a time of the file for nanoseconds since the epoch; 0 if unknown."""
    table = "TARGET_INFO_SESSION_START_TIME"
    if table in tables and "utcEpochNs" in _columns(db, table):
        system = "systemClockNs" if "systemClockNs" in _columns(db, table) else "NULL"
        row = db.execute(f"SELECT utcEpochNs, {system} FROM {table}").fetchone()
        if row and row[0]:
            return int(row[0]) - int(row[1] or 0)
    return 0


def _launches(
    db: sqlite3.Connection, tables: list[str], strings: dict[int, str]
) -> tuple[dict[tuple[int, int], tuple[int, int]], dict[tuple[int, str], tuple[int, int]]]:
    """(process, correlation) → (start, thread), and (process, call) → count and time waited."""
    launches: dict[tuple[int, int], tuple[int, int]] = {}
    waits: dict[tuple[int, str], tuple[int, int]] = {}
    for table in tables:
        for start, end, correlation, thread, name in _rows(
            db, table, ("start", "end", "correlationId", "globalTid"), ("nameId",)
        ):
            if correlation is not None:
                launches[(_process(thread), correlation)] = (start, thread or 0)
            text = strings.get(name, "")
            if kineto.WAIT_CALLS.search(text):
                call = _process(thread), text.split("_v")[0]
                count, blocked = waits.get(call, (0, 0))
                waits[call] = count + 1, blocked + max(0, (end or start) - start)
    return launches, waits


def _process(identifier: int | None) -> int:
    """The process part of Nsight's global ids: everything but the lowest 24 bits."""
    return (identifier or 0) >> 24


def _ranges(
    db: sqlite3.Connection, tables: set[str], strings: dict[int, str], patterns: ModalityPatterns
) -> dict[int, list[tuple[float, float, int]]]:
    """NVTX ranges whose text names a modality, by thread."""
    named: dict[int, list[tuple[float, float, int]]] = defaultdict(list)
    if "NVTX_EVENTS" not in tables:
        return named
    matcher = Matcher(patterns)
    known: dict[str, int] = {}
    have = _columns(db, "NVTX_EVENTS")
    text_id = "textId" if "textId" in have else "NULL"
    thread_column = "globalTid" if "globalTid" in have else "NULL"
    rows = db.execute(
        f"SELECT start, end, text, {text_id}, {thread_column} FROM NVTX_EVENTS "
        f"WHERE end IS NOT NULL AND eventType IN ({','.join(map(str, NVTX_RANGES))})"
    )
    for start, end, text, identifier, thread in rows:
        words = text if text is not None else strings.get(identifier, "")
        modality = known.get(words)
        if modality is None:
            modality = known[words] = tl.MODALITIES.index(matcher.modality(words))
        if modality:
            named[thread or 0].append((start, end, modality))
    return named


def _timeline(
    path: Path, gpu: int, rows: list[tuple[Any, ...]],
    launches: dict[tuple[int, int], tuple[int, int]],
    named: dict[int, list[tuple[float, float, int]]],
    base: int, notes: tuple[str, ...], waits: dict[tuple[int, str], tuple[int, int]],
) -> tl.Timeline:  # fmt: skip
    names: dict[str, int] = {}
    streams: dict[tuple[str, str], int] = {}
    start = np.array([row[0] for row in rows], np.int64)
    end = np.array([row[1] if row[1] is not None else row[0] for row in rows], np.int64)
    name = np.array([names.setdefault(row[5], len(names)) for row in rows], np.int64)
    stream = np.array(
        [streams.setdefault((str(gpu), str(row[2])), len(streams)) for row in rows], np.int64
    )
    joined = [launches.get((_process(row[4]), row[3]), (-1, 0)) for row in rows]
    launch = np.array([at for at, _ in joined], np.int64)
    thread = np.array([thread for _, thread in joined], np.int64)
    modality = np.zeros(len(rows), np.int64)
    for key, ranges in named.items():
        here = (thread == key) & (launch >= 0)
        if here.any():
            edges, values = kineto.innermost(ranges)
            modality[here] = values[np.searchsorted(edges, launch[here], side="right")]
    kind = np.array([tl.kind_of(text) for text in names], np.int64)[name]
    kind = np.where(np.array([row[6] for row in rows]), tl.COPY, kind)
    processes = {_process(row[4]) for row in rows}
    calls = [
        tl.Call(kineto.short_name(row[5]), "default", row[0] + base, (row[1] or row[0]) - row[0])
        for row, k in zip(rows, kind.tolist(), strict=True)
        if k == tl.COLLECTIVE
    ]
    return tl.build(
        str(path), gpu,
        {
            "start_ns": start + base, "end_ns": end + base, "name": name, "kind": kind,
            "stream": stream, "modality": modality,
            "launch_ns": np.where(launch < 0, -1, launch + base),
            "names": list(names), "streams": list(streams),
        },
        calls=calls, notes=notes,
        waits={call: spent for (process, call), spent in waits.items() if process in processes},
    )  # fmt: skip
