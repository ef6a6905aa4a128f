"""What outlives a run: the audit log, the state of every target, and orders given by hand.

All three are files of the user's state folder. The audit log is appended to and synced, line by
line; the state is replaced in one step; orders are appended by ``mmctl breaker trip|hold|reset``
and read by the breaker that runs. Reading any of them changes nothing.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from mmctl.engine import atomic, folders
from mmctl.engine.breaker.breaker import ANSWERS, CHANGES, DECISIONS, Breaker
from mmctl.engine.breaker.state import Target
from mmctl.engine.errors import MmctlError
from mmctl.engine.profiles import Mode
from mmctl.engine.records import SCHEMA, AnyRecord, Event, decode, encode

# What the audit log keeps of the stream: decisions, answers, orders, and what went wrong.
AUDITED = DECISIONS | ANSWERS | CHANGES | {"order", "advice", "notify", "oom", "fault"}
_POLL_S = 0.2


class State(msgspec.Struct, frozen=True, kw_only=True):
    """The state file: every target, who wrote it, and how far it has read the orders."""

    schema: int = SCHEMA
    saved_ns: int
    pid: int
    mode: Mode
    orders_read: int
    targets: dict[str, Target]


def folder() -> Path:
    """``$XDG_STATE_HOME/mmctl/breaker``."""
    return folders.state() / "breaker"


class Store:
    """The files of the breaker that runs. Only one process keeps them at a time.

    ``restore`` False starts afresh, and what is saved of it does not last: the workers of a demo
    do not outlive it. What was saved before stays for the next lasting run.
    """

    def __init__(self, restore: bool = True) -> None:
        self.folder = folder()
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._lock = _lock(self.folder)
        self._audit = os.open(
            self.folder / "audit.ndjson", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600
        )
        self.restore = restore
        self._saved = read_state()
        if self._saved is not None:
            lasting = {name: each for name, each in self._saved.targets.items() if each.lasting}
            self._saved = msgspec.structs.replace(self._saved, targets=lasting)
        # Where no breaker has run yet, an order has waited for this one; a demo takes new ones.
        before = self._saved.orders_read if self._saved else 0
        self._read = before if restore else _size(self.folder / "orders.ndjson")
        self._looked = 0.0
        self._last: bytes = b""

    def close(self) -> None:
        """Let another process keep the state; what was saved stays."""
        os.close(self._audit)
        os.close(self._lock)

    def take_up(self, breaker: Breaker) -> None:
        """Give ``breaker`` the states of the run before; what was under way is tried anew.

        Only once it enforces: until then what an enforcing breaker left open is kept as it is.
        The breaker goes on from a state once it meets the target, and where another process
        serves that now, only from what a person ordered.
        """
        if self._saved is None or not self.restore or breaker.mode != "enforce":
            return
        for name, target in self._saved.targets.items():
            memory = target.memory
            if memory.state in ("verifying", "half_open") or memory.step in ("respond", "rebuild"):
                # Whether the worker did what it was asked is not known: verify again, soon.
                memory = msgspec.structs.replace(
                    memory, state="open", step="backoff", waiting_for=None, verified_ns=None,
                    deadline_ns=self._saved.saved_ns, passes=0,
                )  # fmt: skip
            elif memory.state == "closed":
                memory = msgspec.structs.replace(memory, state="unknown", known_until_ns=0)
            breaker.past.targets[name] = msgspec.structs.replace(target, memory=memory)
        self._saved = None

    def keep(self, events: Iterable[Event]) -> None:
        """Append those that the audit log is about, durably."""
        lines = [encode(event) + b"\n" for event in events if event.what in AUDITED]
        if lines:
            os.write(self._audit, b"".join(lines))
            os.fsync(self._audit)

    def save(self, breaker: Breaker) -> None:
        """Replace the state file when it says something new; an off breaker has nothing to say."""
        if breaker.mode == "off" and not breaker.machines:
            return
        targets = {
            name: msgspec.structs.replace(target, lasting=self.restore)
            for name, target in breaker.targets().items()
        }
        if self._saved is not None:
            kept = {
                name: target
                for name, target in self._saved.targets.items()
                if target.memory.state not in ("closed", "unknown")
            }
            targets = targets | kept if self.restore else kept | targets
        told = msgspec.json.encode([self._read, breaker.mode, _settled(targets)])
        if told == self._last:
            return
        self._last = told
        state = State(
            saved_ns=time.time_ns(), pid=os.getpid(), mode=breaker.mode, orders_read=self._read,
            targets=targets,
        )  # fmt: skip
        atomic.write(self.folder / "state.json", msgspec.json.encode(state), private=True)

    def orders(self, now_ns: int, node: str) -> Iterator[Event]:
        """Orders given since the last look, at the stream's time; expired ones are dropped."""
        if time.monotonic() - self._looked < _POLL_S:
            return
        self._looked = time.monotonic()
        path = self.folder / "orders.ndjson"
        if _size(path) <= self._read:
            return
        with open(path, "rb") as file:
            file.seek(self._read)
            text = file.read()
        whole = text.rfind(b"\n") + 1
        self._read += whole
        for line in text[:whole].splitlines():
            order = decode(line)
            if not isinstance(order, Event):
                continue
            expires = order.evidence.get("expires_ns")
            if isinstance(expires, int) and expires <= now_ns:
                continue
            evidence = {**order.evidence, "given_ns": order.ts_ns}
            yield msgspec.structs.replace(order, ts_ns=now_ns, node=node, evidence=evidence)


