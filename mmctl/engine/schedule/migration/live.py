"""Watches a migration: two processes, one stream of tokens, and who goes on when one is lost.

The watcher alone sees both sides, and decides: the giver lets go when tokens have come from the
taker. Until then a taker that is late or gone is killed first, and only then, with every token
that it made known, the giver goes on behind them.
"""

from __future__ import annotations

import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

import msgspec

from mmctl.engine.errors import MmctlError
from mmctl.engine.schedule.migration import engines
from mmctl.engine.schedule.migration.decode import Begin
from mmctl.engine.schedule.migration.handover import Given, Terms
from mmctl.engine.schedule.migration.wire import LostError, Wire

HELD_TOKENS = 4
"""Tokens that must have come from the taker before the giver lets go."""


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """See ``handover.Terms``; the L2 tolerance is chosen by whether both sides are of a kind."""

    deadline_s: float
    patience_s: float
    l2_same_kind: float
    l2_across_kinds: float

    def tolerance(self, source: str, target: str) -> float:
        """The L2 error allowed between these two engines."""
        same = engines.kind(source) == engines.kind(target)
        return self.l2_same_kind if same else self.l2_across_kinds


class Made(msgspec.Struct, frozen=True):
    """A token as it arrived: its number, itself, when (monotonic clock) and which side made it."""

    index: int
    token: int
    ns: int
    by: str


class Move(msgspec.Struct, frozen=True, kw_only=True):
    """One migration, or the attempt.

    ``pause_s`` is the time in which no token could be made: from the last one before the freeze
    until a side begins the next step. ``gap_s`` lies between the last token before and the first
    after. Both are absent when the decode was never stopped.
    """

    source: str
    target: str
    same_kind: bool
    status: Literal["migrated", "rolled_back"]
    phase: str | None = None
    why: str | None = None
    cache_tokens: int | None = None
    pause_s: float | None = None
    gap_s: float | None = None
    l2_error: float | None = None
    relative_l2_error: float | None = None
    l2_tolerance: float
    checked_steps: int = 0
    copied_bytes: int = 0
    copy_s: float | None = None
    paused_bytes: int | None = None


class Process:
    """A worker process and the tokens that came from it; kill it when done."""

    def __init__(self, side: str, engine: str, threads: int = 1, fault: str = "") -> None:
        self.side, self.engine = side, engine
        ours, theirs = socket.socketpair()
        self.control = Wire(ours)
        self._said = tempfile.TemporaryFile()  # noqa: SIM115 (closed in close)
        command = [sys.executable, "-m", "mmctl.engine.schedule.migration.worker"]
        with theirs:
            self.process = subprocess.Popen(
                [*command, str(theirs.fileno()), engine, str(threads), fault],
                pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL,
                stdout=self._said, stderr=self._said,
            )  # fmt: skip

    def tell(self, do: str, **more: Any) -> None:
        """Send an order; a worker that has gone is noticed when its answer is missed."""
        with suppress(LostError):
            self.control.send({"do": do, **more})

    def hear(self, kind: str, made: list[Made], timeout_s: float | None = None) -> dict[str, Any]:
        """The answer of ``kind``, tokens before it put into ``made``.

        Raises LateError and LostError, and MmctlError when the worker says that it failed.
        """
        due = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            left = None if due is None else max(0.0, due - time.monotonic())
            try:
                head, _ = self.control.receive(left)
            except LostError:
                raise LostError(f"the {self.side} ({self.engine}) ended{self._last()}") from None
            if head["kind"] == "token":
                made.append(Made(head["index"], head["token"], head["ns"], self.side))
            if head["kind"] == kind:
                return head
            if head["kind"] == "failed":
                raise MmctlError(head["why"])
            if head["kind"] not in ("token", "abandoned"):
                raise LostError(f"the {self.side} answered {head['kind']} for {kind}")

    def join(self, other: Process, timeout_s: float) -> None:
        """Join this process and ``other`` by a socket of their own."""
        a, b = socket.socketpair()
        with a, b:
            for side, end in ((self, a), (other, b)):
                side.tell("join")
                with suppress(OSError):
                    socket.send_fds(side.control.end, [b"."], [end.fileno()])
            self.hear("joined", [], timeout_s)
            other.hear("joined", [], timeout_s)

    def kill(self) -> None:
        """End the process for certain: nothing of it runs when this returns."""
        self.process.kill()
        self.process.wait()

    def close(self) -> None:
        """Kill the process and free what was held for it."""
        self.kill()
        self.control.close()
        self._said.close()

    def _last(self) -> str:
        """How it ended, and what it said last."""
        code = self.process.wait(5)
        self._said.seek(0)
        lines = self._said.read().decode("utf-8", "replace").strip().splitlines()
        how = f" by signal {-code}" if code < 0 else f" with {code}"
        return how + (f": {lines[-1][:200]}" if lines else "")


