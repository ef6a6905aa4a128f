"""Who was late, who is missing: against planted faults."""

from __future__ import annotations

import json
import pickle
import random
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mmctl.engine import profiles
from mmctl.engine.access import collectives, dumps, flight_recorder, inputs
from mmctl.engine.access.timeline import Call, build
from mmctl.engine.errors import MmctlError

PATTERNS = profiles.load("default").profile.modality


def timeline(rank: int, calls: list[Call]) -> Any:
    import numpy as np

    empty = np.empty(0, np.int64)
    columns = ("start_ns", "end_ns", "name", "kind", "stream", "modality", "launch_ns")
    rows = {**dict.fromkeys(columns, empty), "names": [], "streams": []}
    return build("x", rank, rows, calls=calls)


@pytest.mark.parametrize("seed", range(20))
def test_the_planted_late_rank_is_named(seed: int) -> None:
    rng = random.Random(seed)
    late, at, ranks = rng.randrange(8), rng.randrange(1, 10), range(8)
    clock = [rng.randrange(10**9) for _ in ranks]  # no common clock is needed
    calls: dict[int, list[Call]] = {rank: [] for rank in ranks}
    for step in range(10):
        arrival = [step * 10**9 + rng.randrange(5_000_000) for _ in ranks]
        if step == at:
            arrival[late] += 300_000_000
        end = max(arrival) + 1_000_000
        for rank in ranks:
            start = arrival[rank]
            calls[rank].append(Call("allgather", "default", start + clock[rank], end - start))
    found = collectives.match([timeline(rank, calls[rank]) for rank in ranks])
    assert len(found) == 10 and [c.cold for c in found] == [True] + [False] * 9
    (imbalance,) = collectives.imbalances(found, 0.2)
    assert (imbalance.late_rank, imbalance.sequence) == (late, at)


@pytest.mark.parametrize("missed", [1, 3])
def test_a_trace_that_begins_later_is_put_in_its_place(missed: int) -> None:
    """Rank 1 has no record of the first calls, and its clock is an hour off."""
    calls: dict[int, list[Call]] = {0: [], 1: []}
    for step in range(8):
        at = step * 10**9 + step * step * 10**7  # steps grow longer
        late = 300_000_000 if step == 5 else 0
        calls[0].append(Call("all_reduce", "default", at, 50_000_000 + late))
        if step >= missed:
            start = at + 40_000_000 + late + 3600 * 10**9
            calls[1].append(Call("all_reduce", "default", start, 10_000_000))
    found = collectives.match([timeline(rank, calls[rank]) for rank in calls])
    assert [c.sequence for c in found] == list(range(missed, 8))
    assert [c.sequence for c in collectives.imbalances(found, 0.2)] == [5]


@pytest.mark.parametrize(("step", "cold"), [("ProfilerStep#10", False), ("ProfilerStep#0", True)])
def test_the_first_call_of_a_warm_trace_counts(step: str, cold: bool) -> None:
    lines = [
        replace(timeline(rank, [Call("all_reduce", "default", 5, wait)]), steps=[(0, 99, step)])
        for rank, wait in ((0, 400_000_000), (1, 1_000_000))
    ]
    (found,) = collectives.match(lines)
    assert found.cold is cold and len(collectives.imbalances([found], 0.2)) == (not cold)


def test_groups_and_sequences_of_the_trace_are_kept_apart() -> None:
    def call(group: str, sequence: int, members: tuple[int, ...], wait: int) -> Call:
        return Call("all_reduce", group, 0, wait, sequence, members)

    lines = [
        timeline(0, [call("tp", 4, (0, 1), 5), call("tp", 5, (0, 1), 900_000_000)]),
        timeline(1, [call("tp", 5, (0, 1), 7)]),
        timeline(2, [call("tp", 5, (2, 3), 9)]),
        timeline(3, [call("tp", 5, (2, 3), 9)]),
    ]
    found = collectives.match(lines)
    assert sorted((c.sequence, tuple(c.wait_s)) for c in found) == [
        (5, ("0", "1")), (5, ("2", "3")),
    ]  # fmt: skip


