"""Fingerprints, reuse and collisions against what can be computed by hand or by brute force."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mmctl.benchmarks import zoo
from mmctl.engine import profiles
from mmctl.engine.access import accesses, cache, compiled, fingerprint, memory_models, reuse, tasks
from mmctl.engine.errors import MmctlError, UsageError
from mmctl.engine.records import Memory

PROFILE = profiles.load("default").profile


def sweep(*blocks: int, size: int = 64, name: str = "t") -> accesses.Accesses:
    address = [block * 64 for block in blocks]
    return accesses.make(name, address, [size] * len(blocks), [False] * len(blocks))


def test_classic_is_the_published_formula() -> None:
    made = accesses.make("t", [0, 4096, 4100, 4104], [4] * 4, [False] * 4)
    mean = int((4096 + 4 + 4) / 3)
    assert fingerprint.classic(made) == (mean & 0xFFFF) << 16 ^ (4 // 2) << 8 ^ (4 & 0xFF)
    assert fingerprint.classic(sweep(5)) == (0 << 16) ^ (1 << 8) ^ 1


def test_gaps_and_footprint_of_a_known_circle() -> None:
    # A B A C, again and again: gaps 2 2 (A), 4 (B), 4 (C)
    made = sweep(10, 11, 10, 12)
    sequence, size = reuse.blocks(made)
    assert size == 64 and sorted(reuse.circular_gaps(sequence).tolist()) == [2, 2, 4, 4]
    found = reuse.signature(made)
    at = dict(zip(reuse.windows().tolist(), found.footprint_bytes, strict=True))
    assert at[64.0] == 64 and at[128.0] == 128  # any two neighbours differ
    assert at[256.0] == 3 * 64
    shares = dict(zip(reuse.windows().tolist(), found.reuse_ratio, strict=True))
    assert (shares[64.0], shares[128.0], shares[256.0]) == (0.0, 0.5, 1.0)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(0, 9), min_size=2, max_size=60))
def test_footprint_is_the_mean_over_all_windows(blocks: list[int]) -> None:
    found = reuse.signature(sweep(*blocks))
    circle = blocks * 2
    for window, footprint in zip(reuse.windows(), found.footprint_bytes, strict=True):
        touches = window / 64
        if touches.is_integer() and touches <= len(blocks):
            sets = [len(set(circle[i : i + int(touches)])) for i in range(len(blocks))]
            assert footprint / 64 == pytest.approx(np.mean(sets))


def test_sweeps_become_every_block_they_touch() -> None:
    made = accesses.make("t", [60, 640], [8, 128], [False, True])
    sequence, _ = reuse.blocks(made)
    assert sequence.tolist() == [0, 1, 10, 11]
    coarse, size = reuse.blocks(accesses.make("t", [0], [1 << 30], [False]), most=1024)
    assert size == 1 << 20 and len(coarse) == 1024


@pytest.mark.parametrize("blocks", [8, 16, 40])
def test_a_loop_misses_always_or_never(blocks: int) -> None:
    loop = reuse.signature(sweep(*range(20)))
    assert reuse.miss_ratio(loop, blocks * 64) == (1.0 if blocks < 20 else 0.0)


def test_two_loops_that_fit_alone_and_not_together() -> None:
    loop = reuse.signature(sweep(*range(20)))
    found = reuse.collision(loop, loop, 30 * 64)
    assert found.alone_miss_ratio == (0.0, 0.0) and found.baseline_ratio == 1.0
    assert found.predicted_extra_misses_ratio == pytest.approx(1.0)
    assert reuse.collision(loop, loop, 41 * 64).predicted_extra_misses_ratio == 0.0


def test_cache_counts_as_a_plain_one_does() -> None:
    rng = np.random.default_rng(0)
    sequence = rng.integers(0, 40, 3000)
    none = np.zeros(len(sequence), np.int64)
    found = int(cache.misses(sequence, none, 1, 8, 0)[0])
    held: list[int] = []
    missed = 0
    for block in sequence.tolist():
        if block in held:
            held.remove(block)
        else:
            missed += 1
        held = [block, *held][:8]
    assert found == missed
    assert int(cache.misses.plain(sequence, none, 1, 8, 0)[0]) == missed


def test_prediction_follows_simulation() -> None:
    rng = np.random.default_rng(1)
    made = [sweep(*rng.integers(0, 1 << k, 4000)) for k in (5, 7, 9, 11)]
    made += [sweep(*range(600)), sweep(*range(90))]
    predicted, simulated = [], []
    for a, b in itertools.combinations(made, 2):
        predicted.append(
            reuse.collision(reuse.signature(a), reuse.signature(b), 256 * 64)
            .predicted_extra_misses_ratio
        )  # fmt: skip
        simulated.append(
            cache.extra_misses(reuse.blocks(a)[0], reuse.blocks(b)[0], 256, ways=256)[0]
        )
    assert np.abs(np.array(predicted) - simulated).max() < 0.03


def kernels() -> list[accesses.Accesses]:
    return [made for scale in (2, 8) for made in zoo.kernels(scale)]


def test_locality_does_not_see_where_memory_begins() -> None:
    for made in kernels():
        moved = accesses.make("m", made.address + (7 << 21), made.size_bytes, made.store)
        assert fingerprint.locality(made) == fingerprint.locality(moved)


def test_locality_is_stable_when_accesses_are_missed() -> None:
    rng = np.random.default_rng(2)
    for made in kernels():
        thinned = made.where(rng.random(len(made)) > 0.05)
        distance = fingerprint.distance(fingerprint.locality(made), fingerprint.locality(thinned))
        assert distance <= 3, made.name


def test_locality_tells_kernels_apart_and_uses_all_bits() -> None:
    codes = [fingerprint.locality(made) for made in zoo.kernels(8)]
    assert len(set(codes)) == len(codes)
    every = [fingerprint.locality(made) for made in kernels()]
    varying = 0
    for code in every:
        varying |= code ^ every[0]
    assert varying.bit_count() > 48


def test_bands_speak_of_patterns_and_ratios_of_collisions() -> None:
    model = memory_models.find("16KiB/4")
    loop, other = (tasks.of(sweep(*range(n), name=str(n)), "locality") for n in (200, 201))
    found = tasks.compare(loop, other, model, PROFILE.fingerprint)
    assert (found.band, found.band_of, found.action) == (
        "high", "pattern similarity", "isolate bandwidth",
    )  # fmt: skip
    assert found.collision and found.advice and found.basis == "modelled"
    bands = [tasks.compare(
        loop, tasks.Task(**{**_fields(other), "fingerprint": f"{loop.code ^ flip:016x}"}), model,
        PROFILE.fingerprint).band for flip in (0b11, 0b111, 0xFF, 0x1FF)]  # fmt: skip
    assert bands == ["high", "medium", "medium", "low"]


def _fields(task: tasks.Task) -> dict[str, object]:
    return {name: getattr(task, name) for name in task.__struct_fields__}


def test_codes_of_two_algorithms_are_not_compared() -> None:
    a, b = tasks.of(sweep(1, 2), "locality"), tasks.of(sweep(1, 2), "classic")
    with pytest.raises(UsageError, match="same --algorithm"):
        tasks.compare(a, b, memory_models.find("h100"), PROFILE.fingerprint)


def test_near_tasks_stand_together() -> None:
    assert tasks.order([[0, 30, 1, 31], [30, 0, 31, 2], [1, 31, 0, 30], [31, 2, 30, 0]]) in (
        [0, 2, 3, 1], [2, 0, 1, 3], [3, 1, 0, 2], [1, 3, 2, 0],
    )  # fmt: skip


@pytest.mark.parametrize("name", ["h1000", "12", "3MiB/0", "1KiB/999"])
def test_unknown_caches_are_usage_errors(name: str) -> None:
    with pytest.raises(UsageError):
        memory_models.find(name)


TRACEG = """-kernel name = k
-kernel id = 1
#traces format = …
#BEGIN_TB
warp = 0
insts = 4
0008 ffffffff 1 R1 MOV 0 0
0010 0000000f 1 R2 LDG.E.64 1 R8 8 1 0x1000 8
0018 00000005 0 STG.E 2 R8 R2 4 0 0x2000 0x3000
0020 00000007 1 R2 LDG.E 1 R8 4 2 0x4000 16 -32
0028 ffffffff 0 STS 2 R0 R25 4 1 0x0 4
#END_TB
"""


def test_accelsim_addresses_in_all_three_encodings(tmp_path: Path) -> None:
    path = tmp_path / "k.traceg"
    path.write_text(TRACEG)
    made = accesses.read(path)
    assert made.address.tolist() == [
        0x1000, 0x1008, 0x1010, 0x1018, 0x2000, 0x3000, 0x4000, 0x4010, 0x3FF0,
    ]  # fmt: skip
    assert made.size_bytes.tolist() == [8] * 4 + [4] * 5
    assert made.store.tolist() == [False] * 4 + [True] * 2 + [False] * 3


def test_nvbit_objects_and_arrays_are_one(tmp_path: Path) -> None:
    import msgspec

    where = [0x7FF000000000, 0x7FF000000004, 0]
    item = {"instr_opcode": "STG.E", "instr_offset": 16, "instr_mem_space": "Global",
            "instr_is_load": False, "instr_is_store": True, "addrs": where}  # fmt: skip
    (tmp_path / "a.json").write_text(json.dumps([item, {**item, "instr_mem_space": "Shared"}]))
    array = [1, 0, [0, 0, 0], 1, "STG.E", 16, 3, [0, False], "Global", False, True, False, where]
    (tmp_path / "a.msgpack").write_bytes(msgspec.msgpack.encode([array]))
    for name in ("a.json", "a.msgpack"):
        made = accesses.read(tmp_path / name)
        assert made.address.tolist() == where[:2] and made.store.all()


def test_kernels_of_one_dump_can_be_told_apart(tmp_path: Path) -> None:
    item = {"instr_opcode": "LDG.E", "instr_offset": 0, "instr_mem_space": "Global",
            "addrs": [1 << 40, (1 << 40) + 4]}  # fmt: skip
    items = [{**item, "grid_launch_id": launch} for launch in (5, 6, 5)]
    (tmp_path / "a.json").write_text(json.dumps(items))
    parts = tasks.by_stream(accesses.read(tmp_path / "a.json"))
    assert [(part.name, len(part)) for part in parts] == [
        ("a.json:kernel 5", 4), ("a.json:kernel 6", 2),
    ]  # fmt: skip


def test_records_and_columns_are_one() -> None:
    made = accesses.make("t", [1 << 40, 2], [4, 8], [True, False], head=[3, -1], layer=[0, -1],
                         token=[9, -1], stream=[0, 1], streams=("a", "b"))  # fmt: skip
    again = accesses.from_records(accesses.records(made), "t")
    for column in ("address", "size_bytes", "store", "cycle", "head", "layer", "token", "stream"):
        assert getattr(again, column).tolist() == getattr(made, column).tolist()


def test_allocations_stand_for_accesses_where_there_are_none() -> None:
    def alloc(at: int, size: int, modality: str, action: str = "alloc") -> Memory:
        return Memory(ts_ns=at, device="gpu0", action=action, address=at << 20, size_bytes=size,
                      modality=modality)  # fmt: skip

    made = accesses.from_records(
        [alloc(1, 512, "vision"), alloc(2, 64, "text"), alloc(1, 512, "vision", "free")], "agent:x"
    )
    assert made.size_bytes.tolist() == [512, 64] and made.store.all()
    assert [part.name for part in tasks.by_stream(made)] == ["agent:x:vision", "agent:x:text"]


@pytest.mark.parametrize("content", [b"x", b"[]", b"{}", b"-kernel name = k\n"])
def test_no_trace_is_an_error(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "x").write_bytes(content)
    with pytest.raises(MmctlError):
        accesses.read(tmp_path / "x")


def test_one_kernel_by_two_tracers(data: Path) -> None:
    nvbit = accesses.read(data / "nvbit" / "matrixmul-32-32-kernel-0-trace.msgpack")
    accelsim = accesses.read(data / "accelsim" / "matrixmul-32-32-kernel-1.traceg")
    other = accesses.read(data / "accelsim" / "vectoradd-100-32-kernel-1.traceg")
    assert len(nvbit) == len(accelsim) == 3072
    codes = [fingerprint.locality(made) for made in (nvbit, accelsim, other)]
    assert fingerprint.distance(codes[0], codes[1]) <= 2
    assert fingerprint.distance(codes[0], codes[2]) > 8


def test_without_numba_the_loop_is_python(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MMCTL_PLAIN", "1")

    seen = []

    def loop(n: int) -> int:
        seen.append(n)
        return n + 1

    assert compiled.compiled(loop)(1) == 2
    assert seen == [1]


def test_a_torch_workload_gives_the_same_addresses_every_time() -> None:
    torch = pytest.importorskip("torch")
    from mmctl.engine.access import tracing

    def run() -> None:
        weight = torch.zeros(256, 256)
        hidden = torch.zeros(4, 256)
        for _ in range(3):
            hidden = torch.relu(hidden @ weight.t())
        torch.nn.functional.embedding(torch.tensor([1, 2]), torch.zeros(1000, 64))

    first, second = tracing.trace(run, "a"), tracing.trace(run, "b")
    assert first.address.tolist() == second.address.tolist()
    products = [i for i, size in enumerate(first.size_bytes) if size == 256 * 256 * 4]
    assert len(products) == 3 + 1  # read by each product, written once by zeros
    assert 1000 * 64 * 4 in first.size_bytes  # zeros writes the table
    loads = first.size_bytes[~first.store]
    assert 2 * 64 * 4 in loads and 1000 * 64 * 4 not in loads  # the lookup reads two rows
