"""The benchmark of responses: every figure measured, none made up, the contract's fields."""

from __future__ import annotations

import json

import pytest

torch = pytest.importorskip("torch")

from mmctl.benchmarks.responses import PUBLISHED, measure  # noqa: E402


@pytest.fixture(scope="module")
def measured():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield measure(runs=3, offload_bytes=2**20, requests=1)
    torch.set_num_threads(threads)


def test_every_response_is_measured_on_its_shapes(measured) -> None:
    names = [row.name for row in measured]
    assert set(PUBLISHED) <= set(names) and names.count("quantize_vision") == 2
    for row in measured:
        assert row.basis == "measured" and row.latency_ms > 0
        assert row.freed_bytes == round(row.freed_ratio * row.size_bytes)
        assert row.latency_ms <= row.latency_p50_ms
        assert (row.link == "none") == (row.name != "offload_kv")


def test_the_promised_quality_and_saving(measured) -> None:
    by_name = {row.name: row for row in measured if "576" in row.shape or row.name == "offload_kv"}
    assert by_name["quantize_vision"].cosine_mean >= 0.9998
    assert by_name["distill_half"].cosine_mean >= 0.98
    assert by_name["distill"].freed_ratio >= 0.55
    assert by_name["offload_kv"].error == 0
    assert by_name["pca_deep"].cosine_mean > 0.99
    assert by_name["truncate"].error is None


def test_from_a_shell(mmctl) -> None:
    done = mmctl("benchmark", "responses", "--device", "nonsense")
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    done = mmctl("benchmark", "responses", "--offload", "12 apples")
    assert done.returncode == 2
    done = mmctl("benchmark", "responses", "--runs", "3", "--requests", "1", "--offload", "1MiB",
                 "-o", "json")  # fmt: skip
    document = json.loads(done.stdout)
    assert done.returncode == 0 and document["schema"] == 1
    assert set(document["responses"][0]) >= {
        "name", "shape", "latency_ms", "freed_bytes", "freed_ratio", "error", "cosine_mean",
        "throughput_ratio", "published", "basis",
    }  # fmt: skip
