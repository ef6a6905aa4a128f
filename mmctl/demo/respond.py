"""How the demo's server gives memory back, piece by piece, with a dry run after each piece.

Freed bytes are not the measure: whether the next batch fits is. Every piece is a step in the
answer, so that the event shows what was done and what it brought.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from mmctl.agent.device_pool import AgentPool
from mmctl.agent.tracker import labelled, on_host
from mmctl.demo.server import Server, Session
from mmctl.engine import plugins
from mmctl.engine.errors import MmctlError
from mmctl.engine.responses.choice import Choice, evidence
from mmctl.engine.responses.distill import distill_pair
from mmctl.engine.responses.offload import HostBlocks, HostMemoryError, offload
from mmctl.engine.responses.quantize import quantize

KNOWN = (
    "hold_admission",
    "cap_batch",
    "light_vision",
    "offload_kv",
    "distill",
    "quantize_vision",
    "compact",
    "choose",
)


def respond(
    server: Server, pool: AgentPool, host: HostBlocks, order: list[str],
    fits: Callable[[], bool], choose: Callable[[], Choice],
) -> Iterator[dict[str, Any]]:  # fmt: skip
    """Apply the responses in ``order`` until ``fits``; one entry for each piece of work.

    ``choose`` in the order stands for whatever is cheapest, by dry runs of the alternatives.
    """
    for name in order:
        if name in _SWITCHES:
            setattr(server, _SWITCHES[name], True)
            yield _step(name, None, pool.allocated_bytes, pool, time.monotonic_ns(), fits())
        elif name == "choose":
            chosen = choose()
            if chosen.batch < chosen.wanted:
                server.capped = True
            for piece in chosen.chosen.pieces if chosen.chosen else ():
                before, started = pool.allocated_bytes, time.monotonic_ns()
                session = next(s for s in server.resident if s.id == piece.target.split()[1])
                _PIECES[piece.response][1](session, host)
                yield _step(piece.response, session.id, before, pool, started, fits())
            yield {"response": "choose", "fits": fits(), "choice": evidence(chosen)}
        elif name == "compact":
            if fits():
                return
            before, started = pool.reserved_bytes, time.monotonic_ns()
            compact(server, pool, host)
            yield _step(name, None, before, pool, started, fits()) | {
                "freed_bytes": before - pool.reserved_bytes
            }
        elif applied := _piece(name):
            candidates, apply = applied
            for session in candidates(server):
                if fits():
                    return
                before, started = pool.allocated_bytes, time.monotonic_ns()
                try:
                    apply(session, host)
                except HostMemoryError as error:
                    yield {"response": name, "holder": session.id, "refused": str(error)}
                    break
                yield _step(name, session.id, before, pool, started, fits())
        else:
            raise MmctlError(f"no response '{name}' here: one of {', '.join(KNOWN)}")


def _piece(name: str) -> _Piece | None:
    """Whom a response may be applied to, and how; a plugin's is applied to vision tokens."""
    if name in _PIECES:
        return _PIECES[name]
    added = plugins.named("mmctl.responses")
    if name not in added:
        return None
    return _quantizable, partial(_plugin_session, name, plugins.load(added[name]))


def _step(
    name: str, holder: str | None, before: int, pool: AgentPool, started: int, fits: bool
) -> dict[str, Any]:
    return {
        "response": name, "holder": holder, "freed_bytes": before - pool.allocated_bytes,
        "took_ns": time.monotonic_ns() - started, "fits": fits,
    }  # fmt: skip


def _offloadable(server: Server) -> list[Session]:
    """Idle sessions first, the one with most text KV first."""
    idle = [session for session in server.resident if session.cache and not session.paused]
    busy = [session for session in server.active if session.cache and not session.paused]

    def longest_first(session: Session) -> tuple[int, str]:
        return -(session.cache.length if session.cache else 0), session.id

    return [*sorted(idle, key=longest_first), *sorted(busy, key=longest_first)]


def _quantizable(server: Server) -> list[Session]:
    """Sessions whose vision tokens are on the device in full precision, idle ones first."""
    return [
        session
        for session in (*server.resident, *server.active)
        if session.vision and isinstance(session.vision[0], torch.Tensor)
    ]


