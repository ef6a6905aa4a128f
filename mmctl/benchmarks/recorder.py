"""A stand-in for torch's recorder: runs the allocator model and dumps what torch would dump.

For benchmarks and tests, where no GPU is at hand; what it dumps is modelled.
``python -m mmctl.benchmarks.recorder oom.pickle`` writes a snapshot to practise on: a node of
8 GiB that serves images beside long texts until it runs out of memory."""

from __future__ import annotations

import pickle
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from mmctl.engine.errors import quiet_interrupt
from mmctl.engine.memory import core
from mmctl.engine.memory.allocator import Allocator, Block, OutOfMemory
from mmctl.engine.memory.settings import Settings, show

MIB = 1 << 20
ACTIONS = {"map": "segment_map", "unmap": "segment_unmap"}
FRAMES = {
    "vision": [
        {"name": "forward", "filename": "/srv/app/models/vision_tower.py", "line": 40},
        {"name": "encode", "filename": "/srv/app/serve.py", "line": 7},
    ],
    "text": [
        {"name": "allocate", "filename": "C:\\srv\\app\\kv_cache.py", "line": 12},
        {"name": "decode", "filename": "/srv/app/serve.py", "line": 9},
    ],
    "other": [{"name": "??", "filename": "??", "line": 0}],
}


class Recorder:
    """One device; every call is written down as torch's history is."""

    def __init__(self, settings: Settings | None = None, capacity: int | None = None) -> None:
        self.settings = settings or Settings()
        self.model = Allocator(self.settings, capacity)
        self.entries: list[dict[str, Any]] = []
        self.pending: list[Block] = []
        self.kinds: dict[int, str] = {}
        self.owners: dict[int, tuple[int, tuple[int, int]]] = {}
        self.clock = 1_700_000_000_000_000

    def malloc(
        self, size: int, stream: int = 0, pool: tuple[int, int] = (0, 0), kind: str = "other"
    ) -> Block:
        """Take ``size`` bytes, and write down what the allocator did; raises its OutOfMemory."""
        try:
            block = self.model.malloc(size, stream, pool)
        except OutOfMemory as error:
            self._device(stream, pool)
            free = self.model.device_free_bytes or 0
            self._entry("oom", free, error.figures.need_bytes, stream, pool, kind)
            raise
        self._device(stream, pool)
        self._entry("alloc", block.address, size, stream, pool, kind)
        self.kinds[block.address] = kind
        return block

    def free(self, block: Block, pending: bool = False) -> None:
        """Give ``block`` back; ``pending`` (in use by another stream) waits for ``complete``."""
        kind = self.kinds[block.address]
        self._entry(
            "free_requested", block.address, block.requested_size, block.stream, block.pool, kind
        )
        self.model.free(block, pending=True)
        if pending:
            self.pending.append(block)
        else:
            self._complete(block)

    def complete(self) -> None:
        """The events of other streams have passed."""
        for block in self.pending:
            self._complete(block)
        self.pending = []

    def _complete(self, block: Block) -> None:
        kind = self.kinds[block.address]
        self._entry(
            "free_completed", block.address, block.requested_size, block.stream, block.pool, kind
        )
        self.model.free(block)

    def empty_cache(self) -> None:
        """Give unused segments back to the device, and write them down."""
        self.model.release_cached()
        self._device(0, (0, 0))

    def _device(self, stream: int, pool: tuple[int, int]) -> None:
        for event in self.model.device_events():
            action = ACTIONS.get(event.action, event.action)
            owner = self._owner(event.address, stream, pool)
            self._entry(action, event.address, event.size, *owner, "other")

    def _owner(
        self, address: int, stream: int, pool: tuple[int, int]
    ) -> tuple[int, tuple[int, int]]:
        """A device event concerns the segment's own stream, whoever asked for it."""
        blocks = self.model.columns.blocks
        for row, state in enumerate(blocks[core.STATE]):
            start = blocks[core.ADDRESS][row]
            if state != core.DEAD and start <= address < start + blocks[core.SIZE][row]:
                pool, stream, _, _ = self.model.keys[blocks[core.ARENA][row]]
                self.owners[address] = (stream, pool)
                return stream, pool
        # The segment is gone by now: what was placed last at or below the address owned it.
        below = max((known for known in self.owners if known <= address), default=None)
        return (stream, pool) if below is None else self.owners[below]

    def _entry(
        self, action: str, address: int, size: int, stream: int, pool: tuple[int, int], kind: str
    ) -> None:
        self.clock += 7
        place = "device_free" if action == "oom" else "addr"
        self.entries.append(
            {
                "action": action, place: address, "size": size, "stream": stream,
                "time_us": self.clock, "compile_context": "N/A", "user_metadata": "",
                "pool_id": pool, "frames": FRAMES[kind],
            }
        )  # fmt: skip

    def snapshot(self, ring: int | None = None, drop: Iterable[str] = ()) -> dict[str, Any]:
        """What torch's ``_snapshot()`` returns, with the last ``ring`` entries and without the
        keys in ``drop``."""
        entries = self.entries[-ring:] if ring else self.entries
        return {
            "segments": [
                {
                    "device": 0, "address": segment.address, "total_size": segment.size,
                    "allocated_size": 0, "active_size": 0, "requested_size": 0,
                    "stream": segment.stream,
                    "segment_type": "small" if segment.small else "large",
                    "segment_pool_id": segment.pool, "is_expandable": segment.expandable,
                    "frames": [],
                    "blocks": [
                        {
                            "address": block.address, "size": block.size,
                            "requested_size": block.requested_size or block.size,
                            "state": block.state, "frames": FRAMES["other"],
                        }
                        for block in segment.blocks
                    ],
                }
                for segment in self.model.segments()
            ],
            "device_traces": [[{k: v for k, v in e.items() if k not in drop} for e in entries]],
            "allocator_settings": {
                "PYTORCH_CUDA_ALLOC_CONF": "" if show(self.settings) == "default"
                else show(self.settings),
                "max_split_size": self.settings.max_split_bytes or -1,
                "garbage_collection_threshold": 0.0,
                "expandable_segments": self.settings.expandable_segments,
                "roundup_power2_divisions": {
                    str(1 << power): parts
                    for power, parts in enumerate(self.settings.roundup_power2_divisions)
                },
            },
            "external_annotations": [],
        }  # fmt: skip


