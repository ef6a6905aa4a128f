"""One document, four formats: table, json, ndjson, csv. Rich is not needed for any of them."""

from __future__ import annotations

import csv
import io
import math
import sys
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

Row = Mapping[str, Any]


def emit(
    document: Mapping[str, Any],
    rows: Sequence[Row],
    output: str,
    table: str | None = None,
) -> None:
    """Write ``document`` (json) or its ``rows`` (ndjson, csv, table) to standard output.

    ``table`` replaces the plain table where a command draws its own.
    """
    if output == "json":
        print(to_json(document, indent=2))
    elif output == "ndjson":
        for row in rows:
            print(to_json(row), flush=True)
    elif output == "csv":
        sys.stdout.write(to_csv(rows))
    else:
        print(table if table is not None else to_table(rows))


def to_json(value: Any, indent: int | None = None) -> str:
    """JSON with null for what is absent, not a number or infinite."""
    encoded = msgspec.json.encode(_finite(msgspec.to_builtins(value)))
    return (msgspec.json.format(encoded, indent=indent) if indent else encoded).decode()


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return value


def to_csv(rows: Sequence[Row]) -> str:
    """RFC 4180, stable columns, and no cell that a spreadsheet would run as a formula."""
    if not rows:
        return ""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\r\n")
    writer.writerow(columns)
    for row in rows:
        writer.writerow([_cell(row.get(column)) for column in columns])
    return text.getvalue()


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, (dict, list, tuple)):
        return to_json(value)
    text = str(value)
    if isinstance(value, str) and text[:1] in ("=", "+", "-", "@", "\t", "\r"):
        return "'" + text
    return text


def to_table(rows: Iterable[Row], columns: Sequence[str] | None = None) -> str:
    """Aligned columns, numbers to the right, ``–`` for what is absent."""
    listed = list(rows)
    if not listed:
        return "(nothing)"
    names = list(columns or dict.fromkeys(key for row in listed for key in row))
    cells = [[_shown(row.get(name)) for name in names] for row in listed]
    widths = [max(width(name), *(width(line[i]) for line in cells)) for i, name in enumerate(names)]
    right = [
        all(isinstance(row.get(name), (int, float, type(None))) for row in listed) for name in names
    ]

    def line(values: Sequence[str]) -> str:
        padded = (
            " " * (w - width(v)) + v if r else v + " " * (w - width(v))
            for v, w, r in zip(values, widths, right, strict=True)
        )
        return "  ".join(padded).rstrip()

    return "\n".join([line(names), *(line(row) for row in cells)])


def _shown(value: Any) -> str:
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.4g}" if math.isfinite(value) else "–"
    if isinstance(value, (list, tuple)):
        return ", ".join(_shown(item) for item in value)
    return "".join(c if c.isprintable() else " " for c in str(value))


def width(text: str) -> int:
    """Columns a terminal needs for ``text``."""
    return sum(
        0 if unicodedata.combining(c) else 2 if unicodedata.east_asian_width(c) in "WF" else 1
        for c in text
    )
