"""The vision and the stream queue of a workload, each at the rate that fills its device.

Images are encoded in arrival order, in batches of what waits, as many at once as take the least
time an image on that device. A text is prefilled by itself, at once when the device is free:
without the host's part of a step, which a captured graph saves on a GPU or NPU. The times are
the cost model's: modelled.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np

from mmctl.engine.errors import MmctlError
from mmctl.engine.schedule.costs import Cost
from mmctl.engine.schedule.figures import spread
from mmctl.engine.schedule.fleet import Device, Engine
from mmctl.engine.schedule.layout import CHUNKS, CONTEXTS, IMAGES, PATCHES, SEQUENCES
from mmctl.engine.schedule.queues import Limit
from mmctl.engine.schedule.stages import serve
from mmctl.engine.schedule.workload import Workload

# Published: mean seconds in the queue at the share of time in use.
PUBLISHED = {"vision": (0.142, 0.92), "stream": (0.028, 0.67)}


class Filled(msgspec.Struct, frozen=True, kw_only=True):
    """One queue before one device at one rate; ``wait_s`` until a request's work begins,
    ``e2e_s`` until it is done. ``published`` is (mean wait, time in use), ``met`` whether the
    mean of ``e2e_s`` too stays below it at no less use."""

    queue: str
    device: str
    source: str
    rate_per_s: float
    requests: int
    batch: int
    service_mean_s: float
    utilisation_ratio: float
    wait_s: dict[str, float] | None
    e2e_s: dict[str, float] | None
    deadline_s: float
    late_ratio: float
    published: dict[str, float]
    met: bool


def vision(work: Callable[[float], Workload], device: Device, limit: Limit) -> Filled:
    """The images of ``work(rate)`` before ``device``; a request waits for all of its images."""

    def run(rate: float) -> tuple[Any, ...]:
        made = work(rate)
        some = made.images > 0
        if not some.any():
            raise MmctlError(f"{made.name} holds no image")
        patches, images = made.patches[some], made.images[some]
        batch = best_batch(device.cost, float(np.average(patches, weights=images)), limit.batch)
        arrival = made.arrival_s[some]
        begun, done, busy_s = encode(device.cost, arrival, images, patches, batch)
        return arrival, begun, done, busy_s, batch

    return _filled(run, device, limit)


def stream(
    work: Callable[[float], Workload], device: Device, limit: Limit, engine: Engine
) -> Filled:
    """The texts of ``work(rate)`` before ``device``, each by itself."""
    host_s = engine.host_s if device.kind == "cpu" else 0.0

    def run(rate: float) -> tuple[Any, ...]:
        made = work(rate)
        service = prefill_s(device.cost, made.text_tokens) + host_s
        begun = serve(made.arrival_s, service, 1)
        return made.arrival_s, begun, begun + service, float(service.sum()), 1

    return _filled(run, device, limit)


def best_batch(cost: Cost, patches: float, most: int) -> int:
    """How many images of ``patches`` each, at most ``most`` at once, take the least time an
    image; of sizes within one percent the smallest, which waits least."""
    sizes = [size for size in IMAGES if size <= most] or [1]
    each = [_encode_s(cost, size, patches) / size for size in sizes]
    return next(size for size, s in zip(sizes, each, strict=True) if s <= 1.01 * min(each))


def _encode_s(cost: Cost, images: int, patches: float) -> float:
    """Seconds of one batch, linear between the cells of the table."""
    table = np.asarray(cost.encode_s).reshape(len(IMAGES), len(PATCHES))
    by_images = [float(np.interp(patches, PATCHES, row)) for row in table]
    return float(np.interp(images, IMAGES, by_images))


def encode(
    cost: Cost, arrival_s: Any, images: Any, patches: Any, batch: int
) -> tuple[np.ndarray, np.ndarray, float]:
    """When each request's first image begins and its last is done, and the seconds in use.

    One device; when it is free it takes up to ``batch`` images from the head of the queue.
    """
    known: dict[tuple[int, int], float] = {}
    count = len(arrival_s)
    begun, done = np.full(count, -1.0), np.zeros(count)
    left = np.asarray(images).tolist()
    size = np.asarray(patches).tolist()
    at = np.asarray(arrival_s).tolist()
    head, now, busy = 0, 0.0, 0.0
    while head < count:
        now = max(now, at[head])
        taken, total, i = 0, 0, head
        while i < count and at[i] <= now and taken < batch:
            part = min(left[i], batch - taken)
            if begun[i] < 0:
                begun[i] = now
            left[i] -= part
            taken += part
            total += part * size[i]
            if left[i]:
                break
            i += 1
        key = (taken, total // taken)
        if (took := known.get(key)) is None:
            took = known[key] = _encode_s(cost, *key)
        now += took
        busy += took
        done[head:i] = now
        head = i
    return begun, done, busy


def prefill_s(cost: Cost, tokens: Any) -> np.ndarray:
    """Seconds of a prompt by itself: products, attention and the head of one sequence."""
    shape = (len(CHUNKS), len(CONTEXTS), len(SEQUENCES), len(CONTEXTS))
    alone = np.asarray(cost.attention_s).reshape(shape)[:, 0, 0, 0]
    count = np.minimum(np.asarray(tokens), len(cost.dense_s) - 1)
    found: np.ndarray = cost.dense_s[count] + np.interp(count, CHUNKS, alone) + cost.head_s[1]
    return found


def _filled(run: Callable[[float], tuple[Any, ...]], device: Device, limit: Limit) -> Filled:
    """The queue at the lowest rate at which its device is in use for the published share."""
    mean_s, share = PUBLISHED[limit.queue]

    def use(found: tuple[Any, ...]) -> float:
        arrival, _, done, busy_s, _ = found
        return min(1.0, busy_s / float(done.max() - arrival[0]))

    arrival, _, done, busy_s, _ = run(1.0)
    # An idle device is in use in proportion to the rate: the first guess, then by halving.
    low, high = 0.0, max(share / max(busy_s / len(arrival), 1e-9), 1e-3)
    while use(run(high)) < share and high < 1e6:
        low, high = high, 1.3 * high
    for _ in range(8):
        middle = (low + high) / 2
        low, high = (low, middle) if use(run(middle)) >= share else (middle, high)
    found = run(high)
    arrival, begun, done, busy_s, batch = found
    wait, whole = spread(begun - arrival), spread(done - arrival)
    assert wait is not None and whole is not None
    return Filled(
        queue=limit.queue, device=device.system, source=device.cost.source, rate_per_s=high,
        requests=len(arrival), batch=batch, service_mean_s=busy_s / len(arrival),
        utilisation_ratio=use(found), wait_s=wait, e2e_s=whole, deadline_s=limit.deadline_s,
        late_ratio=float(((begun - arrival) > limit.deadline_s).mean()),
        published={"mean_s": mean_s, "utilisation_ratio": share},
        met=whole["mean"] <= mean_s and use(found) >= share,
    )  # fmt: skip
