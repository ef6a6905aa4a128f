"""The state machine of one target: a device, or all devices of one serving instance.

    unknown ⇄ closed → open → verifying → half_open → closed
                        ↑________|____________|          isolated: by hand, or after N failures

A pure function of what it is told and when: it reads no clock, draws no random number (the
jitter of a back-off is a hash) and does nothing by itself. Every waiting state has a deadline.
Nothing closes without a passed verification, and nothing is acted on while data is unknown.
"""

from __future__ import annotations

import zlib
from typing import Any, Literal, TypeAlias

import msgspec

from mmctl.engine import profiles
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
    """All that a machine remembers; saved over restarts as it is."""

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
    known_until_ns: int = 0
    reset_ns: int = -1
    expires_ns: int | None = None
    reason: str | None = None


class Machine:
    """One target's breaker; each method is told something and returns what follows.

    ``device`` is what its events name: the device that tripped, before that the first one that
    was judged; the target itself where no rule is about a device.
    """

    def __init__(
        self, target: str, node: str, settings: profiles.Breaker, order: tuple[str, ...] = ()
    ) -> None:
        self.target, self.node, self.settings, self.order = target, node, settings, order
        self.memory = Memory()
        self.device = target
        self.mode: profiles.Mode = "enforce"
        self._sent_ns = 0

    @property
    def state(self) -> State:
        return self.memory.state

    @property
    def deadline_ns(self) -> int | None:
        """When ``expire`` must be called if nothing else happens before."""
        memory = self.memory
        if memory.state == "closed":
            return memory.known_until_ns
        return memory.deadline_ns

    def known(self, now: int, until: int) -> list[Output]:
        """Some rule of this target could be decided; its inputs are good until ``until``."""
        memory = self.memory
        memory.known_until_ns = max(memory.known_until_ns, until)
        if memory.state != "unknown":
            return []
        return [self._enter(now, "closed", "state", {"reason": "telemetry is fresh"})]

    def trip(
        self, now: int, rule: str, evidence: dict[str, Any], respond: tuple[str, ...] = (),
        rebuild: bool = False, took_ns: int | None = None,
    ) -> list[Output]:  # fmt: skip
        """A rule holds and this target is to act on it."""
        memory = self.memory
        if memory.state in ("open", "verifying", "isolated"):
            memory.rebuild = memory.rebuild or rebuild
            note = {**evidence, "also": True}
            return [self._event(now, "trip", memory.state, note, rule=rule, took_ns=took_ns)]
        if memory.state == "half_open":
            event = self._event(now, "trip", "half_open", evidence, rule=rule, took_ns=took_ns)
            memory.rebuild = memory.rebuild or rebuild
            return [event, *self._fail(now, f"rule {rule} held while half open")]
        memory.trip_ns, memory.rule, memory.failures = now, rule, 0
        memory.respond, memory.rebuild = respond or self.order, rebuild
        memory.expires_ns = memory.reason = None
        event, command = self._respond(now)
        evidence = {**evidence, "command": command.id, "respond": list(memory.respond)}
        opened = msgspec.structs.replace(
            event, what="trip", rule=rule, evidence=evidence, took_ns=took_ns
        )
        return [opened, command]

    def answer(self, event: Event) -> list[Output]:
        """The worker's answer to the command that is waited for; any other changes nothing."""
        memory, now = self.memory, event.ts_ns
        if memory.waiting_for is None or event.evidence.get("id") != memory.waiting_for:
            return []
        memory.waiting_for = None
        if refused := event.evidence.get("refused"):
            return self._fail(now, f"{event.what} was refused: {refused}")
        if event.what == "respond":
            if memory.rebuild or event.evidence.get("fits") is False:
                return self._rebuild(now, _why_rebuild(event, memory.rebuild))
            return self._verify(now, "the responses made room")
        if event.what == "rebuild":
            if event.evidence.get("ok") is False or event.evidence.get("error"):
                return self._fail(now, f"rebuild failed: {event.evidence.get('error')}")
            memory.rebuild = False
            return self._verify(now, "rebuilt")
        if event.what == "verify":
            if passed(event) and memory.rebuild:
                # A rule that asks for a rebuild held while the answers were checked.
                return self._rebuild(now, "the rule asks for it")
            if passed(event):
                return self._half_open(now, event)
            return self._fail(now, "verification found wrong answers")
        return []

    def request(self, now: int, completed: bool, calm: bool) -> list[Output]:
        """A request ended while traffic is being tried again.

        ``calm``: no rule of this target holds and its telemetry is fresh.
        """
        memory = self.memory
        if memory.state != "half_open":
            return []
        if not completed:
            return self._fail(now, "a request failed while half open")
        memory.completed += 1
        return self._close(now) if calm else []

    def oom(self, now: int) -> list[Output]:
        """Memory ran out: while half open that is a failed recovery."""
        if self.memory.state == "half_open":
            return self._fail(now, "out of memory while half open")
        return []

    def expire(self, calm: bool, record_ns: int) -> list[Output]:
        """The deadline has passed; what follows has the deadline's own time.

        ``record_ns`` is when it was noticed: a command goes out then, and its answer gets its
        whole time from there, so that a gap in the telemetry is not a row of failures.
        """
        memory, now = self.memory, self.deadline_ns or 0
        self._sent_ns = record_ns
        if memory.state == "closed":
            return [self._enter(now, "unknown", "state", {"reason": "no rule has fresh inputs"})]
        if memory.state == "verifying":
            return self._fail(now, "no verdict before the deadline")
        if memory.state == "half_open":
            if calm and memory.completed:
                return self._close(now, enough=True)
            reason = "a rule holds or inputs are stale" if memory.completed else "no traffic"
            return self._retry(now, f"half open until the deadline: {reason}", memory.failures)
        if memory.state == "isolated":
            return self._verify(now, "the hold has expired")
        if memory.step == "backoff" and not memory.failures:
            return self._verify(now, "trying again after the back-off")
        if memory.step == "backoff":
            return self._rebuild(now, "trying again after the back-off")
        if memory.step == "expiry":
            return self._verify(now, "the manual trip has expired")
        return self._fail(now, f"no answer to {memory.step} before the deadline")

    def let_go(self, now: int) -> list[Output]:
        """The breaker is switched off: traffic is no longer held, and nobody has verified.

        The target stays open: should the breaker be switched on again, it verifies first. What
        a person isolated stays isolated.
        """
        memory = self.memory
        if memory.state not in ("open", "verifying", "half_open"):
            return []
        memory.waiting_for, memory.verified_ns, memory.failures = None, None, 0
        command = self._command("admit", {"share": 1.0})
        evidence = {"reason": "switched off: traffic is admitted without verification"}
        event = self._enter(now, "open", "state", evidence, step="backoff", deadline=now)
        return [event, command]

    def order_by_hand(self, event: Event) -> list[Output]:
        """A person's trip, hold, reset or verify, with a reason and perhaps an expiry."""
        memory, now = self.memory, event.ts_ns
        action = event.evidence.get("action")
        if action == "verify":  # only asked for: the verdict is an event, and no state changes
            calm = memory.state in ("closed", "unknown", "half_open")
            return [self._command("verify", {})] if calm else []
        expires = event.evidence.get("expires_ns")
        evidence = {"by": "hand", "reason": event.evidence.get("reason"), "expires_ns": expires}
        memory.reason, memory.expires_ns = evidence["reason"], expires
        if action == "reset":
            memory.reset_ns, memory.failures = now, 0
            if memory.state in ("closed", "unknown"):
                return [self._event(now, "state", memory.state, {**evidence, "reset": True})]
            return self._verify(now, "reset by hand", evidence)
        if action == "hold":
            command = self._command("admit", {"share": 0.0})
            memory.waiting_for = None
            return [self._enter(now, "isolated", "isolate", evidence, deadline=expires), command]
        if action == "trip" and memory.state in ("closed", "unknown", "half_open"):
            memory.trip_ns, memory.rule, memory.failures = now, "by_hand", 0
            memory.respond, memory.rebuild = self.order, False
            if expires is not None:
                command = self._command("admit", {"share": 0.0})
                opened = self._enter(
                    now, "open", "trip", evidence, step="expiry", deadline=expires, rule="by_hand"
                )
                return [opened, command]
            event_, command = self._respond(now)
            return [
                msgspec.structs.replace(
                    event_, what="trip", rule="by_hand", evidence={**evidence, "id": command.id}
                ),
                command,
            ]
        return []

    def _respond(self, now: int) -> tuple[Event, Command]:
        settings = self.settings
        command = self._command("respond", {"order": list(self.memory.respond)})
        self.memory.waiting_for = command.id
        event = self._enter(
            now, "open", "state", {}, step="respond",
            deadline=self._after(now, settings.respond_deadline_s),
        )  # fmt: skip
        return event, command

    def _rebuild(self, now: int, reason: str) -> list[Output]:
        command = self._command("rebuild", {"reason": reason})
        self.memory.waiting_for = command.id
        event = self._enter(
            now, "open", "state", {"reason": reason, "command": command.id}, step="rebuild",
            deadline=self._after(now, self.settings.rebuild_deadline_s),
        )  # fmt: skip
        return [event, command]

    def _verify(self, now: int, reason: str, more: dict[str, Any] | None = None) -> list[Output]:
        command = self._command("verify", {})
        self.memory.waiting_for = command.id
        event = self._enter(
            now, "verifying", "state", {**(more or {}), "reason": reason, "command": command.id},
            deadline=self._after(now, self.settings.verify_deadline_s),
        )  # fmt: skip
        return [event, command]

    def _half_open(self, now: int, verified: Event) -> list[Output]:
        settings = self.settings
        self.memory.verified_ns, self.memory.completed = now, 0
        command = self._command("admit", {"share": settings.half_open_share})
        evidence = {
            "verdict": verified.evidence.get("verdict"),
            "checks": verified.evidence.get("checks"),
            "share": settings.half_open_share,
            "requests_needed": settings.half_open_requests,
            "command": command.id,
        }
        event = self._enter(
            now, "half_open", "half_open", evidence,
            deadline=self._after(now, settings.half_open_deadline_s),
        )  # fmt: skip
        return [event, command]

    def _close(self, now: int, enough: bool = False) -> list[Output]:
        memory = self.memory
        if memory.verified_ns is None:
            return []
        if memory.completed < self.settings.half_open_requests and not enough:
            return []
        command = self._command("admit", {"share": 1.0})
        evidence = {
            "requests_completed": memory.completed,
            "requests_needed": self.settings.half_open_requests,
            "open_s": (now - memory.trip_ns) * 1e-9,
            "command": command.id,
        }
        memory.verified_ns, memory.closed_ns = None, now
        event = self._enter(now, "closed", "close", evidence)
        memory.rule, memory.failures = None, 0
        memory.known_until_ns = max(memory.known_until_ns, now + 1)
        return [event, command]

    def _fail(self, now: int, reason: str) -> list[Output]:
        return self._retry(now, reason, self.memory.failures + 1)

    def _retry(self, now: int, reason: str, failures: int) -> list[Output]:
        """Open again and wait, longer each time; after the last failure only a person helps."""
        memory, settings = self.memory, self.settings
        memory.failures, memory.waiting_for, memory.verified_ns = failures, None, None
        command = self._command("admit", {"share": 0.0})
        evidence: dict[str, Any] = {
            "reason": reason, "failures": failures, "max_failures": settings.max_failures,
        }  # fmt: skip
        if failures and failures >= settings.max_failures:
            evidence["next"] = f"a person is needed: mmctl breaker reset {self.target} --reason …"
            return [self._enter(now, "isolated", "isolate", evidence), command]
        wait = min(settings.backoff_max_s, settings.backoff_s * 2 ** max(0, failures - 1))
        wait *= 0.75 + 0.5 * self._draw()
        evidence["backoff_s"] = wait
        event = self._enter(
            now, "open", "state", evidence, step="backoff", deadline=self._after(now, wait)
        )
        return [event, command]

    def _after(self, now: int, seconds: float) -> int:
        return max(now, self._sent_ns) + round(seconds * 1e9)

    def _draw(self) -> float:
        """A number in [0, 1) that a replay draws again."""
        key = f"{self.target}:{self.memory.trip_ns}:{self.memory.failures}"
        return zlib.crc32(key.encode()) / 2**32

    def _command(self, action: str, args: dict[str, Any]) -> Command:
        self.memory.commands += 1
        identity = f"{self.target}:{self.memory.trip_ns}:{self.memory.commands}"
        return Command(id=identity, device=self.target, action=action, args=args)

    def _enter(
        self, now: int, state: State, what: str, evidence: dict[str, Any], *, step: Step = "",
        deadline: int | None = None, rule: str | None = None,
    ) -> Event:  # fmt: skip
        memory = self.memory
        evidence = {**evidence, "from": memory.state}
        if deadline is not None:
            evidence["deadline_s"] = (deadline - now) / 1e9
        memory.state, memory.step = state, step
        memory.since_ns, memory.deadline_ns = now, deadline
        return self._event(now, what, state, evidence, rule=rule)

    def _event(
        self, now: int, what: str, state: str, evidence: dict[str, Any], *,
        rule: str | None = None, took_ns: int | None = None,
    ) -> Event:  # fmt: skip
        if self.device != self.target:
            evidence = {**evidence, "group": self.target}
        return Event(
            ts_ns=now, node=self.node, what=what, device=self.device, mode=self.mode,
            rule=rule or self.memory.rule, state=state, evidence=evidence, took_ns=took_ns,
        )  # fmt: skip


def passed(event: Event) -> bool:
    """Whether a verification's answer is a pass."""
    return event.evidence.get("verdict") in ("pass", "passed", "consistent", True)


def _why_rebuild(event: Event, asked: bool) -> str:
    return "the rule asks for it" if asked else "the responses did not make the next batch fit"