def workload(recorder: Recorder, steps: int, seed: int, streams: int = 2, pools: int = 1) -> None:
    """Sizes, lives and streams as a multimodal server has them, at random but repeatable."""
    rng = random.Random(seed)
    live: list[Block] = []
    for _ in range(steps):
        choice = rng.random()
        if live and (choice < 0.45 or len(live) > 120):
            recorder.free(live.pop(rng.randrange(len(live))), pending=rng.random() < 0.1)
        elif choice > 0.995:
            recorder.empty_cache()
        else:
            if rng.random() < 0.1:
                recorder.complete()
            size = int(2 ** rng.uniform(8, rng.choice([14, 21, 25.5])))
            pool = rng.choice([(0, 0), (0, 0), (0, 1)][: pools + 1])
            kind = rng.choice(["vision", "text", "other"])
            try:
                live.append(recorder.malloc(size, rng.randrange(streams), pool, kind))
            except OutOfMemory:
                for block in live[: len(live) // 2]:
                    recorder.free(block)
                del live[: len(live) // 2]


def exhaust(recorder: Recorder, seed: int) -> None:
    """Texts that stay beside images that come and go, ever larger, until one does not fit."""
    rng = random.Random(seed)
    texts: list[Block] = []
    side = 448
    while True:
        patches = (side // 14) ** 2
        live = [recorder.malloc(patches * 1280 * 2 * layers, kind="vision") for layers in (8, 24)]
        texts += [recorder.malloc(rng.randrange(8, 24) * MIB, kind="text") for _ in range(6)]
        for block in live:
            recorder.free(block)
        for _ in range(rng.randrange(5)):
            recorder.free(texts.pop(rng.randrange(len(texts))))
        side = min(side + 14 * rng.randrange(3), 1792)


def dump(path: Path, snapshot: Any, protocol: int = 4) -> Path:
    """Write ``snapshot`` as torch does, a pickle of ``protocol``; gives the path back."""
    path.write_bytes(pickle.dumps(snapshot, protocol))
    return path


if __name__ == "__main__":
    with quiet_interrupt():
        import sys
        from contextlib import suppress

        if len(sys.argv) != 2 or sys.argv[1].startswith("-"):
            sys.exit("usage: python -m mmctl.benchmarks.recorder FILE")
        made = Recorder(capacity=8192 * MIB)
        with suppress(OutOfMemory):
            exhaust(made, seed=0)
        print(f"wrote {dump(Path(sys.argv[1]), made.snapshot())}")
