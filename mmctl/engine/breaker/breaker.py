"""The breaker: rules over records, one state machine per target, decisions and commands out.

A pure function of the record sequence. Time is the records' time: a deadline fires, with its
own time, as soon as a record at or after it is seen. A worker's answers and a person's orders
are events in the same sequence, so that a recording replayed decides the same again.
"""

from __future__ import annotations

from typing import Any

import msgspec

from mmctl.engine.breaker.machine import Machine
from mmctl.engine.breaker.past import Past
from mmctl.engine.breaker.reload import with_policy
from mmctl.engine.breaker.state import Command, Output, Target
from mmctl.engine.errors import MmctlError
from mmctl.engine.profiles import Mode, Profile
from mmctl.engine.records import AnyRecord, Event, Pool, Recording, Request
from mmctl.engine.rules.live import Answer, Live
from mmctl.engine.rules.rule import Instance, compile_rules
from mmctl.engine.rules.subjects import Subject
from mmctl.engine.rules.truth import Truth
from mmctl.engine.units import show_bytes

# Written by the breaker; a replay drops these and decides again.
DECISIONS = frozenset(
    {"breaker", "trip", "clear", "refuse", "state", "half_open", "close", "isolate"}
)
ANSWERS = frozenset({"respond", "rebuild", "verify", "admit"})
# What changes the breaker itself: a replay obeys these as it obeys orders.
CHANGES = frozenset({"mode", "reload"})
# What has not been seen for so long since the first record is not among the sources.
UNSEEN_NS = 10 * 10**9


class Latch(msgspec.Struct):
    """Whether a rule holds for a subject, since when, and whether it has already tripped."""

    truth: bool | None = None
    since_ns: int | None = None
    tripped: bool = False
    not_before_ns: int = 0


