"""One document, four formats: table, json, ndjson, csv. Rich is not needed for any of them."""

from __future__ import annotations

import csv
import io
import math
import re
import shutil
import sys
import textwrap
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from itertools import zip_longest
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
    """Aligned columns, numbers to the right, ``–`` for what is absent.

    On a terminal that is too narrow, headings and texts go on in the next line.
    """
    listed = list(rows)
    if not listed:
        return "(nothing)"
    names = list(columns or dict.fromkeys(key for row in listed for key in row))
    cells = [[_shown(row.get(name)) for name in names] for row in listed]
    right = [
        all(isinstance(row.get(name), (int, float, type(None))) for row in listed)
        or all(_QUANTITY.fullmatch(line[i]) for line in cells)
        for i, name in enumerate(names)
    ]
    columns_wide = [max(width(line[i]) for line in cells) for i in range(len(names))]
    widths = _fitted(names, columns_wide, right)

    def line(values: Sequence[str]) -> str:
        parts = [_wrapped(value, w) for value, w in zip(values, widths, strict=True)]
        return "\n".join(
            "  ".join(
                " " * (w - width(v)) + v if r else v + " " * (w - width(v))
                for v, w, r in zip(row, widths, right, strict=True)
            ).rstrip()
            for row in zip_longest(*parts, fillvalue="")
        )

    return "\n".join([line(names), *(line(row) for row in cells)])


_QUANTITY = re.compile(r"–|[-+×≤≥]? ?\d[\d.,:]*(?: ?[^\s\d]{1,5})?")
"""A number with its unit, or none."""

_TEXT_LEAST = 16
"""No column of texts is made narrower than this."""


def _fitted(names: Sequence[str], cells: Sequence[int], right: Sequence[bool]) -> list[int]:
    """Widths of columns: as wide as they need, narrower where the terminal is."""
    widths = [max(width(name), wide) for name, wide in zip(names, cells, strict=True)]
    if not sys.stdout.isatty():
        return widths
    least = [
        max(max(map(width, name.split()), default=0), wide if r else min(wide, _TEXT_LEAST))
        for name, wide, r in zip(names, cells, right, strict=True)
    ]
    excess = sum(widths) + 2 * (len(widths) - 1) - shutil.get_terminal_size().columns
    while excess > 0:
        slack, at = max((w - m, i) for i, (w, m) in enumerate(zip(widths, least, strict=True)))
        if slack <= 0:
            break
        widths[at] -= 1
        excess -= 1
    return widths


def _wrapped(text: str, wide: int) -> list[str]:
    return textwrap.wrap(text, wide) if width(text) > wide else [text]


def percent(share: float | None) -> str | None:
    """A share as people read it: ``82.5%``."""
    return None if share is None else f"{share:.1%}"


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