def offload_session(session: Session, host: HostBlocks) -> None:
    """Move the text KV of a session to the host; it is paused until it comes back."""
    cache = session.cache
    assert cache is not None
    with on_host():
        moved = [offload(tensor, host) for tensor in (*cache.keys, *cache.values)]
        empty = torch.empty(0, cache.config.text_dim)
    for handle in moved:
        handle.finish()
    layers = len(cache.keys)
    cache.keys, cache.values = [empty] * layers, [empty] * layers
    session.offloaded["text"] = moved


def reload_session(session: Session) -> None:
    """Bring everything that was offloaded back to the device, bit for bit."""
    moved = session.offloaded.pop("text", None)
    if moved is not None and session.cache is not None:
        with labelled("text", session.id):
            back = [handle.reload() for handle in moved]
        layers = len(back) // 2
        session.cache.keys, session.cache.values = back[:layers], back[layers:]
    moved = session.offloaded.pop("vision", None)
    if moved is not None:
        with labelled("vision", session.id):
            session.vision = [handle.reload() for handle in moved]


def offloaded_bytes(session: Session) -> list[int]:
    """Sizes of the tensors that a reload would allocate."""
    return [handle.nbytes for moved in session.offloaded.values() for handle in moved]


def _quantize_session(session: Session, host: HostBlocks) -> None:
    kept = session.vision
    assert kept is not None
    with labelled("vision", session.id):
        for layer, tensor in enumerate(kept):
            assert isinstance(tensor, torch.Tensor)
            kept[layer] = quantize(tensor)


def _distill_session(session: Session, host: HostBlocks) -> None:
    """Merge the vision tokens that are most alike; the answer is not quite the same afterwards."""
    kept = session.vision
    assert kept is not None
    with labelled("vision", session.id):
        for layer, tensor in enumerate(kept):
            assert isinstance(tensor, torch.Tensor)
            # Once is enough: tokens that were merged before are fewer than the image's.
            if tensor.shape[1] == session.vision_tokens:
                kept[layer] = distill_pair(tensor).tokens


def _plugin_session(
    name: str, response: Callable[[torch.Tensor], torch.Tensor], session: Session, host: HostBlocks
) -> None:
    """Apply a plugin's response to every kept tensor of vision tokens [..., N, C]."""
    kept = session.vision
    assert kept is not None
    with labelled("vision", session.id):
        for layer, tensor in enumerate(kept):
            assert isinstance(tensor, torch.Tensor)
            after = response(tensor)
            before = tensor.shape
            if (*after.shape[:-2], after.shape[-1]) != (*before[:-2], before[-1]):
                raise MmctlError(
                    f"the response '{name}' made {tuple(after.shape)} of {tuple(before)}: "
                    "it may change the number of tokens only"
                )
            kept[layer] = after


def _offload_vision(session: Session, host: HostBlocks) -> None:
    assert session.vision is not None
    with on_host():
        moved = [offload(kept, host) for kept in session.vision if isinstance(kept, torch.Tensor)]
    session.vision = []
    for handle in moved:
        handle.finish()
    session.offloaded["vision"] = moved


def compact(server: Server, pool: AgentPool, host: HostBlocks) -> None:
    """Close the holes: everything out to the host, the cache released, one by one back."""
    moved = []
    for session in (*server.resident, *server.active):
        if session.cache is not None and "text" not in session.offloaded:
            offload_session(session, host)
        if session.vision and isinstance(session.vision[0], torch.Tensor):
            _offload_vision(session, host)
        if session.paused:
            moved.append(session)
    pool.release_cached()
    for session in moved:
        reload_session(session)


_SWITCHES = {"hold_admission": "holding", "cap_batch": "capped", "light_vision": "light"}

_Piece = tuple[Callable[[Server], list[Session]], Callable[[Session, HostBlocks], None]]
_PIECES: dict[str, _Piece] = {
    "offload_kv": (_offloadable, offload_session),
    "distill": (_quantizable, _distill_session),
    "quantize_vision": (_quantizable, _quantize_session),
}
