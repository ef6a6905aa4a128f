"""The block that says where a benchmark ran."""

from __future__ import annotations

import msgspec

from mmctl.benchmarks.environment import environment


def test_it_names_the_machine_and_what_is_absent() -> None:
    found = environment()
    assert 1 <= found.cores <= found.machine_cores and found.memory_bytes > 2**20
    assert {"python", "numpy"} <= found.versions.keys()
    assert 0 <= found.busy_ratio <= 1
    for field in ("steal_ratio", "load_factor", "on_battery", "threads"):
        assert (getattr(found, field) is None) == (field in found.absent)
    assert msgspec.json.encode(found)


def test_a_machine_under_load_is_said(monkeypatch) -> None:
    import psutil

    class Times:
        idle, iowait, steal = 10.0, 0.0, 30.0

    monkeypatch.setattr(psutil, "cpu_times_percent", lambda interval: Times)
    said = " ".join(environment().remarks)
    assert "90%" in said and "30%" in said
