"""What the guard answers itself: whether it can serve, its models, its state and metrics."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import TYPE_CHECKING, Any

import aiohttp
import msgspec
from aiohttp import web

from mmctl.engine.export.metrics import SourceHealth
from mmctl.engine.records import SCHEMA
from mmctl.guard.backends import Backend, held_back
from mmctl.guard.refusal import Refusal

if TYPE_CHECKING:
    from mmctl.guard.app import Guard

_METRICS = "application/openmetrics-text; version=1.0.0; charset=utf-8"
_MODELS_TIMEOUT_S = 5.0

Answer = Callable[["Guard"], Awaitable[web.StreamResponse]]


def _json(document: Any, status: int = 200) -> web.Response:
    return web.Response(
        status=status, body=msgspec.json.encode(document), content_type="application/json"
    )


async def health(guard: Guard) -> web.StreamResponse:
    """200 while every backend takes traffic, 503 once none does; the body names each."""
    taking = [backend for backend in guard.backends if backend.takes]
    status = "ok" if len(taking) == len(guard.backends) else "degraded" if taking else "down"
    document = {"schema": SCHEMA, "status": status, "backends": _states(guard)}
    return _json(document, 200 if taking else 503)


async def ready(guard: Guard) -> web.StreamResponse:
    """200 when a request that came now would be placed: a backend takes traffic, is held to no
    share of it, has told its models, and the queue has room."""
    able = [
        b.name
        for b in guard.backends
        if b.takes and b.models
        and not held_back(b, [o for o in guard.backends if set(o.models) & set(b.models)])
    ]  # fmt: skip
    full = guard.admission.depth >= guard.settings.queue
    document = {"schema": SCHEMA, "ready": bool(able) and not full, "backends": able}
    if full:
        document["reason"] = "the queue is full"
    elif not able:
        document["reason"] = "no backend takes traffic"
    return _json(document, 200 if document["ready"] else 503)


def _states(guard: Guard) -> list[dict[str, Any]]:
    found = []
    for backend in guard.backends:
        machine = guard.watch.breaker.machines.get(backend.name)
        state = machine.state if machine and machine.state != "unknown" else None
        found.append(
            {
                "backend": backend.name, "takes": backend.takes,
                "state": state,
                "down": backend.down, "share": backend.share, "models": backend.models,
                "running": backend.in_flight, "images": backend.images,
                "responses": sorted(backend.responses),
                "capacity_tokens": backend.capacity_tokens or None,
                "cost_tokens": backend.cost_tokens,
                "absent": {} if state else {"state": _undecided(guard)},
            }
        )  # fmt: skip
    return found


def _undecided(guard: Guard) -> str:
    """Why the breaker has no state for a backend."""
    if guard.mode == "off":
        return "the mode is off"
    return "no rule of the breaker has had enough readings to be decided yet"


async def status(guard: Guard) -> web.StreamResponse:
    """All that is known: backends, queues, tenants, predictions, the latest events."""
    admission = guard.admission
    return _json(
        {
            "schema": SCHEMA, "mode": guard.mode, "backends": _states(guard),
            "queues": {name: len(queue) for name, queue in admission.waiting.items()},
            "requests": guard.tallies.whole.counts,
            "tenants": {name: tally.counts for name, tally in guard.tallies.tenants.items()},
            "models": {
                name: {
                    "prompt_error": predictor.errors, "samples": predictor.samples,
                    "family": predictor.vision.family if predictor.vision else None,
                }
                for name, predictor in guard.predictors.items()
            },
            "quarantined": len(guard.quarantine), "lost_records": guard.watch.lost,
            "goldens": sorted(guard.health.canaries.known),
            "goldens_problem": guard.health.canaries.problem,
            "events": list(guard.watch.recent),
        }
    )  # fmt: skip


async def metrics(guard: Guard) -> web.StreamResponse:
    """The OpenMetrics page of the guard's own readings."""
    sources = [SourceHealth(b.name, b.takes, None, b.down) for b in guard.backends]
    page = await asyncio.to_thread(guard.watch.page, sources)
    return web.Response(body=page, headers={"Content-Type": _METRICS})


async def models(guard: Guard) -> web.StreamResponse:
    """The models of all backends that can be asked, each once."""
    answers = await asyncio.gather(*(_models(guard.session, b) for b in guard.backends))
    merged: dict[str, Any] = {}
    for document in answers:
        for model in document or ():
            if isinstance(model, dict) and isinstance(model.get("id"), str):
                merged.setdefault(model["id"], model)
    if not any(document is not None for document in answers):
        raise Refusal(503, "no_backend", "no backend lists its models", 1.0)
    return _json({"object": "list", "data": list(merged.values())})


async def _models(session: aiohttp.ClientSession, backend: Backend) -> Iterable[Any] | None:
    if backend.down is not None:
        return None
    try:
        async with session.get(
            backend.url.joinpath("v1/models"),
            timeout=aiohttp.ClientTimeout(total=_MODELS_TIMEOUT_S),
        ) as answer:
            document = msgspec.json.decode(await answer.read())
    except (aiohttp.ClientError, OSError, asyncio.TimeoutError, msgspec.DecodeError):
        return None
    data = document.get("data") if isinstance(document, dict) else None
    return data if isinstance(data, list) else None


PATHS: dict[str, Answer] = {
    "/health": health, "/ready": ready, "/mmctl/status": status, "/mmctl/metrics": metrics,
}  # fmt: skip
"""What a GET of these is answered with, whatever backends have there."""
