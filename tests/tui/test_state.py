"""What the dashboard remembers: a screen by source, theme and layer for all."""

from __future__ import annotations

from pathlib import Path

import pytest

from mmctl.tui import state

pytestmark = pytest.mark.usefixtures("clean_home")


def leave(uris: list[str], screen: str) -> None:
    screens = state.at_screen(state.load(), uris, screen)
    state.save(state.Remembered(screens, "light", "pages", 2))


def test_a_source_never_seen_begins_with_the_overview(tmp_path: Path) -> None:
    first, second = tmp_path / "a.ndjson", tmp_path / "b.ndjson"
    first.touch(), second.touch()
    assert state.screen(state.load(), ["nvml:"]) == "overview"
    leave([str(first)], "traces")
    leave(["demo:burst"], "heatmap")
    kept = state.load()
    assert (kept.theme, kept.layer, kept.level) == ("light", "pages", 2)
    assert state.screen(kept, [str(first)]) == "traces"
    assert state.screen(kept, ["demo:leak"]) == "heatmap"  # of the same kind
    for unseen in ([str(second)], ["nvml:"], ["demo", "nvml:"]):
        assert state.screen(kept, unseen) == "overview"


def test_several_sources_are_known_in_any_order() -> None:
    leave(["nvml:", "http://a:8000/metrics"], "schedule")
    assert state.screen(state.load(), ["http://b:9000/metrics", "nvml:"]) == "schedule"


def test_only_the_latest_sources_are_kept() -> None:
    for number in range(state.SCREENS_KEEP + 3):
        leave([f"source{number}:"], "events")
    leave(["source3:"], "traces")
    kept = state.load()
    assert len(kept.screens) == state.SCREENS_KEEP
    assert state.screen(kept, ["source0:"]) == "overview"
    assert state.screen(kept, ["source3:"]) == "traces" and list(kept.screens)[-1] == "source3"


@pytest.mark.parametrize("content", ["", "{", '{"screens": 3}', '{"screens": {"demo": "maps"}}'])
def test_what_cannot_be_used_is_forgotten(clean_home: Path, content: str) -> None:
    leave(["demo"], "traces")
    (path,) = clean_home.rglob("top.json")
    path.write_text(content)
    assert state.screen(state.load(), ["demo"]) == "overview"
