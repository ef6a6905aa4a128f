"""One screen without a terminal: a snapshot drawn by the same widgets, as SVG or as text."""

from __future__ import annotations

import asyncio
import re

from mmctl.tui.app import Top
from mmctl.tui.model import Snapshot
from mmctl.tui.ui import Ui


def draw(snapshot: Snapshot, ui: Ui, size: tuple[int, int], theme: str) -> tuple[str, str]:
    """The screen as ``(svg, text)``, ``size`` columns by rows."""
    app = Top(ui, theme_name=theme, clock=lambda: ui.now_ns)

    async def drawn() -> tuple[str, str]:
        async with app.run_test(size=size) as pilot:
            app.snapshot = snapshot
            for _ in range(3):  # panels take their heights from their lines, then draw again
                await pilot.pause()
            return portable(app.export_screenshot(title="mmctl top")), screen_text(app)

    return asyncio.run(drawn())


def screen_text(app: Top) -> str:
    """The characters on the screen, a line a row, without spaces at the end."""
    update = app.screen._compositor.render_strips()
    return "\n".join(strip.text.rstrip() for strip in update) + "\n"


_TEXT = re.compile(
    r'(<text [^>]*?x=")([\d.]+)(" [^>]*?textLength=")([\d.]+)("[^>]*>)([^<]*)(</text>)'
)
_ESCAPE = re.compile(r"&#?\w+;")


def portable(svg: str) -> str:
    """The same picture without a font from the network, and without spaces at a text's edge.

    Renderers outside browsers drop those spaces and move what follows them.
    """
    svg = re.sub(r"@font-face \{[^}]*\}\s*", "", svg)
    svg = svg.replace("font-family: Fira Code, monospace", f"font-family: {_FONTS}")

    def trimmed(found: re.Match[str]) -> str:
        before, x, middle, length, after, text, end = found.groups()
        spaces = text.replace("&#160;", " ")
        size = len(_ESCAPE.sub("?", spaces))
        if not spaces.strip(" ") or not size:
            return ""
        cell = float(length) / size
        lead = len(spaces) - len(spaces.lstrip(" "))
        kept = size - lead - (len(spaces) - len(spaces.rstrip(" ")))
        shown = spaces.strip(" ").replace(" ", "&#160;")
        return f"{before}{float(x) + lead * cell:.1f}{middle}{kept * cell:.1f}{after}{shown}{end}"

    return _TEXT.sub(trimmed, svg)


_FONTS = '"Fira Code", "Cascadia Mono", "DejaVu Sans Mono", Menlo, Consolas, monospace'
