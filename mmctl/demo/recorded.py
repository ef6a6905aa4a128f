"""Recordings of the demo in virtual time: the records that a server sends which nobody guards.

It runs as serving engines do that catch an out-of-memory error: the batch that could not be had
fails with its requests, an ``oom`` event says so, and the server goes on.
"""

from __future__ import annotations

from collections.abc import Iterator

from mmctl.demo.virtual import POOL_BYTES, STEP_NS, STEPS, VirtualRun, tapes_and_weights
from mmctl.engine.profiles import Profile
from mmctl.engine.records import AnyRecord, Event


class _Recorded(VirtualRun):
    """A run that keeps its records instead of deciding by them."""

    def __init__(self, scenario: str, seed: int, profile: Profile) -> None:
        super().__init__(*tapes_and_weights(), scenario, seed, profile, "off")
        self.records: list[AnyRecord] = []

    def _give(self, record: AnyRecord) -> None:
        self.records.append(record)


def recorded(
    scenario: str, seed: int, profile: Profile, image_every: int | None = None,
    steps: int | None = None,
) -> Iterator[AnyRecord]:  # fmt: skip
    """The records of one seed, for ``steps`` (by default all of the scenario's), or until text
    alone finds no room. ``image_every`` is the mean of steps between images of its stress."""
    run = _Recorded(scenario, seed, profile)
    server = run.server
    if image_every is not None:
        server.setup = server.setup._replace(image_every=image_every)
    for _ in range(steps or STEPS[scenario]):
        run.now_ns += STEP_NS
        plan = server.planned
        # Executing a plan plays the tapes that its trial played, on the same pool.
        if not server.stalled and not (trial := server.trial(plan)).fits:
            evidence = {"need_bytes": trial.record().need_bytes, "capacity_bytes": POOL_BYTES}
            yield from _drain(run)
            yield Event(
                ts_ns=run.now_ns, node="virtual", device="cpu0", what="oom", evidence=evidence,
            )  # fmt: skip
            if not plan.batch:
                return
            for session in plan.batch:
                server.waiting.remove(session)
            server.plan()
            if not server.plan_fits(server.planned):
                return
        run._tell(server.execute())
        yield from _drain(run)


def _drain(run: _Recorded) -> list[AnyRecord]:
    """The records since the last call."""
    records, run.records = run.records, []
    return records
