"""The canaries: twelve different images that show what they say, the same bytes everywhere."""

from __future__ import annotations

import struct
import zlib

import numpy as np

from mmctl.engine.recovery.canaries import CANARIES, COLOURS, SIDE, digest, draw, png


def test_twelve_different_images_with_closed_questions() -> None:
    assert len(CANARIES) == len({c.name for c in CANARIES}) == 12
    assert len({draw(canary).tobytes() for canary in CANARIES}) == 12
    assert {canary.kind for canary in CANARIES} == {"colour", "count", "yes_no", "text"}
    assert digest() == "c4a3d13d03716cf7"


def test_every_image_shows_the_colours_of_its_scene_and_no_other() -> None:
    for canary in CANARIES:
        shown = {tuple(pixel) for pixel in draw(canary).reshape(-1, 3)}
        wanted = {COLOURS[mark.colour] for mark in canary.marks}
        assert wanted <= shown <= wanted | {COLOURS["white"]}


def test_counts_are_right() -> None:
    for canary in CANARIES:
        if canary.kind != "count":
            continue
        colour = COLOURS[canary.marks[-1].colour]
        assert _blobs((draw(canary) == colour).all(-1)) == int(canary.answer)


def _blobs(mask: np.ndarray) -> int:
    """Connected areas, by flooding."""
    left, found = mask.copy(), 0
    while left.any():
        found += 1
        stack = [tuple(np.argwhere(left)[0])]
        while stack:
            y, x = stack.pop()
            if 0 <= y < SIDE and 0 <= x < SIDE and left[y, x]:
                left[y, x] = False
                stack += [(y + 1, x), (y - 1, x), (y, x + 1), (y, x - 1)]
    return found


def test_png_holds_the_same_pixels() -> None:
    image = draw(CANARIES[0])
    data = png(image)
    assert data.startswith(b"\x89PNG\r\n\x1a\n")
    at, pixels = 8, b""
    while at < len(data):
        (length,), tag = struct.unpack(">I", data[at : at + 4]), data[at + 4 : at + 8]
        content = data[at + 8 : at + 8 + length]
        (check,) = struct.unpack(">I", data[at + 8 + length : at + 12 + length])
        assert check == zlib.crc32(tag + content)
        pixels += content if tag == b"IDAT" else b""
        at += 12 + length
    rows = np.frombuffer(zlib.decompress(pixels), np.uint8).reshape(SIDE, 1 + 3 * SIDE)
    assert not rows[:, 0].any()
    assert np.array_equal(rows[:, 1:].reshape(SIDE, SIDE, 3), image)
