"""A screen as the dashboard knows it, and the list of those there are."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib import import_module
from typing import ClassVar

from rich.style import Style
from textual.containers import Container

from mmctl.engine.records import AnyRecord
from mmctl.tui import SCREENS
from mmctl.tui.filter import shown_devices
from mmctl.tui.keys import Key
from mmctl.tui.snapshot import Region, Snapshot
from mmctl.tui.ui import Choices, Ui
from mmctl.tui.widgets import Lines

Styles = dict[str, Style]


class View(Container):
    """A screen: ``compose`` makes its panels, ``paint`` puts a snapshot on them.

    What its keys and the mouse do is told as the fields of ``Ui`` that they change.
    """

    layout_css: ClassVar[str] = ""
    keys: ClassVar[tuple[Key, ...]] = ()  # beside the general ones; none does anything elsewhere

    def paint(self, snapshot: Snapshot, ui: Ui, styles: Styles) -> None:
        """Show it."""
        raise NotImplementedError

    def panel(self, name: str) -> Lines:
        """One of its panels."""
        return self.query_one(f"#{name}", Lines)

    def move(self, snapshot: Snapshot, ui: Ui, dx: int, dy: int) -> Choices:
        """The cursor so many columns right and rows down."""
        return {}

    def press(self, snapshot: Snapshot, ui: Ui, name: str) -> Choices:
        """Another of its keys, by name."""
        return {}

    def clicked(self, snapshot: Snapshot, ui: Ui, panel: str, column: int, row: int) -> Choices:
        """The mouse on one of its panels."""
        return {}

    def followed(self, before: Snapshot, after: Snapshot, ui: Ui) -> Choices:
        """Where its cursor has gone with what it stands on, when a newer snapshot comes."""
        return {}

    def under_cursor(self, snapshot: Snapshot, ui: Ui) -> list[AnyRecord]:
        """The records that its cursor stands on."""
        return []

    def target(self, snapshot: Snapshot, ui: Ui) -> tuple[str, str] | None:
        """Node and device that an order is for: the overview's, where it has no other."""
        devices = shown_devices(snapshot, ui)
        if not devices:
            return None
        record = devices[min(ui.device, len(devices) - 1)].record
        return record.node, record.device

    def asked(self, snapshot: Snapshot, ui: Ui) -> Region | None:
        """Whose holders the next snapshots shall name."""
        return None


@cache
def views() -> Mapping[str, type[View]]:
    """Every screen by name."""
    return {
        name: getattr(import_module(f"mmctl.tui.{name}"), view) for name, view in SCREENS.items()
    }
