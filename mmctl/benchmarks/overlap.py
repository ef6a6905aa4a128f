"""How much of an all-gather hides behind the vision encoder.

Each rank encodes its share of every micro-batch of images, gathers the vision tokens of all in
the group of its modality, and fuses them with text by cross attention. Blocking, it waits for
each gather where it starts it. Overlapped, the gather of a micro-batch runs while the next one
is encoded, and its handle is waited on where the tokens are fused.

With B, O and C the times of the blocking run, the overlapped one and one without a gather,
communication costs B - C and what is hidden of it is (B - O) / (B - C). What gloo's own copying
takes from the encoder counts against it, as it should.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import msgspec

from mmctl.benchmarks import pacing, processes
from mmctl.benchmarks.intervals import estimate, figure
from mmctl.engine.records import Basis

SIDE = 336
"""Height and width of an image in pixels: 576 vision tokens."""
QUICK_SIDE = 224
PROMPT = "What is in these images?"
LINK_RATIO = 0.7
"""The slow link is set so that a gather takes this share of encoding a micro-batch."""
NOISE_RATIO = 0.03
"""Communication that costs less than this share of the computing is not told from noise."""
LINK_CPU_RATIO = 0.5
"""A paced gather whose ranks keep the cores busy for less than this share of it waits for the
link. Over loopback there is no link: the processor copies, at whatever pace it is given."""
ROUNDS, QUICK_ROUNDS = 12, 4
LEAST_ROUNDS = 3
BUDGET_S, QUICK_BUDGET_S = 130.0, 16.0
"""For all worlds and transports together: on a slow machine, rounds are left out."""
VARIANTS = ("compute", "gather", "blocking", "overlapped")


class Overlap(msgspec.Struct, frozen=True, kw_only=True):
    """One number of ranks over one transport; times are of a round of ``micro_batches``.

    ``gather_ms`` is of one gather with nothing beside it, ``bandwidth_bytes_per_s`` what each
    rank received then. ``gather_cpu_ratio`` is the share of the cores that the gathers kept
    busy, which says what ``bottleneck`` is. ``waited_ms`` is the waiting on handles in the
    overlapped run and ``unwaited_ratio`` the share of the blocking run's that is gone: steadier
    than ``hidden_ratio`` on a busy machine, and blind to what copying takes from the encoder.
    Intervals are of 95 %.
    """

    ranks: int
    transport: str
    bottleneck: str
    rounds: int
    micro_batches: int
    payload_bytes: int
    bandwidth_bytes_per_s: float
    gather_ms: float
    gather_cpu_ratio: float
    compute_ms: float
    blocking_ms: float
    overlapped_ms: float
    waited_ms: float
    unwaited_ratio: float
    saved_ratio: float
    saved_ci: tuple[float, float]
    hidden_ratio: float | None
    hidden_ci: tuple[float, float] | None
    largest_hidden_ratio: float
    equal: bool
    blocking_ms_blocks: tuple[float, ...]
    overlapped_ms_blocks: tuple[float, ...]
    basis: Basis = "measured"
    absent: dict[str, str] = {}


class Spell(NamedTuple):
    """One variant of one round: the slowest rank's time, all ranks' processor time, and how
    long the slowest rank waited on handles."""

    wall_s: float
    cpu_s: float
    waited_s: float


def measure(
    worlds: Sequence[int], quick: bool, link_bytes_per_s: float | None = None,
    tell: Callable[[str, float], None] = lambda name, share: None,
) -> tuple[list[Overlap], dict[str, str]]:  # fmt: skip
    """Every number of ranks, over loopback and over a slow link; and what is absent, and why.

    ``link_bytes_per_s`` is what a rank may send to each other one over the slow link; by
    default it follows from how long encoding takes.
    """
    absent = {}
    reason = pacing.reason_without()
    if reason is not None:
        absent["throttled"] = reason
    rows = []
    transports = 1 if reason is not None else 2
    budget_s = (QUICK_BUDGET_S if quick else BUDGET_S) / len(worlds) / transports
    for number, world in enumerate(worlds):
        rows += _world(
            world, quick, reason is None, link_bytes_per_s, budget_s,
            lambda name, share, at=number: tell(name, (at + share) / len(worlds)),  # type: ignore[misc]
        )  # fmt: skip
    return rows, absent


def _world(
    world: int, quick: bool, throttle: bool, link_bytes_per_s: float | None, budget_s: float,
    tell: Callable[[str, float], None],
) -> list[Overlap]:  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="mmctl-overlap-") as folder:
        results = processes.run(
            _rank, world,
            (world, str(Path(folder, "store")), quick, throttle, link_bytes_per_s, budget_s), tell,
        )  # fmt: skip
    return [_row(world, *one) for one in results[0]]


def _row(
    world: int, transport: str, payload_bytes: int, micro_batches: int, cores: int,
    equal: bool, rounds: dict[str, list[Spell]],
) -> Overlap:  # fmt: skip
    def times(name: str) -> list[float]:
        return [spell.wall_s for spell in rounds[name]]

    def middle(name: str) -> float:
        return median(times(name))

    # Quotients of two times, whose intervals are those of times: what is saved, and what is left.
    left = estimate(
        [b / a for a, b in zip(times("blocking"), times("overlapped"), strict=True)]
    )  # fmt: skip
    cost_ratio = 1 - middle("compute") / middle("blocking")
    hidden, interval, absent = None, None, {}
    if cost_ratio < NOISE_RATIO:
        absent["hidden_ratio"] = absent["hidden_ci"] = (
            "the gathers cost too little beside the encoder to be told from noise"
        )
    else:
        hidden = _clamp((1 - left.value) / cost_ratio)
        interval = (
            _clamp((1 - left.high) / cost_ratio), _clamp((1 - left.low) / cost_ratio)
        )  # fmt: skip
    gather_s = middle("gather") / micro_batches
    busy = median(spell.cpu_s / spell.wall_s / cores for spell in rounds["gather"])
    waited, blocked = (
        median(spell.waited_s for spell in rounds[name]) for name in ("overlapped", "blocking")
    )
    return Overlap(
        ranks=world, transport=transport,
        bottleneck="link" if transport == "throttled" and busy < LINK_CPU_RATIO else "cpu",
        rounds=len(times("gather")), micro_batches=micro_batches, payload_bytes=payload_bytes,
        bandwidth_bytes_per_s=(world - 1) * payload_bytes / gather_s, gather_ms=1e3 * gather_s,
        gather_cpu_ratio=_clamp(busy), compute_ms=1e3 * middle("compute"),
        blocking_ms=1e3 * middle("blocking"), overlapped_ms=1e3 * middle("overlapped"),
        waited_ms=1e3 * waited, unwaited_ratio=_clamp(1 - waited / blocked) if blocked else 0.0,
        saved_ratio=1 - left.value, saved_ci=(1 - left.high, 1 - left.low),
        hidden_ratio=hidden, hidden_ci=interval,
        largest_hidden_ratio=(micro_batches - 1) / micro_batches, equal=equal,
        blocking_ms_blocks=tuple(1e3 * seconds for seconds in times("blocking")),
        overlapped_ms_blocks=tuple(1e3 * seconds for seconds in times("overlapped")),
        absent=absent,
    )  # fmt: skip


def figures(rows: Sequence[Overlap]) -> list[dict[str, Any]]:
    """Each row as ``benchmark compare`` reads it."""
    return [
        figure(f"{row.ranks} ranks/{row.transport}/{name}", blocks)
        for row in rows
        for name, blocks in (
            ("blocking_ms", row.blocking_ms_blocks), ("overlapped_ms", row.overlapped_ms_blocks)
        )
    ]  # fmt: skip


def _clamp(value: float) -> float:
    return min(max(value, 0.0), 1.0)


def _rank(
    rank: int, tell: Callable[[str, float], None], world: int, store: str, quick: bool,
    throttle: bool, link_bytes_per_s: float | None, budget_s: float,
) -> list[tuple[Any, ...]]:  # fmt: skip
    """What a process does: all transports, all variants in turn, several rounds."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo" if os.path.isdir("/sys/class/net/lo") else "")
    cores = min(world, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else world)
    processes.pin(rank)
    import torch
    import torch.distributed as distributed

    torch.set_num_threads(1)
    distributed.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=world
    )
    before = pacing.sockets() if throttle else set()
    # The vision ranks' own group: a collective of another modality is never waited for here.
    group = distributed.new_group(list(range(world)))
    work = _Work(rank, world, group, quick)
    for name in VARIANTS:
        work.run(name)
    opened = (pacing.sockets() - before) if throttle else set()
    rounds = QUICK_ROUNDS if quick else ROUNDS
    found = []
    transports = ("loopback", "throttled") if throttle else ("loopback",)
    for place, transport in enumerate(transports):
        if transport == "throttled":
            pacing.pace(opened, link_bytes_per_s or work.fitting_rate(opened))
        rows: dict[str, list[Spell]] = {name: [] for name in VARIANTS}
        work.run("gather")
        began = time.monotonic()
        for number in range(rounds):
            if number >= LEAST_ROUNDS and work.agreed(time.monotonic() - began > budget_s):
                break
            share = (place + number / rounds) / len(transports)
            tell(f"{world} ranks, {transport}", share)
            for name in VARIANTS:
                rows[name].append(work.timed(name))
        equal = work.same(work.run("blocking"), work.run("overlapped"))
        found.append((transport, work.payload_bytes, work.micro_batches, cores, equal, rows))
    distributed.barrier()
    distributed.destroy_process_group()
    return found


