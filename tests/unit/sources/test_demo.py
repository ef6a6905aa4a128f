from __future__ import annotations

import itertools
import threading

import pytest

from mmctl.engine import profiles, recording
from mmctl.engine.breaker.loop import run
from mmctl.engine.errors import MissingExtraError, UsageError
from mmctl.engine.records import Event
from mmctl.engine.sources import demo


def test_the_uri_names_a_scenario_and_its_options() -> None:
    assert demo.parse("") == ("burst", {})
    assert demo.parse("leak?seed=3&pool=128MiB") == ("leak", {"seed": "3", "pool": str(128 << 20)})


@pytest.mark.parametrize(
    ("rest", "hint"),
    [
        ("brust", "did you mean 'burst'"),
        ("burst?sead=1", "did you mean 'seed'"),
        ("burst?pool=3 parsecs", "unit of bytes"),
        ("burst?seed=x", "whole number"),
    ],
)
def test_what_is_unknown_is_named_with_a_suggestion(rest: str, hint: str) -> None:
    with pytest.raises(UsageError, match=hint):
        demo.parse(rest)


def test_scenarios_are_those_of_the_demo() -> None:
    pytest.importorskip("torch", reason="needs the extra 'torch'")
    from mmctl.demo.scenarios import SCENARIOS

    assert sorted(SCENARIOS) == sorted(demo.SCENARIOS)


def test_without_torch_a_recording_stands_in_and_is_not_acted_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert demo.stand_in("nvml:") == "nvml:"
    monkeypatch.setattr(demo, "live_available", lambda: False)
    assert demo.stand_in("demo").endswith("burst.ndjson.zst")
    with pytest.raises(MissingExtraError, match=r"pip install 'mmctl\[torch\]'"):
        demo.stand_in("demo:leak")
    with pytest.raises(MissingExtraError):
        demo.check_live(["demo:burst"], "enforce")
    demo.check_live(["demo:burst"], "observe")


def test_the_recording_holds_the_whole_loop_and_decides_again_alike() -> None:
    profile = profiles.load("default").profile
    records = list(recording.read(demo.SHIPPED / "burst.ndjson.zst"))
    notice = records[1]
    assert isinstance(notice, Event) and notice.what == "notice"
    assert "recording" in (notice.message or "")
    again = [event for event in run(records, profile, "enforce") if isinstance(event, Event)]
    whats = iter([event.what for event in again])
    assert all(w in whats for w in ("trip", "respond", "verify", "half_open", "close"))


def test_played_in_the_place_of_a_worker_it_would_have_tripped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(demo, "live_available", lambda: False)
    clock = itertools.count(0, 10**13)  # hours pass between two looks: all of it is due
    monkeypatch.setattr(demo.time, "time_ns", lambda: next(clock))
    profile = profiles.load("default").profile
    records = demo.source("burst", profile, threading.Event())
    events = [event for event in run(records, profile, "observe") if isinstance(event, Event)]
    assert events[0].what == "notice"
    assert any(event.what == "trip" and event.rule == "fits" for event in events)
