"""What explaining one long made-up trace costs ``mmctl probe snapshot`` and torch's own viewer."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from mmctl.engine.memory.allocator import Block
from mmctl.engine.memory.settings import Settings


def long_trace(path: Path, entries: int, seed: int = 3) -> None:
    """Write a snapshot of so many entries: a server's allocations under stacks of 12 frames."""
    import pickle

    from mmctl.benchmarks.recorder import Recorder

    rng = random.Random(seed)
    stacks = [
        [
            {
                "name": f"forward_{n}",
                "filename": f"/srv/app/{part}_{n * depth % 97}.py",
                "line": depth,
            }
            for depth in range(12)
        ]
        for part, count in (("vision", 100), ("language_model", 200), ("runner", 200))
        for n in range(count)
    ]
    recorder = Recorder()
    model = recorder.model
    found: list[dict[str, Any]] = []
    live: list[tuple[Block, Any]] = []
    clock = 1_700_000_000_000_000

    def write(action: str, address: int, size: int, frames: Any) -> None:
        nonlocal clock
        clock += 3
        found.append(
            {
                "action": action, "addr": address, "size": size, "stream": 0, "time_us": clock,
                "compile_context": "N/A", "user_metadata": "", "frames": frames,
            }
        )  # fmt: skip

    while len(found) < entries:
        if live and (rng.random() < 0.5 or len(live) > 2000):
            block, frames = live.pop(rng.randrange(len(live)))
            write("free_requested", block.address, block.requested_size, frames)
            write("free_completed", block.address, block.requested_size, frames)
            model.free(block)
            continue
        size, frames = int(2 ** rng.uniform(8, rng.choice((14, 21, 25.5)))), rng.choice(stacks)
        block = model.malloc(size)
        for event in model.device_events():
            write(event.action, event.address, event.size, frames)
        write("alloc", block.address, size, frames)
        live.append((block, frames))
    recorder.entries = found
    with open(path, "wb") as file:
        pickle.dump(recorder.snapshot(), file, 4)


def measure(entries: int) -> list[dict[str, Any]]:
    """CPU and memory of ``mmctl probe snapshot`` and of torch's own viewer on one long trace,
    one after the other in this run."""
    import sys
    import tempfile

    with tempfile.TemporaryDirectory(prefix="mmctl-") as folder:
        path = Path(folder) / "long.pickle"
        long_trace(path, entries)
        mmctl = [sys.executable, "-m", "mmctl", "probe", "snapshot", str(path), "-o", "json"]
        load = "import gc,pickle,sys;gc.disable();pickle.load(open(sys.argv[1],'rb'))"
        rows = [_timed("pickle.load alone", [sys.executable, "-c", load, str(path)])]
        rows.append(_timed("mmctl: explained", [*mmctl, "--no-what-if"]))
        warm()
        confs = ["--conf", "roundup_power2_divisions:4", "--conf", "max_split_size_mb:256"]
        one = _timed("mmctl: settings in force replayed", [*mmctl, *confs[:2]])
        rows.append(_timed("mmctl: with one setting more", [*mmctl, *confs]))
        rows.append({"program": "mmctl: each further setting",
                     "cpu_s": rows[-1]["cpu_s"] - one["cpu_s"], "peak_bytes": None,
                     "basis": "measured"})  # fmt: skip
        viewer = [sys.executable, "-m", "torch.cuda._memory_viz"]
        return rows + [
            _timed(f"torch viewer: {command}", [*viewer, command, str(path)])
            for command in ("stats", "trace")
        ]


def warm() -> None:
    """Compile the walk once, as the first long trace with several settings would."""
    from importlib.util import find_spec

    import numpy as np

    from mmctl.engine.memory import replay, walk
    from mmctl.engine.memory.allocator import add_arena, new_columns

    if find_spec("numba") is None:
        return
    for way in ("exact", "under"):
        columns = new_columns(Settings(), None)
        add_arena(columns, 0, True)
        rows = np.zeros((walk.PROGRAM_ROWS, 1), np.int64)
        rows[walk.OP] = walk.RELEASE
        machine = replay.Machine(rows, columns, [0], runs=10**9)
        getattr(machine, way)(0, 1)


def _timed(name: str, command: list[str]) -> dict[str, Any]:
    """CPU seconds and the largest resident memory of a command and its children."""
    import subprocess
    import sys

    run = (
        "import resource,subprocess,sys;"
        "code=subprocess.run(sys.argv[1:],stdout=subprocess.DEVNULL,"
        "stderr=subprocess.DEVNULL).returncode;"
        "u=resource.getrusage(resource.RUSAGE_CHILDREN);"
        "print(u.ru_utime+u.ru_stime,u.ru_maxrss*1024,code)"
    )
    result = subprocess.run(
        [sys.executable, "-c", run, *command], capture_output=True, text=True, check=True
    )
    cpu, peak, code = result.stdout.split()
    if code not in ("0", "3"):
        return {"program": name, "cpu_s": None, "peak_bytes": None, "basis": "measured"}
    return {"program": name, "cpu_s": float(cpu), "peak_bytes": int(peak), "basis": "measured"}