def _lock(home: Path) -> int:
    """The descriptor by which one process at a time keeps the state."""
    lock = os.open(home / "lock", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(lock)
        raise MmctlError("another breaker keeps the state on this node") from None
    return lock


def _settled(targets: dict[str, Target]) -> list[Any]:
    """What of the targets is worth a new file: not how long telemetry stays fresh."""
    return [
        (name, msgspec.structs.replace(target.memory, known_until_ns=0), target.processes)
        for name, target in targets.items()
    ]


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def append_audit(lines: list[bytes]) -> None:
    """Append what another part of this program did to the audit log, a record a line.

    One write, not synced: these lines come at the rate of requests. Any process may append.
    """
    home = folder()
    home.mkdir(parents=True, exist_ok=True, mode=0o700)
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
    descriptor = os.open(home / "audit.ndjson", flags, 0o600)
    try:
        os.write(descriptor, b"\n".join(lines) + b"\n")
    finally:
        os.close(descriptor)


def read_state() -> State | None:
    """The saved state; None where no breaker has run yet."""
    path = folder() / "state.json"
    try:
        return msgspec.json.decode(path.read_bytes(), type=State)
    except FileNotFoundError:
        return None
    except msgspec.DecodeError as error:
        raise MmctlError(f"{path} is damaged ({error}); remove it to start afresh") from None


def read_audit() -> Iterator[AnyRecord]:
    """The audit log from its beginning; a last line that was cut is left out."""
    from mmctl.engine.recording import read

    path = folder() / "audit.ndjson"
    return read(path) if path.exists() else iter(())


def running(state: State | None) -> bool:
    """Whether the breaker that wrote the state still runs."""
    if state is None:
        return False
    try:
        os.kill(state.pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def forget(target: str, reason: str) -> None:
    """Take a target out of the saved state, with a line in the audit log.

    MmctlError while a breaker runs: it would write its own state over it.
    """
    lock = _lock(folder())
    try:
        state = read_state()
        if state is None:
            return
        targets = {name: each for name, each in state.targets.items() if name != target}
        kept = msgspec.structs.replace(state, targets=targets)
        atomic.write(folder() / "state.json", msgspec.json.encode(kept), private=True)
        append_audit([encode(_order("forget", target, reason, None))])
    finally:
        os.close(lock)


def give_order(action: str, target: str, reason: str, expires_ns: int | None) -> None:
    """Append an order for the breaker that runs, or for the next one."""
    home = folder()
    home.mkdir(parents=True, exist_ok=True, mode=0o700)
    event = _order(action, target, reason, expires_ns)
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
    descriptor = os.open(home / "orders.ndjson", flags, 0o600)
    try:
        os.write(descriptor, encode(event) + b"\n")
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _order(action: str, target: str, reason: str, expires_ns: int | None) -> Event:
    return Event(
        ts_ns=time.time_ns(), what="order", device=target or None,
        evidence={
            "action": action, "reason": reason, "expires_ns": expires_ns, "by": os.getuid(),
        },
    )  # fmt: skip
