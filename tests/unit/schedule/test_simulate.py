"""The step simulation: conservation, determinism, agreement with measured vLLM and numba."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mmctl.engine import compiling
from mmctl.engine.records import Device, Link, Request, Span
from mmctl.engine.schedule import (
    compare,
    figures,
    fleet,
    generate,
    policies,
    simulate,
    stream,
    workload,
)
from mmctl.engine.schedule.layout import ENCODE
from mmctl.engine.schedule.workload import Contents, Workload

MODEL = fleet.model("qwen3-vl-8b")


def run(work: Workload, policy: str, devices: str = "h100_sxm:2,l4:2", **engine: int):  # type: ignore[no-untyped-def]
    settings_ = fleet.Engine(**engine)  # type: ignore[arg-type]
    given_ = fleet.parse(devices, MODEL, settings_)
    which = policies.POLICIES[policy]
    rule = policies.rule(which, output_mean=100.0, seed=3)
    placed = policies.place(which, given_, MODEL)
    return simulate.run(work, placed, rule, MODEL, settings_, policy=policy, log=True)


@pytest.mark.parametrize("policy", sorted(policies.POLICIES))
def test_every_request_is_served_once_and_no_work_is_made(policy: str) -> None:
    work = generate.from_quantiles(rate_per_s=3, count=300, seed=5)
    found = run(work, policy)
    assert found.refused == 0
    assert (found.result.finish_s >= found.result.first_s).all() and (
        found.result.first_s > found.result.started_s
    ).all()
    assert (found.result.started_s >= work.arrival_s).all()
    vision = work.images > 0
    assert (found.result.encoded_s[vision] >= found.result.started_s[vision]).all()
    assert (found.result.first_s[vision] > found.result.encoded_s[vision]).all()
    assert (found.result.encoded_s[~vision] == -1).all()
    busy = found.encode_busy_s + found.prefill_busy_s + found.decode_busy_s
    assert (busy <= found.end_s * (1 + 1e-9)).all()


def test_little_s_law_holds_over_a_run_that_begins_and_ends_empty() -> None:
    work = generate.poisson(rate_per_s=20, count=1500, seed=2, output_tokens=40)
    found = run(work, "least_outstanding")
    moments = np.concatenate([work.arrival_s, found.result.finish_s])
    steps = np.concatenate([np.ones(work.requests), -np.ones(work.requests)])
    order = np.argsort(moments, kind="stable")
    inside = np.cumsum(steps[order])
    area = float((inside[:-1] * np.diff(moments[order])).sum())
    assert area == pytest.approx(float((found.result.finish_s - work.arrival_s).sum()), rel=1e-9)
    assert inside[-1] == 0


def test_the_same_seed_gives_the_same_bytes() -> None:
    work = generate.from_quantiles(rate_per_s=4, count=200, seed=9)
    a, b = run(work, "power_of_two"), run(work, "power_of_two")
    assert a.result.finish_s.tobytes() == b.result.finish_s.tobytes()
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
    assert (found.result.finish_s >= 0).sum() + found.refused == len(jobs)
    assert found.refused == 0


def contents(lists: list[list[int]]) -> Contents:
    flat = [name for names in lists for name in names]
    different = sorted(set(flat))
    return Contents(
        starts=np.cumsum([0, *map(len, lists)]),
        ids=np.array([different.index(name) for name in flat], "i4"), different=len(different),
    )  # fmt: skip


@given(
    st.lists(
        st.tuples(
            st.floats(0, 3), st.integers(1, 2500), st.integers(0, 4), st.integers(1, 40),
            st.lists(st.integers(0, 6), max_size=4, unique=True),
            st.lists(st.integers(0, 3), max_size=4, unique=True),
        ),
        min_size=1, max_size=25,
    ),
    st.sampled_from(["jsq_tokens", "split_e_p_d", "perception"]),
    st.integers(180, 400),
)  # fmt: skip
@settings(max_examples=60, deadline=None)
def test_shared_prompts_and_known_images_lose_no_request_and_no_block(
    jobs: list[tuple[float, int, int, int, list[int], list[int]]], policy: str, blocks: int
) -> None:
    jobs.sort(key=lambda job: job[0])
    arrival, text, images, output = (np.array(c) for c in list(zip(*jobs, strict=True))[:4])
    vision = images * 16
    work = Workload(
        name="small", format="test", basis="modelled", arrival_s=arrival.astype(float),
        text_tokens=text, vision_tokens=vision, images=images,
        patches=workload.patches_of(vision, images), output_tokens=output,
        prefixes=contents([job[4] for job in jobs]),
        named_images=contents([job[5] for job in jobs]),
    )  # fmt: skip
    found = run(work, policy, "h100_sxm:3", blocks=blocks, sequences=8, batched_tokens=512)
    assert (found.result.finish_s >= 0).all() and found.refused == 0
    assert (found.result.reused < text + vision).all()
    assert (found.result.reused_images <= images).all()
    log = found.log
    assert log is not None and (log.free >= 0).all() and (log.free <= blocks).all()


def test_what_a_prompt_repeats_is_computed_once_where_there_is_room() -> None:
    count = 40
    work = generate.poisson(rate_per_s=0.5, count=count, seed=1, text_tokens=2100, output_tokens=4)
    lists = [[0, 1, 2, 100 + i % 4] for i in range(count)]
    work = msgspec.structs.replace(work, prefixes=contents(lists))
    found = run(work, "round_robin", "h100_sxm:1")
    new = 4 + 3  # three pieces once, four different ends
    assert int(found.result.reused.sum()) == 512 * (4 * count - new)
    assert (
        int(run(work, "round_robin", "h100_sxm:1", prefix_caching=False).result.reused.sum()) == 0
    )
    # With room for one request only, a piece survives from one to the next all the same.
    tight = run(work, "round_robin", "h100_sxm:1", blocks=140)
    assert 0 < int(tight.result.reused.sum()) < int(found.result.reused.sum())


def test_an_image_that_was_encoded_before_is_not_encoded_again_while_it_is_kept() -> None:
    work = generate.from_quantiles(rate_per_s=2, count=60, seed=3)
    one = np.minimum(work.images, 1)
    each = np.where(one > 0, 1000, 0).astype("i4")
    work = msgspec.structs.replace(
        work, images=one, vision_tokens=each, patches=workload.patches_of(each, one),
        named_images=contents([[i % 3] if n else [] for i, n in enumerate(one)]),
    )  # fmt: skip
    for policy in ("least_outstanding", "perception"):
        kept = run(work, policy, "h100_sxm:1", encoder_cache_tokens=5000)
        assert int(kept.result.reused_images.sum()) == int(one.sum()) - 3
        lost = run(work, policy, "h100_sxm:1", encoder_cache_tokens=1000)
        assert int(lost.result.reused_images.sum()) < int(one.sum()) // 2
        assert kept.encode_busy_s.sum() < lost.encode_busy_s.sum()


def test_a_run_as_records_is_in_order_and_tells_the_time_of_every_device() -> None:
    work = generate.from_quantiles(rate_per_s=4, count=80, seed=5)
    found = run(work, "split_e_p_d")
    told = list(stream.records(found, MODEL, started_ns=10**18))
    times = [record.ts_ns for record in told]
    assert times == sorted(times)
    spans = [record for record in told if isinstance(record, Span)]
    assert {span.stage for span in spans} == {
        "vision_encode", "cross_attn_fusion", "text_decode_step"
    }  # fmt: skip
    assert sum(span.images or 0 for span in spans) == int(work.images.sum())
    seconds = sum(span.duration_ns for span in spans) / 1e9
    busy = float((found.encode_busy_s + found.prefill_busy_s + found.decode_busy_s).sum())
    assert seconds == pytest.approx(busy, rel=0.01)
    shares = [record.sm_ratio for record in told if isinstance(record, Device)]
    assert sum(share or 0.0 for share in shares) == pytest.approx(busy, rel=0.01)
    done = [r for r in told if isinstance(r, Request) and r.state == "completed"]
    for request in done:
        whole = (request.queue_wait_s or 0.0) + sum(request.stages.values())
        i = int(request.id)
        assert whole == pytest.approx(found.result.finish_s[i] - work.arrival_s[i])
    sent = {(r.a, r.b) for r in told if isinstance(r, Link) and r.used_bytes_per_s}
    encoders = {device.name for device in found.devices if device.role == ENCODE}
    assert any(a in encoders and b not in encoders for a, b in sent)


def test_a_request_that_no_device_could_hold_is_refused_not_lost() -> None:
    work = generate.poisson(rate_per_s=1, count=3, seed=1, text_tokens=10_000)
    found = run(work, "least_outstanding", "h100_sxm:1", blocks=100)
    assert found.refused == 3 and (found.result.device == -1).all()


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


@pytest.mark.skipif(not compiling.available(), reason="numba (the extra 'fast') is not installed")
@pytest.mark.skipif(not os.environ.get("MMCTL_SLOW"), reason="compiling takes 25 s: MMCTL_SLOW=1")
def test_compiled_and_plain_give_the_same_bytes() -> None:
    work = generate.from_quantiles(rate_per_s=4, count=300, seed=4)
    names = [[i % 7, 10 + i % 3] for i in range(300)]
    work = msgspec.structs.replace(work, prefixes=contents(names), named_images=contents(names))
    engine = fleet.Engine()
    which = policies.POLICIES["perception"]
    devices = policies.place(which, fleet.parse("h100_sxm:2,l4:2", MODEL, engine), MODEL)
    rule = policies.rule(which, output_mean=100.0, seed=3)
    a, b = (
        simulate.run(work, devices, rule, MODEL, engine, plain=plain, log=True)
        for plain in (True, False)
    )
    assert a.log is not None and b.log is not None
    for plain, fast in zip((*a.result, *a.log), (*b.result, *b.log), strict=True):
        assert plain.tobytes() == np.ascontiguousarray(fast, plain.dtype).tobytes()


def test_text_waits_a_third_as_long_as_behind_images_and_no_baseline_has_more_goodput() -> None:
    devices = "h100_sxm:2,l40s:4,l4:2"
    for seed in (21, 22):
        work = generate.from_quantiles(rate_per_s=12, count=1000, seed=seed)
        found = {
            name: figures.summary(run(work, name, devices), ttft_slo_s=2.0, itl_slo_s=0.1)
            for name in ("colocated_fcfs", "jsq_requests", "jsq_tokens", "perception")
        }
        late = {name: row["modalities"]["text"]["ttft_s"]["p99"] for name, row in found.items()}
        assert 3 * late["perception"] < late["colocated_fcfs"]
        good = {name: row["goodput_per_device_hour"] for name, row in found.items()}
        assert max(good, key=lambda name: good[name]) == "perception"


def test_with_room_for_all_a_public_trace_reuses_exactly_what_it_repeats(data: Path) -> None:
    work = workload.read(data / "mooncake" / "synthetic_trace.jsonl", limit=400)
    assert work.prefixes is not None
    known: set[int] = set()
    expected = 0
    for i in range(work.requests):
        first, last = work.prefixes.starts[i : i + 2]
        names = work.prefixes.ids[first:last][: int(work.text_tokens[i]) // 512].tolist()
        repeated = next((k for k, name in enumerate(names) if name not in known), len(names))
        expected += min(512 * repeated, (int(work.text_tokens[i]) - 1) // 16 * 16)
        known.update(names)
    found = run(work, "jsq_tokens", "h100_sxm:1", blocks=5_000_000)
    assert expected > 0 and int(found.result.reused.sum()) == expected
