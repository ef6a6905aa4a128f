"""Timings of collectives in files: nccl-tests logs, superbench results, tables of columns.

nccl-tests and rccl-tests print one row a size: size, count, type, redop (and root since 2.13),
then the time out of place in µs. Tables are Parquet or CSV with ``op_name``, ``num_gpus``,
``message_size`` counted in elements of ``nccl_dtype``, and ``latency`` in ms. Superbench's
results name ``alltoall_1048576_time`` in µs.
"""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from mmctl.engine.errors import MissingExtraError, MmctlError, suggestion

MAX_BYTES = 256 * 2**20
"""A larger file is no table of timings."""

WIDTHS = {
    "int8": 1, "uint8": 1, "fp8": 1, "float8": 1, "f8e4m3": 1, "f8e5m2": 1, "half": 2,
    "float16": 2, "fp16": 2, "bfloat16": 2, "bf16": 2, "float": 4, "float32": 4, "fp32": 4,
    "int32": 4, "uint32": 4, "double": 8, "float64": 8, "int64": 8, "uint64": 8,
}  # fmt: skip
"""Bytes of one element, by the names that NCCL, torch and the tables give."""

_OPERATIONS = {
    "allgather": "all_gather", "allreduce": "all_reduce", "alltoall": "alltoall",
    "reducescatter": "reduce_scatter", "broadcast": "broadcast", "reduce": "reduce",
    "sendrecv": "sendrecv", "gather": "gather", "scatter": "scatter", "hypercube": "hypercube",
}  # fmt: skip

_COLUMNS = ("op_name", "num_gpus", "message_size", "latency")


class Timing(msgspec.Struct, frozen=True, kw_only=True):
    """How long one collective of ``size_bytes`` took; ``system`` is the device's name as given."""

    system: str
    operation: str
    dtype: str
    ranks: int
    size_bytes: float
    latency_us: float


class Read(NamedTuple):
    """The timings of a file, and what of it was left out."""

    timings: list[Timing]
    notes: list[str]


def is_table(head: bytes) -> bool:
    """Whether a file that begins like this is Parquet or a CSV with the columns of timings."""
    if head.startswith(b"PAR1"):
        return True
    first = head.split(b"\n", 1)[0].decode("utf-8", "replace")
    return "message_size" in first and "," in first


def is_log(head: bytes) -> bool:
    """Whether a file that begins like this is the output of nccl-tests or of superbench."""
    text = head.decode("utf-8", "replace")
    return bool(
        re.search(r"out-of-place|nThread \d+ nGpus|_perf\b|#\s+size\s+count", text)
        or re.search(r'"[\w:./-]+_\d+_time(?::\d+)?"\s*:', text)
    )


def read(path: Path, ranks: int | None = None) -> Read:
    """The timings in a file, recognised by its content; ``ranks`` for one that does not tell.

    Raises MmctlError for one that holds none, MissingExtraError where Parquet cannot be read.
    """
    try:
        if path.stat().st_size > MAX_BYTES:
            raise MmctlError(f"{path} is larger than {MAX_BYTES >> 20} MiB: no table of timings")
        data = path.read_bytes()
    except OSError as error:
        raise MmctlError(f"cannot read {path}: {error.strerror}") from None
    if is_table(data[:4096]):
        return _from_rows(path, table_rows(path, data))
    text = data.decode("utf-8", "replace")
    if re.search(r'"[\w:./-]+_\d+_time(?::\d+)?"\s*:', text):
        return _superbench(path, text, ranks)
    return _log(path, text, ranks)


def table_rows(path: Path, data: bytes | None = None) -> list[dict[str, Any]]:
    """The rows of a Parquet or CSV file."""
    try:
        raw = path.read_bytes() if data is None else data
    except OSError as error:
        raise MmctlError(f"cannot read {path}: {error.strerror}") from None
    if not raw.startswith(b"PAR1"):
        try:
            return list(csv.DictReader(io.StringIO(raw.decode("utf-8"))))
        except (UnicodeDecodeError, csv.Error) as error:
            raise MmctlError(f"{path} is no table: {error}") from None
    try:
        import pyarrow as arrow
        import pyarrow.parquet as parquet
    except ImportError:
        raise MissingExtraError("reading Parquet", "files") from None
    try:
        found: list[dict[str, Any]] = parquet.read_table(io.BytesIO(raw)).to_pylist()
    except (arrow.ArrowException, OSError, ValueError) as error:
        what = str(error).splitlines()[0][:120]
        raise MmctlError(f"{path} is damaged Parquet: {what}") from None
    return found


def require(path: Path, rows: list[dict[str, Any]], columns: Iterable[str]) -> None:
    """MmctlError naming the columns that ``rows`` lack."""
    if not rows:
        raise MmctlError(f"{path} has no row")
    missing = [name for name in columns if name not in rows[0]]
    if missing:
        near = suggestion(missing[0], [str(name) for name in rows[0]])
        raise MmctlError(
            f"{path} lacks the column{'s' if len(missing) > 1 else ''} {', '.join(missing)}; "
            f"it has {', '.join(map(str, rows[0]))}{near}"
        )


def _from_rows(path: Path, rows: list[dict[str, Any]]) -> Read:
    require(path, rows, _COLUMNS)
    dtype_column = next((name for name in rows[0] if str(name).endswith("dtype")), None)
    if dtype_column is None:
        raise MmctlError(f"{path} lacks a column of data types such as nccl_dtype")
    timings, skipped = [], 0
    for row in rows:
        timing = _timing(row, dtype_column, path.name.split("_nccl")[0])
        if timing is None:
            skipped += 1
        else:
            timings.append(timing)
    if not timings:
        raise MmctlError(f"no row of {path} holds a size and a time above zero")
    return Read(timings, [f"{path.name}: {skipped} rows without a usable time"] if skipped else [])


