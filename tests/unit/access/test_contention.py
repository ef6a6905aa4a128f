"""BWI against its closed form, and planted contention among noise."""

from __future__ import annotations

import numpy as np
import pytest

from mmctl.engine.access import accesses, contention
from mmctl.engine.errors import MmctlError


def independent(
    heads: int, rate: float, cycles: int, rng: np.random.Generator, layers: int = 1
) -> dict[str, np.ndarray]:
    """Heads that access memory at random, each in memory of its own."""
    cycle, agent = np.nonzero(rng.random((cycles, heads * layers)) < rate)
    return {
        "address": (1 << 40) + agent * (1 << 30) + rng.integers(0, 1 << 20, len(cycle)) * 64,
        "cycle": cycle, "head": agent % heads, "layer": agent // heads,
        "store": rng.random(len(cycle)) < 0.1, "stream": np.zeros(len(cycle), np.int64),
    }  # fmt: skip


def made(*parts: dict[str, np.ndarray]) -> accesses.Accesses:
    columns = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    order = np.argsort(columns["cycle"], kind="stable")
    columns = {name: values[order] for name, values in columns.items()}
    address, store = columns.pop("address"), columns.pop("store")
    return accesses.make("t", address, np.full(len(address), 64), store, streams=("v", "t"),
                         **columns)  # fmt: skip


@pytest.mark.parametrize(("heads", "rate"), [(12, 0.01), (4, 0.05), (8, 0.01)])
def test_bwi_of_independent_heads_is_the_closed_form(heads: int, rate: float) -> None:
    cycles = 800_000
    found = contention.analyse(made(independent(heads, rate, cycles, np.random.default_rng(3))),
                               cycles=cycles)  # fmt: skip

    def closed(p: float) -> tuple[float, float]:
        none, one = (1 - p) ** heads, heads * p * (1 - p) ** (heads - 1)
        return (1 - none - one) / (1 - none), 1 - none - one

    of_active, of_all = closed(rate)
    assert found.bwi_cycles_ratio == pytest.approx(of_active, abs=0.005)
    assert found.bwi_all_cycles_ratio == pytest.approx(of_all, abs=0.005)
    assert found.independent_ratio == pytest.approx(of_active, abs=0.005)
    assert found.excess_ratio < 0.005
    of_active, of_all = closed(1 - (1 - rate) ** 32)
    assert found.bwi_windows_ratio == pytest.approx(of_active, abs=0.005)
    assert found.bwi_all_windows_ratio == pytest.approx(of_all, abs=0.005)
    assert found.independent_windows_ratio == pytest.approx(of_active, abs=0.005)
    assert found.pairs == []


def test_the_published_figures() -> None:
    found = contention.analyse(made(independent(12, 0.01, 400_000, np.random.default_rng(5))))
    assert found.bwi_windows_ratio == pytest.approx(0.901, abs=0.005)
    assert found.bwi_cycles_ratio == pytest.approx(0.054, abs=0.005)


def test_heads_that_always_meet_are_all_excess() -> None:
    cycle = np.arange(0, 32_000, 320)
    part = {"cycle": cycle, "layer": cycle * 0, "store": cycle < 0, "stream": cycle * 0}
    found = contention.analyse(made(
        {**part, "head": cycle * 0, "address": cycle * 64},
        {**part, "head": cycle * 0 + 1, "address": (1 << 40) + cycle * 64},
    ))  # fmt: skip
    assert found.bwi_cycles_ratio == found.bwi_windows_ratio == 1.0
    assert found.excess_ratio > 0.99 and found.excess_windows_ratio > 0.85


def planted(seed: int) -> tuple[accesses.Accesses, str, set[tuple[int, int]]]:
    """Noise, and one pair that meets: in a layer on a shared range, or across layers."""
    rng = np.random.default_rng(seed)
    heads, layers, cycles = int(rng.integers(4, 9)), int(rng.integers(2, 4)), 6400
    noise = independent(heads, float(rng.uniform(0.0005, 0.004)), cycles, rng, layers)
    same = bool(rng.integers(2))
    layer = int(rng.integers(layers - 1))
    a, b = (int(head) for head in rng.choice(heads, 2, replace=False))
    meetings = int(rng.integers(25, 80))
    cycle = np.sort(rng.choice(cycles - 4, meetings, replace=False))
    n = np.zeros(meetings, np.int64)
    shared = (1 << 44) + rng.integers(0, 64, meetings) * 64
    bank = int(rng.integers(contention.BANKS)) * contention.LINE_BYTES
    row = contention.BANKS * contention.LINE_BYTES
    reads = {
        "cycle": cycle,
        "head": n + a,
        "layer": n + layer,
        "store": n > 0,
        "stream": n,
        "address": shared if same else (1 << 44) + bank + row * rng.integers(0, 500, meetings),
    }
    meets = {
        "cycle": cycle + rng.integers(0, 3, meetings),
        "head": n + b,
        "stream": n + 1,
        "layer": n + layer + (not same),
        "store": n == (1 if same else 0),
        "address": shared if same else (1 << 45) + bank + row * rng.integers(0, 500, meetings),
    }
    mode = "same_layer" if same else "cross_layer"
    return made(noise, reads, meets), mode, {(layer, a), (layer + (not same), b)}


def test_planted_contention_is_told_apart_in_a_thousand_cases() -> None:
    for seed in range(1000):
        trace, mode, heads = planted(seed)
        found = contention.analyse(trace)
        assert found.pairs, seed
        # The planted heads carry two streams; the pair is named first, and only by its mode.
        first = found.pairs[0]
        assert {(h.layer, h.head) for h in first.heads} == heads, seed
        assert first.mode == mode, seed
        assert {pair.mode for pair in found.pairs} == {mode}, seed


def test_where_they_meet_is_told() -> None:
    same = next(p for p in (contention.analyse(planted(s)[0]).pairs[0] for s in range(9))
                if p.mode == "same_layer")  # fmt: skip
    assert same.shared_lines > 0 and all(1 << 44 <= r.address < 1 << 45 for r in same.ranges)
    cross = next(p for p in (contention.analyse(planted(s)[0]).pairs[0] for s in range(9))
                 if p.mode == "cross_layer")  # fmt: skip
    assert len(cross.banks) == 1 and cross.writer is not None
    assert cross.writer.layer == max(h.layer for h in cross.heads)


def test_records_without_heads_are_refused() -> None:
    with pytest.raises(MmctlError, match="no head"):
        contention.analyse(accesses.make("t", [64], [4], [False]))
