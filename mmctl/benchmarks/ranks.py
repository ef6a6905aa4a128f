"""All-to-all between processes on this machine, timed block by block.

The backend is NCCL or HCCL where two devices of the kind are here, else gloo over the loopback
interface: that one measures the processor's own copying and wake-ups, not a link.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from mmctl.benchmarks import processes
from mmctl.engine.errors import MmctlError

BLOCKS = 8
WARM_UP_RUNS = 8
_LEAST_RUNS = 4
_DEADLINE_S = 240


class Backend(NamedTuple):
    """How ranks talk here: torch's backend, the device each uses, and what joins them."""

    name: str
    device: str
    link_class: str
    most_ranks: int


class Series(NamedTuple):
    """Times of one size: the runs of each block in seconds, warm-up dropped."""

    size_bytes: int
    blocks: list[list[float]]


def backend(wanted: str | None = None) -> tuple[Backend, dict[str, str]]:
    """The backend to use, and why each other one is not.

    Raises MmctlError when the ``wanted`` one is not to be had.
    """
    import torch
    import torch.distributed as distributed

    absent: dict[str, str] = {}
    found: dict[str, Backend] = {}
    cuda = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if cuda < 2:
        absent["nccl"] = "no GPU" if not cuda else "one GPU only"
    elif not distributed.is_nccl_available():
        absent["nccl"] = "this torch was built without NCCL"
    else:
        found["nccl"] = Backend("nccl", "cuda", "unknown", cuda)
    npu = getattr(torch, "npu", None)
    npus = npu.device_count() if npu is not None and npu.is_available() else 0
    if npus < 2:
        absent["hccl"] = "no NPU (torch_npu is not loaded)" if not npus else "one NPU only"
    else:
        found["hccl"] = Backend("hccl", "npu", "HCCS", npus)
    if distributed.is_gloo_available():
        found["gloo"] = Backend("gloo", "cpu", "loopback", 64)
    else:
        absent["gloo"] = "this torch was built without gloo"
    if wanted is not None and wanted not in found:
        raise MmctlError(
            f"no backend '{wanted}' here: {absent.get(wanted, 'it is not known')}; there is "
            f"{', '.join(found) or 'none'}"
        )
    if not found:
        raise MmctlError("torch has no backend between processes here")
    return found[wanted] if wanted else next(iter(found.values())), absent


def measure(
    chosen: Backend, world: int, sizes: Sequence[int], runs: int, seconds: float,
    progress: Callable[[float], None] = lambda share: None,
) -> list[Series]:  # fmt: skip
    """All-to-all of each size among ``world`` ranks: ``runs`` in ``BLOCKS`` blocks that take
    turns, fewer where ``seconds`` would not do.

    Raises MmctlError when a rank fails or nothing ends in time.
    """
    with tempfile.TemporaryDirectory(prefix="mmctl-ranks-") as folder:
        series = processes.run(
            _rank, world,
            (chosen, world, str(Path(folder, "store")), list(sizes), runs, seconds),
            lambda name, share: progress(share), deadline_s=_DEADLINE_S,
        )  # fmt: skip
    return [Series(size, blocks) for size, blocks in series[0].items()]


def _rank(
    rank: int, tell: Callable[[str, float], None], chosen: Backend, world: int, store: str,
    sizes: list[int], runs: int, seconds: float,
) -> dict[int, list[list[float]]]:  # fmt: skip
    """What each process does; its blocks of times by size."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    import torch
    import torch.distributed as distributed

    torch.set_num_threads(1)
    device = torch.device("cpu" if chosen.device == "cpu" else f"{chosen.device}:{rank}")
    if chosen.device == "cuda":
        torch.cuda.set_device(device)
    distributed.init_process_group(
        chosen.name, init_method=f"file://{store}", rank=rank, world_size=world
    )
    buffers = {size: torch.zeros(max(size // world, 1) * world, dtype=torch.uint8, device=device)
               for size in sizes}  # fmt: skip
    results = {size: torch.empty_like(buffer) for size, buffer in buffers.items()}

    def block(size: int, count: int) -> list[float]:
        times = []
        for number in range(count + WARM_UP_RUNS):
            begun = time.perf_counter()
            distributed.all_to_all_single(results[size], buffers[size])
            if device.type != "cpu":
                getattr(torch, device.type).synchronize()
            if number >= WARM_UP_RUNS:
                times.append(time.perf_counter() - begun)
        return times

    plan = _planned({size: block(size, _LEAST_RUNS) for size in sizes}, runs, seconds)
    counts = torch.tensor([plan[size] for size in sizes], device=device)
    distributed.broadcast(counts, 0)
    found: dict[int, list[list[float]]] = {size: [] for size in sizes}
    for number in range(BLOCKS):
        for place, (size, count) in enumerate(zip(sizes, counts.tolist(), strict=True), 1):
            distributed.barrier()
            found[size].append(block(size, count))
            tell("links", (number + place / len(sizes)) / BLOCKS)
    distributed.destroy_process_group()
    return found


def _planned(tried: dict[int, list[float]], runs: int, seconds: float) -> dict[int, int]:
    """Runs a block of each size: all that are asked for, or what its share of the time holds.

    A size gets the time that the quicker ones leave over.
    """
    each = -(-runs // BLOCKS)
    left = seconds
    plan = {}
    costs = {size: sorted(times)[len(times) // 2] for size, times in tried.items()}
    for place, size in enumerate(sorted(costs, key=lambda s: costs[s])):
        share = left / (len(costs) - place)
        count = max(_LEAST_RUNS, min(each, int(share / BLOCKS / costs[size]) - WARM_UP_RUNS))
        plan[size] = count
        left -= BLOCKS * (count + WARM_UP_RUNS) * costs[size]
    return plan
