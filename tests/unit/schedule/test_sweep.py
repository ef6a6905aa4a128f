"""Sweeps: equal budgets, the same table from any engine, journals, dead workers, the front."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import msgspec
import pytest

from mmctl.engine.errors import MmctlError
from mmctl.engine.schedule import fleet, sweep

TASK = sweep.Task(
    source=sweep.Source(trace="azure", rate_per_s=4.0, count=40, seed=2), devices="h100_sxm:2",
    model="qwen3-vl-8b", engine=fleet.Engine(), ttft_slo_s=2.0, itl_slo_s=0.1,
)  # fmt: skip


def test_every_policy_gets_the_same_number_of_plans_and_no_plan_twice() -> None:
    names = ("colocated_fcfs", "split_e_pd", "perception")
    plans = sweep.grid(names, 30)
    assert [sum(plan.policy == name for plan in plans) for name in names] == [10, 10, 10]
    assert len({plan.key for plan in plans}) == 30


def test_a_journal_is_gone_on_with_and_a_cut_line_is_dropped(tmp_path: Path) -> None:
    plans = sweep.grid(("colocated_fcfs", "perception"), 4)
    journal = tmp_path / "j.ndjson"
    whole = sweep.run(TASK, plans, workers=1, journal=journal)
    lines = journal.read_text().splitlines(keepends=True)
    assert len(lines) == 4
    journal.write_text("".join(lines[:2]) + lines[2][:40])
    seen: list[tuple[int, int]] = []
    again = sweep.run(
        TASK, plans, workers=1, journal=journal, progress=lambda done, of: seen.append((done, of))
    )
    assert again == whole and seen == [(2, 4), (3, 4), (4, 4)]
    other = msgspec.structs.replace(TASK, ttft_slo_s=1.0)
    assert sweep.run(other, plans[:1], workers=1, journal=journal)[0]["lost"] == 0
    journal.write_text("nonsense\n" + lines[0])
    with pytest.raises(MmctlError, match="line 1"):
        sweep.run(TASK, plans, journal=journal)


def test_a_killed_worker_loses_nothing(tmp_path: Path) -> None:
    plans = sweep.grid(("perception",), 3)
    expected = [sweep.one(TASK, plan) for plan in plans]
    killed = False

    def kill(done: int, of: int) -> None:
        nonlocal killed
        if done == 1 and not killed:
            killed = True
            for child in _children(os.getpid()):
                os.kill(child, signal.SIGKILL)

    assert sweep.run(TASK, plans, workers=1, progress=kill) == expected
    assert killed


def _children(pid: int) -> list[int]:
    """The spawned workers of this process, by the command line that spawn gives them."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            if parent == pid and b"spawn_main" in (folder / "cmdline").read_bytes():
                found.append(int(folder.name))
        except (OSError, ValueError):
            continue
    return found


def test_ray_gives_the_same_table() -> None:
    pytest.importorskip("ray", reason="ray (the extra) is not installed")
    plans = sweep.grid(("colocated_fcfs", "perception"), 4)
    assert sweep.run(TASK, plans, engine="ray") == [sweep.one(TASK, plan) for plan in plans]


def test_the_front_is_what_nothing_beats() -> None:
    def row(energy: float, late: float | None, good: float) -> dict[str, Any]:
        return {
            "joules_per_request": energy, "text_ttft_p99_s": late, "vision_ttft_p99_s": None,
            "goodput_per_device_hour": good,
        }  # fmt: skip

    rows = [row(1, 1, 1), row(2, 2, 2), row(2, 2, 1), row(1, 1, 1), row(0, None, 9)]
    assert sweep.pareto(rows) == [0, 1]
