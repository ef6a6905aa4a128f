"""Sizes from heads, against Pillow's own reading of the same files."""

from __future__ import annotations

import base64
import io
from typing import Any

import pytest

pytest.importorskip("aiohttp", reason="the guard needs the extra 'guard'")

from mmctl.guard.images import Size, data_url, size_of
from mmctl.guard.refusal import Refusal

Image = pytest.importorskip("PIL.Image", reason="images are scaled by Pillow (extra 'guard')")


def encoded(kind: str, size: tuple[int, int], **more: Any) -> str:
    out = io.BytesIO()
    Image.effect_noise(size, 90).convert("RGB").save(out, kind, **more)
    return base64.b64encode(out.getvalue()).decode()


@pytest.mark.parametrize("size", [(1, 1), (17, 900), (1203, 64)])
@pytest.mark.parametrize(
    ("kind", "more"),
    [
        ("PNG", {}), ("GIF", {}), ("BMP", {}), ("JPEG", {}), ("JPEG", {"progressive": True}),
        ("JPEG", {"comment": b"\xff" * 3000}), ("WEBP", {}), ("WEBP", {"lossless": True}),
        ("WEBP", {"exif": b"Exif\0\0II*\0\x08\0\0\0\0\0"}),
    ],
)  # fmt: skip
def test_size(kind: str, more: dict[str, Any], size: tuple[int, int]) -> None:
    assert size_of(encoded(kind, size, **more)) == size


@pytest.mark.parametrize("orientation", range(1, 9))
def test_a_turned_photograph_has_the_size_it_is_shown_in(orientation: int) -> None:
    from PIL import ImageOps

    exif = Image.Exif()
    exif[0x0112] = orientation
    content = encoded("JPEG", (60, 20), exif=exif)
    shown = ImageOps.exif_transpose(Image.open(io.BytesIO(base64.b64decode(content))))
    assert size_of(content) == shown.size


def test_unknown_formats_have_no_size_and_broken_ones_are_refused() -> None:
    assert size_of(base64.b64encode(b"II*\0 some tiff").decode()) is None
    for broken in ("", "@@@", "iVBORw0KGgo=", encoded("JPEG", (9, 9))[:24]):
        with pytest.raises(Refusal):
            size_of(broken)


@pytest.mark.parametrize("cut", range(0, 700, 7))
def test_any_cut_of_a_file_is_a_size_or_a_refusal(cut: int) -> None:
    whole = base64.b64decode(encoded("JPEG", (50, 40)))
    try:
        found = size_of(base64.b64encode(whole[:cut]).decode())
    except Refusal:
        found = None
    assert found in (None, Size(50, 40))


def test_data_urls() -> None:
    assert data_url("data:image/png;base64,AAAA") == ("image/png", "AAAA")
    assert data_url("DATA:image/png;BASE64,AAAA") == ("image/png", "AAAA")
    assert data_url("data:image/png,raw") == ("image/png", "")
    assert data_url("https://example.org/cat.png") is None
