"""PCA: exact on what the basis spans, bounded on the rest, files that never execute."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from mmctl.engine.errors import MmctlError  # noqa: E402
from mmctl.engine.responses import pca  # noqa: E402
from mmctl.engine.responses.estimate import CHUNK_BYTES, bytes_of, compare  # noqa: E402


def low_rank(rows: int, channels: int, rank: int, seed: int = 0):
    generator = torch.Generator().manual_seed(seed)
    mix = torch.randn(rank, channels, generator=torch.Generator().manual_seed(99))
    return torch.randn(1, rows, rank, generator=generator) @ mix + 50


def test_what_the_basis_spans_comes_back() -> None:
    basis = pca.fit([low_rank(200, 96, 8, 1), low_rank(200, 96, 8, 2)], 8, "test")
    assert basis.explained_ratio == pytest.approx(1.0)
    gram = basis.components @ basis.components.T
    assert torch.allclose(gram, torch.eye(8), atol=1e-5)
    fresh = low_rank(50, 96, 8, 3)
    for features in (fresh, fresh.half()):
        projected = pca.project(features, basis)
        assert projected.values.dtype == features.dtype
        assert pca.restore(projected).dtype == features.dtype
        assert compare(features, pca.restore(projected))[0] < 2e-3
    assert pca.project(projected, basis) is projected


def test_the_error_is_what_the_variance_left_out_says() -> None:
    features = torch.randn(1, 4000, 32, generator=torch.Generator().manual_seed(4))
    features *= torch.linspace(3, 0.1, 32)
    basis = pca.fit([features], 12, "test")
    error, _ = compare(features, pca.restore(pca.project(features, basis)))
    assert error**2 == pytest.approx(1 - basis.explained_ratio, abs=0.01)


def test_fitting_is_reproducible_and_needs_enough_features() -> None:
    batch = low_rank(100, 16, 16)
    assert torch.equal(pca.fit([batch], 4, "a").components, pca.fit([batch], 4, "a").components)
    with pytest.raises(MmctlError, match="as many features"):
        pca.fit([batch[:, :3]], 4, "a")


@pytest.mark.parametrize("level", ["shallow", "deep"])
def test_shipped_bases(level: str) -> None:
    channels, keep = pca.SHIPPED[level]
    basis = pca.shipped(level)
    assert basis.components.shape == (keep, channels) and "random weights" in basis.origin
    features = torch.randn(1, 64, channels)
    projected = pca.project(features, basis)
    promised = pca.estimate_project(features, basis)
    assert promised.before_bytes - promised.frees_bytes == projected.nbytes
    assert 1 - projected.nbytes / bytes_of(features) == pytest.approx(1 - keep / channels)
    with pytest.raises(MmctlError, match="fit one"):
        pca.project(torch.randn(1, 4, 7), basis)


def test_scratch_is_one_output_and_one_chunk(peak_bytes) -> None:
    features = torch.randn(1, 576, 1024)
    pca.project(features, pca.shipped("deep"))
    peak, projected = peak_bytes(lambda: pca.project(features, pca.shipped("deep")))
    assert peak <= projected.nbytes + CHUNK_BYTES


def test_files_round_trip_and_hostile_ones_are_refused(tmp_path: Path) -> None:
    basis = pca.fit([low_rank(100, 16, 16)], 4, "test")
    path = tmp_path / "basis.npz"
    pca.save(basis, path)
    again = pca.load(path)
    assert again.origin == "test" and torch.allclose(again.components, basis.components, atol=1e-3)
    whole = path.read_bytes()

    class Bomb:
        def __reduce__(self):
            return (Path.touch, (tmp_path / "executed",))

    np.savez(tmp_path / "pickle.npz", mean=np.array([Bomb()], dtype=object))
    (tmp_path / "cut.npz").write_bytes(whole[:200])
    (tmp_path / "empty.npz").write_bytes(b"")
    np.savez(tmp_path / "wrong.npz", mean=np.ones(3), components=np.ones((2, 4)),
             explained_ratio=1.0, origin="x")  # fmt: skip
    for name in ("pickle", "cut", "empty", "wrong"):
        with pytest.raises(MmctlError, match="no basis"):
            pca.load(tmp_path / f"{name}.npz")
    assert not (tmp_path / "executed").exists()
