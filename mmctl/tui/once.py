"""One screen without a terminal: a snapshot drawn by the same widgets, as SVG or as text."""

from __future__ import annotations

import asyncio

from mmctl.tui.app import Top
from mmctl.tui.snapshot import Snapshot
from mmctl.tui.svg import portable
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