def hand_over(
    giver: Process, taker: Process, made: list[Made], limits: Limits, **terms: Any
) -> Move:
    """Move the decode from ``giver`` to ``taker``, joined and prepared; ``terms`` as in ``Terms``.

    After a failure the giver has made the rest of the tokens, and the taker is dead.
    """
    tolerance = limits.tolerance(giver.engine, taker.engine)
    on = Terms(
        l2_tolerance=tolerance, deadline_s=limits.deadline_s, patience_s=limits.patience_s, **terms
    )
    taker.tell("take")
    giver.tell("give", terms=msgspec.to_builtins(on))
    given = msgspec.convert(giver.hear("given", made)["given"], Given)
    told: dict[str, Any] = {
        "source": giver.engine, "target": taker.engine, "cache_tokens": given.past,
        "same_kind": engines.kind(giver.engine) == engines.kind(taker.engine),
        "l2_error": given.l2_error, "relative_l2_error": given.relative_l2_error,
        "l2_tolerance": tolerance, "checked_steps": given.checked_steps,
        "copied_bytes": given.copied_bytes, "copy_s": given.copy_s,
        "paused_bytes": given.paused_bytes,
    }  # fmt: skip
    last_ns = made[-1].ns
    if given.phase is not None:
        taker.kill()
        giver.hear("done", made)
        pause_s = _seconds(given.frozen_ns, given.resumed_ns)
        gap_s = _gap(made, given.index, last_ns) if pause_s is not None else None
        return Move(
            status="rolled_back", phase=given.phase, why=given.why, pause_s=pause_s, gap_s=gap_s,
            **told,
        )  # fmt: skip
    try:
        took = taker.hear("took", made, limits.deadline_s)
        for _ in range(min(HELD_TOKENS, on.until - given.index)):
            taker.hear("token", made, limits.deadline_s)
    except MmctlError as error:
        pause_s = _resume(giver, taker, made, given)
        gap_s = _gap(made, given.index, last_ns)
        return Move(
            status="rolled_back", phase="take", why=str(error), pause_s=pause_s, gap_s=gap_s, **told
        )
    giver.tell("release")
    return Move(
        status="migrated", pause_s=_seconds(given.frozen_ns, took["ns"]),
        gap_s=_gap(made, given.index, last_ns), **told,
    )  # fmt: skip


def _resume(giver: Process, taker: Process, made: list[Made], given: Given) -> float | None:
    """The giver goes on behind what the taker has made, when nothing more can come from it."""
    taker.kill()
    with suppress(MmctlError):
        taker.hear("done", made, 1.0)  # tokens that were under way
    from_taker = [one.token for one in made if one.index >= given.index]
    giver.tell("resume", tokens=from_taker)
    resumed = giver.hear("resumed", made)
    giver.hear("done", made)
    return _seconds(given.frozen_ns, resumed["ns"])


def _seconds(start_ns: int | None, end_ns: int | None) -> float | None:
    return None if start_ns is None or end_ns is None else (end_ns - start_ns) / 1e9


