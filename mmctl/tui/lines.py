"""What a panel shows, before there is a terminal: lines of styled pieces, bars, sparklines, ramps.

A line is a tuple of ``(text, role)`` pieces; a role ("vision", "bad", "dim" …) is a name that
``palette`` turns into a style. Nothing here knows of Textual, so a panel is a pure function and
a test reads its text.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple, TypeAlias

from rich.cells import cell_len, set_cell_size

Piece: TypeAlias = tuple[str, str]
Line: TypeAlias = tuple[Piece, ...]

ABSENT = "–"
EMPTY: Line = ()


class Glyphs(NamedTuple):
    """The characters that stand for amounts; every modality has its own, colour comes on top."""

    ramp: str  # nothing, then little to much
    spark: str
    vision: str
    text: str
    other: str
    free: str
    unusable: str
    dot: str
    done: str
    failed: str
    waiting: str
    absent: str
    up: str
    down: str
    rule: str
    event: str
    play: str
    pause: str
    cursor: str


UNICODE = Glyphs(
    ramp="·░▒▓█", spark="▁▂▃▄▅▆▇█", vision="█", text="▓", other="▒", free="·", unusable="×",
    dot="●", done="✓", failed="✗", waiting="○", absent="–", up="▲", down="▼", rule="─",
    event="┼", play="▶", pause="‖", cursor="▸",
)  # fmt: skip
ASCII = Glyphs(
    ramp=".:+*#", spark="_.-=+*%#", vision="#", text="=", other="-", free=".", unusable="x",
    dot="*", done="+", failed="x", waiting="o", absent="-", up="^", down="v", rule="-",
    event="|", play=">", pause="=", cursor=">",
)  # fmt: skip


def clean(text: object) -> str:
    """``text`` without control characters: names and messages come from strangers."""
    return "".join(c if c.isprintable() else " " for c in str(text))


def plain(line: Line) -> str:
    """The characters of a line, without its styles."""
    return "".join(text for text, _ in line)


def width(line: Line) -> int:
    """Columns that a line takes."""
    return sum(cell_len(text) for text, _ in line)


def fit(line: Line, columns: int) -> Line:
    """``line`` cut or padded to ``columns``; a cut shows as an ellipsis."""
    room, pieces = columns, []
    for text, role in line:
        size = cell_len(text)
        if size > room:
            if room > 0:
                pieces.append((set_cell_size(text, room - 1) + "…", role))
            return tuple(pieces)
        pieces.append((text, role))
        room -= size
    if room > 0:
        pieces.append((" " * room, ""))
    return tuple(pieces)


def flow(pieces: Sequence[Line], columns: int, gap: int = 3) -> list[Line]:
    """Pieces side by side, on as many lines as they need."""
    lines: list[Line] = [EMPTY]
    for piece in pieces:
        if lines[-1] and width(lines[-1]) + gap + width(piece) > columns:
            lines.append(piece)
        else:
            lines[-1] = (*lines[-1], (" " * gap, ""), *piece) if lines[-1] else piece
    return lines


def left(text: object, columns: int) -> str:
    """``text`` in exactly ``columns``, from the left, cut with an ellipsis."""
    shown = clean(text)
    if cell_len(shown) > columns:
        return set_cell_size(shown, max(0, columns - 1)) + "…" if columns > 0 else ""
    return set_cell_size(shown, columns)


def right(text: object, columns: int) -> str:
    """``text`` in at least ``columns``, to the right."""
    shown = clean(text)
    return " " * (columns - cell_len(shown)) + shown


def justify(start: Line, end: Line, columns: int) -> Line:
    """``start`` at the left edge and ``end`` at the right one; the start gives way."""
    room = columns - width(end)
    if room <= 0:
        return fit(end, columns)
    gap = 1 if end else 0
    return (*fit(start, room - gap), (" " * gap, ""), *end)


def wrap(text: str, columns: int) -> list[str]:
    """Words of ``text`` in lines of at most ``columns``; a longer word goes on in the next."""
    lines: list[str] = []
    wide = max(1, columns)
    for word in clean(text).split():
        while cell_len(word) > wide:
            lines.append(word[:wide])
            word = word[wide:]
        if lines and cell_len(lines[-1]) + 1 + cell_len(word) <= columns:
            lines[-1] += " " + word
        else:
            lines.append(word)
    return lines or [""]


def window(lines: list[Line], rows: int, scroll: int) -> list[Line]:
    """``rows`` of the lines from ``scroll`` on; a last line says how many are left out."""
    if len(lines) <= rows or rows < 2:
        return lines
    first = max(0, min(scroll, len(lines) - rows + (1 if scroll < len(lines) - rows else 0)))
    shown = lines[first : first + rows]
    after = len(lines) - first - rows
    if after > 0:
        shown[-1] = ((f"{after + 1} more lines below", "dim"),)
    return shown


def quiet(told: str, columns: int) -> list[Line]:
    """Words on what is not there, in as many lines as they need."""
    return [((part, "dim"),) for part in wrap(told, columns)]


def spark(values: Sequence[float | None], top: float, glyphs: Glyphs = UNICODE) -> str:
    """One character a value, scaled from 0 to ``top``; a gap is a space."""
    marks = glyphs.spark
    last = len(marks) - 1
    return "".join(
        " "
        if value is None
        else marks[0 if top <= 0 else max(0, min(last, round(value / top * last)))]
        for value in values
    )


def shares(parts: Iterable[tuple[float, str, str]], columns: int) -> Line:
    """A bar of ``columns`` from ``(amount, glyph, role)``; every amount above zero shows.

    Largest remainders decide the widths, so that the bar is always full.
    """
    listed = [(max(0.0, amount), glyph, role) for amount, glyph, role in parts]
    total = sum(amount for amount, _, _ in listed)
    if columns <= 0 or total <= 0:
        return ((" " * max(0, columns), ""),)
    exact = [amount / total * columns for amount, _, _ in listed]
    cells = [int(size) for size in exact]
    order = sorted(range(len(listed)), key=lambda i: exact[i] - cells[i], reverse=True)
    for i in order[: columns - sum(cells)]:
        cells[i] += 1
    for i, (amount, _, _) in enumerate(listed):
        if amount > 0 and cells[i] == 0:
            widest = max(range(len(cells)), key=cells.__getitem__)
            if cells[widest] > 1:
                cells[widest] -= 1
                cells[i] = 1
    return tuple(
        (glyph * count, role)
        for count, (_, glyph, role) in zip(cells, listed, strict=True)
        if count
    )


def natural(name: str) -> tuple[int | str, ...]:
    """A key that sorts gpu2 before gpu10."""
    return tuple(int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name))


def percent(ratio: float | None) -> str:
    """``93%``; an absent share is ``–``."""
    return ABSENT if ratio is None else f"{100 * ratio:.0f}%"
