"""Serving engines: which metric of which engine and version is which canonical signal.

A signal is named as the field of ``Serving`` that it becomes, or of which it becomes the quantiles
(``QUANTILES``); it lists names newest first, and the first that a page has is taken. Names were
read in the engines' own sources: vLLM 0.6.6 to 0.33, SGLang 0.4.3 to 0.5.23, TensorRT-LLM and its
Triton backend, TGI, LMDeploy, llama.cpp.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal, NamedTuple

QUANTILES = ("ttft", "itl", "e2e")
"""Histograms that become ``NAME_p50_s``, ``NAME_p95_s`` and ``NAME_p99_s``."""

VISION = {"vision_queue": "queue_wait_s", "vision_e2e": "e2e"}
"""What an engine with an encoder of its own says about images, for ``modalities``."""


class Signal(NamedTuple):
    """Where a canonical signal comes from: a sum of ``names`` for each of ``also``, times scale.

    A *mean* is the quotient of two counters' changes: ``names`` are sums, ``also`` counts.
    """

    kind: Literal["gauge", "counter", "histogram", "mean"]
    names: tuple[str, ...]
    scale: float = 1.0
    where: tuple[tuple[str, str], ...] = ()
    also: tuple[str, ...] = ()


class Engine(NamedTuple):
    """A serving engine: how its metrics begin, what tells its instances apart, its signals."""

    prefixes: tuple[str, ...]
    instance: tuple[str, ...]
    signals: dict[str, Signal]
    ranks: tuple[str, ...] = ("pid", "tp_rank", "pp_rank", "moe_ep_rank")
    missing: Mapping[str, str] = MappingProxyType({})


def _gauge(*names: str, also: tuple[str, ...] = (), **where: str) -> Signal:
    return Signal("gauge", names, where=tuple(where.items()), also=also)


def _counter(*names: str, scale: float = 1.0, **where: str) -> Signal:
    return Signal("counter", names, scale, tuple(where.items()))


def _histogram(*names: str, scale: float = 1.0, **where: str) -> Signal:
    return Signal("histogram", names, scale, tuple(where.items()))


def _mean(total: str, count: str, scale: float = 1.0) -> Signal:
    return Signal("mean", (total,), scale, also=(count,))


def _vllm_like(prefix: str) -> dict[str, Signal]:
    p = prefix
    return {
        "running": _gauge(f"{p}num_requests_running"),
        "waiting": _gauge(
            f"{p}num_requests_waiting", f"{p}num_requests_waiting_by_reason",
            also=(f"{p}num_requests_swapped",),
        ),
        "kv_ratio": _gauge(f"{p}kv_cache_usage_perc", f"{p}gpu_cache_usage_perc"),
        "ttft": _histogram(f"{p}time_to_first_token_seconds"),
        "itl": _histogram(
            f"{p}inter_token_latency_seconds", f"{p}iter_token_latency",
            f"{p}time_per_output_token_seconds",
        ),
        "e2e": _histogram(f"{p}e2e_request_latency_seconds"),
        "queue_wait_s": _histogram(f"{p}request_queue_time_seconds", f"{p}time_in_queue_requests"),
        "generation_tokens_per_s": _counter(f"{p}generation_tokens_total", f"{p}generation_tokens"),
        "prompt_tokens_per_s": _counter(f"{p}prompt_tokens_total", f"{p}prompt_tokens"),
        "preemptions": _counter(f"{p}num_preemptions_total", f"{p}num_preemptions"),
    }  # fmt: skip


ENGINES: dict[str, Engine] = {
    "vllm": Engine(("vllm:",), ("engine",), _vllm_like("vllm:")),
    "lmdeploy": Engine(
        ("lmdeploy:",), ("engine",), _vllm_like("lmdeploy:"),
        missing={"preemptions": "LMDeploy does not count preemptions"},
    ),
    "sglang": Engine(
        ("sglang:", "sglang_"), ("dp_rank", "engine_type"),
        {
            "running": _gauge("sglang:num_running_reqs"),
            "waiting": _gauge("sglang:num_queue_reqs"),
            "kv_ratio": _gauge("sglang:token_usage"),
            "ttft": _histogram("sglang:time_to_first_token_seconds"),
            "itl": _histogram(
                "sglang:inter_token_latency_seconds", "sglang:time_per_output_token_seconds"
            ),
            "e2e": _histogram("sglang:e2e_request_latency_seconds"),
            "queue_wait_s": _histogram("sglang:queue_time_seconds"),
            "generation_tokens_per_s": _counter("sglang:generation_tokens_total"),
            "prompt_tokens_per_s": _counter("sglang:prompt_tokens_total"),
            "preemptions": _counter("sglang:num_retracted_requests_total"),
            "vision_queue": _histogram("sglang:encoder_queue_wait_seconds"),
            "vision_e2e": _histogram("sglang:encoder_request_e2e_latency_seconds"),
        },
    ),
    "trtllm": Engine(
        ("trtllm_",), (),
        {
            "running": _gauge("trtllm_num_requests_running"),
            "waiting": _gauge("trtllm_num_requests_waiting"),
            "kv_ratio": _gauge("trtllm_kv_cache_utilization"),
            "ttft": _histogram("trtllm_time_to_first_token_seconds"),
            "itl": _histogram("trtllm_time_per_output_token_seconds"),
            "e2e": _histogram("trtllm_e2e_request_latency_seconds"),
            "queue_wait_s": _histogram("trtllm_request_queue_time_seconds"),
            "generation_tokens_per_s": _counter("trtllm_generation_tokens_total"),
            "prompt_tokens_per_s": _counter("trtllm_prompt_tokens_total"),
        },
        missing={"preemptions": "TensorRT-LLM gives paused requests now, no count"},
    ),
    "triton": Engine(
        ("nv_trt_llm_", "nv_inference_"), ("model", "version"),
        {
            "running": _gauge("nv_trt_llm_request_metrics", request_type="active"),
            "waiting": Signal(
                "gauge", ("nv_trt_llm_request_metrics", "nv_inference_pending_request_count"),
                where=(("request_type", "waiting"),),
            ),
            "kv_ratio": _gauge("nv_trt_llm_kv_cache_block_metrics", kv_cache_block_type="fraction"),
            "ttft": _histogram("nv_inference_first_response_histogram_ms", scale=1e-3),
            "queue_wait_s": _mean(
                "nv_inference_queue_duration_us", "nv_inference_request_success", 1e-6
            ),
        },
        missing={
            "e2e": "Triton sums request times and has no histogram of them",
            "itl": "Triton does not time tokens",
            "generation_tokens_per_s": "Triton does not count tokens",
            "prompt_tokens_per_s": "Triton does not count tokens",
            "preemptions": "Triton does not count preemptions",
        },
    ),
    "tgi": Engine(
        ("tgi_",), (),
        {
            "running": _gauge("tgi_batch_current_size"),
            "waiting": _gauge("tgi_queue_size"),
            "itl": _histogram("tgi_request_mean_time_per_token_duration"),
            "e2e": _histogram("tgi_request_duration"),
            "queue_wait_s": _histogram("tgi_request_queue_duration"),
            "generation_tokens_per_s": _counter("tgi_request_generated_tokens_sum"),
            "prompt_tokens_per_s": _counter("tgi_request_input_length_sum"),
        },
        missing={
            "kv_ratio": "TGI does not give its KV cache",
            "ttft": "TGI does not time first tokens",
            "preemptions": "TGI does not count preemptions",
        },
    ),
    "llamacpp": Engine(
        ("llamacpp:",), (),
        {
            "running": _gauge("llamacpp:requests_processing"),
            "waiting": _gauge("llamacpp:requests_deferred"),
            "kv_ratio": _gauge("llamacpp:kv_cache_usage_ratio"),
            "generation_tokens_per_s": _counter("llamacpp:tokens_predicted_total"),
            "prompt_tokens_per_s": _counter("llamacpp:prompt_tokens_total"),
        },
    ),
}  # fmt: skip

MODEL_LABELS = ("model_name", "model", "served_model_name")

STARTED = "process_start_time_seconds"
"""Tells one worker process behind a page from another, and a restart from a flip."""


def wanted() -> frozenset[str]:
    """Every name of a sample that some signal may need."""
    names = {STARTED}
    for engine in ENGINES.values():
        for signal in engine.signals.values():
            for name in (*signal.names, *signal.also):
                names.add(name)
                if signal.kind == "histogram":
                    names.update(f"{name}{end}" for end in ("_bucket", "_sum", "_count"))
                    names.discard(name)
                if signal.kind == "counter":
                    names.add(f"{name.removesuffix('_total')}_created")
    return frozenset(names)
