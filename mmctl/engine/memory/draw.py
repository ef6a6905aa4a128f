"""A heatmap as text, SVG or PNG: address downwards, time to the right, colour is conflict."""

from __future__ import annotations

import io
from bisect import bisect_right
from collections.abc import Sequence
from html import escape

from mmctl.engine.errors import MissingExtraError
from mmctl.engine.memory.heatmap import Heatmap
from mmctl.engine.units import show_bytes, show_seconds

SHADES = "·░▒▓█"
STEPS = (0.005, 0.1, 0.3, 0.6)  # where each shade after the first begins: little is not none
BARS = "▁▂▃▄▅▆▇█"

# From calm to conflict, dark enough for white paper and readable without colour vision.
_RAMP = ((247, 247, 247), (253, 219, 199), (244, 165, 130), (214, 96, 77), (178, 24, 43))
_MODALITY = {"vision": "#2166ac", "text": "#1b7837", "other": "#999999"}
CELL_WIDTH, CELL_HEIGHT, LEFT, TOP, STRIP = 10, 9, 130, 100, 48


def colour(value: float) -> tuple[int, int, int]:
    """The colour of a conflict in [0, 1]."""
    at = min(max(value, 0.0), 1.0) * (len(_RAMP) - 1)
    low = min(int(at), len(_RAMP) - 2)
    share = at - low
    a, b = _RAMP[low], _RAMP[low + 1]
    return (
        round(a[0] + (b[0] - a[0]) * share),
        round(a[1] + (b[1] - a[1]) * share),
        round(a[2] + (b[2] - a[2]) * share),
    )


def title(heatmap: Heatmap) -> str:
    """One line: what is shown."""
    span = "one moment" if len(heatmap.seconds) < 2 else (
        f"{show_seconds(heatmap.seconds[-1])}" if heatmap.timed else "order of events"
    )  # fmt: skip
    return (
        f"Conflict of vision and text · device {heatmap.device} · {span} · "
        f"{show_bytes(heatmap.row_bytes)} a row"
    )


def text(heatmap: Heatmap) -> str:
    """For a terminal; a space is memory that was not mapped."""
    steps = "  ".join(f"{shade} {step:g}" for shade, step in zip(SHADES[1:], STEPS, strict=True))
    lines = [f"{title(heatmap)}   {SHADES[0]} none  {steps}"]
    for name, values in heatmap.held.items():
        lines.append(f"{name:>16} {_bars(values)}  max {show_bytes(max(values, default=0))}")
    for address, row in zip(heatmap.addresses, heatmap.cells, strict=True):
        shades = "".join(" " if cell is None else SHADES[bisect_right(STEPS, cell)] for cell in row)
        lines.append(f"{address:#16x} {shades}")
    return "\n".join(lines)


