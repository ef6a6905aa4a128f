"""The twin of the demo's server: the same queues and plans, and tapes replayed on a pool of rows.

Nothing is computed. Allocations come from the tapes that the dry run uses: the blocks that each
stage takes, in its order.
"""

from __future__ import annotations

from copy import deepcopy
from typing import Any, NamedTuple

from mmctl.demo.plan import Tape, Tapes
from mmctl.demo.rows import Rows
from mmctl.demo.scenarios import SCENARIOS
from mmctl.demo.server import PREFILL_TOKENS, Plan, Server, Session
from mmctl.engine.memory import core
from mmctl.engine.memory.allocator import OutOfMemory
from mmctl.engine.memory.causes import cause
from mmctl.engine.model import Config
from mmctl.engine.records import Fits, Modality


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