class Breaker:
    """``step`` takes a record and returns the events and commands that follow from it."""

    def __init__(self, profile: Profile, mode: Mode | None = None) -> None:
        self.profile = profile
        self._mode: Mode = mode or profile.breaker.mode
        self.live = Live(compile_rules(profile.breaker.rules))
        self.machines: dict[str, Machine] = {}
        self.past = Past()
        self._latches: dict[tuple[str, Subject], Latch] = {}
        self._now = 0
        self._begun_ns: int | None = None

    @property
    def mode(self) -> Mode:
        """Off, observe or enforce."""
        return self._mode

    def set_mode(self, mode: Mode, now: int) -> list[Output]:
        """Go on in ``mode``.

        A recovery that is under way is finished in observe mode, for its traffic is held; off
        lets the traffic through at once, and leaves verification to a later mode. An alarm that
        was only observed is acted on in enforce mode if its rule still holds.
        """
        before, self._mode = self._mode, mode
        out: list[Output] = []
        if mode == "off" != before:
            for machine in self.machines.values():
                out += machine.let_go(now)
        if mode == "enforce" != before:
            for latch in self._latches.values():
                latch.tripped = False
        for machine in self.machines.values():
            machine.mode = mode
        return out

    def reload(self, profile: Profile, now: int) -> list[Output]:
        """Go on with another profile: UsageError, and nothing changed, when it has a bad rule.

        States, holds and deadlines stay; so do windows, hold times and alarms of rules that are
        the same. A rule that was changed or is new begins anew.
        """
        rules = compile_rules(profile.breaker.rules)
        self.profile = profile
        out: list[Output] = []
        for instance in self.live.reload(rules):
            latch = self._latches.pop(_key(instance), None)
            if latch is not None and latch.tripped:
                out += self._cleared(instance, now, "the rule was changed or removed")
        for machine in self.machines.values():
            machine.settings, machine.order = profile.breaker, profile.responses.order
        return out

    def step(self, record: AnyRecord) -> list[Output]:
        """What ``record`` leads to; an off breaker evaluates nothing."""
        if isinstance(record, Event) and record.what in CHANGES:
            self._now = max(self._now, record.ts_ns)
            due = [] if self.mode == "off" else self._deadlines(self._now)
            return due + self._change(record)
        if self.mode == "off" or isinstance(record, Recording):
            return []
        if isinstance(record, Event) and record.what in DECISIONS:
            return []
        self._now = max(self._now, record.ts_ns)
        self._begun_ns = self._begun_ns or self._now
        out: list[Output] = []
        if isinstance(record, Event) and record.what == "agent":
            out += self._greeted(record)
        if self.past.targets:
            out += self.recall()
        out += self._deadlines(self._now)
        if isinstance(record, Event):
            out += self._event(record)
        elif isinstance(record, Request) and record.state == "queued":
            for machine in self._serving(record):
                machine.arrive(record.ts_ns)
        elif isinstance(record, Request) and record.state in ("completed", "failed"):
            for machine in self._serving(record):
                calm = self._calm(machine, record.ts_ns)
                out += machine.request(record.ts_ns, record.state == "completed", calm)
        for answer in self.live.step(record):
            out += self._judge(answer, self._now, record)
        return out

    def _greeted(self, event: Event) -> list[Output]:
        """An agent says which process serves its device; a recovery of another one is over."""
        changed = self.past.greet(event)
        return [
            output
            for name in changed
            if name in self.machines
            for output in self._replaced(self.machines[name])
        ]

    def _replaced(self, machine: Machine) -> list[Output]:
        for instance in self.live.instances.values():
            latch = self._latches.get(_key(instance))
            if latch is not None and self.live.router.group(instance.subject) == machine.target:
                latch.tripped, latch.since_ns = False, None
        return machine.replaced(self._now)

    def recall(self, unseen: bool = False) -> list[Output]:
        """Go on from what is remembered of the targets that are met by now.

        ``unseen`` True meets all of them: for who knows its targets before their first record.
        """
        if unseen:
            for name, target in self.past.targets.items():
                self.machine(name, target.node)
        met = [self.machines[name] for name in self.past.targets if name in self.machines]
        return [output for machine in met for output in self._recall(machine)]

    def _recall(self, machine: Machine) -> list[Output]:
        target, same = self.past.take(machine.target)
        if target is None:
            return []
        machine.memory, machine.device = target.memory, target.device
        return [] if same else machine.replaced(self._now)

    def targets(self) -> dict[str, Target]:
        """Every target as it is, or as it is remembered where it was not met."""
        now = {
            name: Target(
                node=machine.node, device=machine.device, memory=machine.memory,
                processes=self.past.processes.get(name, {}),
            )
            for name, machine in self.machines.items()
        }  # fmt: skip
        return {**now, **self.past.targets}

    def _change(self, event: Event) -> list[Output]:
        """Another profile, another mode, or both; what cannot be read is refused."""
        out: list[Output] = []
        if event.what == "reload" and event.state != "refused":
            try:
                out += self.reload(with_policy(self.profile, event.evidence), self._now)
            except MmctlError as error:
                evidence = {"refused": str(error)}
                return [msgspec.structs.replace(event, what="refuse", evidence=evidence)]
        if event.mode is not None and event.mode != self.mode:
            out += self.set_mode(event.mode, self._now)
        return out

    def _deadlines(self, now: int) -> list[Output]:
        """Every deadline up to ``now``, the earliest first; one may set another."""
        out: list[Output] = []
        while True:
            due = [
                (machine.deadline_ns, machine.target, machine)
                for machine in self.machines.values()
                if machine.deadline_ns is not None and machine.deadline_ns < now
            ]
            if not due:
                return out
            at, _, machine = min(due, key=lambda item: item[:2])
            out += machine.expire(self._calm(machine, at), now)

    def _event(self, event: Event) -> list[Output]:
        if event.what == "order" and self.mode != "enforce" and not self._ends(event):
            evidence = {**event.evidence, "refused": f"the breaker runs in mode {self.mode}"}
            return [msgspec.structs.replace(event, what="refuse", evidence=evidence)]
        if event.what == "order":
            return self._order(event)
        out: list[Output] = []
        if event.what in ANSWERS:
            for machine in self.machines.values():
                out += machine.answer(event, self._calm(machine, event.ts_ns))
        elif event.what == "oom":
            for machine in self._of_node(event.node):
                if event.device in (None, machine.device, machine.target):
                    out += machine.oom(event.ts_ns)
        return out

    def _ends(self, order: Event) -> bool:
        """Whether an order ends something that an enforcing breaker began."""
        return order.evidence.get("action") == "reset" and any(
            machine.state not in ("closed", "unknown") for machine in self.machines.values()
        )

    def _order(self, event: Event) -> list[Output]:
        """A person's order to one target, or to all; a device stands for its group."""
        name = event.device
        known: dict[str, Target | Machine] = {**self.past.targets, **self.machines}
        if name is None:
            chosen = list(known)
        else:
            group = self.live.router.group(Subject("device", event.node, name))
            chosen = [each for each in (name, group) if each in known][:1]
        if not chosen:
            names = ", ".join(known) or "none yet"
            evidence = {**event.evidence, "refused": f"no target '{name}'; known are: {names}"}
            return [msgspec.structs.replace(event, what="refuse", evidence=evidence)]
        out: list[Output] = []
        for each in chosen:
            if event.evidence.get("action") == "reset" and each not in self.machines:
                out.append(self._reset_unseen(each, event))
                continue
            machine = self.machine(each, known[each].node)
            out += self._recall(machine) + machine.order_by_hand(event)
        return out

    def _reset_unseen(self, name: str, reset: Event) -> Event:
        """A reset of a target that no record has shown: verified once it is met, or forgotten."""
        target = self.past.targets.pop(name)
        seen_ns = self._now - (self._begun_ns or self._now)
        gone = seen_ns >= UNSEEN_NS
        evidence = {
            "by": "hand", "reason": reset.evidence.get("reason"), "group": name,
            "from": target.memory.state,
            "next": "forgotten: no source shows it" if gone else "verified once a source shows it",
        }  # fmt: skip
        if not gone:
            memory = msgspec.structs.replace(
                target.memory, state="open", step="backoff", deadline_ns=self._now, failures=0,
                passes=0, waiting_for=None, verified_ns=None, reset_ns=self._now,
            )  # fmt: skip
            self.past.targets[name] = msgspec.structs.replace(target, memory=memory)
        state = "unknown" if gone else "open"
        return msgspec.structs.replace(
            reset, what="state", state=state, device=target.device, evidence=evidence
        )

    def _judge(self, answer: Answer, now: int, record: AnyRecord) -> list[Output]:
        """Hold times, hysteresis, the cap; then the machine. ``record`` has led to the answer."""
        instance, truth = answer
        latch = self._latches.setdefault(_key(instance), Latch())
        latch.truth = truth
        if truth is None:
            latch.since_ns = None
            return []
        target = self.live.router.group(instance.subject)
        known = target in self.machines or target in self.past.targets
        if not truth and instance.subject.scope == "node" and not known:
            return []  # a node becomes a target once something is wrong with it
        machine = self.machine(target, instance.subject.node)
        recalled = self._recall(machine)
        if machine.device == target and instance.subject.scope == "device":
            machine.device = instance.subject.name.partition("/")[0]
        if now <= machine.memory.reset_ns:
            return recalled
        if truth and instance.rule.settings.quiet_in_recovery and self._recovering(machine, now):
            truth = False
        # What only observes decides nothing about a target, nor whether it is known.
        acts = instance.rule.settings.mode != "observe"
        out = recalled + (machine.known(now, now + instance.max_age_ns) if acts else [])
        if not truth:
            latch.since_ns = None
        if latch.tripped:
            over = instance.clear(now) is True if instance.clear else not truth
            if over:
                latch.tripped = False
                out += self._cleared(instance, now)
            return out
        if not truth:
            return out
        if latch.since_ns is None:
            latch.since_ns = now
        held = now - latch.since_ns
        settings = instance.rule.settings
        if held < settings.hold_s * 1e9 or now < latch.not_before_ns:
            return out
        verdict = instance.verdict(now, truth)
        evidence: dict[str, Any] = {
            "when": settings.when,
            "reason": verdict.reason,
            "inputs": msgspec.to_builtins(verdict.inputs),
            "held_s": held * 1e-9,
            "hold_s": settings.hold_s,
        }
        if isinstance(record, Pool) and any(one.name == "fits" for one in instance.rule.signals):
            evidence |= _lack(record)
        if machine.target != str(instance.subject):
            evidence["group"] = machine.target
        if self.mode == "observe" or settings.mode == "observe":
            latch.tripped = True
            return [*out, self._observed(instance, machine, now, evidence)]
        if machine.state == "closed" and (refusal := self._cap()):
            latch.not_before_ns = now + round(self.profile.breaker.backoff_s * 1e9)
            evidence["refused"] = refusal
            event = self._plain(instance, machine, now, "refuse", evidence)
            return [*out, event]
        latch.tripped = True
        machine.device = instance.subject.name.partition("/")[0] or machine.target
        respond = tuple(name for name in settings.respond if name != "rebuild")
        return out + machine.trip(
            now, instance.rule.name, evidence, respond, "rebuild" in settings.respond
        )

    def _cap(self) -> str | None:
        """Why one more target may not be opened; the first one always may."""
        machines = self.machines.values()
        busy = sum(machine.state not in ("closed", "unknown") for machine in machines)
        share = self.profile.breaker.max_open_ratio
        if busy + 1 > max(1, int(share * len(self.machines))):
            return f"{busy} of {len(self.machines)} targets are open; at most {share:.0%} may be"
        return None

    def _recovering(self, target: Machine, now: int) -> bool:
        """Whether what a rule sees on this node may be our own doing, such as held admission."""
        settle_ns = round(self.profile.breaker.settle_s * 1e9)
        return any(
            machine.state in ("open", "verifying", "half_open")
            or (machine.memory.closed_ns is not None and now - machine.memory.closed_ns < settle_ns)
            for machine in self._of_node(target.node)
        )

    def _calm(self, machine: Machine, now: int) -> Truth:
        """No rule of ``machine`` holds; None where none is known by fresh inputs."""
        if now > machine.memory.known_until_ns:
            return None
        return not any(
            self._latches[_key(instance)].truth
            for instance in self.live.instances.values()
            if _key(instance) in self._latches
            and instance.rule.settings.mode != "observe"
            and self.live.router.group(instance.subject) == machine.target
        )

    def machine(self, target: str, node: str) -> Machine:
        """The state machine of ``target``, made when it is first met."""
        if target not in self.machines:
            machine = Machine(target, node, self.profile.breaker, self.profile.responses.order)
            machine.mode = self.mode
            self.machines[target] = machine
        return self.machines[target]

    def _serving(self, request: Request) -> list[Machine]:
        """The target that served a request; where that is not told, any of its node."""
        if request.instance is not None:
            machine = self.machines.get(request.instance)
            return [machine] if machine else []
        return self._of_node(request.node)

    def _of_node(self, node: str) -> list[Machine]:
        return [machine for machine in self.machines.values() if machine.node == node]

    def _observed(
        self, instance: Instance, machine: Machine, now: int, evidence: dict[str, Any]
    ) -> Event:
        wanted = list(instance.rule.settings.respond) or list(machine.order)
        return self._plain(
            instance, machine, now, "trip", {**evidence, "would_respond": wanted}, "observe"
        )

    def _cleared(self, instance: Instance, now: int, why: str = "") -> list[Output]:
        settings = instance.rule.settings
        verdict = instance.verdict(now, False)
        evidence = {
            "condition": why or settings.clear or f"not ({settings.when})",
            "reason": why or (f"{settings.clear} holds" if settings.clear else verdict.reason),
            "inputs": msgspec.to_builtins(verdict.inputs),
        }
        observed = self.mode == "observe" or settings.mode == "observe"
        mode: Mode = "observe" if observed else "enforce"
        subject = instance.subject
        machine = self.machine(self.live.router.group(subject), subject.node)
        return [self._plain(instance, machine, now, "clear", evidence, mode)]

    def _plain(
        self, instance: Instance, machine: Machine, now: int, what: str,
        evidence: dict[str, Any], mode: Mode = "enforce",
    ) -> Event:  # fmt: skip
        return Event(
            ts_ns=now, node=instance.subject.node, what=what,
            device=instance.subject.name.partition("/")[0] or None, rule=instance.rule.name,
            mode=mode, state=machine.state, evidence=evidence,
        )  # fmt: skip


