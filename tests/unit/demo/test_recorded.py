"""Recordings of the demo in virtual time, for whoever learns from them."""

from __future__ import annotations

import pytest

pytest.importorskip("torch", reason="needs the extra 'torch'")

from mmctl.demo.recorded import recorded
from mmctl.engine import profiles
from mmctl.engine.records import Event, Pool, encode


def test_memory_runs_out_only_where_the_dry_run_said_so() -> None:
    profile = profiles.load(None).profile
    found = list(recorded("fragmentation", 3, profile, steps=250))
    pools = [record for record in found if isinstance(record, Pool)]
    ooms = [r for r in found if isinstance(r, Event) and r.what == "oom"]
    refused = [pool for pool in pools if pool.fits is not None and not pool.fits.fits]
    step = pools[1].ts_ns - pools[0].ts_ns
    assert len(ooms) > 3 and len(pools) == 250  # it goes on after each
    assert [pool.ts_ns + step for pool in refused if pool is not pools[-1]] == [
        oom.ts_ns for oom in ooms
    ]
    again = list(recorded("fragmentation", 3, profile, steps=250))
    assert [encode(record) for record in again] == [encode(record) for record in found]


def test_another_pace_is_another_recording() -> None:
    profile = profiles.load(None).profile
    slow, fast = (
        [r.vision_tokens for r in recorded("calm", 1, profile, pace, 80) if isinstance(r, Pool)]
        for pace in (40, 2)
    )
    assert sum(map(bool, fast)) > sum(map(bool, slow))
