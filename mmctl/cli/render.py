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

    On a terminal that is too narrow, headings and texts go on in the next line, and columns that
    still do not fit in a further table below, behind the first column again.
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
    drawn = []
    wide = [max(width(line[i]) for line in cells) for i in range(len(names))]
    least = [_least(name, w, r) for name, w, r in zip(names, wide, right, strict=True)]
    for part in _parts(least):
        kept = [[line[i] for i in part] for line in [names, *cells]]
        drawn.append(_drawn(kept, [least[i] for i in part], [right[i] for i in part]))
    return "\n\n".join(drawn)


def _drawn(lines: Sequence[Sequence[str]], least: Sequence[int], right: Sequence[bool]) -> str:
    """Cells, the headings first, in columns; none is made narrower than its ``least``."""
    widths = _fitted([max(map(width, column)) for column in zip(*lines, strict=True)], least)

    def line(values: Sequence[str]) -> str:
        parts = [_wrapped(value, w) for value, w in zip(values, widths, strict=True)]
        return "\n".join(
            "  ".join(
                " " * (w - width(v)) + v if r else v + " " * (w - width(v))
                for v, w, r in zip(row, widths, right, strict=True)
            ).rstrip()
            for row in zip_longest(*parts, fillvalue="")
        )

    return "\n".join(map(line, lines))


_QUANTITY = re.compile(r"–|[-+×≤≥]? ?\d[\d.,:]*(?: ?[^\s\d]{1,5})?")
"""A number with its unit, or none."""

_TEXT_LEAST = 16
"""No column of texts is made narrower than this."""


def _least(name: str, wide: int, right: bool) -> int:
    """The least width of a column: numbers and the words of its heading stay whole."""
    return max(max(map(width, name.split()), default=0), wide if right else min(wide, _TEXT_LEAST))


def _room() -> int | None:
    """Columns of the terminal; None where there is none."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def _parts(least: Sequence[int]) -> list[list[int]]:
    """Columns by their place, in as many tables as the terminal asks for."""
    room = _room()
    parts: list[list[int]] = [[]]
    taken = 0
    for i, wide in enumerate(least):
        if room is not None and len(parts[-1]) > 1 and taken + wide > room:
            parts.append([0])
            taken = least[0] + 2
        parts[-1].append(i)
        taken += wide + 2
    return parts


def _fitted(widths: Sequence[int], least: Sequence[int]) -> list[int]:
    """Widths of columns: as wide as they need, narrower where the terminal is."""
    fitted = list(widths)
    room = _room()
    if room is None:
        return fitted
    excess = sum(fitted) + 2 * (len(fitted) - 1) - room
    while excess > 0:
        slack, at = max((w - m, i) for i, (w, m) in enumerate(zip(fitted, least, strict=True)))
        if slack <= 0:
            break
        fitted[at] -= 1
        excess -= 1
    return fitted


def _wrapped(text: str, wide: int) -> list[str]:
    """``text`` in lines; a word that is too long for one is parted behind a mark."""
    if width(text) <= wide:
        return [text]
    lines = []
    for line in textwrap.wrap(text, wide, break_long_words=False):
        while len(line) > wide:
            marks = [mark.end() for mark in re.finditer(r"[._,/:;|=-]", line[:wide])]
            at = marks[-1] if marks and marks[-1] > wide // 3 else wide
            lines.append(line[:at])
            line = line[at:]
        lines.append(line)
    return lines


def hanging(line: str, indent: int) -> str:
    """A line of text within the terminal, going on behind ``indent``."""
    room = _room()
    if room is None or width(line) <= room:
        return line
    return "\n".join(textwrap.wrap(line, room, subsequent_indent=" " * indent))


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
