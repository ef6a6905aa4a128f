"""What each response costs and brings on this device, beside what is published of its kind.

Latency is of one call after warm-up, error and cosine of what can be restored, throughput of
whole requests of the demo model (an image, a prompt, sixteen tokens) with and without the
response, taken in turn so that a busy machine slows both.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from statistics import median
from typing import Any, NamedTuple

import msgspec
import torch
from torch import Tensor

from mmctl.engine.model import KvCache, VisionLanguageModel, build, in_float32, tokenize
from mmctl.engine.records import Basis
from mmctl.engine.responses import pca
from mmctl.engine.responses.distill import (
    distill,
    distill_kv,
    estimate_distill,
    undistill,
)
from mmctl.engine.responses.estimate import bytes_of, compare
from mmctl.engine.responses.offload import HostBlocks, estimate_offload, offload
from mmctl.engine.responses.precision import hand_over
from mmctl.engine.responses.quantize import dequantize, quantize
from mmctl.engine.responses.truncate import truncate

SIDE = 448
"""Height and width of the image of a request, in pixels: 1,024 vision tokens."""

OUTPUT_TOKENS = 16
PROMPT = "What is in this image? Answer with one word."

PUBLISHED: dict[str, dict[str, float]] = {
    "quantize_vision": {"latency_ms": 3, "freed_ratio": 0.42, "throughput_ratio": 0.93},
    "offload_kv": {"latency_ms": 12, "freed_ratio": 0.68, "throughput_ratio": 0.77},
    "distill": {"latency_ms": 5, "freed_ratio": 0.55, "throughput_ratio": 0.98},
    "pca_shallow": {"freed_ratio": 0.83},
    "pca_deep": {"freed_ratio": 0.75},
}
"""Published figures; theirs are of other devices and sizes, which are not stated."""


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """One response on one shape. ``size_bytes`` is the state it was given, ``link`` what its
    bytes crossed. ``latency_ms`` is the best of the runs, which a busy machine disturbs least,
    ``latency_p50_ms`` their median; ``done_ms`` is when the memory was free, where that is
    later than the call."""

    name: str
    shape: str
    dtype: str
    size_bytes: int
    latency_ms: float
    latency_p50_ms: float
    done_ms: float
    freed_bytes: int
    freed_ratio: float
    scratch_bytes: int | None
    error: float | None
    cosine_mean: float | None
    throughput_ratio: float | None
    link: str
    published: dict[str, float]
    basis: Basis = "measured"


class Run(NamedTuple):
    """One call of a response: what it kept on the device, and what comes back from it."""

    kept_bytes: int
    restore: Callable[[], Tensor] | None
    done: Callable[[], object] = lambda: None


def correlated(tokens: int, channels: int, seed: int = 0) -> Tensor:
    """Features [1, tokens, channels] like those of images: a token resembles the one before it
    (correlation 0.95), and the k-th direction of channels varies as 1/k."""
    noise = torch.randn(tokens, channels, generator=torch.Generator().manual_seed(seed))
    walk = noise.clone()
    for place in range(1, tokens):
        walk[place] = 0.95 * walk[place - 1] + 0.3122 * noise[place]
    mix = torch.randn(channels, channels, generator=torch.Generator().manual_seed(12345))
    directions = torch.linalg.qr(mix).Q
    features: Tensor = walk / torch.arange(1, channels + 1) @ directions * channels**0.5
    return features[None]


def measure(
    device: str = "cpu", runs: int = 15, offload_bytes: int = 64 * 2**20, requests: int = 7,
    progress: Callable[[str], None] = lambda name: None,
) -> list[Measured]:  # fmt: skip
    """Every response on [1, 576, 1024] and on the demo model's own vision tokens.

    ``runs`` calls are timed, and ``requests`` of the demo model with and without it. Offload
    moves a KV cache of ``offload_bytes``. Everything runs on ``device`` with the threads torch has.
    """
    with torch.inference_mode():
        model = build(device=device)
        image = torch.rand(1, 3, SIDE, SIDE, generator=torch.Generator().manual_seed(0))
        own = model.encode(image.to(device))
        features = correlated(576, 1024).to(device)
        shallow = correlated(576, 768, 1).to(device)
        cases = list(_cases(features, own, shallow, offload_bytes))
        ratios: dict[str, float | None] = {}
        found = []
        for case in cases:
            progress(case.name)
            if case.name not in ratios:
                ratios[case.name] = _throughput(model, image.to(device), case.name, requests)
            found.append(_measured(case, runs, ratios[case.name]))
    return found


class Case(NamedTuple):
    """A response, its name, the state it is given and how one call of it goes."""

    name: str
    state: tuple[Tensor, ...]
    call: Callable[[], Run]
    compared: Tensor | None
    scratch_bytes: int | None = None


def _cases(features: Tensor, own: Tensor, shallow: Tensor, offload_bytes: int) -> Iterator[Case]:
    for tokens in (features, own):
        half = tokens.half()
        yield Case("quantize_vision", (half,), partial(_quantize, half), half)
        yield Case(
            "distill_half", (tokens,), partial(_distill, tokens, 0.5), tokens,
            estimate_distill(tokens, 0.5).scratch_bytes,
        )  # fmt: skip
        scores = tokens.float().norm(dim=-1)
        limit = tokens.shape[1] // 2
        yield Case("truncate", (tokens,), partial(_truncate, tokens, scores, limit), None)
    kv = torch.randn(2, 1, 8, 1024, 64, device=features.device)
    yield Case("distill", (features, kv), partial(_distill_both, features, kv[0], kv[1]), features)
    for level, tokens in (("shallow", shallow), ("deep", features)):
        basis = pca.fit([correlated(576, tokens.shape[2], seed) for seed in (7, 8, 9)],
                        pca.SHIPPED[level][1], "the first batches")  # fmt: skip
        yield Case(f"pca_{level}", (tokens,), partial(_project, tokens, basis), tokens)
    yield Case("hand_over", (features,), partial(_hand_over, features), features)
    block = torch.ones(offload_bytes // 2, dtype=torch.float16, device=features.device)
    pool = HostBlocks()
    pool.reserve(offload_bytes)
    yield Case(
        "offload_kv", (block,), partial(_offload, block, pool), block[:4096].view(1, -1),
        estimate_offload([block]).scratch_bytes,
    )  # fmt: skip


def _quantize(tokens: Tensor) -> Run:
    packed = quantize(tokens)
    return Run(packed.nbytes, lambda: dequantize(packed))


def _distill(tokens: Tensor, keep_ratio: float) -> Run:
    merged = distill(tokens, keep_ratio)
    return Run(merged.nbytes, lambda: undistill(merged))


def _distill_both(tokens: Tensor, keys: Tensor, values: Tensor) -> Run:
    """The recommended path: vision tokens by similarity and text KV by importance."""
    merged, merged_kv = distill(tokens), distill_kv(keys, values)
    return Run(merged.nbytes + merged_kv.nbytes, lambda: undistill(merged))


def _truncate(tokens: Tensor, scores: Tensor, limit: int) -> Run:
    return Run(truncate(tokens, scores, limit).nbytes, None)


def _project(tokens: Tensor, basis: pca.Basis) -> Run:
    projected = pca.project(tokens, basis)
    return Run(projected.nbytes, lambda: pca.restore(projected))


def _hand_over(tokens: Tensor) -> Run:
    converted = hand_over(tokens.clone(), torch.float16)
    return Run(bytes_of(converted), lambda: converted)


def _offload(block: Tensor, pool: HostBlocks) -> Run:
    handle = offload(block, pool)
    return Run(0, lambda: handle.reload()[:4096].view(1, -1), handle.finish)


def _measured(case: Case, runs: int, throughput_ratio: float | None) -> Measured:
    latencies, ends = [], []
    before = bytes_of(*case.state)
    error = cosine = None
    kept = 0
    for number in range(runs + 3):
        _wait(case.state[0])
        started = time.perf_counter()
        run = case.call()
        called = time.perf_counter()
        run.done()
        _wait(case.state[0])
        ended = time.perf_counter()
        if number >= 3:
            latencies.append(called - started)
            ends.append(ended - started)
        kept = run.kept_bytes
        back = run.restore() if run.restore else None
        if back is not None and case.compared is not None and error is None:
            error, cosine = compare(case.compared, back)
    done_s = min(ends)
    crossed = case.name == "offload_kv"
    calls = latencies if crossed else ends
    return Measured(
        name=case.name, shape=" + ".join(str(list(t.shape)) for t in case.state),
        dtype=str(case.state[0].dtype).removeprefix("torch."), size_bytes=before,
        latency_ms=1e3 * min(calls), latency_p50_ms=1e3 * median(calls), done_ms=1e3 * done_s,
        freed_bytes=before - kept, freed_ratio=(before - kept) / before,
        scratch_bytes=case.scratch_bytes, error=error, cosine_mean=cosine,
        throughput_ratio=throughput_ratio,
        link=f"host memory at {before / done_s / 1e9:.1f} GB/s" if crossed else "none",
        published=PUBLISHED.get(case.name, {}),
    )  # fmt: skip


def _wait(tensor: Tensor) -> None:
    if tensor.device.type == "cuda":
        torch.cuda.synchronize(tensor.device)


def _throughput(
    model: VisionLanguageModel, image: Tensor, name: str, requests: int
) -> float | None:
    """Requests a second with the response over those without; absent where it has no meaning."""
    with_it = _VARIANTS.get(name)
    if with_it is None:
        return None
    pool = HostBlocks()
    times: dict[bool, list[float]] = {False: [], True: []}
    for number in range(requests + 1):
        for active in (False, True):
            started = time.perf_counter()
            _request(model, image, with_it if active else _plain, pool)
            _wait(image)
            if number:
                times[active].append(time.perf_counter() - started)
    return median(times[False]) / median(times[True])


Variant = Callable[[VisionLanguageModel, Tensor, KvCache, HostBlocks], Any]
"""Vision tokens [tokens, dim] → the cross-attention cache, with a response in between."""


def _request(model: VisionLanguageModel, image: Tensor, variant: Variant, pool: HostBlocks) -> None:
    cache = KvCache(model.config, image.device)
    cross = variant(model, model.encode(image)[0], cache, pool)
    logits = model.decode(torch.tensor(tokenize(PROMPT), device=image.device), cache, cross)
    for step in range(OUTPUT_TOKENS):
        if variant is _with_offload and step == OUTPUT_TOKENS // 2:
            moved = [offload(tensor, pool) for tensor in (*cache.keys, *cache.values)]
            for handle in moved:
                handle.finish()
            back = [handle.reload() for handle in moved]
            cache.keys, cache.values = back[: len(cache.keys)], back[len(cache.keys) :]
        logits = model.decode(logits.argmax()[None], cache, cross)


def _plain(model: VisionLanguageModel, tokens: Tensor, _: KvCache, __: HostBlocks) -> Any:
    return in_float32(model.cross_cache(tokens))


def _with_int8(model: VisionLanguageModel, tokens: Tensor, _: KvCache, __: HostBlocks) -> Any:
    packed = [quantize(kept) for kept in model.cross_cache(tokens)]

    def layer_pair(layer: int) -> tuple[Tensor, Tensor]:
        keys, values = dequantize(packed[layer]).float().unbind(0)
        return keys, values

    return layer_pair


def _with_distill(
    model: VisionLanguageModel, tokens: Tensor, _: KvCache, __: HostBlocks,
    keep_ratio: float = 0.5,
) -> Any:  # fmt: skip
    return in_float32(model.cross_cache(distill(tokens[None], keep_ratio).tokens[0]))


def _with_truncate(model: VisionLanguageModel, tokens: Tensor, _: KvCache, __: HostBlocks) -> Any:
    cut = truncate(tokens[None], tokens.norm(dim=-1)[None], len(tokens) // 2)
    return in_float32(model.cross_cache(cut.tokens[0]))


def _with_offload(model: VisionLanguageModel, tokens: Tensor, _: KvCache, __: HostBlocks) -> Any:
    return in_float32(model.cross_cache(tokens))


_VARIANTS: dict[str, Variant] = {
    "quantize_vision": _with_int8,
    "distill_half": _with_distill,
    "distill": partial(_with_distill, keep_ratio=0.44),
    "truncate": _with_truncate,
    "offload_kv": _with_offload,
}
