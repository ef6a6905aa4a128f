"""Twelve small images drawn by code, each with a closed question and an open one.

The scenes are simple enough that a right caption can be told from a wrong one by its words:
shapes, colours, counts, digits and text on white.
"""

from __future__ import annotations

import hashlib
import struct
import zlib
from collections.abc import Callable
from functools import cache
from typing import Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

SIDE = 224
"""Height and width of every canary, in pixels."""

Image = NDArray[np.uint8]
Kind = Literal["colour", "count", "yes_no", "text"]

CAPTION = "Describe the image in one sentence."

COLOURS = {
    "white": (255, 255, 255), "black": (20, 20, 20), "red": (214, 39, 40), "blue": (31, 80, 200),
    "green": (30, 150, 50), "yellow": (245, 205, 30), "purple": (130, 50, 160),
    "orange": (255, 127, 14),
}  # fmt: skip


class Mark(msgspec.Struct, frozen=True):
    """One thing of a scene: ``shape`` is circle, square, triangle, bar, or text to write.

    ``x``, ``y`` (its centre) and ``size`` (its width) are shares of the image's side.
    """

    shape: str
    colour: str
    x: float
    y: float
    size: float


class Canary(msgspec.Struct, frozen=True):
    """An image, a closed question about it, the right answer and a right caption.

    A model with random weights cannot give the right answer; what counts is that it gives
    the same answer as before. ``described`` canaries are also asked for a caption.
    """

    name: str
    kind: Kind
    question: str
    answer: str
    caption: str
    marks: tuple[Mark, ...]
    described: bool = False


def _row(shape: str, colour: str, count: int, y: float = 0.5) -> tuple[Mark, ...]:
    step = 1 / (count + 1)
    return tuple(Mark(shape, colour, step * (i + 1), y, min(0.2, 0.7 * step)) for i in range(count))


_COLOUR = "Answer with one word."
_COUNT = "Answer with a number."
_YES_NO = "Answer yes or no."

CANARIES: tuple[Canary, ...] = (
    Canary(
        "red_circle", "colour", f"What colour is the circle? {_COLOUR}", "red",
        "A red circle on a white background.", (Mark("circle", "red", 0.5, 0.5, 0.5),), True,
    ),
    Canary(
        "blue_square", "yes_no", f"Is there a triangle in the image? {_YES_NO}", "no",
        "A blue square on a white background.", (Mark("square", "blue", 0.45, 0.55, 0.45),),
    ),
    Canary(
        "three_green_squares", "count", f"How many squares are there? {_COUNT}", "3",
        "Three green squares in a row.", _row("square", "green", 3), True,
    ),
    Canary(
        "digit_seven", "text", f"Which digit is written in the image? {_COUNT}", "7",
        "The black digit 7 on a white background.", (Mark("7", "black", 0.5, 0.5, 0.4),),
    ),
    Canary(
        "word_cat", "text", f"Which word is written in the image? {_COLOUR}", "cat",
        "The word CAT in blue letters.", (Mark("CAT", "blue", 0.5, 0.5, 0.8),),
    ),
    Canary(
        "triangle_left", "text", f"Which shape is left of the circle? {_COLOUR}", "triangle",
        "A yellow triangle to the left of a purple circle.",
        (Mark("triangle", "yellow", 0.28, 0.5, 0.36), Mark("circle", "purple", 0.72, 0.5, 0.36)),
        True,
    ),
    Canary(
        "five_dots", "count", f"How many circles are there? {_COUNT}", "5",
        "Five black circles.",
        (*_row("circle", "black", 3, 0.33), *_row("circle", "black", 2, 0.68)),
    ),
    Canary(
        "orange_bar", "colour", f"What colour is the top half? {_COLOUR}", "orange",
        "An orange half above a purple half.",
        (Mark("bar", "orange", 0.5, 0.25, 1.0), Mark("bar", "purple", 0.5, 0.75, 1.0)),
    ),
    Canary(
        "black_triangle", "yes_no", f"Is the shape a triangle? {_YES_NO}", "yes",
        "A black triangle on a white background.", (Mark("triangle", "black", 0.5, 0.5, 0.6),),
    ),
    Canary(
        "number_42", "text", f"Which number is written in the image? {_COUNT}", "42",
        "The green number 42 on a white background.", (Mark("42", "green", 0.5, 0.5, 0.6),),
    ),
    Canary(
        "word_stop", "text", f"Which word is written in the image? {_COLOUR}", "stop",
        "The word STOP in red letters.", (Mark("STOP", "red", 0.5, 0.5, 0.85),),
    ),
    Canary(
        "circle_and_squares", "count", f"How many blue squares are there? {_COUNT}", "2",
        "A red circle above two blue squares.",
        (Mark("circle", "red", 0.5, 0.28, 0.34), *_row("square", "blue", 2, 0.72)), True,
    ),
)  # fmt: skip

