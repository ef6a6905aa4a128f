"""The demo in virtual time: the same arrivals, plans and allocation lists on the same pool,
without computing anything, so that thousands of seeds can be tried.

Allocations come from the tapes that the dry run uses: the blocks that each stage takes, in its
order. A step lasts 100 ms. Responses free and take what the
live ones do; answers of canaries are not computed: a verification takes its steps and passes.
"""

from __future__ import annotations

from copy import deepcopy
from functools import cache
from typing import Any, NamedTuple

from mmctl.demo.plan import Tape, Tapes, kept_tapes
from mmctl.demo.rows import Rows
from mmctl.demo.scenarios import SCENARIOS
from mmctl.demo.server import PREFILL_TOKENS, Plan, Server, Session
from mmctl.engine.breaker.breaker import Breaker
from mmctl.engine.breaker.state import Command
from mmctl.engine.memory import core
from mmctl.engine.memory.allocator import OutOfMemory
from mmctl.engine.memory.causes import cause
from mmctl.engine.model import Config
from mmctl.engine.profiles import Mode, Profile
from mmctl.engine.records import (
    AnyRecord,
    Event,
    Fits,
    Memory,
    Modality,
    Pool,
    Request,
    Serving,
)  # fmt: skip

STEP_NS = 100_000_000
START_NS = 1_700_000_000 * 10**9
POOL_BYTES = 256 * 2**20
STEPS = {"calm": 1200, "burst": 400, "fragmentation": 400, "leak": 600, "stall": 400}
CANARY_STEPS = 14
OFFLOAD_STEPS, REBUILD_STEPS = 1, 25
QUANTIZED = 0.5  # of half precision, and a scale per channel


class Storage:
    """A tensor's place: what the plan asks of a tensor (``shape``), and the row of its block."""

    def __init__(self, row: int, size_bytes: int, length: int = 1) -> None:
        self.row, self.size_bytes = row, size_bytes
        self.shape = (length,)


class Empty:
    """A storage of no bytes, where one was moved to the host."""

    row, size_bytes, shape = None, 0, (0,)


class Moved:
    """A tensor on the host."""

    def __init__(self, storage: Storage) -> None:
        self.nbytes, self.length = storage.size_bytes, storage.shape[0]

    def discard(self) -> None:
        """Nothing on the device to give back."""


class Cache:
    """Stands for a KvCache: how long it is and where its storages lie."""

    def __init__(self, layers: int) -> None:
        self.length = 0
        self.keys: list[Any] = []
        self.values: list[Any] = []
        self.layers = layers

    @property
    def capacity(self) -> int:
        """Tokens for which there is storage on the device."""
        return self.keys[0].shape[0] if self.keys else 0


class Outcome(NamedTuple):
    """How one run ended; times are of the records."""

    oom_ns: int | None
    trips: tuple[tuple[int, str], ...]
    closed: bool
    completed: int
    end_ns: int


class Trial(NamedTuple):
    """A plan played on a copy of the pool: the answer, and the pool as the plan leaves it with
    the rows that each of its tapes left. ``changes`` says of which state of the pool."""

    plan: Plan
    changes: int
    fits: bool
    after: Rows
    left: tuple[list[int], ...]

    def record(self) -> Fits:
        """The answer as a pool record holds it."""
        refused = None if self.fits else self.after.figures()
        return Fits(
            fits=self.fits, allocations=self.after.changes - self.changes,
            peak_bytes=self.after.reserved_bytes,
            need_bytes=None if refused is None else refused.need_bytes,
            cause=None if refused is None else cause(refused),
        )  # fmt: skip


