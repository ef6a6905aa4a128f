"""A simulated run against a measured one: signed errors, and by request."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from mmctl.engine.errors import MmctlError
from mmctl.engine.schedule.figures import latencies, spread
from mmctl.engine.schedule.fleet import Engine
from mmctl.engine.schedule.simulate import Run
from mmctl.engine.schedule.workload import Workload

NAMES = (("ttft", "ttft_s"), ("itl", "itl_s"), ("e2e", "e2e_s"))


def engine_of(run: Path, engine: Engine) -> Engine:
    """The engine's settings from the ``meta.json`` beside a measured run, where it is there."""
    path = run.parent / "meta.json"
    if not path.is_file():
        return engine
    try:
        meta = json.loads(path.read_text("utf-8"))
        given = meta.get("engine_kwargs", {})
        cache = meta.get("kv_cache", {})
        resolved = meta.get("resolved_config", {}).get("scheduler_config", {})
        return msgspec.structs.replace(
            engine,
            sequences=int(given.get("max_num_seqs") or engine.sequences),
            batched_tokens=int(given.get("max_num_batched_tokens") or engine.batched_tokens),
            blocks=cache.get("num_gpu_blocks") or engine.blocks,
            prefix_caching=bool(cache.get("enable_prefix_caching", engine.prefix_caching)),
            asynchronous=bool(resolved.get("async_scheduling", engine.asynchronous)),
        )
    except OSError as error:
        raise MmctlError(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, TypeError, AttributeError) as error:
        raise MmctlError(f"{path} describes no engine: {error}") from None


def _measured(workload: Workload) -> dict[str, np.ndarray]:
    times = workload.measured
    if times is None:
        raise MmctlError(
            f"{workload.name} holds no measured times (first_token_ts and last_token_ts)"
        )
    output = workload.output_tokens
    several = output > 1
    return {
        "ttft_s": times["first_s"],
        "itl_s": (times["last_s"] - times["first_s"])[several] / (output[several] - 1),
        "e2e_s": times["last_s"],
    }


def errors(run: Run, measured: Workload) -> dict[str, Any]:
    """Signed relative errors of mean and quantiles, and the mean absolute one by request.

    Both count from when the engine took the request from its inbox, as vLLM does. Raises
    MmctlError when the two are not of the same requests.
    """
    truth = _measured(measured)
    if measured.requests != run.workload.requests or not np.array_equal(
        measured.output_tokens, run.workload.output_tokens
    ):
        raise MmctlError(
            f"{measured.name} and the trace are not of the same requests: "
            f"{measured.requests} and {run.workload.requests}"
        )
    if (run.result.finish_s < 0).any():
        raise MmctlError("some requests were never finished: nothing to compare")
    found = latencies(run, run.result.seen_s)
    document: dict[str, Any] = {}
    for name, column in NAMES:
        mine, theirs = spread(found[column]), spread(truth[column])
        assert mine is not None and theirs is not None
        mape = float(np.mean(np.abs(found[column] - truth[column]) / truth[column]))
        document[name] = {
            **{key: mine[key] / theirs[key] - 1.0 for key in theirs},
            "mape": mape, "measured": theirs, "simulated": mine,
        }  # fmt: skip
    return document


def fit_host_s(simulate: Callable[[float], Run], measured: Workload) -> float:
    """The host's seconds a step that bring the means of this run nearest, by golden section."""

    def off(host_s: float) -> float:
        found = errors(simulate(host_s), measured)
        return abs(found["e2e"]["mean"]) + abs(found["itl"]["mean"])

    low, high = 0.0, 0.005
    ratio = (5**0.5 - 1) / 2
    a, b = high - ratio * (high - low), low + ratio * (high - low)
    at_a, at_b = off(a), off(b)
    while high - low > 2e-5:
        if at_a <= at_b:
            high, b, at_b = b, a, at_a
            a = high - ratio * (high - low)
            at_a = off(a)
        else:
            low, a, at_a = a, b, at_b
            b = low + ratio * (high - low)
            at_b = off(b)
    return (low + high) / 2
