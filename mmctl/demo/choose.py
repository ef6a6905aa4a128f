"""The cheapest way to let the next batch in, for the demo's sessions: the response ``choose``.

Pieces are what can be done to sessions that are at rest; each try is a dry run on a copy of the
pool, with what the piece frees and takes, before the batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from mmctl.demo.server import Plan, Session
from mmctl.engine.memory.dryrun import Step
from mmctl.engine.profiles import Responses
from mmctl.engine.records import Fits
from mmctl.engine.responses.choice import Choice, Piece, choose
from mmctl.engine.responses.distill import KEEP_RATIO, kept_count
from mmctl.engine.responses.estimate import bytes_of
from mmctl.engine.responses.offload import host_free_bytes

if TYPE_CHECKING:
    from mmctl.demo.worker import Worker

# Modelled: a copy out and back over host memory, and what benchmarks of responses show a core
# to need. Only their order matters to the choice.
OFFLOAD_S_PER_BYTE, DISTILL_S_PER_BYTE, QUANTIZE_S_PER_BYTE = 1e-9, 1.2e-9, 0.7e-9
DISTILL_COSINE, QUANTIZE_COSINE = 0.98, 0.9998


def pieces_of(sessions: Sequence[Session]) -> list[Piece]:
    """What can be done to sessions at rest: their text KV to the host, their vision tokens merged
    or quantised."""
    found = []
    for session in sessions:
        if session.cache is not None and not session.paused:
            size = bytes_of(*session.cache.keys, *session.cache.values)
            found.append(
                Piece(
                    response="offload_kv", target=f"text {session.id}", frees_bytes=size,
                    cost_s=2 * size * OFFLOAD_S_PER_BYTE, host_bytes=size,
                )
            )  # fmt: skip
        vision = _vision(session)
        if vision:
            size = bytes_of(*vision)
            for response, ratio, per_byte, cosine in (
                ("distill", 1 - KEEP_RATIO, DISTILL_S_PER_BYTE, DISTILL_COSINE),
                ("quantize_vision", 0.5, QUANTIZE_S_PER_BYTE, QUANTIZE_COSINE),
            ):
                found.append(
                    Piece(
                        response=response, target=f"vision {session.id}", cosine=cosine,
                        frees_bytes=round(size * ratio), cost_s=size * per_byte,
                    )
                )  # fmt: skip
    return found


def _vision(session: Session) -> list[torch.Tensor]:
    """The vision tokens of a session that nothing was done to yet."""
    kept = [tensor for tensor in session.vision or () if isinstance(tensor, torch.Tensor)]
    return [tensor for tensor in kept if tensor.shape[1] == session.vision_tokens]


def choice(worker: Worker, wanted: Plan, settings: Responses) -> Choice:
    """The cheapest way to fit ``wanted``'s batch, or as much of it as can be."""
    server = worker.server
    busy = {session.id for session in (*wanted.decodes, *wanted.batch)}
    if wanted.prefill is not None:
        busy.add(wanted.prefill.id)
    idle = {s.id: s for s in server.resident if s.id not in busy}

    def dry_run(pieces: Sequence[Piece], batch: int) -> Fits:
        steps = [step for piece in pieces for step in _steps(worker, piece, idle)]
        plan = wanted._replace(batch=wanted.batch[:batch])
        tail = worker.steps_of(server.tapes_of(plan))
        moved = [step._replace(frees=tuple(n + len(steps) for n in step.frees)) for step in tail]
        return worker.try_steps([*steps, *moved])

    pieces = pieces_of(list(idle.values()))
    return choose(pieces, dry_run, max(1, len(wanted.batch)), settings, host_free_bytes())


def _steps(worker: Worker, piece: Piece, idle: dict[str, Session]) -> list[Step]:
    """What a piece does to the pool: layer by layer, the new before the old goes."""
    session = idle[piece.target.split()[1]]

    def address(tensor: torch.Tensor) -> tuple[int, ...]:
        found = worker.pool.addresses.get(tensor.untyped_storage()._cdata)
        return () if found is None else (found,)

    if piece.response == "offload_kv" and session.cache is not None:
        tensors = [*session.cache.keys, *session.cache.values]
        return [Step(0, frees_addresses=address(tensor)) for tensor in tensors]
    steps = []
    for tensor in _vision(session):
        size = bytes_of(tensor)
        if piece.response == "distill":
            new = size // tensor.shape[1] * kept_count(tensor.shape[1], KEEP_RATIO)
        else:
            new = size // 2
        steps += [Step(new), Step(0, frees_addresses=address(tensor))]
    return steps
