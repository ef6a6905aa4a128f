"""The scene that every test of the screen draws, and a time zone that does not move."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from mmctl.tui.model import Model
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
    return snapshot_of(40.0)


def model_of(seconds: float) -> Model:
    import scenes

    model = Model()
    for record in scenes.burst(seconds):
        model.add(record)
    return model


def snapshot_of(seconds: float) -> Snapshot:
    return model_of(seconds).snapshot()
