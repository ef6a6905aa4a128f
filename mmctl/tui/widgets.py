"""Two widgets: lines that repaint only what changed, and the heatmap's grid."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from rich.segment import Segment
from rich.style import Style
from textual import events
from textual.geometry import Region
from textual.message import Message
from textual.strip import Strip
from textual.widget import Widget

from mmctl.tui.lines import Line


class Resized(Message):
    """A widget has another size: what it shows is to be made anew."""

    def can_replace(self, message: Message) -> bool:
        return isinstance(message, Resized)


class Clicked(Message):
    """A character of a widget was clicked."""

    def __init__(self, widget: Widget, column: int, row: int) -> None:
        super().__init__()
        self.widget, self.column, self.row = widget, column, row

    @classmethod
    def at(cls, widget: Widget, event: events.Click) -> Clicked:
        return cls(widget, event.x - widget.gutter.left, event.y - widget.gutter.top)


class Lines(Widget):
    """Lines of styled pieces; a role such as "#d62728 on #ffffff" is its own style.

    ``show`` compares with what is there and repaints the difference.
    """

    def __init__(self, *, id: str, title: str | None = None, classes: str = "") -> None:
        super().__init__(id=id, classes=classes)
        self._lines: Sequence[Line] = ()
        self._styles_by_role: dict[str, Style] = {}
        if title is not None:
            self.border_title = title

    def show(self, lines: Sequence[Line], styles: dict[str, Style]) -> None:
        """Show ``lines``; only lines that differ from the last ones are painted again."""
        if styles is not self._styles_by_role:
            self._styles_by_role, self._lines = styles, lines
            self.refresh()
            return
        before, self._lines = self._lines, lines
        width = self.size.width
        changed = [
            Region(0, y, width, 1)
            for y in range(min(self.size.height, max(len(before), len(lines))))
            if (before[y] if y < len(before) else None) != (lines[y] if y < len(lines) else None)
        ]
        if changed:
            self.refresh(*changed)

    def render_line(self, y: int) -> Strip:
        width = self.size.width
        plain = self._styles_by_role.get("", Style.null())
        if y >= len(self._lines):
            return Strip.blank(width, plain)
        find = self._styles_by_role.get
        segments = [
            Segment(text, Style.parse(role) if " on " in role else find(role, plain))
            for text, role in self._lines[y]
        ]
        return Strip(segments).adjust_cell_length(width, plain)

    def on_resize(self) -> None:
        self.post_message(Resized())

    def on_click(self, event: events.Click) -> None:
        self.post_message(Clicked.at(self, event))


class Grid(Widget):
    """A grid of codes, one character and style a code; a row is painted when it changed."""

    def __init__(self, *, id: str) -> None:
        super().__init__(id=id)
        self._rows: list[bytes] = []
        self._cells: list[tuple[str, Style]] = [(" ", Style())]
        self._cursor: tuple[int, int] | None = None
        self._cursor_style = Style(reverse=True)

    def show(
        self,
        rows: list[bytes],
        cells: list[tuple[str, Style]],
        cursor: tuple[int, int] | None,
        cursor_style: Style,
    ) -> None:
        """Show ``rows`` of codes into ``cells``; the cursor's cell is drawn in its own style."""
        before, self._rows = self._rows, rows
        was, self._cursor = self._cursor, cursor
        if cells is not self._cells or cursor_style is not self._cursor_style:
            self._cells, self._cursor_style = cells, cursor_style
            self.refresh()
            return
        dirty = {y for y, row in enumerate(rows) if y >= len(before) or row != before[y]}
        dirty.update(range(len(rows), len(before)))
        if was != cursor:
            dirty.update(at[1] for at in (was, cursor) if at is not None)
        if dirty:
            width = self.size.width
            self.refresh(*(Region(0, y, width, 1) for y in dirty))

    def render_line(self, y: int) -> Strip:
        width = self.size.width
        cells = self._cells
        if y >= len(self._rows):
            return Strip.blank(width, cells[0][1])
        segments = []
        for code, run in groupby(self._rows[y]):
            mark, style = cells[code]
            segments.append(Segment(mark * len(list(run)), style))
        strip = Strip(segments, len(self._rows[y]))
        if self._cursor is not None and self._cursor[1] == y:
            x = self._cursor[0]
            mark = cells[self._rows[y][x]][0]
            before, _, after = strip.divide([x, x + 1, strip.cell_length])
            strip = Strip.join([before, Strip([Segment(mark, self._cursor_style)]), after])
        return strip.adjust_cell_length(width, cells[0][1])

    def on_resize(self) -> None:
        self.post_message(Resized())

    def on_click(self, event: events.Click) -> None:
        self.post_message(Clicked.at(self, event))