def entry(group: str, sequence: int, name: str = "nccl:all_reduce", **more: Any) -> dict[str, Any]:
    return {
        "process_group": [group, ""], "pg_id": 0, "collective_seq_id": sequence, "retired": False,
        "profiling_name": name, "state": "scheduled", "input_sizes": [[4]],
        "input_dtypes": ["Float"], "time_created_ns": 10**18 + sequence * 10**6, **more,
    }  # fmt: skip


def job(entries_of: dict[int, list[dict[str, Any]]], ranks: int = 4) -> flight_recorder.Verdict:
    config = {"0": {"name": "0", "ranks": str(list(range(ranks)))}}
    parsed = [
        dumps.parse({"entries": entries, "pg_config": config}, rank, "dump")
        for rank, entries in entries_of.items()
    ]
    return flight_recorder.judge(parsed, 0.2)


def test_a_missing_member_is_the_suspect() -> None:
    whole = [entry("0", s) for s in (5, 6, 7)]
    verdict = job({0: whole, 1: whole[:1], 2: whole, 3: whole})
    assert [(m.group, m.sequence, m.ranks, m.waiting) for m in verdict.missing] == [
        ("0", 6, [1], [0, 2, 3])
    ]
    assert [s.rank for s in verdict.suspects] == [1]


def test_a_rank_that_lags_is_the_suspect() -> None:
    done = [entry("0", s, state="completed", retired=True) for s in (5, 6)]
    verdict = job({r: [*done, entry("0", 7)] if r != 2 else [entry("0", s) for s in (5, 6, 7)]
                   for r in range(4)})  # fmt: skip
    assert verdict.missing == [] and [s.rank for s in verdict.suspects] == [2]


def test_a_rank_stuck_since_before_its_peers_is_a_suspect() -> None:
    """All entered the same collectives; rank 3 has hung since long before the others."""
    entries = {r: [entry("0", 5), entry("0", 6)] for r in range(4)}
    entries[3] = [entry("0", 5, time_created_ns=10**18 - 10**9), entry("0", 6)]
    verdict = job(entries)
    assert verdict.missing == [] and [s.rank for s in verdict.suspects] == [3]


def test_a_collective_that_all_entered_and_that_does_not_end() -> None:
    few = job({0: [entry("0", 5)], 1: [entry("0", 5)]}, ranks=2)
    assert {s.rank for s in few.suspects} == {0, 1}
    many = job({rank: [entry("0", 5)] for rank in range(8)}, ranks=8)
    assert many.suspects == [] and "does not end" in many.notes[0]
    started = {rank: [entry("0", 5, state="started")] for rank in range(8)}
    verdict = job({**started, 6: [entry("0", 5)]}, ranks=8)
    assert [s.rank for s in verdict.suspects] == [6]


def test_an_empty_or_absent_dump_is_a_finding() -> None:
    waiting = [entry("0", 5)]
    verdict = job({0: waiting, 1: [], 2: waiting})
    assert [s.rank for s in verdict.suspects] == [1, 3] or {s.rank for s in verdict.suspects} == {
        1,
        3,
    }
    assert verdict.missing[0].ranks == [1, 3]


def test_few_dumps_blame_nobody_for_not_being_given() -> None:
    verdict = job({0: [entry("0", 5)]}, ranks=16)
    assert verdict.suspects == [] and "15 ranks" in verdict.notes[0]


def test_who_waits_for_the_culprit_is_no_suspect() -> None:
    """Rank 2 never entered (0, 6); rank 1 waits there, and 0 waits for 1 elsewhere."""
    config = {
        "a": {"name": "a", "ranks": "[0, 1]"}, "b": {"name": "b", "ranks": "[1, 2]"},
    }  # fmt: skip
    entries_of = {
        0: [entry("a", 9)],
        1: [entry("a", 8, state="completed"), entry("b", 6)],
        2: [entry("b", 5, state="completed")],
    }
    parsed = [
        dumps.parse({"entries": entries, "pg_config": config}, rank, "dump")
        for rank, entries in entries_of.items()
    ]
    verdict = flight_recorder.judge(parsed, 0.2)
    assert {(m.group, *m.ranks) for m in verdict.missing} == {("a", 1), ("b", 2)}
    assert [s.rank for s in verdict.suspects] == [2]


