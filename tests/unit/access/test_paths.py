"""Access paths of tokens, against plain Python on the same records."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from mmctl.engine.access import paths, ptx
from mmctl.engine.errors import MmctlError

REGIONS = [
    paths.Region(address=0x1000, size_bytes=0x100, name="weights"),
    paths.Region(address=0x4000, size_bytes=0x80, name="cache", modality="text"),
]


def ring(path: Path, rows: list[tuple[int, int, int, int]]) -> Path:
    np.array(rows, paths.RECORD).tofile(path)
    return path


def kind(store: bool, size: int, space: str = "global") -> int:
    return int(store) | ptx.SPACES.index(space) << 2 | size << 8


def test_steps_regions_and_totals(tmp_path: Path) -> None:
    rows = [
        (7, 0, kind(False, 4), 0x1000), (8, 0, kind(False, 4), 0x9000),
        (7, 0, kind(False, 4), 0x1004), (7, 1, kind(True, 16), 0x4000),
        (7, 2, kind(False, 8, "shared"), 0x1000), (8, 1, kind(True, 4), 0x407F),
    ]  # fmt: skip
    columns, lost = paths.read_ring(ring(tmp_path / "r", rows))
    (seven, eight), totals = paths.rebuild(columns, REGIONS)
    assert lost == 0 and totals == {"records": 6, "tokens": 2, "stores": 2, "size_bytes": 40}
    assert (seven.token_id, seven.loads, seven.stores, seven.size_bytes) == (7, 3, 1, 32)
    assert seven.regions == ["weights", "cache", "shared"]
    assert [(s.pc, s.kind, s.region, s.accesses, s.size_bytes) for s in seven.steps] == [
        (0, "load", "weights", 2, 8), (1, "store", "cache", 1, 16), (2, "load", "shared", 1, 8),
    ]  # fmt: skip
    assert [s.region for s in eight.steps] == [None, "cache"]
    assert paths.rebuild(columns, REGIONS, tokens=[8])[0] == [eight]


@pytest.mark.parametrize("span", [100, 1 << 40])
def test_grouping_keeps_the_order_within_a_token(span: int) -> None:
    rng = np.random.default_rng(0)
    token = rng.integers(0, span, 300)[rng.integers(0, 300, 5000)]
    order, first, present = paths.group(token)
    expected: dict[int, list[int]] = {}
    for position, value in enumerate(token.tolist()):
        expected.setdefault(value, []).append(position)
    last = np.append(first[1:], len(order))
    found = {int(t): order[a:b].tolist() for t, a, b in zip(present, first, last, strict=True)}
    assert found == expected


def test_a_ring_that_went_round_begins_with_the_oldest(tmp_path: Path) -> None:
    path = ring(tmp_path / "r", [(0, pc, kind(False, 4), 0) for pc in (5, 6, 3, 4)])
    columns, lost = paths.read_ring(path, count=6)
    assert columns.pc.tolist() == [3, 4, 5, 6] and lost == 2
    columns, lost = paths.read_ring(path, count=2)
    assert columns.pc.tolist() == [5, 6] and lost == 0


def test_long_paths_say_what_is_left_out(tmp_path: Path) -> None:
    rows = [(1, pc, kind(False, 4), 0x1000) for pc in range(30)]
    columns, _ = paths.read_ring(ring(tmp_path / "r", rows))
    (token,), _ = paths.rebuild(columns, most_steps=10)
    assert len(token.steps) == 10 and token.steps_left_out == 20


@pytest.mark.parametrize("content", [b"", b"x" * 25])
def test_other_files_are_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "r").write_bytes(content)
    with pytest.raises(MmctlError, match="no ring"):
        paths.read_ring(tmp_path / "r")