def _bars(values: Sequence[int]) -> str:
    most = max(values, default=0) or 1
    return "".join(BARS[min(value * len(BARS) // most, len(BARS) - 1)] for value in values)


def svg(heatmap: Heatmap) -> str:
    """A stand-alone SVG with a strip of bytes per modality above."""
    columns = len(heatmap.seconds)
    wide = max(CELL_WIDTH, 700 // max(columns, 1))
    width = LEFT + columns * wide + 20
    height = TOP + len(heatmap.cells) * CELL_HEIGHT + 60
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" font-family="monospace" font-size="10">',
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
        f'<text x="10" y="18" font-size="12">{escape(title(heatmap))}</text>',
    ]
    parts += _strip(heatmap, wide)
    every = max(len(heatmap.addresses) // 10, 1)
    for number, (address, row) in enumerate(zip(heatmap.addresses, heatmap.cells, strict=True)):
        y = TOP + number * CELL_HEIGHT
        if number % every == 0:
            parts.append(f'<text x="10" y="{y + 8}">{address:#x}</text>')
        for column, cell in enumerate(row):
            if cell is not None:
                red, green, blue = colour(cell)
                parts.append(
                    f'<rect x="{LEFT + column * wide}" y="{y}" width="{wide}" '
                    f'height="{CELL_HEIGHT}" fill="#{red:02x}{green:02x}{blue:02x}">'
                    f"<title>{address:#x} {cell:.2f}</title></rect>"
                )
    parts += _axis(heatmap, wide, TOP + len(heatmap.cells) * CELL_HEIGHT)
    parts.append("</svg>")
    return "\n".join(parts) + "\n"


def _strip(heatmap: Heatmap, wide: int) -> list[str]:
    most = max((sum(values) for values in zip(*heatmap.held.values(), strict=True)), default=0)
    parts = []
    for column, values in enumerate(zip(*heatmap.held.values(), strict=True)):
        y = float(TOP - 16)
        for name, value in zip(heatmap.held, values, strict=True):
            tall = STRIP * value / most if most else 0
            y -= tall
            parts.append(
                f'<rect x="{LEFT + column * wide}" y="{y:.1f}" width="{wide}" '
                f'height="{tall:.1f}" fill="{_MODALITY[name]}"/>'
            )
    for number, (name, shade) in enumerate(_MODALITY.items()):
        parts.append(f'<text x="10" y="{TOP - 50 + 14 * number}" fill="{shade}">{name}</text>')
    parts.append(f'<text x="60" y="{TOP - 50}">{escape(show_bytes(most))}</text>')
    return parts


def _axis(heatmap: Heatmap, wide: int, bottom: int) -> list[str]:
    parts = []
    columns = len(heatmap.seconds)
    for column in range(0, columns, max(columns // 7, 1)):
        if columns > 1:
            at = heatmap.seconds[column]
            label = show_seconds(at) if heatmap.timed else f"{at:.0%}"
            parts.append(
                f'<text x="{LEFT + column * wide}" y="{bottom + 16}">{escape(label)}</text>'
            )
    for step in range(21):
        red, green, blue = colour(step / 20)
        parts.append(
            f'<rect x="{LEFT + step * 8}" y="{bottom + 28}" width="8" height="10" '
            f'fill="#{red:02x}{green:02x}{blue:02x}"/>'
        )
    parts.append(f'<text x="10" y="{bottom + 37}">conflict 0 to 1</text>')
    return parts


def png(heatmap: Heatmap) -> bytes:
    """The cells and the strip as a PNG; needs the extra ``files`` (Pillow)."""
    try:
        from PIL import Image, ImageDraw
    except ImportError:
        raise MissingExtraError("a PNG heatmap", "files") from None
    columns = len(heatmap.seconds)
    wide = max(CELL_WIDTH, 700 // max(columns, 1))
    size = (LEFT + columns * wide + 20, TOP + len(heatmap.cells) * CELL_HEIGHT + 60)
    image = Image.new("RGB", size, "white")
    canvas = ImageDraw.Draw(image)
    plain = title(heatmap).replace("·", "-")
    canvas.text((10, 8), plain, fill="black")
    most = max((sum(values) for values in zip(*heatmap.held.values(), strict=True)), default=0)
    for column, values in enumerate(zip(*heatmap.held.values(), strict=True)):
        y = float(TOP - 16)
        x = LEFT + column * wide
        for name, value in zip(heatmap.held, values, strict=True):
            tall = STRIP * value / most if most else 0.0
            if tall:
                canvas.rectangle((x, y - tall, x + wide - 1, y), fill=_MODALITY[name])
            y -= tall
    every = max(len(heatmap.addresses) // 10, 1)
    for number, (address, row) in enumerate(zip(heatmap.addresses, heatmap.cells, strict=True)):
        y = TOP + number * CELL_HEIGHT
        if number % every == 0:
            canvas.text((10, y), f"{address:#x}", fill="black")
        for column, cell in enumerate(row):
            if cell is not None:
                x = LEFT + column * wide
                box = (x, y, x + wide - 1, y + CELL_HEIGHT - 1)
                canvas.rectangle(box, fill=colour(cell))
    bottom = TOP + len(heatmap.cells) * CELL_HEIGHT + 28
    for step in range(21):
        x = LEFT + step * 8
        canvas.rectangle((x, bottom, x + 7, bottom + 10), fill=colour(step / 20))
    canvas.text((10, bottom), "conflict 0 to 1", fill="black")
    out = io.BytesIO()
    image.save(out, "PNG")
    return out.getvalue()
