"""The stage-level queue against closed forms, and conservation on random work."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mmctl.engine.schedule.stages import serve

JOBS, SEEDS, WARM = 60_000, 20, 10_000


def erlang_c_wait_s(rate: float, service_s: float, servers: int) -> float:
    load = rate * service_s
    share = load / servers
    last = load**servers / math.factorial(servers) / (1 - share)
    total = sum(load**k / math.factorial(k) for k in range(servers)) + last
    return last / total * service_s / (servers * (1 - share))


def waits(rho: float, servers: int, draw) -> np.ndarray:  # type: ignore[no-untyped-def]
    """The mean wait of each of the seeds, service of mean one second."""
    means = []
    for seed in range(SEEDS):
        random = np.random.default_rng(seed)
        arrival = np.cumsum(random.exponential(1.0 / (rho * servers), JOBS))
        begun = serve(arrival, draw(random), servers)
        means.append(float((begun - arrival)[WARM:].mean()))
    return np.array(means)


def agrees(means: np.ndarray, expected: float) -> bool:
    """Within the 99.9 % interval of the seeds' own spread (t of 19 degrees: 3.88)."""
    return abs(means.mean() - expected) <= 3.88 * means.std(ddof=1) / math.sqrt(len(means))


@pytest.mark.parametrize("rho", [0.5, 0.85, 0.95])
def test_mm8_waits_as_erlang_says(rho: float) -> None:
    means = waits(rho, 8, lambda random: random.exponential(1.0, JOBS))
    assert agrees(means, erlang_c_wait_s(rho * 8, 1.0, 8))


@pytest.mark.parametrize("rho", [0.5, 0.95])
def test_md1_and_mg1_wait_as_pollaczek_and_khinchine_say(rho: float) -> None:
    constant = waits(rho, 1, lambda random: np.ones(JOBS))
    assert agrees(constant, rho / (2 * (1 - rho)))
    shape = 0.5  # gamma: squared coefficient of variation 2
    general = waits(rho, 1, lambda random: random.gamma(shape, 1 / shape, JOBS))
    assert agrees(general, rho * (1 + 1 / shape) / (2 * (1 - rho)))


@given(
    st.lists(st.tuples(st.floats(0, 100), st.floats(0.001, 10)), min_size=1, max_size=60),
    st.integers(1, 5),
)
@settings(max_examples=100, deadline=None)
def test_no_server_does_two_jobs_and_none_idles_while_one_waits(
    jobs: list[tuple[float, float]], servers: int
) -> None:
    jobs.sort()
    arrival, service = (np.array(column) for column in zip(*jobs, strict=True))
    begun = serve(arrival, service, servers)
    assert (begun >= arrival).all() and (np.diff(begun) >= 0).all()
    for i, moment in enumerate(begun):
        busy = int(((begun[:i] <= moment) & (begun[:i] + service[:i] > moment + 1e-9)).sum())
        assert busy < servers
        if moment > arrival[i]:
            before = int(((begun[:i] < moment) & (begun[:i] + service[:i] >= moment)).sum())
            assert before >= servers