# 5 x 7 pixels, one row a byte's low five bits, top first.
_GLYPHS = {
    "2": (14, 17, 1, 2, 4, 8, 31), "4": (2, 6, 10, 18, 31, 2, 2), "7": (31, 1, 2, 4, 8, 8, 8),
    "A": (14, 17, 17, 31, 17, 17, 17), "C": (14, 17, 16, 16, 16, 17, 14),
    "O": (14, 17, 17, 17, 17, 17, 14), "P": (30, 17, 17, 30, 16, 16, 16),
    "S": (15, 16, 16, 14, 1, 1, 30), "T": (31, 4, 4, 4, 4, 4, 4),
}  # fmt: skip


def _circle(u: NDArray[np.float64], v: NDArray[np.float64]) -> NDArray[np.bool_]:
    return u * u + v * v <= 0.25


def _square(u: NDArray[np.float64], v: NDArray[np.float64]) -> NDArray[np.bool_]:
    return (abs(u) <= 0.5) & (abs(v) <= 0.5)


def _triangle(u: NDArray[np.float64], v: NDArray[np.float64]) -> NDArray[np.bool_]:
    return (abs(v) <= 0.5) & (abs(u) <= (v + 0.5) / 2)


def _bar(u: NDArray[np.float64], v: NDArray[np.float64]) -> NDArray[np.bool_]:
    return (abs(u) <= 0.5) & (abs(v) <= 0.25)


_SHAPES: dict[
    str, Callable[[NDArray[np.float64], NDArray[np.float64]], NDArray[np.bool_]]
] = {"circle": _circle, "square": _square, "triangle": _triangle, "bar": _bar}  # fmt: skip


def _written(text: str, u: NDArray[np.float64], v: NDArray[np.float64]) -> NDArray[np.bool_]:
    """``text`` one unit wide, centred: six columns a letter, the last of them a gap."""
    columns = 6 * len(text) - 1
    column = np.floor((u + 0.5) * columns).astype(int)
    row = np.floor(v * columns + 3.5).astype(int)
    bitmap = np.zeros((7, columns), bool)
    for place, letter in enumerate(text):
        for y, bits in enumerate(_GLYPHS[letter]):
            for x in range(5):
                bitmap[y, 6 * place + x] = bits >> (4 - x) & 1
    inside = (column >= 0) & (column < columns) & (row >= 0) & (row < 7)
    return inside & bitmap[row.clip(0, 6), column.clip(0, columns - 1)]


@cache
def draw(canary: Canary) -> Image:
    """The image of a canary, RGB [SIDE, SIDE, 3], read-only; the same bytes everywhere."""
    image = np.full((SIDE, SIDE, 3), COLOURS["white"], np.uint8)
    centres = (np.arange(SIDE) + 0.5) / SIDE
    for mark in canary.marks:
        u = (centres[None, :] - mark.x) / mark.size + np.zeros((SIDE, 1))
        v = (centres[:, None] - mark.y) / mark.size + np.zeros((1, SIDE))
        shape = _SHAPES.get(mark.shape)
        covered = shape(u, v) if shape else _written(mark.shape, u, v)
        image[covered] = COLOURS[mark.colour]
    image.flags.writeable = False
    return image


def png(image: Image) -> bytes:
    """``image`` as a PNG file (RFC 2083): eight bits a channel, no filter."""

    def chunk(tag: bytes, content: bytes) -> bytes:
        check = zlib.crc32(tag + content)
        return struct.pack(">I", len(content)) + tag + content + struct.pack(">I", check)

    height, width, _ = image.shape
    rows = np.concatenate([np.zeros((height, 1), np.uint8), image.reshape(height, -1)], axis=1)
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header)
        + chunk(b"IDAT", zlib.compress(rows.tobytes(), 9)) + chunk(b"IEND", b"")
    )  # fmt: skip


def digest(canaries: tuple[Canary, ...] = CANARIES) -> str:
    """A name for a set of canaries: goldens of another set are of no use."""
    content = hashlib.sha256()
    for canary in canaries:
        content.update(f"{canary.name}\0{canary.question}\0{canary.described}\0".encode())
        content.update(draw(canary).tobytes())
    return content.hexdigest()[:16]
