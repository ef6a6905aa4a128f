"""A dependency graph of tasks on devices, run by one process per device.

An edge between devices becomes two semaphores: ``ready`` counts results that its source has put
into a slot, ``free`` slots that its target has emptied. A device that is ahead waits, by no more
than the slots; nothing else synchronises. Edges within a device are an order.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from graphlib import CycleError, TopologicalSorter
from typing import Any, NamedTuple

from mmctl.engine.errors import MmctlError

SLOTS = 2
PATIENCE_S = 60.0

Edge = tuple[str, str]


class Task(NamedTuple):
    """A piece of work, done for every batch (or ``once``, before the first that needs it)."""

    name: str
    device: int
    after: tuple[str, ...] = ()
    once: bool = False


class Ran(NamedTuple):
    """When a task ran for a batch, on the monotonic clock."""

    task: str
    batch: int
    start_s: float
    end_s: float


class Channel(NamedTuple):
    """The semaphores of an edge between devices."""

    ready: Any
    free: Any


def inference(shared: bool, serial: bool = False) -> list[Task]:
    """Both towers, then the contrast of their features on the image's device.

    T0: the towers do not depend on each other. T1 (``shared``): one temperature, which lives
    with the text and is passed once. ``serial`` puts one tower after the other.
    """
    tasks = [
        Task("image", 0),
        Task("text", 1, ("image",) if serial else ()),
        Task("contrast", 0, ("image", "text", *(("temperature",) if shared else ()))),
    ]
    return [Task("temperature", 1, once=True), *tasks] if shared else tasks


def training(shared: bool, serial: bool = False) -> list[Task]:
    """The same with gradients: each tower's way back begins with the contrast's."""
    back = [
        Task("image_backward", 0, ("contrast",)),
        Task("text_backward", 1, ("contrast", *(("image_backward",) if serial else ()))),
    ]
    # So that no batch begins before the one before it is done.
    end = [Task("end", 0, ("text_backward",))] if serial else []
    return [*inference(shared, serial), *back, *end]


def order(tasks: Sequence[Task]) -> list[Task]:
    """The tasks such that each comes behind those it depends on; MmctlError for a cycle or a
    dependency that there is not."""
    by_name = {task.name: task for task in tasks}
    for task in tasks:
        for name in task.after:
            if name not in by_name:
                raise MmctlError(f"task '{task.name}' comes after '{name}', which is no task")
    try:
        names = TopologicalSorter({task.name: task.after for task in tasks}).static_order()
        return [by_name[name] for name in names]
    except CycleError as error:
        raise MmctlError(f"tasks depend on each other: {' → '.join(error.args[1])}") from None


def crossing(tasks: Sequence[Task]) -> list[Edge]:
    """The edges between devices."""
    device = {task.name: task.device for task in tasks}
    return [
        (name, task.name) for task in tasks for name in task.after if device[name] != task.device
    ]


def channels(tasks: Sequence[Task], context: Any) -> dict[Edge, Channel]:
    """Fresh semaphores for every edge between devices."""
    return {
        edge: Channel(context.Semaphore(0), context.Semaphore(SLOTS)) for edge in crossing(tasks)
    }


def run(
    tasks: Sequence[Task], device: int, batches: int, joined: Mapping[Edge, Channel],
    work: Mapping[str, Callable[[int], None]],
) -> list[Ran]:  # fmt: skip
    """Do a device's tasks for every batch; ``work`` gives each its function of the batch.

    Raises MmctlError when the other device keeps this one waiting for a minute.
    """
    own = [task for task in order(tasks) if task.device == device]
    once = {task.name for task in tasks if task.once}
    found = []
    for batch in range(batches):
        for task in own:
            if task.once and batch:
                continue
            incoming = [
                edge for edge in joined
                if edge[1] == task.name and not (batch and edge[0] in once)
            ]  # fmt: skip
            outgoing = [edge for edge in joined if edge[0] == task.name]
            for edge in incoming:
                _take(joined[edge].ready, edge)
            for edge in outgoing:
                _take(joined[edge].free, edge)
            start = time.monotonic()
            work[task.name](batch)
            found.append(Ran(task.name, batch, start, time.monotonic()))
            for edge in outgoing:
                joined[edge].ready.release()
            for edge in incoming:
                joined[edge].free.release()
    return found


def _take(semaphore: Any, edge: Edge) -> None:
    if not semaphore.acquire(timeout=PATIENCE_S):
        raise MmctlError(f"waited {PATIENCE_S:.0f} s between '{edge[0]}' and '{edge[1]}'")
