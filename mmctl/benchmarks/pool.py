"""The default pool against the lifetime-aware one, and the model against published figures.

What runs here is the allocator's exact model; time on the device is modelled, from published
costs of batches and of calls to the driver.

Published for a lifetime-aware pool on such a pair: 1.82 times the throughput and a largest
contiguous free block 63 % larger. The second is reached at the default capacity, the first is
not, at any capacity, and ``bound`` shows why: memory acts on throughput by the size of batches
alone, and the curve of batches is flat. Where fragmentation costs most (500 MiB), the default
pool still serves two images a batch, by a dry run, and a pool without any would serve five:
1.44 times. Tried, and short of it as well: no dry run (batches of a fixed size, work lost to
errors), 20 MiB pages, one reserved range with long-lived blocks at its far end.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from mmctl.engine.memory import core
from mmctl.engine.memory.allocator import Allocator, Block, DeviceEvent, Tag
from mmctl.engine.memory.dryrun import Step, dry_run
from mmctl.engine.memory.lint import lint
from mmctl.engine.memory.settings import MIB, Settings

# pytorch issue 193400: allocated and reserved MiB on a real 16 GiB card after each cycle.
PUBLISHED = {
    0: (66, 220), 20: (106, 2980), 40: (146, 5760), 60: (186, 8520), 80: (226, 11300),
    100: (266, 14060),
}  # fmt: skip

# Lifetime-aware recycling against the default allocator on a ViT and BERT pair.
PUBLISHED_PAIRS_FACTOR = 1.82

# Calls to the driver, during which the device is taken to idle. For a page or handle of an
# expandable segment: means on an A100 at 2 MB, from the output of bench_vmm in the repository
# magnate3/linux-riscv-dev (nccl/gpu/shm/bench_vmm/README.md); for larger handles taken to be the
# same, which favours expandable_segments. cuMemRelease is not in it and is not charged.
CREATE_S = 193.32e-6  # cuMemCreate
MAP_S = (1.45 + 35.99) * 1e-6  # cuMemMap and cuMemSetAccess
UNMAP_S = 25.63e-6  # cuMemUnmap
# cudaMalloc and cudaFree, assumed: the default pool makes so few that it hardly matters.
SEGMENT_CALL_S = 1e-3
# Encoding b images of about 1,024 patches takes 0.657 + 0.343 b times as long as one: eight take
# 3.4 times as long (published). One takes:
ONE_IMAGE_S = 10e-3
BATCHES = (8, 6, 4, 3, 2, 1)
CLASSES = ("short", "medium", "long")
# Where classes of lifetime begin, in allocations; a batch makes about two dozen.
LIFETIMES = (24, 256)
LAYERS = 8
ALIVE = 3  # activations of a batch that are alive at once


def published() -> list[dict[str, Any]]:
    """The twelve published figures beside the model's."""
    model = Allocator(Settings(expandable_segments=True, max_split_bytes=128 * MIB))
    model.malloc(64 * MIB)
    rows = []
    for cycle in range(101):
        a, b = model.malloc(91 * MIB), model.malloc(91 * MIB // 2)
        model.malloc(2 * MIB)
        model.free(a)
        model.free(b)
        if cycle in PUBLISHED:
            held = sum(one.size for one in model.blocks() if one.state != "inactive")
            found = (held // MIB, model.reserved_bytes // MIB)
            allocated, reserved = PUBLISHED[cycle]
            rows.append(
                {
                    "cycle": cycle, "allocated_mib": found[0], "reserved_mib": found[1],
                    "published_allocated_mib": allocated, "published_reserved_mib": reserved,
                    "equal": found == PUBLISHED[cycle],
                }
            )  # fmt: skip
    return rows


def conflict_remarks() -> list[str]:
    """What the lint says of the settings behind the published figures."""
    settings = Settings(expandable_segments=True, max_split_bytes=128 * MIB)
    return [remark.message for remark in lint(settings)]


class Pair(NamedTuple):
    """An image and its text: the shapes that decide about memory, and for how many pairs to
    come the text's state is kept (0: not at all)."""

    patches: int
    tokens: int
    cached_bytes: int
    kept: int


class Request(NamedTuple):
    """An allocation: where in the code, how large, and for how many pairs it is kept (0: it
    dies within its batch)."""

    place: str
    size: int
    kept: int
    tag: Tag


def pairs(count: int, seed: int = 7) -> list[Pair]:
    """The offered load of a ViT and BERT pair: images of every size, and one text in two whose
    state stays cached for long."""
    rng = random.Random(seed)
    return [
        Pair(
            patches=rng.randint(16, 64) ** 2,
            tokens=rng.randint(16, 512),
            cached_bytes=rng.randint(8, 96) * 32 * 1024,
            kept=rng.randint(150, 500) if rng.random() < 0.5 else 0,
        )
        for _ in range(count)
    ]


def allocations(batch: Sequence[Pair]) -> list[Request]:
    """What a batch asks for, at the shapes of ViT-L and BERT-large in half precision."""
    patches = sum(pair.patches for pair in batch)
    tokens = sum(pair.tokens for pair in batch)
    found = []
    for layer in range(LAYERS):
        found.append(Request("vit.qkv", patches * 3072 * 2, 0, Tag("vision", "vit.qkv")))
        found.append(Request("vit.mlp", patches * 4096 * 2, 0, Tag("vision", "vit.mlp")))
        if layer % 2:
            found.append(Request("bert.mlp", tokens * 4096 * 2, 0, Tag("text", "bert.mlp")))
    for pair in batch:
        found.append(
            Request("vit.embedding", pair.patches * 2048, 12, Tag("vision", "vit.embedding"))
        )
        if pair.kept:
            found.append(
                Request("text.state", pair.cached_bytes, pair.kept, Tag("text", "text.state"))
            )
    return found


class Ran(NamedTuple):
    """What the load did to a pool, and how long it took by the model of time above."""

    largest_free_bytes: list[int]  # after each batch: the largest contiguous free block
    device_calls: int
    peak_reserved_bytes: int
    served: int
    refused: int
    seconds: float
    lives: dict[str, list[int]]  # per place: allocations that its blocks outlived


def steps_of(batch: Sequence[Request], lifetime: dict[str, str]) -> list[Step]:
    """A batch as a list for the dry run, the passing activations freed on the way."""
    steps: list[Step] = []
    passing: list[int] = []
    for request in batch:
        frees: tuple[int, ...] = ()
        if not request.kept:
            passing.append(len(steps))
            if len(passing) > ALIVE:
                frees = (passing.pop(0),)
        steps.append(
            Step(request.size, frees, tag=request.tag, lifetime=lifetime.get(request.place, ""))
        )
    return steps


def serve(load: Sequence[Pair], model: Allocator, lifetime: dict[str, str] | None = None) -> Ran:
    """Serve the load in the largest batches that fit, as a dry run tells; a pair that fits not
    even alone is refused."""
    due: dict[int, list[tuple[Block, str, int]]] = {}
    lives: dict[str, list[int]] = {}
    largest: list[int] = []
    places = lifetime or {}
    at = clock = refused = calls = 0
    seconds = 0.0
    while at < len(load):
        for moment in [moment for moment in due if moment <= at]:
            for block, place, born in due.pop(moment):
                model.free(block)
                lives.setdefault(place, []).append(clock - born)
        size = next(
            (b for b in BATCHES if dry_run(model, steps_of(allocations(load[at : at + b]), places)
                                           ).fits), 0,
        )  # fmt: skip
        if size == 0:
            refused += 1
            at += 1
            continue
        batch = load[at : at + size]
        requests = allocations(batch)
        peak = model.peak_reserved_bytes
        blocks: list[Block] = []
        for number, step in enumerate(steps_of(requests, places)):
            for gone in step.frees:
                model.free(blocks[gone])
                lives.setdefault(requests[gone].place, []).append(number - gone)
            clock += 1
            blocks.append(model.malloc(step.size_bytes, tag=step.tag, lifetime=step.lifetime))
        freed = {gone for step in steps_of(requests, places) for gone in step.frees}
        for number, (block, request) in enumerate(zip(blocks, requests, strict=True)):
            if request.kept:
                due.setdefault(at + request.kept, []).append((block, request.place, clock))
            elif number not in freed:
                model.free(block)
        at += len(batch)
        events = model.device_events()
        calls += len(events)
        new = model.peak_reserved_bytes - peak if model.settings.lifetime_pool else None
        seconds += batch_s(len(batch)) + device_s(events, new)
        largest.append(max((row[-1] for row in model.columns.free[core.KEY_SIZE] if row),
                           default=0))  # fmt: skip
    return Ran(
        largest, calls, model.peak_reserved_bytes, len(load) - refused, refused, seconds,
        lives,
    )  # fmt: skip


def batch_s(size: int) -> float:
    """How long the device takes over a batch of so many pairs."""
    return ONE_IMAGE_S * (0.657 + 0.343 * size)


def device_s(events: Sequence[DeviceEvent], created_bytes: int | None) -> float:
    """What these calls to the driver take.

    A pool that keeps its pages and moves them creates only ``created_bytes`` of them; None is a
    pool that creates what it maps and gives back what it unmaps.
    """
    total = (created_bytes or 0) / core.SMALL_SEGMENT * CREATE_S
    for event in events:
        if event.action in ("segment_alloc", "segment_free"):
            total += SEGMENT_CALL_S
            continue
        large = created_bytes is None and event.size % core.LARGE_SEGMENT == 0
        handles = event.size / (core.LARGE_SEGMENT if large else core.SMALL_SEGMENT)
        create = CREATE_S if created_bytes is None else 0.0
        total += handles * (create + MAP_S if event.action == "map" else UNMAP_S)
    return total


def bound(load: Sequence[Pair], capacity_bytes: int) -> tuple[float, int]:
    """Pairs a second, and pairs refused, of a pool without fragmentation and without a call to
    the driver: a batch fits where its bytes do."""
    due: dict[int, int] = {}
    at = refused = 0
    seconds = 0.0
    while at < len(load):
        held = sum(size for moment, size in due.items() if moment > at)
        size = next(
            (b for b in BATCHES if held + _peak(allocations(load[at : at + b])) <= capacity_bytes),
            0,
        )
        if size == 0:
            refused += 1
            at += 1
            continue
        batch = load[at : at + size]
        for request in allocations(batch):
            if request.kept:
                moment = at + request.kept
                due[moment] = due.get(moment, 0) + request.size
        at += len(batch)
        seconds += batch_s(len(batch))
    return ((len(load) - refused) / seconds if seconds else 0.0), refused


def _peak(batch: Sequence[Request]) -> int:
    """The most bytes that a batch holds at once."""
    held = peak = 0
    for step in steps_of(batch, {}):
        held += step.size_bytes - sum(batch[gone].size for gone in step.frees)
        peak = max(peak, held)
    return peak


def _settled(values: Sequence[int]) -> Sequence[int]:
    """All but the first quarter, in which the pool fills."""
    return values[len(values) // 4 :] or [0]


def learn(lives: dict[str, list[int]]) -> dict[str, str]:
    """The class of lifetime of every place, from the median of a run before."""
    return {
        place: CLASSES[sum(statistics.median(spans) >= limit for limit in LIFETIMES)]
        for place, spans in lives.items()
    }


def compare_pools(count: int, capacity_bytes: int, seed: int = 7) -> list[dict[str, Any]]:
    """The pools on the same load in the same memory; a run before teaches lifetimes."""
    load = pairs(count, seed)
    taught = learn(serve(pairs(count // 2 + 600, seed + 1), Allocator()).lives)
    rows: list[dict[str, Any]] = []
    for name, settings in (
        ("default", Settings()),
        ("expandable_segments", Settings(expandable_segments=True)),
        ("lifetime_pool", Settings(lifetime_pool=True)),
    ):
        model = Allocator(settings, capacity_bytes)
        start = time.process_time()
        ran = serve(load, model, taught if settings.lifetime_pool else None)
        rows.append(
            {
                "pool": name,
                "largest_free_bytes": int(statistics.mean(_settled(ran.largest_free_bytes))),
                "device_calls": ran.device_calls,
                "peak_reserved_bytes": ran.peak_reserved_bytes,
                "served": ran.served,
                "refused": ran.refused,
                "pairs_per_s": ran.served / ran.seconds,
                "host_s": time.process_time() - start,
                "basis": "modelled",
            }
        )
    base = rows[0]
    for row in rows:
        for name in ("largest_free_bytes", "pairs_per_s"):
            factor = float(row[name]) / float(base[name] or 1)
            row[f"{name.removesuffix('_bytes').removesuffix('_per_s')}_factor"] = factor
    return rows


def compare_bound(count: int, capacity_bytes: int, default: dict[str, Any]) -> dict[str, Any]:
    """The most that any pool could gain over ``default``, the row of that pool."""
    pairs_per_s, refused = bound(pairs(count), capacity_bytes)
    return {
        "pairs_per_s": pairs_per_s,
        "pairs_factor": pairs_per_s / float(default["pairs_per_s"]),
        "refused": refused,
        "published_pairs_factor": PUBLISHED_PAIRS_FACTOR,
        "basis": "modelled",
    }


def compare_snapshots(files: Sequence[Path]) -> list[dict[str, Any]]:
    """Recorded traces under the settings in force and with the lifetime pool."""
    import numpy as np

    from mmctl.engine.memory import program, snapshot, whatif

    rows = []
    for file in files:
        found = snapshot.read(file)
        for device in found.devices():
            if program.reason_without(found, device) is not None:
                continue
            ready = program.prepare(found, device)
            requests = whatif.Requests(ready, np.zeros(ready.units, np.int64))
            for settings in (Settings(), Settings(lifetime_pool=True)):
                one = whatif.what_if(requests, settings, settings_in_all=2)
                rows.append(
                    {
                        "file": file.name, "device": device, "setting": one.setting,
                        "peak_reserved_bytes": one.peak_reserved_bytes,
                        "largest_free_at_peak_bytes": one.largest_free_at_peak_bytes,
                        "device_allocs": one.device_allocs, "basis": "modelled",
                    }
                )  # fmt: skip
    return rows