def _gap(made: list[Made], index: int, last_ns: int) -> float | None:
    after = [one.ns for one in made if one.index == index]
    return (after[0] - last_ns) / 1e9 if after else None


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """A decode that was moved: every token as it arrived, and each move.

    ``reference`` are the tokens of the same decode run without a move, absent for one that came
    from a file.
    """

    moves: list[Move]
    made: list[Made]
    reference: list[int] | None
    until: int
    sizes: dict[str, int]
    prepare_s: float | None

    @property
    def tokens(self) -> list[int]:
        """The tokens in the order in which they arrived."""
        return [one.token for one in self.made]

    @property
    def lost(self) -> int:
        """Numbers of tokens that never came."""
        first = self.made[0].index if self.made else 0
        return len(set(range(first, self.until)) - {one.index for one in self.made})

    @property
    def repeated(self) -> int:
        """Tokens that came for a number that had come already."""
        return len(self.made) - len({one.index for one in self.made})


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What to move, where from and to, and how often, there and back.

    ``tokens`` are made in all; ``before`` of them on a side before it gives. ``begin`` is a
    decode of the demo, or ``path`` names the file of one.
    """

    source: str
    target: str
    tokens: int
    before: int = 8
    moves: int = 1
    begin: Begin = Begin()
    path: str | None = None
    fault: str = ""
    threads: int = 1


def run(plan: Plan, limits: Limits, note: Callable[[str], None]) -> Outcome:
    """Carry ``plan`` out; the decode is run to its end, wherever it then is."""
    source = Process("source", plan.source, plan.threads)
    target = Process("target", plan.target, plan.threads, plan.fault)
    try:
        return _run(plan, limits, note, source, target)
    finally:
        source.close()
        target.close()


def _run(
    plan: Plan, limits: Limits, note: Callable[[str], None], source: Process, target: Process
) -> Outcome:
    made: list[Made] = []
    begun, reference, until = start(source, plan, limits, made)
    note(f"{plan.source}: a decode with {begun['past']} tokens in its cache is ready")
    moves: list[Move] = []
    try:
        prepare_s = prepare(source, target, limits)
    except MmctlError as error:
        target.kill()
        note(f"{plan.target}: not ready: {error}")
        same = engines.kind(plan.source) == engines.kind(plan.target)
        failed = Move(
            source=plan.source, target=plan.target, same_kind=same, status="rolled_back",
            phase="build", why=str(error), l2_tolerance=limits.tolerance(plan.source, plan.target),
        )  # fmt: skip
        moves.append(failed)
        source.tell("run", until=until)
        source.hear("done", made)
        prepare_s = None
    else:
        note(f"{plan.target}: the graph is ready after {prepare_s:.1f} s")
        _move(plan, limits, note, source, target, until, made, moves)
    return Outcome(
        moves=moves, made=made, reference=reference, until=until, prepare_s=prepare_s,
        sizes={key: begun[key] for key in ("past", "nodes", "weights_bytes", "vision_tokens")},
    )  # fmt: skip


def start(
    source: Process, plan: Plan, limits: Limits, made: list[Made]
) -> tuple[dict[str, Any], list[int] | None, int]:
    """Set the decode up at ``source``: sizes, the tokens of an unmoved run, where it ends."""
    if plan.path is None:
        source.tell("begin", demo=msgspec.to_builtins(plan.begin), until=plan.tokens)
        begun = source.hear("begun", made)
        return begun, begun["reference"], plan.tokens
    tolerance = limits.l2_across_kinds  # which engine wrote the file is not told
    source.tell("load", path=plan.path, more=plan.tokens, l2_tolerance=tolerance)
    begun = source.hear("loaded", made)
    return begun, None, begun["index"] + plan.tokens


def prepare(source: Process, target: Process, limits: Limits) -> float:
    """Join both and have the target rebuild the graph; the seconds it took."""
    source.join(target, limits.patience_s)
    target.tell("build")
    source.tell("prepare", patience_s=limits.patience_s)
    return float(source.hear("prepared", [])["seconds"])


def _move(
    plan: Plan, limits: Limits, note: Callable[[str], None], source: Process, target: Process,
    until: int, made: list[Made], moves: list[Move],
) -> None:  # fmt: skip
    giver, taker = source, target
    for number in range(1, plan.moves + 1):
        last = number == plan.moves
        steps = None if last else HELD_TOKENS
        move = hand_over(
            giver, taker, made, limits, after=plan.before, until=until, taker_steps=steps
        )
        moves.append(move)
        if move.status == "rolled_back":
            note(f"{move.target}: rolled back: {move.why}")
            return
        note(f"{move.source} → {move.target}: a pause of {(move.pause_s or 0) * 1e3:.2f} ms")
        taker.hear("done", made)
        giver, taker = taker, giver


def freeze(plan: Plan, limits: Limits, path: Path) -> tuple[list[Made], dict[str, Any]]:
    """Make ``plan.tokens`` tokens at the source and freeze the decode into ``path``."""
    source = Process("source", plan.source, plan.threads)
    made: list[Made] = []
    try:
        begun, _, until = start(source, plan, limits, made)
        source.tell("run", until=until)
        source.hear("done", made)
        source.tell("save", path=str(path))
        saved = source.hear("saved", made)
    finally:
        source.close()
    return made, {**begun, "bytes": saved["bytes"]}


def thaw(plan: Plan, limits: Limits) -> tuple[list[Made], dict[str, Any]]:
    """Go on with the decode in ``plan.path`` on ``plan.target`` for ``plan.tokens`` tokens."""
    target = Process("target", plan.target, plan.threads)
    made: list[Made] = []
    try:
        begun, _, until = start(target, plan, limits, made)
        target.tell("run", until=until)
        target.hear("done", made)
    finally:
        target.close()
    return made, begun
