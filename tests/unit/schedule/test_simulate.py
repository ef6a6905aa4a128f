"""The step simulation: conservation, determinism, agreement with measured vLLM and numba."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mmctl.engine.schedule import compare, compiled, fleet, generate, policies, simulate, workload
from mmctl.engine.schedule.workload import Workload

MODEL = fleet.model("qwen3-vl-8b")


def run(work: Workload, policy: str, devices: str = "h100_sxm:2,l4:2", **engine: int):  # type: ignore[no-untyped-def]
    settings_ = fleet.Engine(**engine)  # type: ignore[arg-type]
    given_ = fleet.parse(devices, MODEL, settings_)
    which = policies.POLICIES[policy]
    rule = policies.rule(which, output_mean=100.0, seed=3)
    placed = policies.place(which, given_, MODEL)
    return simulate.run(work, placed, rule, MODEL, settings_, policy=policy, receipts=True)


@pytest.mark.parametrize("policy", sorted(policies.POLICIES))
def test_every_request_is_served_once_and_no_work_is_made(policy: str) -> None:
    work = generate.from_quantiles(rate_per_s=3, count=300, seed=5)
    found = run(work, policy)
    assert found.refused == 0
    assert (found.finish_s >= found.first_s).all() and (found.first_s > found.started_s).all()
    assert (found.started_s >= found.arrival_s).all()
    vision = work.images > 0
    assert (found.encoded_s[vision] >= found.started_s[vision]).all()
    assert (found.first_s[vision] > found.encoded_s[vision]).all()
    assert (found.encoded_s[~vision] == -1).all()
    busy = found.encode_busy_s + found.prefill_busy_s + found.decode_busy_s
    assert (busy <= found.end_s * (1 + 1e-9)).all()


def test_little_s_law_holds_over_a_run_that_begins_and_ends_empty() -> None:
    work = generate.poisson(rate_per_s=20, count=1500, seed=2, output_tokens=40)
    found = run(work, "least_outstanding")
    moments = np.concatenate([found.arrival_s, found.finish_s])
    steps = np.concatenate([np.ones(work.requests), -np.ones(work.requests)])
    order = np.argsort(moments, kind="stable")
    inside = np.cumsum(steps[order])
    area = float((inside[:-1] * np.diff(moments[order])).sum())
    assert area == pytest.approx(float((found.finish_s - found.arrival_s).sum()), rel=1e-9)
    assert inside[-1] == 0


def test_the_same_seed_gives_the_same_bytes() -> None:
    work = generate.from_quantiles(rate_per_s=4, count=200, seed=9)
    a, b = run(work, "power_of_two"), run(work, "power_of_two")
    assert a.finish_s.tobytes() == b.finish_s.tobytes()
    again = generate.from_quantiles(rate_per_s=4, count=200, seed=9)
    assert again.arrival_s.tobytes() == work.arrival_s.tobytes()


@given(
    st.lists(
        st.tuples(st.floats(0, 5), st.integers(1, 400), st.integers(0, 6), st.integers(1, 60)),
        min_size=1, max_size=40,
    ),
    st.sampled_from(sorted(policies.POLICIES)),
    st.integers(40, 120),
)  # fmt: skip
@settings(max_examples=60, deadline=None)
def test_scarce_blocks_preempt_but_lose_nothing(
    jobs: list[tuple[float, int, int, int]], policy: str, blocks: int
) -> None:
    jobs.sort()
    arrival, text, images, output = (np.array(column) for column in zip(*jobs, strict=True))
    vision = images * 16
    work = Workload(
        name="small", format="test", basis="modelled", arrival_s=arrival.astype(float),
        text_tokens=text, vision_tokens=vision, images=images,
        patches=workload.patches_of(vision, images), output_tokens=output,
    )  # fmt: skip
    found = run(work, policy, "h100_sxm:3", blocks=blocks, sequences=8, batched_tokens=64)
    assert (found.finish_s >= 0).sum() + found.refused == len(jobs)
    assert found.refused == 0


def test_a_request_that_no_device_could_hold_is_refused_not_lost() -> None:
    work = generate.poisson(rate_per_s=1, count=3, seed=1, text_tokens=10_000)
    found = run(work, "least_outstanding", "h100_sxm:1", blocks=100)
    assert found.refused == 3 and (found.device == -1).all()


@pytest.mark.parametrize(
    ("measured", "operations"),
    [
        ("RTX4090/Llama-3.1-8B", "RTX4090/meta-llama/Llama-3.1-8B/bf16/tp1"),
        ("RTXPRO6000/Qwen3-32B", "RTXPRO6000/Qwen/Qwen3-32B/bf16/tp2"),
    ],
)
def test_measured_vllm_runs_are_met_with_constants_of_the_first(
    data: Path, measured: str, operations: str
) -> None:
    path = data / "vllm_runs" / measured / "vllm" / "requests.jsonl"
    tables = data / "vllm_runs" / "profiles" / operations
    if not path.is_file():
        pytest.skip("the measured runs are absent")
    engine = compare.engine_of(path, fleet.Engine(host_s=10e-6))
    work = workload.read(path)
    model = fleet.model_of(tables)
    devices = fleet.parse(str(tables), None, engine)
    rule = policies.rule(policies.POLICIES["least_outstanding"], output_mean=500.0, seed=1)
    errors = compare.errors(simulate.run(work, devices, rule, model, engine), work)
    for name in ("itl", "e2e"):
        assert abs(errors[name]["mean"]) < 0.03 and abs(errors[name]["p99"]) < 0.04
    assert abs(errors["ttft"]["mean"]) < 0.03
    assert errors["e2e"]["mape"] < 0.03


@pytest.mark.skipif(not compiled.available(), reason="numba (the extra 'fast') is not installed")
@pytest.mark.skipif(not os.environ.get("MMCTL_SLOW"), reason="compiling takes 25 s: MMCTL_SLOW=1")
def test_compiled_and_plain_give_the_same_bytes() -> None:
    work = generate.from_quantiles(rate_per_s=4, count=300, seed=4)
    engine = fleet.Engine()
    which = policies.POLICIES["perception"]
    devices = policies.place(which, fleet.parse("h100_sxm:2,l4:2", MODEL, engine), MODEL)
    rule = policies.rule(which, output_mean=100.0, seed=3)
    a, b = (
        simulate.run(work, devices, rule, MODEL, engine, plain=plain) for plain in (True, False)
    )
    for name in ("first_s", "finish_s", "started_s", "device"):
        assert (
            getattr(a, name).tobytes()
            == np.ascontiguousarray(getattr(b, name)).astype(getattr(a, name).dtype).tobytes()
        )


def test_text_waits_a_third_as_long_as_behind_images_and_no_baseline_has_more_goodput() -> None:
    devices = "h100_sxm:2,l40s:4,l4:2"
    for seed in (21, 22):
        work = generate.from_quantiles(rate_per_s=12, count=1000, seed=seed)
        found = {
            name: simulate.summary(run(work, name, devices), ttft_slo_s=2.0, itl_slo_s=0.1)
            for name in ("colocated_fcfs", "jsq_requests", "jsq_tokens", "perception")
        }
        late = {name: row["modalities"]["text"]["ttft_s"]["p99"] for name, row in found.items()}
        assert 3 * late["perception"] < late["colocated_fcfs"]
        good = {name: row["goodput_per_device_hour"] for name, row in found.items()}
        assert max(good, key=lambda name: good[name]) == "perception"
