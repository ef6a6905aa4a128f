"""Images inside requests: their size from the first bytes, and smaller ones in their place.

Nothing is decoded to learn a size. What is made smaller keeps its format, its orientation mark
and its colour profile; a file that claims more pixels than allowed is never opened.
"""

from __future__ import annotations

import base64
import binascii
import io
import struct
from typing import NamedTuple

from mmctl.guard.refusal import Refusal

_HEAD_CHARACTERS = 4 * (96 << 10) // 3  # of base64: enough for a thumbnail before a JPEG's size
_QUALITY = 90
_ORIENTATION = 0x0112
_TURNED = (5, 6, 7, 8)


class Size(NamedTuple):
    """Width and height in pixels, as an image is shown."""

    width: int
    height: int

    def scaled(self, scale: float) -> Size:
        """The size with both sides times ``scale``, as a smaller image is made."""
        return Size(max(1, round(self.width * scale)), max(1, round(self.height * scale)))


def data_url(url: str) -> tuple[str, str] | None:
    """(media type, base64) of a data URL; None for any other kind of address."""
    if url[:5].lower() != "data:":
        return None
    head, comma, content = url.partition(",")
    if not comma or not head.lower().endswith(";base64"):
        return head[5:], ""
    return head[5:-7], content


def size_of(content: str) -> Size | None:
    """The size of a base64 image; None for a format that is not known here.

    Raises Refusal for what is no base64, and for an image whose head is broken.
    """
    if not content:
        raise Refusal(400, "image_unreadable", "an image without base64 content")
    head = content[:_HEAD_CHARACTERS]
    try:
        data = base64.b64decode(head[: len(head) & ~3] if len(content) > len(head) else head,
                                validate=True)  # fmt: skip
    except (binascii.Error, ValueError) as error:
        raise Refusal(400, "image_unreadable", f"an image is no base64: {error}") from None
    try:
        size = _size(data)
    except (struct.error, IndexError):
        raise Refusal(400, "image_unreadable", "an image ends within its head") from None
    if size is not None and (size.width < 1 or size.height < 1):
        raise Refusal(400, "image_unreadable", "an image without pixels")
    return size


def _size(data: bytes) -> Size | None:
    if data.startswith(b"\x89PNG\r\n\x1a\n"):
        return Size(*struct.unpack_from(">II", data, 16))
    if data.startswith(b"\xff\xd8"):
        return _jpeg(data)
    if data.startswith((b"GIF87a", b"GIF89a")):
        return Size(*struct.unpack_from("<HH", data, 6))
    if data.startswith(b"RIFF") and data[8:12] == b"WEBP":
        return _webp(data)
    if data.startswith(b"BM"):
        width, height = struct.unpack_from("<ii", data, 18)
        return Size(width, abs(height))
    return None


def _jpeg(data: bytes) -> Size:
    """By the frame's own segment; turned where an Exif segment before it says so."""
    at, turned = 2, False
    while True:
        while data[at] != 0xFF:
            at += 1
        while data[at] == 0xFF:
            at += 1
        marker, at = data[at], at + 1
        if marker == 0x01 or 0xD0 <= marker <= 0xD8:
            continue
        length = struct.unpack_from(">H", data, at)[0]
        if 0xC0 <= marker <= 0xCF and marker not in (0xC4, 0xC8, 0xCC):
            height, width = struct.unpack_from(">HH", data, at + 3)
            return Size(height, width) if turned else Size(width, height)
        if marker == 0xE1 and data[at + 2 : at + 8] == b"Exif\0\0":
            turned = _orientation(data[at + 8 : at + length]) in _TURNED
        at += length


def _orientation(tiff: bytes) -> int:
    order = {b"II": "<", b"MM": ">"}.get(tiff[:2])
    if order is None:
        return 1
    try:
        at = struct.unpack_from(order + "I", tiff, 4)[0]
        for entry in range(struct.unpack_from(order + "H", tiff, at)[0]):
            tag, _, _, value = struct.unpack_from(order + "HHIH", tiff, at + 2 + 12 * entry)
            if tag == _ORIENTATION:
                return int(value)
    except struct.error:
        pass
    return 1


def _webp(data: bytes) -> Size | None:
    kind = data[12:16]
    if kind == b"VP8X":
        width = int.from_bytes(data[24:27], "little") + 1
        return Size(width, int.from_bytes(data[27:30], "little") + 1)
    if kind == b"VP8L":
        bits = struct.unpack_from("<I", data, 21)[0]
        return Size((bits & 0x3FFF) + 1, ((bits >> 14) & 0x3FFF) + 1)
    if kind == b"VP8 ":
        width, height = struct.unpack_from("<HH", data, 26)
        return Size(width & 0x3FFF, height & 0x3FFF)
    return None


def shrink(media: str, content: str, scale: float, most_pixels: int) -> tuple[str, str]:
    """(media type, base64) of the image with both sides times ``scale``; blocks for a while.

    Only the first frame of a moving image stays. Raises Refusal for one that cannot be read.
    """
    from PIL import Image

    try:
        with Image.open(io.BytesIO(base64.b64decode(content))) as image:
            if image.width * image.height > most_pixels:
                raise too_many_pixels(Size(image.width, image.height), most_pixels)
            width, height = (max(1, round(side * scale)) for side in image.size)
            kind = image.format if image.format in ("PNG", "WEBP") else "JPEG"
            exif = image.getexif()
            turned = {_ORIENTATION: exif[_ORIENTATION]} if _ORIENTATION in exif else {}
            profile = image.info.get("icc_profile")
            if image.format == "JPEG":
                image.draft(None, (width, height))
            plain = image if image.mode in ("RGB", "RGBA", "L") else image.convert(_mode(image))
            if kind == "JPEG" and plain.mode == "RGBA":
                kind = "PNG"
            small = plain.resize((width, height), Image.Resampling.BICUBIC, reducing_gap=2.0)
            kept = Image.Exif()
            kept.update(turned)
            out = io.BytesIO()
            small.save(out, kind, quality=_QUALITY, exif=kept, icc_profile=profile)
    except Refusal:
        raise
    except Exception as error:  # Pillow's decoders raise what they like on broken files
        said = f"an image cannot be read: {type(error).__name__}"
        raise Refusal(400, "image_unreadable", said) from None
    return f"image/{kind.lower()}", base64.b64encode(out.getvalue()).decode()


def _mode(image: object) -> str:
    """What an image is turned into to be scaled: with transparency where it has any."""
    mode = getattr(image, "mode", "")
    return "RGBA" if mode in ("PA", "LA") or "transparency" in getattr(image, "info", {}) else "RGB"


def too_many_pixels(size: Size, most: int) -> Refusal:
    """The answer to an image of more than ``most`` pixels."""
    return Refusal(
        413, "image_too_large", f"an image of {size.width}x{size.height} pixels; at most {most}"
    )
