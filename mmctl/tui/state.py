"""What the screen remembers from one run to the next: a few choices, in the state folder."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec

from mmctl.engine import atomic, folders
from mmctl.engine.errors import MmctlError
from mmctl.tui.ui import Layer


class Remembered(msgspec.Struct, frozen=True):
    """Choices that come back; what no longer exists is forgotten."""

    screen: str | None = None
    theme: str | None = None
    layer: Layer = "conflict"
    level: Annotated[int, msgspec.Meta(ge=0, le=3)] = 1


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
