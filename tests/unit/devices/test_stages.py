"""Stage models: known constants come back, batches are advised by what they bring."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from mmctl.engine.devices import encoder, stages
from mmctl.engine.errors import MmctlError, UsageError


def points(overhead: float, rate: float, bandwidth: float, noise: float = 0.0) -> list:
    chooser = np.random.default_rng(1)
    found = []
    for flops in np.geomspace(1e6, 1e12, 8):
        for intensity in (0.5, 5.0, 200.0):
            moved = flops / intensity
            time = overhead + max(flops / rate, moved / bandwidth)
            found.append(
                stages.Point(
                    stage="x", shape={}, flops=float(flops), bytes=float(moved),
                    seconds=float(time * (1 + noise * chooser.uniform(-1, 1))),
                )
            )  # fmt: skip
    return found


def test_constants_of_a_roofline_come_back() -> None:
    found = stages.fit(points(20e-6, 5e12, 2e11))
    assert found.overhead_s == pytest.approx(20e-6, rel=1e-3)
    assert found.flops_per_s == pytest.approx(5e12, rel=1e-3)
    assert found.bandwidth_bytes_per_s == pytest.approx(2e11, rel=1e-3)


def test_the_error_is_of_points_that_were_kept_out() -> None:
    stage = stages.judged("x", "here", points(20e-6, 5e12, 2e11, noise=0.05))
    out = [p for p in stage.points if not p.fitted]
    assert len(out) == len(stage.points) // 2
    assert stage.mape == pytest.approx(
        np.mean([abs((p.modelled_s or 0) / p.seconds - 1) for p in out])
    )
    assert 0.005 < (stage.mape or 0) < 0.05


def test_a_side_that_never_shows_is_absent() -> None:
    found = stages.fit([p for p in points(1e-6, 5e12, 1e15) if p.flops / p.bytes > 1])
    assert found.bandwidth_bytes_per_s is None and "memory" in found.absent["bandwidth_bytes_per_s"]
    with pytest.raises(MmctlError):
        stages.fit([])


def test_too_few_points_say_so() -> None:
    stage = stages.judged("x", "here", points(0, 1e9, 1e9)[:4])
    assert stage.mape is None and stage.absent["mape"]


@pytest.mark.parametrize(
    ("gains", "most", "batch"),
    [
        ({1: 1, 2: 1.76, 4: 2.2, 8: 2.36}, 8, 8), ({1: 1, 2: 0.79, 4: 1.1, 8: 0.94}, 8, 1),
        ({1: 1, 2: 1.76, 4: 2.2, 8: 2.36}, 4, 4), ({1: 1, 8: 1.1}, 8, 1), ({}, 8, 1),
        ({1: 1, 2: 1.9, 4: 1.95, 8: 1.99}, 8, 2),
    ],
)  # fmt: skip
def test_a_batch_pays_for_its_wait(gains: dict[int, float], most: int, batch: int) -> None:
    assert stages.batch_for(gains, most) == batch


def table() -> list[encoder.Measured]:
    """Two waves of 64 units, then all in proportion; 5 µs to start."""
    rows = []
    for patches in (256, 1024):
        for heads in (1, 2, 4, 5, 8, 12, 16):
            for images in (1, 2, 4, 8, 16):
                units = images * heads
                unit_s = 4.0 * patches**2 * 64 / 1e12
                seconds = 5e-6 + unit_s * (8 if units <= 8 else units)
                rows.append(
                    encoder.Measured(
                        images=images, patches=patches, heads=heads, head_dim=64, seconds=seconds
                    )
                )
    return rows


def test_attention_of_unseen_head_counts_is_known_from_the_others() -> None:
    stage, whole = encoder.judged("x", table())
    assert stage.model["held_out_heads"] == [2, 5, 12] and (stage.mape or 1) < 0.02
    assert encoder.seconds(whole, 3, 1024, 7, 64) == pytest.approx(
        5e-6 + 21 * 4.0 * 1024**2 * 64 / 1e12, rel=0.02
    )
    only = encoder.judged("x", table(), hold_out=[16])[0]
    assert {p.shape["heads"] for p in only.points if not p.fitted} == {16}
    with pytest.raises(UsageError, match="head counts in the table"):
        encoder.judged("x", table(), hold_out=[7])
    with pytest.raises(UsageError, match="no head count is left"):
        encoder.judged("x", table(), hold_out=[1, 2, 4, 5, 8, 12, 16])


def test_batching_is_advised_where_it_pays() -> None:
    _, whole = encoder.judged("x", table())
    few = {row["patches"]: row for row in encoder.advice("x", table(), whole, 1, 64, 8)}
    many = {row["patches"]: row for row in encoder.advice("x", table(), whole, 16, 64, 8)}
    assert few[1024]["batch"] == 8 and few[1024]["throughput_factor"] == pytest.approx(8)
    assert many[1024]["batch"] == 1 and not many[1024]["pays"]
    assert many[1024]["basis"] == "measured"
    unseen = encoder.advice("x", table(), whole, 3, 64, 8)
    assert {row["basis"] for row in unseen} == {"modelled"}


def test_real_tables_hold_for_unseen_heads_and_advise_as_measured(data: Path) -> None:
    pytest.importorskip("pyarrow", reason="needs the extra 'files'")
    files = sorted((data / "device_profiles/encoder_attention").glob("*.parquet"))
    assert files
    for path in files:
        system, measured, notes = encoder.read(path)
        kept = [m for m in measured if m.head_dim == 72 and m.patches in (64, 576, 1024, 4096)]
        stage, whole = encoder.judged(system, kept)
        assert notes == [] and (stage.mape or 1) <= 0.15, (system, stage.mape)
        if "H100" in system:
            rows = encoder.advice(system, kept, whole, 16, 72, 8)
            batches = {row["patches"]: row["batch"] for row in rows}
            assert batches[1024] == 8 and batches[4096] != 8
