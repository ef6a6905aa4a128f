"""Rebuild: steps in turn, the first failure ends it, one more try where that helps."""

from __future__ import annotations

import time

import msgspec
import pytest

from mmctl.engine import profiles
from mmctl.engine.errors import MmctlError
from mmctl.engine.records import Device, Process
from mmctl.engine.recovery.rebuild import (
    Report,
    Step,
    driver_agrees,
    memory_is_back,
    no_orphan,
    rebuild,
)

SETTINGS = profiles.load("default").profile.recovery
GPU = Device(ts_ns=1, device="gpu0", kind="gpu")
MIB = 2**20


def test_steps_in_turn_and_the_first_failure_ends_it() -> None:
    seen: list[Report] = []

    def held() -> dict[str, int]:
        return memory_is_back(500 * MIB, 0, SETTINGS)

    steps = [Step("drain", lambda: {"unfinished": 3}), Step("baseline", held),
             Step("rebuild", dict)]  # fmt: skip
    done = rebuild(steps, SETTINGS, seen.append)
    assert list(done) == seen and [report.step for report in done] == ["drain", "baseline"]
    assert done[0].passed and done[0].evidence == {"unfinished": 3}
    assert not done[1].passed and "500 MiB" in str(done[1].error)


def test_a_context_that_does_not_go_is_synchronised_and_tried_again() -> None:
    calls: list[str] = []

    def destroy() -> dict[str, str]:
        calls.append("destroy")
        if "synchronise" not in calls:
            raise MmctlError("busy")
        return {}

    (report,) = rebuild(
        [Step("destroy", destroy, lambda: calls.append("synchronise"))], SETTINGS, lambda _: None
    )
    assert calls == ["destroy", "synchronise", "destroy"]
    assert report.passed and report.tries == 2


def test_a_step_past_its_deadline_has_failed() -> None:
    hurried = msgspec.structs.replace(SETTINGS, step_deadline_s=0.001)
    slow = Step("warm_up", lambda: time.sleep(0.01) or {})
    (report,) = rebuild([slow], hurried, lambda _: None)
    assert not report.passed and "deadline" in str(report.error)


def test_memory_processes_and_driver() -> None:
    assert memory_is_back(10 * MIB, 5 * MIB, SETTINGS)["held_bytes"] == 10 * MIB
    own = msgspec.structs.replace(GPU, processes=(Process(pid=7, used_bytes=1),))
    assert no_orphan(own, {7}) == {"orphans": []}
    with pytest.raises(MmctlError, match="orphan processes hold memory of gpu0: 7"):
        no_orphan(own, set())
    assert no_orphan(GPU, set())["orphans"] is None  # not told is not none
    assert driver_agrees(None, GPU)["recovery_action"] is None
    with pytest.raises(MmctlError, match="asks for 'gpu_reset'"):
        driver_agrees(GPU, msgspec.structs.replace(GPU, recovery_action="gpu_reset"))
    failed = msgspec.structs.replace(GPU, xid=31)
    with pytest.raises(MmctlError, match="new Xid 31"):
        driver_agrees(GPU, failed)
    assert driver_agrees(failed, failed)["xid"] == 31
