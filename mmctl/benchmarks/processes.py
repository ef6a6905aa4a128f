"""Several processes of one benchmark: started afresh, told on, ended with the benchmark."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from typing import Any

from mmctl.engine.errors import MmctlError

DEADLINE_S = 600.0

Target = Callable[..., Any]
"""``target(rank, tell, *arguments)``: a function of a module; ``tell(name, share)`` reports."""


def run(
    target: Target, count: int, arguments: tuple[Any, ...],
    tell: Callable[[str, float], None] = lambda name, share: None,
    deadline_s: float = DEADLINE_S,
) -> list[Any]:  # fmt: skip
    """Call ``target`` in ``count`` processes at once; their results, by rank.

    Progress comes from rank 0. All are ended when one fails (MmctlError with its reason), when
    nothing is done in time, or when the benchmark is interrupted.
    """
    context = get_context("spawn")
    pipes = [context.Pipe(duplex=False) for _ in range(count)]
    children = [
        context.Process(target=_child, args=(target, rank, pipes[rank][1], arguments), daemon=True)
        for rank in range(count)
    ]
    results: dict[int, Any] = {}
    try:
        for child, (_, sender) in zip(children, pipes, strict=True):
            child.start()
            sender.close()
        listening = {receiver: rank for rank, (receiver, _) in enumerate(pipes)}
        end = time.monotonic() + deadline_s
        while listening:
            ready = wait(list(listening), timeout=max(0.0, end - time.monotonic()))
            if not ready:
                raise MmctlError(f"the processes were not done after {deadline_s:.0f} s")
            for receiver in ready:
                assert isinstance(receiver, Connection)
                _take(receiver, listening, results, tell)
    finally:
        for child in children:
            if child.is_alive() and len(results) < count:
                child.terminate()
            if child.pid is not None:
                child.join()
    return [results[rank] for rank in range(count)]


def _take(
    receiver: Connection, listening: dict[Any, int], results: dict[int, Any],
    tell: Callable[[str, float], None],
) -> None:  # fmt: skip
    """One message of a process: progress, its result, or why it failed."""
    rank = listening[receiver]
    try:
        kind, value = receiver.recv()
    except EOFError:
        raise MmctlError(f"process {rank} of the benchmark ended before it was done") from None
    if kind == "failed":
        raise MmctlError(f"process {rank} of the benchmark failed: {value}")
    if kind == "result":
        results[rank] = value
        del listening[receiver]
    elif rank == 0:
        tell(*value)


def _child(target: Target, rank: int, sender: Connection, arguments: tuple[Any, ...]) -> None:
    # Torch warns about things that its user cannot change from here.
    sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    try:
        result = target(rank, lambda name, share: sender.send(("told", (name, share))), *arguments)
    except KeyboardInterrupt:
        return
    except Exception as error:
        lines = str(error).strip().splitlines()
        sender.send(("failed", f"{type(error).__name__}: {lines[0] if lines else 'no reason'}"))
        return
    sender.send(("result", result))


def pin(place: int) -> int | None:
    """Keep this process to one of the cores it may use, the ``place``-th in turn; its number,
    or None where the system does not let a process choose."""
    if not hasattr(os, "sched_setaffinity"):
        return None
    cores = sorted(os.sched_getaffinity(0))
    core = cores[place % len(cores)]
    os.sched_setaffinity(0, {core})
    return core
