"""The loop: records in, records and decisions out, commands to whoever carries them out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TypeAlias

import msgspec

from mmctl.engine.breaker.breaker import DECISIONS, Breaker
from mmctl.engine.breaker.machine import Command
from mmctl.engine.profiles import Mode, Profile
from mmctl.engine.records import AnyRecord, Event

# Takes a command and returns at once; the answer comes as an event in the record stream.
Actuator: TypeAlias = Callable[[Command], None]


def run(
    records: Iterable[AnyRecord],
    profile: Profile,
    mode: Mode | None = None,
    actuator: Actuator | None = None,
    breaker: Breaker | None = None,
) -> Iterator[AnyRecord]:
    """Every input record, each followed by the breaker's events.

    Decisions already in the stream are dropped: they are made again. The first event names the
    mode, so that a recording of this stream can be replayed as it ran.
    """
    if breaker is None:
        breaker = Breaker(profile, mode)
    begun = False
    for record in records:
        if isinstance(record, Event) and record.what in DECISIONS:
            continue
        yield record
        if not begun and hasattr(record, "ts_ns"):
            begun = True
            yield _begin(record, breaker)
        for output in breaker.step(record):
            if isinstance(output, Event):
                yield output
            elif actuator is not None:
                actuator(output)


def _begin(record: AnyRecord, breaker: Breaker) -> Event:
    rules = breaker.profile.breaker.rules
    return Event(
        ts_ns=record.ts_ns,  # type: ignore[union-attr]
        node=record.node, what="breaker", mode=breaker.mode,
        evidence={"rules": [msgspec.to_builtins(rule) for rule in rules]},
    )  # fmt: skip
