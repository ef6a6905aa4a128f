"""What a simulated run comes to: latencies, goodput, blocking, utilisation, energy."""

from __future__ import annotations

from typing import Any

import numpy as np

from mmctl.engine.schedule.fleet import Device
from mmctl.engine.schedule.layout import DECODE, ENCODE, PREFILL
from mmctl.engine.schedule.simulate import Run

QUANTILES = (("p50", 50.0), ("p95", 95.0), ("p99", 99.0))


def spread(values: np.ndarray) -> dict[str, float] | None:
    """Mean and quantiles; absent of nothing."""
    if not len(values):
        return None
    found = np.percentile(values, [q for _, q in QUANTILES])
    return {
        "mean": float(values.mean()),
        **{name: float(v) for (name, _), v in zip(QUANTILES, found, strict=True)},
    }


def latencies(run: Run, since: Any = None) -> dict[str, np.ndarray]:
    """By finished request: seconds to first token, per token after it, and end to end.

    ``since`` is the moment counted from, the arrival unless told.
    """
    done = run.result.finish_s >= 0
    begun = (run.workload.arrival_s if since is None else since)[done]
    output = run.workload.output_tokens[done]
    first, last = run.result.first_s[done], run.result.finish_s[done]
    several = output > 1
    return {
        "ttft_s": first - begun,
        "itl_s": ((last - first)[several]) / (output[several] - 1),
        "e2e_s": last - begun,
    }


def summary(run: Run, *, ttft_slo_s: float, itl_slo_s: float) -> dict[str, Any]:
    """The figures of one policy, as the output contract names them.

    Goodput counts requests whose first token and mean time per token keep the objective.
    Joules are modelled: power while busy, idle power else; absent where no power is known.
    """
    work, found = run.workload, run.result
    done = found.finish_s >= 0
    vision = work.images > 0
    first = found.first_s - work.arrival_s
    per_token = (found.finish_s - found.first_s) / np.maximum(work.output_tokens - 1, 1)
    good = done & (first <= ttft_slo_s) & (per_token <= itl_slo_s)
    hours = len(run.devices) * run.end_s / 3600.0
    busy = run.encode_busy_s + run.prefill_busy_s + run.decode_busy_s
    energy = _energy(run, busy)
    count = int(done.sum())

    def of(mask: np.ndarray) -> dict[str, Any]:
        picked = mask & done
        several = picked & (work.output_tokens > 1)
        return {
            "requests": int(mask.sum()),
            "ttft_s": spread(first[picked]),
            "itl_s": spread(per_token[several]),
            "e2e_s": spread((found.finish_s - work.arrival_s)[picked]),
            "slo_ratio": float(good[mask].mean()) if mask.any() else None,
        }

    span = max(run.end_s, 1e-12)
    return {
        "policy": run.policy,
        "modalities": {"vision": of(vision), "text": of(~vision)},
        "ttft_mean_s": float(first[done].mean()) if count else None,
        "goodput_per_device_hour": float(good.sum()) / hours if hours > 0 else None,
        "slo_ratio": float(good.mean()),
        # Of the last third to come: lower where queues grow, and a longer run would be worse.
        "late_slo_ratio": float(good[-(len(good) // 3 or 1) :].mean()),
        "tokens_per_s_per_device": _throughput(run),
        "hol_blocking_s": float(run.blocking_s.sum()),
        "utilisation_ratio": {
            **{
                stage: float(np.mean(column) / span)
                for stage, column in (
                    ("vision_encode", run.encode_busy_s),
                    ("cross_attn_fusion", run.prefill_busy_s),
                    ("text_decode_step", run.decode_busy_s),
                )
            },
            **{d.name: min(float(busy[i]) / span, 1.0) for i, d in enumerate(run.devices)},
        },
        "joules_per_request": energy / count if energy is not None and count else None,
        "device_hours": hours,
        "preemptions": int(found.preempted.sum()),
        "steps": int(run.steps.sum()),
        "reused_ratio": _share(found.reused[done], (work.text_tokens + work.vision_tokens)[done]),
        "reused_images_ratio": _share(found.reused_images[done], work.images[done]),
        "makespan_s": run.end_s,
        "lost": work.requests - count,
        "refused": run.refused,
    }


def _throughput(run: Run) -> float | None:
    """Output tokens a second and device until nine in ten of them are made: the rest is a tail
    in which devices run dry."""
    done = run.result.finish_s >= 0
    if not done.any():
        return None
    order = np.argsort(run.result.finish_s[done], kind="stable")
    made = np.cumsum(run.workload.output_tokens[done][order])
    at = int(np.searchsorted(made, 0.9 * made[-1]))
    took_s = float(run.result.finish_s[done][order][at]) - float(run.workload.arrival_s[0])
    return float(made[at]) / took_s / len(run.devices) if took_s > 0 else None


def _share(part: np.ndarray, whole: np.ndarray) -> float | None:
    total = int(whole.sum(dtype=np.int64))
    return float(part.sum(dtype=np.int64)) / total if total else None


def _energy(run: Run, busy: np.ndarray) -> float | None:
    total = 0.0
    for device, seconds in zip(run.devices, busy, strict=True):
        if device.power_w is None:
            return None
        idle = device.idle_w if device.idle_w is not None else 0.0
        total += device.power_w * float(seconds) + idle * max(0.0, run.end_s - float(seconds))
    return total


def stages(device: Device) -> str:
    """``E``, ``PD``, ``EPD`` …: the stages a device does."""
    return "".join(
        letter
        for letter, bit in (("E", ENCODE), ("P", PREFILL), ("D", DECODE))
        if device.role & bit
    )