def _lack(pool: Pool) -> dict[str, Any]:
    """What the next batch lacks: in words as the reason, and its figures."""
    dry_run = pool.fits
    if dry_run is None or dry_run.fits or dry_run.need_bytes is None:
        return {}
    device = ""
    if pool.device_free_bytes is not None:
        device = f" and {show_bytes(pool.device_free_bytes)} on the device"
    told = (
        f"{dry_run.batch or 'the next batch'} does not fit: its allocation "
        f"{dry_run.allocations + 1} needs {show_bytes(dry_run.need_bytes)}; free now are "
        f"{show_bytes(pool.free_bytes)} in the pool (largest block "
        f"{show_bytes(pool.largest_free_bytes)}){device}"
    )
    figures = {
        "need_bytes": dry_run.need_bytes, "free_bytes": pool.free_bytes,
        "largest_free_bytes": pool.largest_free_bytes,
        "device_free_bytes": pool.device_free_bytes, "cause": dry_run.cause,
        "batch": dry_run.batch,
    }  # fmt: skip
    return {"reason": f"{told} ({dry_run.cause})" if dry_run.cause else told, "lack": figures}


def _key(instance: Instance) -> tuple[str, Subject]:
    return instance.rule.name, instance.subject


__all__ = ["ANSWERS", "CHANGES", "DECISIONS", "Breaker", "Command", "Latch"]
