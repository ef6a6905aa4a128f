"""Words and conditions behind ``/``."""

from __future__ import annotations

import msgspec
import pytest

from mmctl.tui import events, filter, frame
from mmctl.tui.lines import plain
from mmctl.tui.ui import Ui


def devices(snapshot, text: str) -> list[str]:
    return [v.record.device for v in filter.shown_devices(snapshot, Ui(filter=text))]


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("", ["gpu0", "gpu1", "npu0"]),
        ("H100 gpu1", ["gpu1"]),
        ("sm_ratio < 10%", ["gpu1"]),
        ("power_w > 200 and temperature_c < 90", ["gpu0"]),
        ("used_bytes > 1GiB", ["npu0"]),
        ("fragmentation_ratio > 0.5", ["gpu0"]),
        ("not (sm_ratio < 10%)", ["gpu0"]),  # unknown is neither
        ("total_bytes - used_bytes > 9GiB", ["npu0"]),
        ("what == 'trip'", ["gpu0", "gpu1", "npu0"]),
    ],
)
def test_devices_pass(burst, text: str, wanted: list[str]) -> None:
    assert devices(burst, text) == wanted


def test_events_pass_by_their_own_fields(burst) -> None:
    found = events.shown_events(burst, Ui(filter="what == 'trip' or what == 'close'"))
    assert [event.what for event in found] == ["close", "trip"]
    assert len(events.shown_events(burst, Ui(filter="sm_ratio < 10%"))) == len(burst.events)


@pytest.mark.parametrize(
    ("text", "told"),
    [("sm_ratio <", "cannot read"), ("sm_ratoi < 1", "did you mean 'sm_ratio'"),
     ("p99(sm_ratio, 10s) > 1", "over time"), ("__import__('os') == 1", "")],
)  # fmt: skip
def test_what_cannot_be_read_hides_nothing_and_is_said(burst, text: str, told: str) -> None:
    assert len(devices(burst, text)) == 3
    assert told in filter.problem(text)
    line, *_ = frame.notices(msgspec.structs.replace(burst), Ui(filter=text), 300)
    assert told in plain(line)
