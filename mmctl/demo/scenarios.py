"""What arrives at the demo server, by step and seed. No scenario knows of rules or events.

Time is counted in steps, so that one seed gives one sequence of allocations however fast the
machine is.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import NamedTuple


class Arrival(NamedTuple):
    """A request as it arrives.

    ``images`` holds the side of each square image in pixels. After its output a request stays
    resident until ``until_step``, as a chat waits for its next turn.
    """

    images: tuple[int, ...] = ()
    text_tokens: int = 32
    output_tokens: int = 8
    until_step: int = 0


FOREVER = 1 << 60

Scenario = Callable[[int, Random, int], list[Arrival]]
"""Step, a generator of its own, mean steps between images of the scenario's stress → arrivals."""


def _conversations(step: int, random: Random, first: int, every: int, count: int) -> list[Arrival]:
    """Long texts that stay: ``count`` of them from step ``first`` on."""
    if step < first or (step - first) % every or (step - first) // every >= count:
        return []
    return [Arrival((), random.randint(1000, 1500), 8, FOREVER)]


def calm(step: int, random: Random, image_every: int) -> list[Arrival]:
    """Conversations come and go, small images now and then: memory is never short."""
    arrivals = []
    if step % 40 == 2:
        arrivals.append(Arrival((), random.randint(1000, 1500), 8, step + 110))
    if random.random() * image_every < 1:
        arrivals.append(Arrival((random.choice((224, 336)),), 32, 8))
    return arrivals


def burst(step: int, random: Random, image_every: int) -> list[Arrival]:
    """Large images come in a burst while long texts hold the pool."""
    arrivals = _conversations(step, random, 2, 7, 12)
    phase = step % 400
    if 90 <= phase < 130:
        if random.random() * image_every < 1:
            arrivals.append(Arrival((448,), random.randint(24, 48), 8))
    elif step % 15 == 14:
        arrivals.append(Arrival((random.choice((224, 336)),), 32, 8))
    return arrivals


def fragmentation(step: int, random: Random, image_every: int) -> list[Arrival]:
    """Images that stay and long texts that leave lie interleaved: afterwards enough bytes are
    free, but no block is large enough."""
    if step < 58 and step % 8 == 2:
        text_tokens = random.randint(1100, 1500)
        return [Arrival((336, 336), 32, 4, FOREVER), Arrival((), text_tokens, 4, 80)]
    if step >= 90 and random.random() * image_every < 1:
        return [Arrival((448, 448), random.randint(24, 48), 8)]
    return []


def leak(step: int, random: Random, image_every: int) -> list[Arrival]:
    """A steady trickle of images; the server keeps a reference that it should have dropped."""
    arrivals = _conversations(step, random, 2, 12, 3)
    if random.random() * image_every < 1:
        arrivals.append(Arrival((random.choice((224, 336)),), 24, 6))
    return arrivals


def stall(step: int, random: Random, image_every: int) -> list[Arrival]:
    """Ordinary load on a server whose scheduler stops while it still says that it is healthy."""
    arrivals = _conversations(step, random, 2, 12, 3)
    if random.random() * image_every < 1:
        arrivals.append(Arrival((random.choice((224, 336)),), 24, 6))
    return arrivals


class Setup(NamedTuple):
    """A scenario with the defects of its server and the pace of its stress."""

    arrivals: Scenario
    image_every: int
    leaks: bool = False
    stalls_at: int | None = None
    fault: str | None = None
    fault_at: int = 60


SCENARIOS: dict[str, Setup] = {
    "calm": Setup(calm, 25),
    "burst": Setup(burst, 2),
    "fragmentation": Setup(fragmentation, 10),
    "leak": Setup(leak, 3, leaks=True),
    "stall": Setup(stall, 6, stalls_at=60),
    "fault": Setup(calm, 25, fault="zeroed_head"),
}
