"""The cheapest way in, decided by dry runs on the real allocator model."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from mmctl.engine import profiles
from mmctl.engine.memory.allocator import Allocator, Settings
from mmctl.engine.memory.dryrun import Step, dry_run
from mmctl.engine.records import Fits
from mmctl.engine.responses.choice import Choice, Piece, choose, evidence

MIB = 2**20
SETTINGS = profiles.load("default").profile.responses
PLENTY = 64 * 2**30


class Pool:
    """A pool with blocks by name; pieces free the block of their target."""

    def __init__(self, capacity: int, blocks: dict[str, int]) -> None:
        self.allocator = Allocator(settings=Settings(), capacity_bytes=capacity)
        self.address = {name: self.allocator.malloc(size).address for name, size in blocks.items()}
        self.item_bytes = 24 * MIB

    def dry_run(self, pieces: Sequence[Piece], batch: int) -> Fits:
        copy = self.allocator.copy()
        for piece in pieces:
            copy.free(self.address[piece.target])
        return dry_run(copy, [Step(self.item_bytes)] * batch)


def piece(target: str, mib: int, response: str = "offload_kv", **more) -> Piece:
    values = {"cost_s": mib / 1000, "frees_bytes": mib * MIB, **more}
    return Piece(response=response, target=target, **values)


def choice(pool: Pool, pieces: list[Piece], wanted: int, host: int = PLENTY) -> Choice:
    return choose(pieces, pool.dry_run, wanted, SETTINGS, host)


def test_nothing_is_done_where_the_batch_fits() -> None:
    found = choice(Pool(256 * MIB, {"a": 20 * MIB}), [piece("a", 20)], 4)
    assert found.batch == 4 and found.chosen is None and found.dry_runs == 1


def test_the_batch_is_capped_first_and_the_alternatives_are_shown() -> None:
    pool = Pool(128 * MIB, {"a": 40 * MIB, "b": 24 * MIB})
    found = choice(pool, [piece("a", 40), piece("b", 24)], 4)
    assert found.batch == 2 and found.chosen is None and not found.before.fits
    assert [way.name for way in found.alternatives] == ["offload_kv"]
    assert found.alternatives[0].fits.fits


def test_freed_bytes_mislead_and_only_what_is_needed_is_done() -> None:
    # Twelve pieces of 4 MiB share segments with neighbours that stay; one of 24 has its own.
    blocks = {f"small{i}": 4 * MIB for i in range(12)} | {"whole": 24 * MIB}
    pool = Pool(84 * MIB, blocks)
    many = [piece(f"small{i}", 4, cost_s=0.001) for i in range(0, 12, 2)]
    found = choice(pool, [*many, piece("whole", 24, "recompute_kv", cost_s=0.05)], 1)
    assert found.chosen and found.chosen.name == "recompute_kv"
    (only,) = found.chosen.pieces
    assert only.target == "whole"
    offload = next(way for way in found.alternatives if way.name == "offload_kv")
    assert offload.frees_bytes == 24 * MIB and not offload.fits.fits


def test_the_cheapest_of_two_ways_that_fit() -> None:
    pool = Pool(72 * MIB, {"a": 24 * MIB, "b": 24 * MIB, "c": 24 * MIB})
    found = choice(pool, [piece("a", 24, cost_s=0.5), piece("b", 24, "distill", cost_s=0.01)], 1)
    assert found.chosen and found.chosen.name == "distill"
    assert found.chosen.cost_s < min(
        way.cost_s for way in found.alternatives if way.name == "offload_kv"
    )


def test_quality_floor_and_host_memory_refuse() -> None:
    pool = Pool(48 * MIB, {"a": 24 * MIB, "b": 24 * MIB})
    poor = piece("a", 24, "distill", cosine=0.5)
    heavy = piece("b", 24, host_bytes=24 * MIB)
    found = choice(pool, [poor, heavy], 1, host=SETTINGS.host_reserve_bytes + MIB)
    assert found.batch == 0 and found.chosen is None
    assert "quality floor" in found.refused["distill a"]
    assert "no memory to spare" in found.refused["offload_kv b"]
    assert choice(pool, [poor, heavy], 1).batch == 1


def test_a_target_is_taken_once_and_the_event_holds_all() -> None:
    pool = Pool(48 * MIB, {"a": 24 * MIB, "b": 24 * MIB})
    found = choice(pool, [piece("a", 24), piece("a", 12, "quantize_vision", cost_s=0.001)], 1)
    for way in (found.chosen, *found.alternatives):
        assert way and len({p.target for p in way.pieces}) == len(way.pieces)
    assert evidence(found) == msgspec.to_builtins(found)
    assert evidence(found)["before"]["cause"]