@pytest.mark.parametrize(
    ("change", "what"),
    [({"profiling_name": "nccl:broadcast"}, "call"), ({"input_sizes": [[8]]}, "input size"),
     ({"input_dtypes": ["Half"]}, "input type")],
)  # fmt: skip
def test_calls_that_do_not_match(change: dict[str, Any], what: str) -> None:
    odd = {**entry("0", 5), **change}
    verdict = job({0: [entry("0", 5)], 1: [entry("0", 5)], 2: [odd], 3: [entry("0", 5)]})
    (mismatch,) = verdict.mismatches
    assert (mismatch.sequence, mismatch.what) == (5, what)
    assert [s.rank for s in verdict.suspects] == [2]


def test_a_healthy_job_gives_no_finding() -> None:
    done = [entry("0", s, state="completed", retired=True) for s in range(5)]
    verdict = job(dict.fromkeys(range(4), done))
    assert not (verdict.missing or verdict.mismatches or verdict.suspects or verdict.imbalance)


def test_gloo_straggler(data: Path) -> None:
    folder = data / "kineto" / "gloo_straggler"
    lines, _ = inputs.load(sorted(folder.glob("rank*.gz")), PATTERNS, lambda _: [])
    found = collectives.imbalances(collectives.match(lines), 0.2)
    assert [item.late_rank for item in found] == [2, 2]
    for item, (low, high) in zip(found, [(0.252, 0.268), (0.357, 0.360)], strict=True):
        assert all(low < item.waits_s[rank] < high for rank in ("0", "1", "3"))
        assert 0.006 < item.waits_s["2"] < 0.010
    _, recorded = inputs.load(sorted(folder.glob("fr*.json")), PATTERNS, lambda _: [])
    verdict = flight_recorder.judge(recorded, 0.2)
    assert [item.late_rank for item in verdict.imbalance] == [2, 2]
    assert verdict.suspects == []


@pytest.mark.parametrize("fault", ["gpu_error_1st", "lock_gil_1st"])
def test_both_injected_ranks_are_the_suspects(data: Path, fault: str) -> None:
    folder = data / "flight_recorder" / fault
    log = (folder / "fault_injection.log").read_text()
    injected = {int(rank) for rank in re.findall(r"^Rank (\d+)", log, re.MULTILINE)}
    _, recorded = inputs.load([folder], PATTERNS, lambda _: [])
    verdict = flight_recorder.judge(recorded, 0.2)
    assert {s.rank for s in verdict.suspects} == injected and verdict.missing


def test_a_hostile_pickle_is_refused(tmp_path: Path) -> None:
    class Touch:
        def __reduce__(self) -> Any:
            return (Path.touch, (tmp_path / "executed",))

    path = tmp_path / "_dump_0"
    path.write_bytes(pickle.dumps({"entries": [Touch()]}))
    with pytest.raises(MmctlError, match="refused"):
        inputs.load([path], PATTERNS, lambda _: [])
    assert not (tmp_path / "executed").exists()


def test_a_pickle_and_json_of_a_dump_are_the_same(tmp_path: Path) -> None:
    content = {"pg_config": {"0": {"name": "0", "ranks": "[0, 1]"}}, "entries": [entry("0", 5)]}
    (tmp_path / "a_0").write_bytes(pickle.dumps(content, protocol=2))
    (tmp_path / "b_0.json").write_text(json.dumps(content))
    _, (first, second) = inputs.load([tmp_path], PATTERNS, lambda _: [])
    assert first == second and first.rank == 0
