"""The demo in virtual time: the same arrivals, plans and allocation lists on the same pool,
without computing anything, so that thousands of seeds can be tried.

A step lasts 100 ms. Responses free and take what the live ones do; answers of canaries are not
computed: a verification takes its steps and passes.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import msgspec

from mmctl.demo.plan import Tapes, kept_tapes
from mmctl.demo.rows import Rows
from mmctl.demo.server import Plan, Session
from mmctl.demo.twin import Empty, Moved, Storage, VirtualServer
from mmctl.engine.breaker.breaker import Breaker
from mmctl.engine.breaker.state import Command
from mmctl.engine.memory.allocator import OutOfMemory
from mmctl.engine.model import Config
from mmctl.engine.profiles import Mode, Profile
from mmctl.engine.records import (
    AnyRecord,
    Event,
    Fits,
    Memory,
    Pool,
    Request,
    Serving,
)  # fmt: skip

STEP_NS = 100_000_000
START_NS = 1_700_000_000 * 10**9
POOL_BYTES = 256 * 2**20
STEPS = {"calm": 1200, "burst": 400, "fragmentation": 400, "leak": 600, "stall": 400}
CANARY_STEPS = 14
REBUILD_STEPS = 25
QUANTIZED = 0.5  # of half precision, and a scale per channel


class Outcome(NamedTuple):
    """How one run ended, at times of its records.

    ``trips`` are those of the rules that act, with their names; ``closed`` is whether the target
    closed again after one of them; under stress that goes on it may have tripped again.
    """

    oom_ns: int | None
    trips: tuple[tuple[int, str], ...]
    closed: bool
    completed: int
    end_ns: int


class VirtualRun:
    """One seed of one scenario under a breaker, step by step."""

    def __init__(
        self, tapes: Tapes, weights: tuple[int, ...], scenario: str, seed: int, profile: Profile,
        mode: Mode, fast: bool | None = None,
    ) -> None:  # fmt: skip
        self.scenario = scenario
        self.breaker = Breaker(profile, mode)
        self.acting = acting(profile)
        self.weights = weights
        self.tapes = tapes
        self.server = VirtualServer(tapes, scenario, seed, Rows(POOL_BYTES, weights, fast))
        self.now_ns = START_NS
        self.trips: list[tuple[int, str]] = []
        self.closed = False
        self.answers: list[tuple[int, Event]] = []  # step at which each is due
        self.tokens: list[int] = []
        self.left_alone: VirtualServer | None = None  # as it was before the first command
        self._planned = 0  # the last step of which the plan was made

    def run(self) -> Outcome:
        """Until the scenario's last step, or until memory is out."""
        oom_ns = None
        for _ in range(STEPS[self.scenario]):
            self.now_ns += STEP_NS
            try:
                finished = self.server.execute()
            except OutOfMemory:
                oom_ns = self.now_ns
                break
            self._tell(finished)
        return Outcome(oom_ns, tuple(self.trips), self.closed, self.server.completed, self.now_ns)

    def truth(self, ended: Outcome) -> int | None:
        """When the seed runs out of memory if nobody acts; ``ended`` is this run's own end.

        Up to the first command a run is the same whether somebody watches or not.
        """
        server = self.left_alone
        if server is None:
            return ended.oom_ns
        while server.step_number < STEPS[self.scenario]:
            try:
                server.execute()
            except OutOfMemory:
                return START_NS + (server.step_number + 1) * STEP_NS
            server.arrive()
            server.plan()
        return None

    def _tell(self, finished: list[Session]) -> None:
        server = self.server
        due = [event for at, event in self.answers if at <= server.step_number]
        self.answers = [item for item in self.answers if item[0] > server.step_number]
        for event in due:
            self._give(msgspec.structs.replace(event, ts_ns=self.now_ns))
        for segment in server.pool.device_events():
            self._give(
                Memory(
                    ts_ns=self.now_ns, node="virtual", device="cpu0",
                    action=segment.action,  # type: ignore[arg-type]
                    address=segment.address, size_bytes=segment.size,
                )
            )  # fmt: skip
        for session in finished:
            seconds = (server.step_number - session.arrived_step) * STEP_NS / 1e9
            self._give(
                Request(
                    ts_ns=self.now_ns, node="virtual", id=session.id, state="completed",
                    images=len(session.arrival.images), stages={"e2e_s": seconds},
                )
            )  # fmt: skip
        server.arrive()
        server.plan()
        self._planned = server.step_number
        self._bring_back()
        self._give(self._pool(server.trial(server.planned).record()))
        self._give(self._serving())

    def _give(self, record: AnyRecord) -> None:
        for output in self.breaker.step(record):
            if isinstance(output, Command):
                if self.left_alone is None:
                    self._leave_alone()
                self._command(output)
            elif output.what == "trip" and output.rule in self.acting:
                self.trips.append((output.ts_ns, output.rule or ""))
            elif output.what == "close":
                self.closed = True

    def _leave_alone(self) -> None:
        """Keep the server as it goes on without a breaker from here."""
        self.left_alone = self.server.twin()
        if self._planned < self.server.step_number:
            self.left_alone.arrive()
            self.left_alone.plan()

    def _pool(self, fits: Fits) -> Pool:
        server = self.server
        pool = server.pool
        free, largest, releasable = pool.free_figures()
        return Pool(
            ts_ns=self.now_ns, node="virtual", device="cpu0",
            reserved_bytes=pool.reserved_bytes, allocated_bytes=pool.reserved_bytes - free,
            free_bytes=free, largest_free_bytes=largest, releasable_bytes=releasable,
            capacity_bytes=POOL_BYTES, device_free_bytes=POOL_BYTES - pool.reserved_bytes,
            fragmentation_ratio=1 - largest / free if free else 0.0,
            vision_bytes=pool.held["vision"], text_bytes=pool.held["text"],
            other_bytes=pool.held["other"], fits=fits,
            vision_tokens=sum(s.vision_tokens for s in server.sessions if s.vision is not None)
            + sum(s.vision_tokens for s in server.planned.batch),
            text_tokens=sum(s.cache.length for s in server.sessions if s.cache),
            basis="modelled",
        )  # fmt: skip

    def _serving(self) -> Serving:
        server = self.server
        self.tokens = [*self.tokens[-10:], server.generated_tokens]
        queued = [s for s in (*server.waiting, *server.active) if s.begun_s is None]
        steps = max(len(self.tokens) - 1, 1)
        oldest = min((s.arrived_step for s in queued), default=server.step_number)
        return Serving(
            ts_ns=self.now_ns, node="virtual", engine="mmctl-demo", instance="virtual",
            running=len(server.active) + len(server.waiting) - len(queued), waiting=len(queued),
            queue_wait_s=(server.step_number - oldest) * STEP_NS / 1e9,
            generation_tokens_per_s=(self.tokens[-1] - self.tokens[0]) / steps * 10,
        )  # fmt: skip

    def _command(self, command: Command) -> None:
        """Carry a command out; its answer comes in a later step."""
        server = self.server
        evidence: dict[str, Any] = {"id": command.id}
        steps = 1
        if command.action == "respond":
            outlook = server.outlook()
            for name in command.args.get("order", ()):
                self._respond(name, outlook)
            server.plan()
            evidence["fits"] = server.plan_fits(self._least(outlook))
        elif command.action == "rebuild":
            self._rebuild()
            steps = REBUILD_STEPS
        elif command.action == "verify":
            evidence["verdict"] = "consistent"
            steps = CANARY_STEPS
        elif command.action == "admit":
            server.admit(float(command.args["share"]))
            return
        event = Event(
            ts_ns=self.now_ns, node="virtual", device="cpu0", what=command.action,
            evidence=evidence,
        )  # fmt: skip
        self.answers.append((server.step_number + steps, event))

    def _least(self, plan: Plan) -> Plan:
        return self.server.least(plan) if self.server.capped else plan

    def _respond(self, name: str, outlook: Plan) -> None:
        server = self.server
        if name == "hold_admission":
            server.holding = True
        elif name == "cap_batch":
            server.capped = True
        elif name == "offload_kv":
            for session in self._by_length():
                if server.plan_fits(self._least(outlook)):
                    return
                cache: Any = session.cache
                moved = [*cache.keys, *cache.values]
                session.offloaded["text"] = [Moved(storage) for storage in moved]  # type: ignore[misc]
                for storage in moved:
                    server.pool.free(storage.row, "text")
                layers = len(cache.keys)
                cache.keys, cache.values = [Empty()] * layers, [Empty()] * layers
        elif name == "quantize_vision":
            for session in [*server.resident, *server.active]:
                if server.plan_fits(self._least(outlook)):
                    return
                self._quantize(session)

    def _by_length(self) -> list[Session]:
        server = self.server

        def of(sessions: list[Session]) -> list[Session]:
            held = [s for s in sessions if s.cache is not None and s.cache.keys and not s.paused]
            return sorted(held, key=lambda s: (-s.cache.length if s.cache else 0, s.id))

        return [*of(server.resident), *of(server.active)]

    def _quantize(self, session: Session) -> None:
        if not session.vision or getattr(session, "quantized", False):
            return
        if getattr(session, "leaked", False):
            return  # another reference keeps the original alive: nothing would come back
        small = []
        for kept in session.vision:
            size = round(kept.size_bytes * QUANTIZED)  # type: ignore[union-attr]
            try:
                row = self.server.pool.malloc(size, "vision")
            except OutOfMemory:
                small.append(kept)
                continue
            self.server.pool.free(kept.row, "vision")  # type: ignore[union-attr]
            small.append(Storage(row, size))  # type: ignore[arg-type]
        session.vision = small
        session.quantized = True  # type: ignore[attr-defined]

    def _rebuild(self) -> None:
        """A new worker: everything goes, what was unfinished begins again."""
        old = self.server
        unfinished = [*old.active, *old.waiting]
        for session in old.sessions:
            old.drop(session)
            session.prefilled = session.produced = session.waiting_steps = 0
            session.begun_s = None
            session.leaked = session.quantized = False  # type: ignore[attr-defined]
        pool = Rows(POOL_BYTES, self.weights)
        server = VirtualServer(self.tapes, self.scenario, old.seed, pool)
        server.setup = old.setup._replace(stalls_at=None)
        server.take_over(old, unfinished)
        self.server = server

    def _bring_back(self) -> None:
        """With all traffic admitted again, reload one session a step where it fits."""
        server = self.server
        if server.holding or server.share < 1:
            return
        session = next((session for session in server.sessions if session.paused), None)
        if session is None or session.cache is None:
            return
        moved: list[Any] = session.offloaded["text"]
        outlook = server.trial(server.outlook())
        reload = [(slot, handle.nbytes) for slot, handle in enumerate(moved)]
        if outlook.fits and outlook.after.copy().admits(reload):
            rows = [server.pool.malloc(handle.nbytes, "text") for handle in moved]
            back = [Storage(row, h.nbytes, h.length) for row, h in zip(rows, moved, strict=True)]
            cache: Any = session.cache
            cache.keys, cache.values = back[: len(back) // 2], back[len(back) // 2 :]
            session.offloaded.clear()


def acting(profile: Profile) -> frozenset[str]:
    """The rules whose trips are more than a word in the log."""
    return frozenset(rule.name for rule in profile.breaker.rules if rule.mode != "observe")


@cache
def tapes_and_weights() -> tuple[Tapes, tuple[int, ...]]:
    """The tapes (made once per shape) and the sizes of the model's parameters."""
    config = Config()
    tapes = Tapes(config, kept_tapes(config))
    weights = tuple(p.numel() * p.element_size() for p in tapes.model.parameters())
    return tapes, weights


def run_seed(
    scenario: str, seed: int, profile: Profile, fast: bool | None = None
) -> tuple[int | None, Outcome]:
    """When the seed runs out of memory by itself (the truth), and its run under an enforcing
    breaker."""
    tapes, weights = tapes_and_weights()
    run = VirtualRun(tapes, weights, scenario, seed, profile, "enforce", fast)
    enforced = run.run()
    return run.truth(enforced), enforced
