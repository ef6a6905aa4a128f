"""Counts and latencies of the requests that went through, per backend and per tenant."""

from __future__ import annotations

import hashlib
import time
from collections import deque
from collections.abc import Iterable
from typing import Any, NamedTuple

import msgspec

from mmctl.engine.records import Guard, Latencies, Serving, latency_quantiles
from mmctl.guard.backends import Backend

_WINDOW_S = 10.0
_SAMPLES = 1000  # of the window, per backend
_TENANTS = 100
_NAME_CHARACTERS = 64
OTHERS = "(others)"


class Tally:
    """The counts of a ``guard`` record, by its field names."""

    FIELDS = tuple(
        field.name for field in msgspec.structs.fields(Guard)
        if field.type is int and field.name != "ts_ns"
    )  # fmt: skip

    def __init__(self) -> None:
        self.counts: dict[str, Any] = dict.fromkeys(self.FIELDS, 0)

    def add(self, **counts: int) -> None:
        """Add to the counts by name."""
        for name, count in counts.items():
            self.counts[name] += count


class Sample(NamedTuple):
    """One answered request; times in seconds, ``at_s`` of ``time.monotonic``."""

    at_s: float
    vision: bool
    e2e_s: float
    ttft_s: float | None
    itl_s: float | None


class Tallies:
    """All that is counted; a tenant beyond the first hundred is among the others."""

    def __init__(self, backends: Iterable[Backend]) -> None:
        self.backends = {backend.name: Tally() for backend in backends}
        self.tenants: dict[str, Tally] = {}
        self.whole = Tally()
        self._samples: dict[str, deque[Sample]] = {
            name: deque(maxlen=_SAMPLES) for name in self.backends
        }

    def tenant(self, name: str) -> Tally:
        """The counts of one tenant; beyond the most that are kept, those of all others together."""
        found = self.tenants.get(name)
        if found is None:
            if len(self.tenants) >= _TENANTS:
                return self.tenants.setdefault(OTHERS, Tally())
            found = self.tenants[name] = Tally()
        return found

    def add(self, tenant: str, backend: str | None, **counts: int) -> None:
        """Count for everybody whom a request concerns."""
        self.whole.add(**counts)
        self.tenant(tenant).add(**counts)
        if backend is not None:
            self.backends[backend].add(**counts)

    def sample(self, backend: str, sample: Sample) -> None:
        """Remember an answered request for ``recent``."""
        self._samples[backend].append(sample)

    def recent(self, backend: str) -> list[Sample]:
        """The requests answered in the last seconds."""
        kept, oldest = self._samples[backend], time.monotonic() - _WINDOW_S
        while kept and kept[0].at_s < oldest:
            kept.popleft()
        return list(kept)


def guard_records(
    tallies: Tallies, backends: Iterable[Backend], errors: dict[str, float | None],
    node: str, now_ns: int,
) -> list[Guard]:  # fmt: skip
    """One record of each backend and of each tenant; ``errors`` are the predictions' by backend."""
    records = []
    for backend in backends:
        capacity = backend.capacity_tokens
        error = errors.get(backend.name)
        absent = {}
        if not capacity:
            absent["headroom_tokens"] = "the backend's capacity is not known: --capacity-tokens"
        if error is None:
            absent["prompt_error"] = "no answer has stated its usage yet"
        records.append(
            Guard(
                ts_ns=now_ns, node=backend.name, instance=backend.name,
                **tallies.backends[backend.name].counts, running=backend.in_flight,
                share=0.0 if backend.down else backend.share,
                headroom_tokens=capacity - backend.cost_tokens if capacity else None,
                prompt_error=error, absent=absent,
            )
        )  # fmt: skip
    for name, tally in tallies.tenants.items():
        records.append(Guard(ts_ns=now_ns, node=node, tenant=name, **tally.counts))
    return records


def serving_record(
    backend: Backend, samples: list[Sample], waits_s: list[float], tokens_per_s: float | None,
    now_ns: int,
) -> Serving:  # fmt: skip
    """A backend as the guard sees it: what runs there, what waits for it here, latencies.

    ``waits_s`` are of the requests that wait in the guard or for their first token.
    """
    absent = {"prompt_tokens_per_s": "prompts are not seen while they are read"}
    capacity = backend.capacity_tokens
    if not capacity:
        absent["kv_ratio"] = "the backend's capacity is not known: --capacity-tokens"
    if tokens_per_s is None:
        absent["generation_tokens_per_s"] = "answers in work are not streamed"
    return Serving(
        ts_ns=now_ns, node=backend.name, engine="guard", instance=backend.name,
        model=backend.models[0] if backend.models else None,
        running=backend.in_flight, waiting=len(waits_s),
        kv_ratio=min(1.0, backend.cost_tokens / capacity) if capacity else None,
        queue_wait_s=max(waits_s, default=0.0), **latency_quantiles(samples),
        modalities={
            name: Latencies(**latency_quantiles(of))
            for name, of in (
                ("vision", [sample for sample in samples if sample.vision]),
                ("text", [sample for sample in samples if not sample.vision]),
            )
            if of
        },
        generation_tokens_per_s=tokens_per_s, absent=absent,
    )  # fmt: skip


def tenant_of(headers: Any, header: str) -> str:
    """Who sends a request: what the header says, else a hash of the key, never the key."""
    named = headers.get(header)
    if named:
        return "".join(c for c in named[:_NAME_CHARACTERS] if c.isprintable())
    key = headers.get("Authorization") or headers.get("Api-Key")
    if not key:
        return "(none)"
    return "key-" + hashlib.blake2b(key.encode("utf-8", "replace"), digest_size=4).hexdigest()
