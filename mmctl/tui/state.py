"""What the dashboard remembers from one run to the next: a few choices, in the state folder.

Theme and layer are a person's; the screen is a source's, for what is worth watching depends on
what it tells. A source never seen begins with the overview.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import msgspec

from mmctl.engine import atomic, folders
from mmctl.engine.errors import MmctlError
from mmctl.tui import SCREENS
from mmctl.tui.ui import Layer


class Remembered(msgspec.Struct, frozen=True):
    """Choices that come back; what no longer exists is forgotten."""

    screens: dict[str, str] = {}  # by ``source_of``, the latest last
    theme: str | None = None
    layer: Layer = "conflict"
    level: Annotated[int, msgspec.Meta(ge=0, le=3)] = 1


SCREENS_KEEP = 50


def source_of(uris: Sequence[str]) -> str:
    """What sources are remembered by: a live one by its kind, a file by where it is."""
    kinds = {
        str(Path(uri).resolve()) if Path(uri).exists() else uri.partition(":")[0] for uri in uris
    }
    return " ".join(sorted(kinds))


def screen(remembered: Remembered, uris: Sequence[str]) -> str:
    """Where these sources were left; the overview where they were never shown."""
    found = remembered.screens.get(source_of(uris), "")
    return found if found in SCREENS else next(iter(SCREENS))


def at_screen(remembered: Remembered, uris: Sequence[str], screen: str) -> dict[str, str]:
    """The screens by source, with the one that these sources are left at."""
    source = source_of(uris)
    others = {key: name for key, name in remembered.screens.items() if key != source}
    return dict([*others.items(), (source, screen)][-SCREENS_KEEP:])


def _path() -> Path:
    return folders.state() / "top.json"


def load() -> Remembered:
    """What was kept; nothing where there is nothing to be read."""
    try:
        return msgspec.json.decode(_path().read_bytes(), type=Remembered)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError):
        return Remembered()


def save(remembered: Remembered) -> None:
    """Keep it; a folder that cannot be written costs the memory, not the session."""
    path = _path()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        atomic.write(path, msgspec.json.encode(remembered))
    except (OSError, MmctlError):
        return
