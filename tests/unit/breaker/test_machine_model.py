"""Model checking: whatever comes in whatever order, the breaker keeps its promises.

No path closes without a passed verification, none stays in verifying or half open past its
deadline, and nothing is acted on while all inputs are unknown. From wherever a run has ended, a
healthy target without traffic comes to rest; and a replay of all of it decides alike.
"""

from __future__ import annotations

import msgspec
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from mmctl.engine import profiles
from mmctl.engine.breaker.breaker import Breaker
from mmctl.engine.breaker.state import Command, Output
from mmctl.engine.records import AnyRecord, Event, Fits, Pool, Request

SECOND = 10**9
LOADED = profiles.load("default").profile
RULES = tuple(rule for rule in LOADED.breaker.rules if rule.name == "fits")
PROFILE = msgspec.structs.replace(
    LOADED,
    breaker=msgspec.structs.replace(
        LOADED.breaker, rules=RULES, half_open_requests=2, verify_deadline_s=8.0,
        half_open_deadline_s=9.0, respond_deadline_s=4.0, rebuild_deadline_s=6.0,
        backoff_max_s=40.0,
    ),
)  # fmt: skip


class Checked(RuleBasedStateMachine):
    """Feeds a breaker and watches every decision that it makes."""

    def __init__(self) -> None:
        super().__init__()
        self.breaker = Breaker(PROFILE, "enforce")
        self.now = 1_790_000_000 * SECOND
        self.known_until = 0
        self.verified = False
        self.pending: Command | None = None
        self.entered: dict[str, int] = {}
        self.state = "unknown"
        self.told: list[tuple[AnyRecord, list[Output]]] = []
        self.commands: list[tuple[int, Command]] = []

    def feed(self, record: AnyRecord) -> None:
        outputs = self.breaker.step(record)
        self.told.append((record, outputs))
        for output in outputs:
            if isinstance(output, Command):
                self.commands.append((self.now, output))
                assert self.state != "unknown", "nothing is commanded while all is unknown"
                if output.action != "admit":
                    self.pending = output
                continue
            self.decided(output)

    def decided(self, event: Event) -> None:
        if event.what == "trip" and event.rule == "fits":
            assert self.now <= self.known_until, "a trip on stale data"
        if event.what == "half_open":
            assert self.verified, "half open without a passed verification"
        if event.what == "close":
            assert self.verified and self.state == "half_open", "closed without verification"
            assert event.ts_ns <= self.known_until, "closed on stale data"
        if event.state == "closed" and self.state not in ("closed", "unknown"):
            assert event.what == "close"
        if event.state != self.state:
            self.state = event.state or self.state
            if self.state in ("open", "verifying"):
                self.verified = False
            self.entered[self.state] = self.now

    @rule(fits=st.booleans(), after=st.sampled_from([0.1, 0.5, 1.0]))
    def telemetry(self, fits: bool, after: float) -> None:
        self.now += round(after * SECOND)
        self.known_until = self.now + 2 * SECOND
        self.feed(
            Pool(
                ts_ns=self.now, node="n", device="gpu0", reserved_bytes=1, allocated_bytes=1,
                free_bytes=0, largest_free_bytes=0, releasable_bytes=0, fragmentation_ratio=0.0,
                fits=Fits(fits=fits, allocations=1, peak_bytes=1),
            )
        )  # fmt: skip

    @rule(
        state=st.sampled_from(["queued", "completed", "failed"]),
        after=st.sampled_from([0.1, 1.0, 5.0]),
    )
    def request(self, state: str, after: float) -> None:
        self.now += round(after * SECOND)
        self.feed(Request(ts_ns=self.now, node="n", id="r", state=state))

    @rule(after=st.sampled_from([0.5, 3.0, 7.0, 30.0, 400.0]))
    def silence(self, after: float) -> None:
        self.now += round(after * SECOND)
        self.feed(Event(ts_ns=self.now, node="n", what="notice"))

    @rule()
    def oom(self) -> None:
        self.feed(Event(ts_ns=self.now, node="n", what="oom", device="gpu0"))

    @precondition(lambda self: self.pending is not None)
    @rule(good=st.booleans(), after=st.sampled_from([0.0, 1.0, 3.0]))
    def answer(self, good: bool, after: float) -> None:
        command, self.pending = self.pending, None
        assert command is not None
        self.now += round(after * SECOND)
        evidence = {"id": command.id, "fits": good, "verdict": "pass" if good else "fail"}
        waiting = self.breaker.machines["gpu0"].memory
        due = waiting.waiting_for == command.id and (
            waiting.deadline_ns is None or self.now <= waiting.deadline_ns
        )
        if command.action == "verify" and good and due:
            self.verified = True
        self.feed(
            Event(
                ts_ns=self.now, node="n", what=command.action, device="gpu0", evidence=evidence
            )
        )  # fmt: skip

    @rule(action=st.sampled_from(["trip", "hold", "reset", "verify"]), expires=st.booleans())
    def order(self, action: str, expires: bool) -> None:
        evidence = {
            "action": action, "reason": "model",
            "expires_ns": self.now + 20 * SECOND if expires else None,
        }  # fmt: skip
        was, self.known_until = self.known_until, max(self.known_until, self.now)
        if self.state == "unknown" and self.breaker.machines:
            self.state = "by hand"  # a person may act on what the breaker does not know
        self.feed(Event(ts_ns=self.now, node="n", what="order", device="gpu0", evidence=evidence))
        if self.state == "by hand":
            self.state = self.breaker.machines["gpu0"].state
        self.known_until = was

    @invariant()
    def deadlines_are_kept(self) -> None:
        machine = self.breaker.machines.get("gpu0")
        if machine is None:
            return
        assert machine.state == self.state
        if machine.state in ("verifying", "half_open") or machine.memory.step:
            assert machine.deadline_ns is not None and machine.deadline_ns >= self.now
        if machine.state == "isolated":
            assert machine.memory.waiting_for is None
        assert machine.memory.failures <= PROFILE.breaker.max_failures

    def teardown(self) -> None:
        if "gpu0" in self.breaker.machines:
            self.comes_to_rest()
        self.a_replay_decides_alike()

    def comes_to_rest(self) -> None:
        """Good telemetry, every check passes, nobody asks for anything."""
        machine = self.breaker.machines["gpu0"]
        begun_ns = self.now
        while self.now < begun_ns + 400 * SECOND:
            if self.pending is not None:
                self.answer(good=True, after=0.5)
            self.telemetry(fits=True, after=1.5)
        assert machine.state in ("closed", "isolated") and machine.memory.waiting_for is None
        if machine.state == "isolated":
            assert machine.memory.failures or machine.deadline_ns is None, "held by hand"
        sent = [(at, command) for at, command in self.commands if at > begun_ns]
        assert len(sent) <= 16, "few actions on the way"
        assert not [at for at, _ in sent if at > begun_ns + 200 * SECOND], "none once at rest"
        actions = [command.action for _, command in self.commands]
        trips = sum(
            isinstance(output, Event) and output.what == "trip" and "also" not in output.evidence
            for _, outputs in self.told
            for output in outputs
        )
        assert actions.count("respond") <= trips, "a trip is responded to once"
        identities = [command.id for _, command in self.commands]
        assert len(set(identities)) == len(identities)

    def a_replay_decides_alike(self) -> None:
        again = Breaker(PROFILE, "enforce")
        for record, outputs in self.told:
            assert again.step(record) == outputs


TestMachine = Checked.TestCase
TestMachine.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