class VirtualServer(Server):
    """A server whose stages replay their tapes on a pool."""

    def __init__(self, tapes: Tapes, scenario: str, seed: int, pool: Rows) -> None:
        self.config = Config()
        self.pool = pool
        super().__init__(_Sized(self.config), SCENARIOS[scenario], seed, self.plan_fits)  # type: ignore[arg-type]
        self.tapes = tapes
        self._trial: Trial | None = None
        self._done: list[list[int]] = []  # what the tapes of this step left, played before

    def twin(self) -> VirtualServer:
        """An independent server in the same state, to which the same will arrive."""
        self._trial, self._done = None, []
        shared = (self.tapes, self.setup, self.model, self.config)
        memo: dict[int, Any] = {id(each): each for each in shared}
        pool = self.pool.copy()
        memo[id(self.pool)] = pool
        return deepcopy(self, memo)

    def rows_of(self, session: Session) -> list[int]:
        """The blocks of the storage that the negative slots of a tape stand for."""
        cache: Any = session.cache
        if cache is None:
            return []
        return [
            core.NONE if held.row is None else held.row
            for pair in zip(cache.keys, cache.values, strict=True)
            for held in pair
        ]

    def trial(self, plan: Plan) -> Trial:
        """Play ``plan`` on a copy of the pool as it is now, unless that was the last thing done."""
        known = self._trial
        if known is not None and known.plan == plan and known.changes == self.pool.changes:
            return known
        after = self.pool.copy()
        left: list[list[int]] = []
        fits = True
        for session, tape in self.tapes_of(plan):
            modality: Modality = "vision" if session in plan.batch else "text"
            rows = after.play(tape, self.rows_of(session), modality)
            if rows is None:
                fits = False
                break
            left.append(rows)
        self._trial = Trial(plan, self.pool.changes, fits, after, tuple(left))
        return self._trial

    def plan_fits(self, plan: Plan) -> bool:
        """Whether a plan would fit now."""
        return self.trial(plan).fits

    def execute(self) -> list[Session]:
        """Run the plan; where its trial is still good the pool becomes what it was there."""
        trial, self._trial, self._done = self._trial, None, []
        if (
            trial is not None and not self.stalled
            and trial.plan == self.planned and trial.changes == self.pool.changes
            and len(trial.left) == _stages(trial.plan)
        ):  # fmt: skip
            self.pool, self._done = trial.after, list(trial.left)
        return super().execute()

    def replay(self, tape: Tape, session: Session, modality: Modality) -> list[Storage]:
        """Run a tape on the pool; what it leaves, in the order it was made."""
        rows = self._done.pop(0) if self._done else None
        if rows is None:
            rows = self.pool.play(tape, self.rows_of(session), modality)
        if rows is None:
            raise OutOfMemory(self.pool.figures())
        return [Storage(row, self.pool.requested_bytes(row)) for row in rows]

    def _prefill(self, session: Session) -> None:
        count = min(PREFILL_TOKENS, session.arrival.text_tokens - session.prefilled)
        session.begun_s = session.begun_s or float(self.step_number)
        self._text(session, count)
        session.prefilled += count

    def _decode(self, session: Session) -> None:
        self._text(session, 1)
        session.produced += 1
        self.generated_tokens += 1

    def _text(self, session: Session, new: int) -> None:
        left = self.replay(self._text_tape(session, new), session, "text")
        if session.cache is None:
            session.cache = Cache(self.config.text_layers)  # type: ignore[assignment]
        cache: Any = session.cache
        cache.length += new
        if left:
            row_bytes = 4 * self.config.text_dim
            for storage in left:
                storage.shape = (storage.size_bytes // row_bytes,)
            cache.keys, cache.values = left[0::2], left[1::2]

    def _encode(self, batch: tuple[Session, ...]) -> None:
        counts = tuple(len(session.arrival.images) for session in batch)
        tape = self.tapes.encode(batch[0].arrival.images[0], counts)
        tokens, *pairs = self.replay(tape, batch[0], "vision")
        layers = self.config.text_layers
        for number, session in enumerate(batch):
            session.begun_s = session.begun_s or float(self.step_number)
            own = pairs[number * layers : (number + 1) * layers]
            session.vision = list(own)  # type: ignore[arg-type]
            self.waiting.remove(session)
            self.active.append(session)
        if self.setup.leaks:
            self.forgotten.append((tokens, list(pairs)))
            for session in batch:
                session.leaked = True  # type: ignore[attr-defined]
        else:
            self.pool.free(tokens.row, "vision")

    def _release(self) -> None:
        for session in [s for s in self.resident if self.step_number >= s.arrival.until_step]:
            self.resident.remove(session)
            self.drop(session)

    def drop(self, session: Session) -> None:
        """Give back everything of a session that nobody else keeps."""
        cache: Any = session.cache
        for storage in (*cache.keys, *cache.values) if cache is not None else ():
            if storage.row is not None:
                self.pool.free(storage.row, "text")
        if not getattr(session, "leaked", False):
            for kept in session.vision or ():
                self.pool.free(kept.row, "vision")  # type: ignore[union-attr]
        session.offloaded.clear()
        session.cache = session.vision = None


def _stages(plan: Plan) -> int:
    """How many tapes the step of a plan plays."""
    return (plan.prefill is not None) + len(plan.decodes) + bool(plan.batch)


class _Sized(NamedTuple):
    """In the place of a model: its sizes alone."""

    config: Config


class VirtualRun:
    """One seed of one scenario under a breaker, step by step."""

    def __init__(
        self, tapes: Tapes, weights: tuple[int, ...], scenario: str, seed: int, profile: Profile,
        mode: Mode, fast: bool | None = None,
    ) -> None:  # fmt: skip
        self.scenario = scenario
        self.breaker = Breaker(profile, mode)
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
            self._give(_at(event, self.now_ns))
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
            elif output.what == "trip":
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
        server.random, server.step_number = old.random, old.step_number
        server.arrived, server.completed = old.arrived, old.completed
        server.generated_tokens = old.generated_tokens
        server.holding, server.capped, server.share = True, True, old.share
        for session in unfinished:
            (server.waiting if session.arrival.images else server.active).append(session)
        server.plan()
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


def _at(event: Event, ts_ns: int) -> Event:
    import msgspec

    return msgspec.structs.replace(event, ts_ns=ts_ns)


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