class _Work:
    """A rank's images, its model, and the variants of a round over them."""

    def __init__(self, rank: int, world: int, group: Any, quick: bool) -> None:
        import torch
        from torch import Tensor

        from mmctl.engine.model import build, tokenize

        self.group, self.world = group, world
        side = QUICK_SIDE if quick else SIDE
        self.micro_batches = 4 if quick else 6
        self.model = build()
        draw = torch.Generator().manual_seed(rank)
        self.images = [torch.rand(1, 3, side, side, generator=draw)
                       for _ in range(self.micro_batches)]  # fmt: skip
        self.prompt = torch.tensor(tokenize(PROMPT))
        with torch.inference_mode():
            self.tokens = self.model.encode(self.images[0])[0].clone()
        # Two sets of places for what arrives: one is read while the other is filled.
        self.arrived: list[list[Tensor]] = [
            [torch.zeros_like(self.tokens) for _ in range(world)] for _ in range(2)
        ]
        self.payload_bytes = self.tokens.numel() * self.tokens.element_size()
        self.waited_s = 0.0

    def encode(self, number: int) -> Any:
        """The vision tokens of this rank's share of a micro-batch, ``[tokens, dim]``."""
        return self.model.encode(self.images[number])[0].contiguous()

    def fuse(self, parts: Sequence[Any]) -> Any:
        """Logits of a prompt that attends to the tokens of all ranks."""
        import torch

        from mmctl.engine.model import KvCache, in_float32

        kept = self.model.cross_cache(torch.cat(list(parts)))
        return self.model.decode(self.prompt, KvCache(self.model.config, "cpu"), in_float32(kept))

    def gather(self, tokens: Any, number: int) -> Any:
        """Start to gather into the places of a micro-batch; the handle."""
        import torch.distributed as distributed

        return distributed.all_gather(
            self.arrived[number % 2], tokens, group=self.group, async_op=True
        )

    def wait(self, handle: Any) -> None:
        """Wait on a handle, and count for how long."""
        began = time.perf_counter()
        handle.wait()
        self.waited_s += time.perf_counter() - began

    def run(self, name: str) -> list[Any]:
        """One round of a variant; the logits of every micro-batch, none of a mere gather."""
        import torch

        fused = []
        with torch.inference_mode():
            if name == "overlapped":
                return self._overlapped()
            for number in range(self.micro_batches):
                tokens = self.tokens if name == "gather" else self.encode(number)
                if name != "compute":
                    self.wait(self.gather(tokens, number))
                if name != "gather":
                    fused.append(self.fuse(self.arrived[number % 2]))
        return fused

    def _overlapped(self) -> list[Any]:
        fused = []
        before = self.gather(self.encode(0), 0)
        for number in range(1, self.micro_batches):
            tokens = self.encode(number)
            handle = self.gather(tokens, number)
            self.wait(before)
            fused.append(self.fuse(self.arrived[(number - 1) % 2]))
            before = handle
        self.wait(before)
        fused.append(self.fuse(self.arrived[(self.micro_batches - 1) % 2]))
        return fused

    def timed(self, name: str) -> Spell:
        """One round, begun by all at once."""
        import torch
        import torch.distributed as distributed

        distributed.barrier()
        self.waited_s = 0.0
        cpu, began = time.process_time(), time.perf_counter()
        self.run(name)
        wall = time.perf_counter() - began
        cpu = time.process_time() - cpu
        slowest = torch.tensor([wall, self.waited_s], dtype=torch.float64)
        distributed.all_reduce(slowest, distributed.ReduceOp.MAX)
        total = torch.tensor([cpu], dtype=torch.float64)
        distributed.all_reduce(total)
        return Spell(float(slowest[0]), float(total[0]), float(slowest[1]))

    def agreed(self, word: bool) -> bool:
        """What rank 0 says."""
        import torch
        import torch.distributed as distributed

        said = torch.tensor([word])
        distributed.broadcast(said, 0)
        return bool(said)

    def fitting_rate(self, opened: set[int]) -> float:
        """The pace at which a gather takes ``LINK_RATIO`` of encoding: measured, for TCP reaches
        less than it is allowed in short bursts."""
        import torch
        import torch.distributed as distributed

        wanted_s = LINK_RATIO * self.timed("compute").wall_s / self.micro_batches
        rate = (self.world - 1) * self.payload_bytes / wanted_s
        for _ in range(2):
            pacing.pace(opened, rate)
            self.run("gather")
            took_s = self.timed("gather").wall_s / self.micro_batches
            shared = torch.tensor([rate * min(max(took_s / wanted_s, 0.25), 4.0)])
            distributed.broadcast(shared, 0)
            rate = float(shared)
        return rate

    @staticmethod
    def same(first: Sequence[Any], second: Sequence[Any]) -> bool:
        """Whether two rounds gave the same logits, to the bit."""
        import torch

        return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
