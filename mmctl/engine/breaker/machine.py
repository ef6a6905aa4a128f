"""The state machine of one target: a device, or all devices of one serving instance.

    unknown ⇄ closed → open → verifying → half_open → closed
                        ↑________|____________|          isolated: by hand, or after N failures

A pure function of what it is told and when: it reads no clock, draws no random number (the
jitter of a back-off is a hash) and does nothing by itself. Every waiting state has a deadline.
Nothing closes without a passed verification, and nothing is acted on while data is unknown.

Half open without a completed request, nothing speaks for or against the target: taking the small
share away again would help nobody, so it stays half open and is verified again, at intervals that
double up to the longest back-off. The canaries are then the only requests there are: after so many
passed verifications in a row, with fresh telemetry, no rule that holds and no request that came
and was not served, the target closes.
"""

from __future__ import annotations

import zlib
from typing import Any

import msgspec

from mmctl.engine import profiles
from mmctl.engine.breaker.state import Command, Memory, Output, State, Step
from mmctl.engine.records import Event
from mmctl.engine.rules.truth import Truth


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
        """Where the target stands; ``unknown`` until a rule that acts could be decided."""
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
        self._tripped(now, rule)
        memory.respond, memory.rebuild = respond or self.order, rebuild
        memory.reason = None
        event, command = self._respond(now)
        evidence = {**evidence, "command": command.id, "respond": list(memory.respond)}
        opened = msgspec.structs.replace(
            event, what="trip", rule=rule, evidence=evidence, took_ns=took_ns
        )
        return [opened, command]

    def answer(self, event: Event, calm: Truth) -> list[Output]:
        """The worker's answer to the command that is waited for; any other changes nothing.

        ``calm``: no rule of this target holds; None where its telemetry is stale.
        """
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
            if passed(event) and memory.state == "half_open":
                return self._passed_again(now, calm)
            if passed(event):
                return self._half_open(now, event)
            return self._fail(now, "verification found wrong answers")
        return []

    def arrive(self, now: int) -> None:
        """A request came; while half open one in so many is admitted and should be completed."""
        memory = self.memory
        if memory.state != "half_open":
            return
        memory.arrived += 1
        if memory.tried_ns is None and memory.arrived * self.settings.half_open_share >= 1:
            memory.tried_ns = now

    def request(self, now: int, completed: bool, calm: Truth) -> list[Output]:
        """A request ended while traffic is being tried again; ``calm`` as for ``answer``."""
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

    def expire(self, calm: Truth, record_ns: int) -> list[Output]:
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
            return self._still_half_open(now, calm)
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
        memory.waiting_for, memory.verified_ns = None, None
        memory.failures = memory.passes = 0
        command = self._command("admit", {"share": 1.0})
        evidence = {"reason": "switched off: traffic is admitted without verification"}
        event = self._enter(now, "open", "state", evidence, step="backoff", deadline=now)
        return [event, command]

    def replaced(self, now: int) -> list[Output]:
        """Another process serves the target: what was wrong with the old one is over with it.

        What a person ordered, and what only a person may end, holds for the new one as well.
        """
        memory = self.memory
        if memory.state in ("closed", "unknown"):
            return []
        if memory.state == "isolated" or memory.step == "expiry":
            evidence = {"reason": "another process serves the target: it is held too"}
            event = self._event(now, "state", memory.state, evidence)
            return [event, self._command("admit", {"share": 0.0})]
        evidence = {"reason": "another process serves the target: the recovery of the old is over"}
        event = self._enter(now, "unknown", "state", evidence)
        self.memory = Memory(
            since_ns=now, trip_ns=memory.trip_ns, commands=memory.commands,
            reset_ns=memory.reset_ns,
        )  # fmt: skip
        return [event]

    def order_by_hand(self, event: Event) -> list[Output]:
        """A person's trip, hold, reset or verify, with a reason and perhaps an expiry.

        A trip or a verification is refused while a recovery is under way: that goes first.
        """
        memory, now = self.memory, event.ts_ns
        action = event.evidence.get("action")
        if action in ("trip", "verify") and memory.state in ("open", "verifying", "isolated"):
            refused = f"{self.target} is {memory.state}: its recovery goes first"
            return [
                self._event(now, "refuse", memory.state, {**event.evidence, "refused": refused})
            ]
        if action == "verify":  # only asked for: the verdict is an event, and no state changes
            return [self._command("verify", {})]
        expires = event.evidence.get("expires_ns")
        evidence = {"by": "hand", "reason": event.evidence.get("reason"), "expires_ns": expires}
        memory.reason = evidence["reason"]
        if action == "reset":
            memory.reset_ns = now
            memory.failures = memory.passes = 0
            if memory.state in ("closed", "unknown"):
                return [self._event(now, "state", memory.state, {**evidence, "reset": True})]
            return self._verify(now, "reset by hand", evidence)
        if action == "hold":
            command = self._command("admit", {"share": 0.0})
            memory.waiting_for, memory.passes = None, 0
            return [self._enter(now, "isolated", "isolate", evidence, deadline=expires), command]
        if action == "trip":
            self._tripped(now, "by_hand")
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

    def _tripped(self, now: int, rule: str) -> None:
        """Forget the recovery before, and what it waited for."""
        memory = self.memory
        memory.trip_ns, memory.rule, memory.waiting_for = now, rule, None
        memory.failures = memory.passes = 0

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
        settings, memory = self.settings, self.memory
        memory.verified_ns, memory.tried_ns = now, None
        memory.completed = memory.arrived = 0
        memory.passes += 1
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

    def _still_half_open(self, now: int, calm: Truth) -> list[Output]:
        """The deadline has passed, and the requests that are needed were not completed."""
        memory = self.memory
        if memory.waiting_for is not None:
            return self._fail(now, "no verdict before the deadline")
        if calm and memory.completed:
            return self._close(now, enough=True)
        if calm is False:
            reason = "half open until the deadline: a rule holds"
            return self._retry(now, reason, memory.failures)
        due_ns = round(self.settings.half_open_deadline_s * 1e9)
        tried = memory.tried_ns is not None and now - memory.tried_ns >= due_ns
        if tried and not memory.completed and self._verified_enough():
            reason = f"{memory.arrived} requests came while half open and none was completed"
            return self._fail(now, reason)
        command = self._command("verify", {})
        memory.waiting_for = command.id
        reason = "inputs are stale" if calm is None else "no request was completed"
        evidence = {"reason": f"verified again: {reason}", "command": command.id}
        return [self._stay(now, evidence, self.settings.verify_deadline_s), command]

    def _passed_again(self, now: int, calm: Truth) -> list[Output]:
        """A verification while half open has passed."""
        memory, settings = self.memory, self.settings
        memory.verified_ns = now
        memory.passes += 1
        nothing_to_try = memory.tried_ns is None and self._verified_enough()
        if calm and (memory.completed or nothing_to_try):
            return self._close(now, enough=True)
        wait = self._longer(settings.half_open_deadline_s, memory.passes - 1)
        return [self._stay(now, {"reason": "the verification has passed"}, wait)]

    def _verified_enough(self) -> bool:
        return self.memory.passes >= self.settings.half_open_verifications

    def _stay(self, now: int, evidence: dict[str, Any], wait_s: float) -> Event:
        """Go on half open, with another deadline."""
        deadline = self.memory.deadline_ns = self._after(now, wait_s)
        evidence |= {
            "verifications_passed": self.memory.passes,
            "verifications_needed": self.settings.half_open_verifications,
            "deadline_s": (deadline - now) / 1e9,
        }
        return self._event(now, "state", "half_open", evidence)

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
            "verifications_passed": memory.passes,
            "open_s": (now - memory.trip_ns) * 1e-9,
            "command": command.id,
        }
        memory.verified_ns, memory.closed_ns, memory.waiting_for = None, now, None
        event = self._enter(now, "closed", "close", evidence)
        memory.rule = None
        memory.failures = memory.passes = 0
        memory.known_until_ns = max(memory.known_until_ns, now + 1)
        return [event, command]

    def _fail(self, now: int, reason: str) -> list[Output]:
        self.memory.passes = 0
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
        wait = self._longer(settings.backoff_s, max(failures, memory.passes) - 1)
        wait *= 0.75 + 0.5 * self._draw()
        evidence["backoff_s"] = wait
        event = self._enter(
            now, "open", "state", evidence, step="backoff", deadline=self._after(now, wait)
        )
        return [event, command]

    def _longer(self, wait_s: float, times: int) -> float:
        """``wait_s`` doubled so many times, no longer than the longest back-off."""
        longest_s = max(wait_s, self.settings.backoff_max_s)
        return min(longest_s, wait_s * 2.0 ** min(max(times, 0), 64))

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
