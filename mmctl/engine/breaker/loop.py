"""The loop: records in, records and decisions out, commands to whoever carries them out."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator
from typing import TypeAlias

import msgspec

from mmctl.engine.breaker.actuators import Actuators
from mmctl.engine.breaker.agent_socket import AgentSocket
from mmctl.engine.breaker.breaker import CHANGES, DECISIONS, Breaker
from mmctl.engine.breaker.reload import Changes, policy
from mmctl.engine.breaker.state import Command
from mmctl.engine.breaker.store import Store
from mmctl.engine.errors import MmctlError
from mmctl.engine.profiles import Mode, Profile
from mmctl.engine.records import AnyRecord, Event, Recording

# Takes a command and returns at once; the answer comes as an event in the record stream.
# MmctlError when it cannot be carried out: the machine's deadline then does what is needed.
Actuator: TypeAlias = Callable[[Command], None]


def run(
    records: Iterable[AnyRecord],
    profile: Profile,
    mode: Mode | None = None,
    actuator: Actuator | None = None,
    breaker: Breaker | None = None,
    store: Store | None = None,
    changes: Changes | None = None,
) -> Iterator[AnyRecord]:
    """Every input record, each followed by the breaker's events.

    Decisions already in the stream are dropped: they are made again. The first event names the
    mode, so that a recording of this stream can be replayed as it ran. ``actuator`` None sends
    the commands to nobody, as a replay must. ``store`` keeps the audit log and the state, and
    gives the orders of a person, which become events of the stream. So do the changes of the
    profile that ``changes`` reads again; changes already in the stream are obeyed.
    """
    breaker = breaker or Breaker(profile, mode)
    if store is not None:
        store.take_up(breaker)
    begun = False
    for record in records:
        if isinstance(record, Event) and record.what in DECISIONS:
            continue
        yield record
        if isinstance(record, Recording):
            continue
        if not begun:
            begun = True
            yield _begin(record, breaker)
        yield from _decide(record, breaker, actuator, store, changes)


def attend(
    records: Iterable[AnyRecord],
    profile: Profile,
    mode: Mode,
    *,
    breaker: Breaker | None = None,
    store: Store | None = None,
    changes: Changes | None = None,
    dry_run: bool = False,
) -> Generator[AnyRecord, None, None]:
    """``run`` with the profile's actuators: the agent or engine that carries commands out, and
    the webhook, command and Alertmanager that are told. They and ``store`` are closed at the end.
    """
    actuators = Actuators(profile, mode, dry_run=dry_run)
    try:
        yield from run(records, profile, mode, actuators, breaker, store, changes)
    finally:
        actuators.close()
        if store is not None:
            store.close()


def without_changes(records: Iterable[AnyRecord]) -> Iterator[AnyRecord]:
    """``records`` to be decided by one profile in one mode, whatever was changed on the way."""
    return (
        record for record in records if not (isinstance(record, Event) and record.what in CHANGES)
    )


def _decide(
    record: AnyRecord, breaker: Breaker, actuator: Actuator | None, store: Store | None,
    changes: Changes | None,
) -> Iterator[Event]:  # fmt: skip
    """Orders, changes and answers that came meanwhile, then what follows from ``record``."""
    now: int = record.ts_ns  # type: ignore[union-attr]
    before: list[Event] = []
    if changes is not None:
        before += changes.events(breaker.profile, breaker.mode, now, record.node)
    if store is not None:
        before += store.orders(now, record.node)
    if isinstance(actuator, (AgentSocket, Actuators)):
        actuator.see(record)
    if isinstance(actuator, Actuators):
        before += [
            msgspec.structs.replace(answer, ts_ns=now, node=record.node)
            for answer in actuator.answers()
        ]
    for step in (*before, record):
        if step is not record:
            yield step  # type: ignore[misc]
        outputs = breaker.step(step)
        if isinstance(step, Event) and step.what in CHANGES:
            if isinstance(actuator, Actuators):
                profile = breaker.profile if changes is None else changes.loaded.profile
                actuator.follow(profile, breaker.mode)
            if store is not None:
                store.take_up(breaker)
        if store is not None:
            # Written before anybody acts on it: a kill leaves a state that knows of the command.
            store.keep(item for item in (step, *outputs) if isinstance(item, Event))
            store.save(breaker)
        for output in outputs:
            if isinstance(output, Event):
                yield output
                if isinstance(actuator, Actuators):
                    actuator.tell(output)
                    if actuator.dry_run and output.what == "trip":
                        yield _plan(output, actuator)
            elif actuator is not None and (failure := _carry_out(actuator, output, now)):
                if store is not None:
                    store.keep([failure])
                yield failure


def _plan(trip: Event, actuator: Actuators) -> Event:
    """What an enforcing breaker would have done, step by step, with today's preconditions."""
    order = trip.evidence.get("would_respond") or []
    device = trip.evidence.get("group") or trip.device or ""
    command = Command(id="", device=device, action="respond", args={"order": order})
    steps = actuator.plan(command)
    return Event(
        ts_ns=trip.ts_ns, node=trip.node, what="plan", device=trip.device, rule=trip.rule,
        mode="observe", message="; ".join(steps), evidence={"steps": steps},
    )  # fmt: skip


def _carry_out(actuator: Actuator, command: Command, now: int) -> Event | None:
    try:
        actuator(command)
    except MmctlError as error:
        return Event(
            ts_ns=now, what="advice", device=command.device, message=str(error),
            evidence={"id": command.id, "action": command.action, "args": command.args},
        )  # fmt: skip
    return None


def _begin(record: AnyRecord, breaker: Breaker) -> Event:
    return Event(
        ts_ns=record.ts_ns,  # type: ignore[union-attr]
        node=record.node, what="breaker", mode=breaker.mode, evidence=policy(breaker.profile),
    )  # fmt: skip
