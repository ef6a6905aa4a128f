"""What the state machine of a target remembers, and what it asks of a worker."""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

import msgspec

from mmctl.engine.records import Event

State: TypeAlias = Literal["unknown", "closed", "open", "verifying", "half_open", "isolated"]
# What an open target waits for.
Step: TypeAlias = Literal["respond", "rebuild", "backoff", "expiry", ""]


class Command(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="command"):
    """What a worker is asked to do; its answer is an event whose evidence holds ``id``."""

    id: str
    device: str
    action: str
    args: dict[str, Any] = {}


Output: TypeAlias = Event | Command


class Memory(msgspec.Struct, kw_only=True):
    """All that a machine remembers; saved over restarts as it is.

    ``since_ns`` is when the state was entered, ``waiting_for`` the id of the command whose answer
    is due; ``known_until_ns`` is how long the inputs of some rule that acts stay fresh, and what is
    no newer than ``reset_ns`` is not acted on. ``completed`` and ``arrived`` count requests since
    the target became half open, ``tried_ns`` is when so many had come that the admitted share held
    one. ``failures`` are steps of the recovery
    that failed since the trip, ``passes`` verifications passed since the last of them.
    """

    state: State = "unknown"
    step: Step = ""
    since_ns: int = 0
    deadline_ns: int | None = None
    failures: int = 0
    commands: int = 0
    waiting_for: str | None = None
    trip_ns: int = 0
    rule: str | None = None
    respond: tuple[str, ...] = ()
    rebuild: bool = False
    verified_ns: int | None = None
    closed_ns: int | None = None
    completed: int = 0
    arrived: int = 0
    tried_ns: int | None = None
    passes: int = 0
    known_until_ns: int = 0
    reset_ns: int = -1
    reason: str | None = None


class Target(msgspec.Struct, frozen=True, kw_only=True):
    """The saved state of one target, and of which processes it speaks.

    ``processes`` holds the process that served each device, as its agent named itself; it is empty
    where no agent did. What is not ``lasting`` ends with the run: the worker of a demo.
    """

    node: str
    device: str
    memory: Memory
    processes: dict[str, str] = {}
    lasting: bool = True