def _timing(row: Mapping[str, Any], dtype_column: str, fallback: str) -> Timing | None:
    """A row as a timing; None where it has no size, time, number of ranks or known type."""
    dtype = str(row.get(dtype_column) or "").lower()
    width = WIDTHS.get(dtype.removeprefix("torch."))
    try:
        count, ranks = float(row["message_size"]), int(float(row["num_gpus"]))
        latency_us = float(row["latency"]) * 1e3
    except (TypeError, ValueError, OverflowError):
        return None
    if width is None or not 0 < count < 1e15 or not 0 < latency_us < 1e12 or ranks < 1:
        return None
    return Timing(
        system=str(row.get("device") or fallback), operation=operation(str(row["op_name"])),
        dtype=dtype, ranks=ranks, size_bytes=count * width, latency_us=latency_us,
    )  # fmt: skip


def operation(name: str) -> str:
    """The collective's name as torch.distributed writes it, ``unknown`` where ``name`` has none."""
    plain = re.sub(r"[^a-z]", "", name.lower())
    for key in sorted(_OPERATIONS, key=len, reverse=True):
        if key in plain:
            return _OPERATIONS[key]
    return "unknown"


_ROW = re.compile(r"(?:^|\s)(?P<size>\d+)\s+(?P<count>\d+)\s+(?P<type>[a-z]\w*)\s+(?P<rest>\S.*)$")
_RANK = re.compile(r"Rank\s+(\d+)\b.*?\[\S+\]\s+(\S.*?)\s*$")


def _log(path: Path, text: str, given: int | None) -> Read:
    """nccl-tests' output; rows that the end of a truncated log cuts are left out."""
    lines = text.splitlines()
    header = next((line for line in lines if re.search(r"#\s*size\s+count", line)), None)
    if header is None:
        raise MmctlError(
            f"{path} holds no timings: give a log of nccl-tests, a table with the columns "
            f"{', '.join(_COLUMNS)}, or a matrix of bandwidth or latency"
        )
    ranks = {found[1]: found[2] for line in lines if (found := _RANK.search(line))}
    shape = re.search(r"nThread\s+(\d+)\s+nGpus\s+(\d+)", text)
    count = len(ranks) or (int(shape[1]) * int(shape[2]) if shape else given or 0)
    if not count:
        raise MmctlError(f"{path} does not say how many ranks took part: say --ranks")
    named = re.search(r"(\w+)_perf\b", text)
    what = operation(named[1] if named else path.stem)
    timings, cut = [], 0
    for line in lines:
        if line.lstrip().startswith("#") or not (row := _ROW.search(line)):
            continue
        latency_us = _time(row["rest"].split(), "root" in header.split())
        if latency_us is None:
            cut += 1
        elif int(row["size"]) > 0 and row["type"] in WIDTHS:
            timings.append(
                Timing(
                    system=next(iter(ranks.values()), "unknown"), operation=what,
                    dtype=row["type"], ranks=count, size_bytes=float(row["size"]),
                    latency_us=latency_us,
                )
            )  # fmt: skip
    if not timings:
        raise MmctlError(f"{path} ends before its first timing")
    notes = []
    if cut or "Avg bus bandwidth" not in text:
        notes.append(f"{path.name} ends early: {len(timings)} timings before that")
    return Read(timings, notes)


def _time(words: list[str], has_root: bool) -> float | None:
    """The time out of place behind redop and root; None where the row is cut before its end."""
    if words and re.match(r"[a-z]", words[0]):
        words = words[1:]
    if has_root and words and re.fullmatch(r"-?\d+", words[0]):
        words = words[1:]
    if len(words) < 3:
        return None
    try:
        time_us = float(words[0])
    except ValueError:
        return None
    return time_us if 0 < time_us < 1e12 else None


_METRIC = re.compile(r"(?:^|[/:])(?P<op>[a-z_]*[a-z])_(?P<size>\d+)_time(?::\d+)?$")


def _superbench(path: Path, text: str, ranks: int | None) -> Read:
    """One JSON object a line, or one alone: ``nccl-bw:nvlink/alltoall_1024_time:0`` in µs."""
    if ranks is None:
        raise MmctlError(f"{path} does not say how many ranks took part: say --ranks")
    timings = []
    try:
        documents = [json.loads(text)]
    except ValueError:
        try:
            documents = [json.loads(line) for line in text.splitlines() if line.strip()]
        except (ValueError, RecursionError):
            raise MmctlError(f"{path} is not superbench's JSON, one object a line") from None
    except RecursionError:
        raise MmctlError(f"{path} is not superbench's JSON") from None
    for document in documents:
        for name, value in document.items() if isinstance(document, dict) else ():
            found = _METRIC.search(name)
            if not found or not isinstance(value, (int, float)) or not 0 < value < 1e12:
                continue
            if (size := int(found["size"])) > 0:
                timings.append(
                    Timing(
                        system=str(document.get("node") or "unknown"),
                        operation=operation(found["op"]), dtype="float", ranks=ranks,
                        size_bytes=float(size), latency_us=float(value),
                    )
                )  # fmt: skip
    if not timings:
        raise MmctlError(f"{path} names no time of a collective")
    return Read(timings, [])
