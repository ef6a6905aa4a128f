"""The scene that every test of the screen draws, and a time zone that does not move."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from mmctl.tui.snapshot import Snapshot


@pytest.fixture(autouse=True)
def utc(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TZ", "UTC")
    monkeypatch.delenv("NO_COLOR", raising=False)
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


@pytest.fixture(scope="session")
def burst() -> Snapshot:
    """The scene after forty seconds."""
    import scenes

    return scenes.snapshot_of(40.0)
