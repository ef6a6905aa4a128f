"""Requests in: every format, and what is said of rows that cannot be used."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from mmctl.engine.errors import MmctlError
from mmctl.engine.schedule import generate, workload


def test_a_damaged_trace_is_read_as_far_as_it_goes(tmp_path: Path) -> None:
    trace = tmp_path / "t.jsonl"
    trace.write_text(
        '{"timestamp": 1000, "input_length": 10, "output_length": 2, "hash_ids": [1]}\n'
        '{"timestamp": 1000, "input_length": 10, "output_length": 2, "hash_ids": [1]}\n'
        '{"timestamp": -5, "input_length": 10, "output_length": 2, "hash_ids": [2]}\n'
        '{"timestamp": 500, "input_length": 11, "output_length": 3, "hash_ids": [3]}\n'
        '{"timestamp": 900, "input_length": 11}\n'
        '{"timestamp": "soon", "input_length": 11, "output_length": 3}\n'
        "not json\n"
    )
    work = workload.read(trace)
    assert work.requests == 2 and work.reordered == 1
    assert work.arrival_s.tolist() == [0.0, 0.5]
    assert work.skipped == {
        "duplicate": 1, "negative time": 1, "no output tokens": 1, "time is not a number": 1,
        "not JSON": 1,
    }  # fmt: skip


def test_a_trace_with_nothing_usable_says_why(tmp_path: Path) -> None:
    trace = tmp_path / "t.csv"
    trace.write_text("TIMESTAMP,ContextTokens\n2023-11-16 18:15:46.68,374\n")
    with pytest.raises(MmctlError, match="1 × no output tokens"):
        workload.read(trace)
    assert workload.read(trace, output_tokens=5).output_tokens.tolist() == [5]
    trace.write_text("a,b\n1,2\n")
    with pytest.raises(MmctlError, match="no trace that is known"):
        workload.read(trace)


def test_azure_and_images(tmp_path: Path) -> None:
    trace = tmp_path / "t.csv"
    trace.write_text(
        "TIMESTAMP,NumImages,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:15:46.6805900,0,374,44\n2023-11-16 18:15:47.6805900,2,4000,9\n"
    )
    work = workload.read(trace)
    assert work.arrival_s[1] == pytest.approx(1.0, abs=1e-6)
    assert work.images.tolist() == [0, 2]
    assert (work.text_tokens + work.vision_tokens).tolist() == [374, 4000]


def test_the_public_traces(data: Path) -> None:
    azure = workload.read(data / "azure" / "AzureLLMInferenceTrace_2023_conv.csv")
    assert azure.requests > 19_000
    mooncake = workload.read(data / "mooncake" / "synthetic_trace.jsonl", limit=500)
    assert mooncake.requests == 500 and mooncake.text_tokens.max() > 10_000
    sent = workload.read(data / "vllm_runs" / "sharegpt-llama-3.1-8b-300-sps10.jsonl")
    assert sent.requests == 300 and sent.measured is None


def test_servegen_keeps_its_clients_rate_and_sizes(data: Path) -> None:
    folder = data / "servegen_mm" / "mm-image"
    work = generate.from_servegen(folder, count=3000, seed=1, clients=(0,))
    assert work.requests == 3000
    assert 0.7 < work.requests / work.span_s < 2.0
    assert set(work.images.tolist()) == {1}
    assert set(np.unique(work.vision_tokens)) <= {525, 714, 1196, 1222, 1230}


def test_quantiles_are_met() -> None:
    work = generate.from_quantiles(rate_per_s=5, count=40_000, seed=1)
    vision = work.images > 0
    assert vision.mean() == pytest.approx(0.48, abs=0.01)
    images = work.images[vision]
    assert np.percentile(images, 50) == 1 and np.percentile(images, 90) == pytest.approx(25, abs=3)
    text = work.text_tokens[~vision]
    assert np.percentile(text, 50) == pytest.approx(784, rel=0.05)
    assert np.percentile(text, 99) == pytest.approx(14005, rel=0.05)
    assert work.requests / work.span_s == pytest.approx(5, rel=0.05)
