"""Replay: of real snapshots, and of whatever the model's own recorder writes down."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mmctl.benchmarks.recorder import MIB, Recorder, dump, workload
from mmctl.engine.memory import program, replay, snapshot
from mmctl.engine.memory.replay import Replay
from mmctl.engine.memory.settings import Settings

COMPILED = "MMCTL_TEST_COMPILED" in os.environ  # read now: tests run in a clean environment
REAL = {
    "cs336_tiny_complete": 36, "cs336_train_128": 6526, "cs336_train_annot_2026": 2162,
    "cs336_windows_2026": 1721, "oom_expandable_no_frames": 3025,
}  # fmt: skip


def replayed(path: Path) -> list[Replay]:
    found = snapshot.read(path)
    results = []
    for device in found.devices():
        if program.reason_without(found, device) is None:
            ready = replay.prepared(found, device)
            (last,) = replay.moments(ready, [ready.rows.shape[1]])
            results.append(replay.fidelity(found, ready, last))
    return results


@pytest.mark.parametrize("name", REAL)
def test_real_snapshots_come_out_exactly(name: str, data: Path) -> None:
    results = replayed(data / "snapshots" / f"{name}.pickle")
    assert sum(one.allocs for one in results) == REAL[name]
    for one in results:
        assert (one.exact, one.exact_segments, one.lost) == (one.allocs, one.segments, 0)
        assert one.final_equal


CONFS = st.sampled_from(
    [
        Settings(), Settings(expandable_segments=True), Settings(max_split_bytes=24 * MIB),
        Settings(roundup_power2_divisions=(4,) * 16),
        Settings(expandable_segments=True, max_split_bytes=32 * MIB),
    ]
)  # fmt: skip


@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    conf=CONFS, seed=st.integers(0, 10_000), capacity=st.sampled_from([None, 500 * MIB]),
    pools=st.integers(0, 1), drop=st.sampled_from([(), ("pool_id",), ("frames", "time_us")]),
)  # fmt: skip
def test_own_traces_come_out_exactly(
    conf: Settings, seed: int, capacity: int | None, pools: int, drop: tuple[str, ...],
    tmp_path: Path,
) -> None:  # fmt: skip
    """Any settings, streams, private pools, releases and errors, from an empty allocator."""
    recorder = Recorder(conf, capacity)
    workload(recorder, 300, seed, pools=pools)
    (one,) = replayed(dump(tmp_path / "own", recorder.snapshot(drop=drop)))
    assert one.complete
    assert (one.exact, one.exact_segments, one.lost) == (one.allocs, one.segments, 0)
    assert one.final_equal


@settings(
    max_examples=20,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(conf=CONFS, seed=st.integers(0, 10_000), ring=st.sampled_from([150, 400, 700]))
def test_a_lost_beginning_is_rebuilt(conf: Settings, seed: int, ring: int, tmp_path: Path) -> None:
    """A ring that has overflowed: what was there before is derived from the rest."""
    recorder = Recorder(conf)
    workload(recorder, 500, seed)
    (one,) = replayed(dump(tmp_path / "ring", recorder.snapshot(ring)))
    assert one.allocs > 0
    if conf.expandable_segments:
        # What was unmapped without ever being used in sight does not tell whose it was.
        assert one.exact >= 0.85 * one.allocs
    else:
        assert (one.exact, one.lost, one.final_equal) == (one.allocs, 0, True)


def test_a_wrong_address_is_counted_not_believed(tmp_path: Path) -> None:
    recorder = Recorder()
    workload(recorder, 200, 1)
    found = recorder.snapshot()
    allocs = [entry for entry in found["device_traces"][0] if entry["action"] == "alloc"]
    allocs[50]["addr"] += 512
    (one,) = replayed(dump(tmp_path / "wrong", found))
    assert one.exact < one.allocs


@pytest.mark.parametrize(
    "conf",
    [Settings(), Settings(roundup_power2_divisions=(4,) * 16), Settings(max_split_bytes=24 * MIB)],
)
def test_torch_2_0_files_record_no_settings(conf: Settings, tmp_path: Path) -> None:
    """Neither settings, pools, block addresses nor times; the settings show in the addresses."""
    recorder = Recorder(conf, 500 * MIB)
    workload(recorder, 600, 11, pools=0)
    found = recorder.snapshot(drop=("time_us", "pool_id", "compile_context", "user_metadata"))
    for key in ("allocator_settings", "external_annotations"):
        del found[key]
    for segment in found["segments"]:
        for key in ("segment_pool_id", "is_expandable", "frames"):
            del segment[key]
        for block in segment["blocks"]:
            history = {"addr": block.pop("address"), "real_size": block["requested_size"],
                       "frames": block.pop("frames")}  # fmt: skip
            block["history"] = [history]
    path = dump(tmp_path / "old", found, protocol=2)
    assert snapshot.read(path).era == "2.0"
    (one,) = replayed(path)
    assert (one.exact, one.final_equal) == (one.allocs, True)


def test_history_that_was_off_is_said(data: Path) -> None:
    found = snapshot.read(data / "snapshots" / "kivi_kvcache_llama.pickle")
    assert program.reason_without(found, 0) == (
        "the history holds at most one entry: recording was off"
    )


def test_compiled_and_plain_agree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same source through numba: only where asked, since it compiles for a while."""
    if not COMPILED:
        pytest.skip("compiling takes a quarter of a minute (MMCTL_TEST_COMPILED=1 runs it)")
    pytest.importorskip("numba")
    from mmctl.engine.memory import compiled

    recorder = Recorder(Settings(expandable_segments=True), 300 * MIB)
    workload(recorder, 2000, 5)
    path = dump(tmp_path / "both", recorder.snapshot())
    plain = replayed(path)
    monkeypatch.setattr(compiled, "worth", lambda _: True)
    assert replayed(path) == plain
