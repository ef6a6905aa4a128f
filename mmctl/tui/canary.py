"""A canary's image in characters: two pixels a cell, the question and the right answer below.

Where characters must be plain, a pixel is a letter: the first of its colour, ``k`` for black.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from mmctl.tui.lines import ASCII, EMPTY, Glyphs, Line, wrap

MOST = 34  # columns: every letter of the longest word is still whole


def named(check: dict[str, Any]) -> str | None:
    """The canary that a check asked, ``NAME`` or ``NAME/caption``; or the one that decided it."""
    from mmctl.engine.recovery.canaries import CANARIES

    names = {canary.name for canary in CANARIES}
    asked = str(check.get("name", "")).partition("/")[0]
    decisive = str(check.get("detail") or "").rpartition(" in ")[2].partition("/")[0]
    return asked if asked in names else decisive if decisive in names else None


def panel(name: str, columns: int, rows: int, glyphs: Glyphs) -> list[Line]:
    """The image as large as fits above its question and answer."""
    from mmctl.engine.recovery.canaries import CANARIES

    canary = next(one for one in CANARIES if one.name == name)
    told: list[Line] = [((part, "dim"),) for part in wrap(canary.question, columns)]
    told.append((("right answer ", "dim"), (canary.answer, "strong")))
    if glyphs is ASCII:
        side = min(columns, MOST, 2 * (rows - len(told) - 1))
        drawn = _letters(name, side) if side >= 8 else []
    else:
        side = min(columns, MOST, 2 * (rows - len(told) - 1)) // 2 * 2
        drawn = _blocks(name, side) if side >= 8 else []
    return [*drawn, EMPTY, *told] if drawn else [*told]


def _pixels(name: str, columns: int, rows: int) -> list[list[tuple[int, int, int]]]:
    """The colours at the middles of ``rows`` × ``columns`` cells."""
    from mmctl.engine.recovery.canaries import CANARIES, SIDE, draw

    image = draw(next(one for one in CANARIES if one.name == name))
    return [
        [
            (int(red), int(green), int(blue))
            for x in range(columns)
            for red, green, blue in (
                image[int((y + 0.5) * SIDE / rows), int((x + 0.5) * SIDE / columns)],
            )
        ]
        for y in range(rows)
    ]


@lru_cache(maxsize=16)
def _blocks(name: str, side: int) -> list[Line]:
    """Half blocks: the upper pixel is the ink, the lower one the ground."""
    pixels = _pixels(name, side, side)
    return [
        tuple(
            ("▀", "#{:02x}{:02x}{:02x} on #{:02x}{:02x}{:02x}".format(*upper, *lower))
            for upper, lower in zip(pixels[y], pixels[y + 1], strict=True)
        )
        for y in range(0, side, 2)
    ]


@lru_cache(maxsize=16)
def _letters(name: str, side: int) -> list[Line]:
    """A letter a cell, twice as high as wide; white is a dot."""
    from mmctl.engine.recovery.canaries import COLOURS

    letters = {colour: word[0] for word, colour in COLOURS.items()}
    letters |= {COLOURS["white"]: ".", COLOURS["black"]: "k"}
    return [
        (("".join(letters[pixel] for pixel in row), ""),) for row in _pixels(name, side, side // 2)
    ]
