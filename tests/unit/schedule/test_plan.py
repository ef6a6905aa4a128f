"""Plans: found by simulating, kept in a file, taken by the simulator as they were told."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from mmctl.engine.errors import MmctlError, UsageError
from mmctl.engine.schedule import fleet, plan, planner, sweep
from mmctl.engine.schedule.plan import Slo
from mmctl.engine.schedule.source import Source

SLO = Slo(ttft_s=2.0, itl_s=0.1, share_ratio=0.9)


def task(devices: str, rate: float = 4.0, model: str = "qwen3-vl-8b") -> sweep.Task:
    return sweep.Task(
        source=Source(trace="azure", rate_per_s=rate, count=150, seed=2), devices=devices,
        model=model, engine=fleet.Engine(), ttft_slo_s=SLO.ttft_s, itl_slo_s=SLO.itl_s,
    )  # fmt: skip


def here(jobs: Sequence[sweep.Job]) -> list[dict[str, Any]]:
    return [sweep.one(*job) for job in jobs]


def test_the_plan_keeps_the_objective_and_one_device_less_would_not() -> None:
    given = task("h100_sxm:2,l4:3")
    found = planner.search(given, SLO, here, budget=6)
    assert found.kept and found.figures["slo_ratio"] >= 0.9
    again = sweep.one(given, found.chosen.settings())
    assert again["slo_ratio"] == found.figures["slo_ratio"]
    assert again["goodput_per_device_hour"] == found.figures["goodput_per_device_hour"]
    used = fleet.parts(found.chosen.devices)
    assert len(used) <= 5
    for i in range(len(used)):
        fewer = used[:i] + used[i + 1 :]
        roles = "".join(role for _, role in fewer)
        if "P" in roles and "D" in roles:
            less = msgspec.structs.replace(
                found.chosen.settings(), devices=fleet.named(fewer)
            )  # fmt: skip
            assert not planner.keeps(sweep.one(given, less), SLO)
    # No alternative that keeps it does better.
    best = found.figures["goodput_per_device_hour"]
    for row in found.alternatives:
        assert row["slo_ratio"] < 0.9 or row["goodput_per_device_hour"] <= best
    # Another order of the same devices is no other alternative.
    told = [
        (row["structure"], *sorted(fleet.parts(str(row["devices"])))) for row in found.alternatives
    ]
    assert len(told) == len(set(told))
    structures = [cost["structure"] for cost in found.split_cost]
    assert structures == ["colocated", "E|PD", "E|P|D"]
    assert found.split_cost[0]["ttft_factor"] == found.split_cost[0]["throughput_factor"] == 1
    assert {limit.queue for limit in found.chosen.queues} == {"vision", "stream"}
    assert all(limit.depth and limit.depth >= 1 for limit in found.chosen.queues)


def test_where_nothing_keeps_it_the_nearest_is_told() -> None:
    found = planner.search(task("l4:2", rate=20.0), SLO, here, budget=2)
    assert not found.kept and any("comes nearest" in line for line in found.because)
    assert found.figures["slo_ratio"] == max(
        [found.figures["slo_ratio"], *(row["slo_ratio"] for row in found.alternatives)]
    )


def test_a_model_without_images_is_not_split_for_them() -> None:
    found = planner.search(task("h100_sxm:2", model="llama-3.1-8b"), SLO, here, budget=2)
    assert found.split_cost == [] and "|" not in "".join(
        str(row["structure"]) for row in found.alternatives
    )


def test_devices_too_small_for_the_model_are_a_usage_error() -> None:
    with pytest.raises(UsageError, match=r"too little for|can hold"):
        planner.search(task("l4:2", model="llama-3.1-70b"), SLO, here)


def test_devices_are_named_and_read_alike() -> None:
    text = "h100_sxm:2@EPD,l4:1@E,l4:3@PD"
    assert fleet.named(fleet.parts(text)) == text
    assert fleet.parts("l4@DPE") == [("l4", "EPD")]
    for wrong in ("@E", "l4@X", "", " , "):
        with pytest.raises(UsageError):
            fleet.parts(wrong)
    with pytest.raises(UsageError, match="more than"):
        fleet.parts("l4:5000")


def test_an_objective_as_typed() -> None:
    assert plan.slo("", SLO) == SLO
    assert plan.slo("ttft=500ms, share=95%", SLO) == Slo(ttft_s=0.5, itl_s=0.1, share_ratio=0.95)
    for wrong in ("ttfb=2s", "ttft", "ttft=soon", "share=120%", "itl=0s", "itl=-1s"):
        with pytest.raises(UsageError):
            plan.slo(wrong, SLO)


def test_a_plan_file_is_read_as_written_and_nothing_else_is(tmp_path: Path) -> None:
    chosen = plan.of(
        sweep.Plan(policy="perception", devices="l4:2@EPD", age_s=1.0), "qwen3-vl-8b", ()
    )
    path = tmp_path / "plan.json"
    path.write_bytes(msgspec.json.encode(chosen))
    assert plan.read(path) == chosen
    path.write_bytes(msgspec.json.encode({"schema": 1, "plan": chosen, "because": []}))
    assert plan.read(path).settings() == chosen.settings()
    for wrong in (b"", b"{}", b"[1]", b"\xff\xfe", b'{"plan": {"schema": 1}}'):
        path.write_bytes(wrong)
        with pytest.raises(MmctlError, match="is no plan"):
            plan.read(path)
    path.write_bytes(msgspec.json.encode(msgspec.structs.replace(chosen, schema=9)))
    with pytest.raises(MmctlError, match="schema 9"):
        plan.read(path)
    with pytest.raises(MmctlError, match="cannot read"):
        plan.read(tmp_path / "absent.json")
