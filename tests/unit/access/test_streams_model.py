"""The cache-and-bank model against cases that can be counted by hand, and counters as read."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest

from mmctl.engine.access import accesses, counters, memory_models, streams
from mmctl.engine.errors import MmctlError

SMALL = memory_models.MemoryModel(
    name="small", l2_bytes=64 * 1024, ways=16, channels=4, banks=4, row_bytes=1024
)


def loop(name: str, kib: int, times: int) -> accesses.Accesses:
    """Sweeps the same memory over and over, 1 KiB an operator."""
    address = np.tile(np.arange(kib) * 1024, times)
    return accesses.make(name, address, np.full(len(address), 1024), np.zeros(len(address)))


def by_schedule(found: streams.Report) -> dict[str, streams.Case]:
    return {case.schedule: case for case in found.cases}


def test_what_fits_misses_once_and_what_does_not_misses_always() -> None:
    found = by_schedule(streams.simulate([loop("a", 16, 10), loop("b", 16, 10)], SMALL))
    assert found["two_streams"].l2_miss_ratio == pytest.approx(0.1, abs=0.02)
    large = by_schedule(streams.simulate([loop("a", 512, 3), loop("b", 512, 3)], SMALL))
    assert large["run_to_completion"].l2_miss_ratio > 0.95


def test_two_loops_that_fit_only_one_at_a_time() -> None:
    found = by_schedule(streams.simulate([loop("a", 40, 20), loop("b", 40, 20)], SMALL))
    alone = found["run_to_completion"]
    together = found["two_streams"]
    assert alone.l2_miss_ratio < 0.2 < 0.5 < together.l2_miss_ratio
    for share in together.streams:
        assert share.extra_misses_ratio == pytest.approx(
            share.l2_miss_ratio - share.alone_l2_miss_ratio
        )


def test_disjoint_channels_end_conflicts_with_the_other() -> None:
    found = by_schedule(streams.simulate([loop("a", 600, 2), loop("b", 600, 2)], SMALL))
    assert any(s.conflicts_by_other_ratio > 0.01 for s in found["two_streams"].streams)
    assert all(s.conflicts_by_other_ratio == 0 for s in found["two_streams_disjoint"].streams)


def test_sectors_are_filled_one_by_one() -> None:
    address = np.arange(0, 4096, 128)
    first = accesses.make("a", address, [32] * 32, [False] * 32)
    again = accesses.make("b", np.concatenate([address, address + 32]), [32] * 64, [False] * 64)
    found = by_schedule(streams.simulate([first, again], SMALL))
    assert found["run_to_completion"].l2_miss_ratio == 1.0  # the line is there, its sector not


def test_compiled_and_plain_agree() -> None:
    rng = np.random.default_rng(0)
    address = rng.integers(0, 1 << 18, 5000) // 32 * 32
    owner = rng.integers(0, 2, 5000)
    for groups in (1, 2):
        arguments = (address, owner, groups, 4, 32, 4, 128, 32, 4, 1024, 256)
        assert (
            streams._simulate(*arguments).tolist() == streams._simulate.plain(*arguments).tolist()
        )


def test_long_sweeps_shrink_with_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    model = msgspec.structs.replace(SMALL, l2_bytes=1 << 20)
    tasks = [loop("a", 640, 5), loop("b", 640, 5)]
    whole = streams.simulate(tasks, model)
    monkeypatch.setattr(streams, "MOST_SECTORS", 150_000)
    half = streams.simulate(tasks, model)
    assert (whole.model["scale"], half.model["scale"]) == (1, 2)
    for a, b in zip(whole.cases, half.cases, strict=True):
        assert a.l2_miss_ratio == pytest.approx(b.l2_miss_ratio, abs=0.1)


def test_causes_are_named() -> None:
    odd = accesses.make("odd", np.arange(2000) * 64 + 30, [4] * 2000, [False] * 2000)
    found = streams.simulate([odd, loop("b", 60, 5)], SMALL)
    assert any("straddle" in cause for cause in found.causes)
    assert "nvlink_arbitration" in found.absent


def test_one_stream_is_not_enough() -> None:
    with pytest.raises(MmctlError, match="two streams"):
        streams.simulate([loop("a", 1, 1)], SMALL)


WIDE = """==PROF== Connected
"ID","Kernel Name","Stream","lts__t_sector_hit_rate.pct","lts__t_sectors.sum"
"","","","%","sector"
"0","vit","7","80.00","3,000"
"1","vit","7","60.00","1,000"
"2","bert","8","50.0","4,000"
"""
LONG = """"ID","Kernel Name","Stream","Metric Name","Metric Unit","Metric Value"
"0","vit","7","lts__t_sectors_lookup_hit.sum","sector","750"
"0","vit","7","lts__t_sectors_lookup_miss.sum","sector","250"
"""


def test_counters_in_both_layouts(tmp_path: Path) -> None:
    path = tmp_path / "c.csv"
    path.write_text(WIDE)
    assert counters.looks_like(WIDE.encode())
    found = counters.read(path)
    (case,) = found["cases"]
    assert found["basis"] == "measured" and "row_conflict_ratio" in found["absent"]
    assert {s["stream"]: s["l2_miss_ratio"] for s in case["streams"]} == pytest.approx(
        {"7": 0.25, "8": 0.5}
    )
    assert case["l2_miss_ratio"] == pytest.approx(0.375) and case["row_conflict_ratio"] is None
    path.write_text(LONG)
    assert counters.read(path)["cases"][0]["l2_miss_ratio"] == 0.25
    path.write_text("a,b\n1,2\n")
    with pytest.raises(MmctlError, match="no last-level cache counter"):
        counters.read(path)


def test_real_counters(data: Path) -> None:
    found = counters.read(data / "ncu" / "nsight_vectoradd_100_32_metrics_all.csv")
    assert 0.5 < found["cases"][0]["l2_miss_ratio"] < 0.9
    counters.read(data / "ncu" / "nvprof_vectoradd_100_32_metrics_all.txt")


def test_models_are_plain_data() -> None:
    for model in memory_models.MODELS.values():
        assert model.l2_bytes % (model.ways * model.line_bytes) == 0
        assert msgspec.to_builtins(model)["name"] == model.name
