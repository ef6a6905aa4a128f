"""A simulated run as records, so that the dashboard and the rules see it as they see a node."""

from __future__ import annotations

from collections.abc import Iterator
from heapq import merge
from typing import Any

import numpy as np

from mmctl.engine.records import AnyRecord, Event, Link, Modality, Request, Serving, Span
from mmctl.engine.records import Device as Reading
from mmctl.engine.schedule.costs import Model
from mmctl.engine.schedule.layout import BLOCK_TOKENS, DECODE, PREFILL
from mmctl.engine.schedule.simulate import Run

NODE = "simulated"


def records(
    run: Run, model: Model, *, started_ns: int, interval_s: float = 1.0
) -> Iterator[AnyRecord]:
    """The run in order of time; it must have been made with a log.

    Requests as they are queued, admitted and completed, and placements as ``route`` events;
    micro-batches as spans; and every interval a reading of each device, of the links in use and
    of the fleet's serving.
    """
    parts: tuple[Iterator[Request | Event | Span | Reading | Link | Serving], ...] = (
        _requests(run, started_ns),
        _micro_batches(run, started_ns, interval_s),
        _readings(run, model, started_ns, interval_s),
    )
    yield from merge(*parts, key=lambda record: record.ts_ns)


def _requests(run: Run, started_ns: int) -> Iterator[Request | Event]:
    work, found = run.workload, run.result
    moments = np.concatenate([work.arrival_s, found.started_s, found.finish_s])
    which = np.repeat(np.arange(3), work.requests)
    who = np.tile(np.arange(work.requests), 3)
    known = moments >= 0
    moments, which, who = moments[known], which[known], who[known]
    states = ("queued", "admitted", "completed")
    for at in np.lexsort((which, moments)):
        now_s, kind, r = float(moments[at]), int(which[at]), int(who[at])
        ts_ns = started_ns + round(now_s * 1e9)
        yield Request(
            ts_ns=ts_ns, node=NODE, id=str(r), images=int(work.images[r]),
            vision_tokens=int(work.vision_tokens[r]), text_tokens=int(work.text_tokens[r]),
            output_tokens=int(work.output_tokens[r]), arrival_s=float(work.arrival_s[r]),
            state=states[kind], stages=_stages(run, r) if kind == 2 else {},
            queue_wait_s=float(found.started_s[r] - work.arrival_s[r]) if kind == 2 else None,
        )  # fmt: skip
        if kind == 0 and found.device[r] >= 0:
            yield Event(
                ts_ns=ts_ns, node=NODE, what="route", device=run.devices[found.device[r]].name,
                message=f"request {r}", evidence=receipt(run, r),
            )  # fmt: skip


def _stages(run: Run, r: int) -> dict[str, float]:
    """Seconds of a finished request by stage; with its wait they add up to its whole time."""
    found, stages = run.result, {}
    begun = float(found.started_s[r])
    if found.encoded_s[r] >= 0:
        stages["vision_encode"] = float(found.encoded_s[r]) - begun
        begun = float(found.encoded_s[r])
    stages["cross_attn_fusion"] = float(found.first_s[r]) - begun
    stages["text_decode_step"] = float(found.finish_s[r] - found.first_s[r])
    return stages


def receipt(run: Run, r: int) -> dict[str, Any]:
    """Why request ``r`` went where it went: the chosen device's load against the next best."""
    found = run.result
    second = int(found.second[r])

    def name(device: int) -> str | None:
        return run.devices[device].name if device >= 0 else None

    return {
        "policy": run.policy,
        "encoder": name(int(found.encoder[r])),
        "prefiller": name(int(found.prefiller[r])),
        "load": float(found.cost_s[r]),
        "next_best": name(second),
        "next_best_load": float(found.second_s[r]) if second >= 0 else None,
        "reused_tokens": int(found.reused[r]),
        "reused_images": int(found.reused_images[r]),
    }


def _micro_batches(run: Run, started_ns: int, interval_s: float) -> Iterator[Span]:
    """A span for what each step encodes and prefills, and one for the decoding of a device from
    one prefill, pause or interval to the next: it joins and loses sequences, but goes on."""
    log = run.log
    assert log is not None
    decoding: dict[int, list[float]] = {}  # by device: begin, end, tokens, steps, modality's sums

    def close(device: int) -> Span:
        begin, end, tokens, steps = decoding.pop(device)
        return _span(
            run, device, "text_decode_step", begin, end - begin, started_ns, "text",
            requests=round(tokens / steps), tokens=int(tokens),
        )  # fmt: skip

    late: list[Span] = []
    for i in np.argsort(log.start_s, kind="stable"):
        device, start_s, took_s = int(log.device[i]), float(log.start_s[i]), float(log.took_s[i])
        encode_s = float(log.encode_s[i])
        batch = decoding.get(device)
        if batch and (
            log.prompts[i] or log.images[i] or start_s > batch[1] + 1e-9
            or int(batch[0] / interval_s) != int(start_s / interval_s)
        ):  # fmt: skip
            late.append(close(device))
        if log.images[i]:
            late.append(_span(
                run, device, "vision_encode", start_s, encode_s, started_ns, "vision",
                images=int(log.images[i]), tokens=int(log.patches[i]),
            ))  # fmt: skip
        if log.prompts[i]:
            ofvision, tokens = int(log.vision_tokens[i]), int(log.chunk_tokens[i])
            modality: Modality | None = (
                "vision" if ofvision == tokens else None if ofvision else "text"
            )
            late.append(_span(
                run, device, "cross_attn_fusion", start_s + encode_s, took_s - encode_s,
                started_ns, modality, requests=int(log.prompts[i]), tokens=tokens,
            ))  # fmt: skip
        if log.decoding[i]:
            end = start_s + took_s
            batch = decoding.setdefault(device, [start_s + encode_s, end, 0.0, 0.0])
            batch[1:] = [end, batch[2] + float(log.decoding[i]), batch[3] + 1.0]
        # What began before all that is still open may go out, in order of its begin.
        floor = started_ns + round(min([start_s, *(b[0] for b in decoding.values())]) * 1e9)
        if len(late) > 256:
            late.sort(key=lambda span: span.ts_ns)
            ready = [span for span in late if span.ts_ns <= floor]
            late = late[len(ready) :]
            yield from ready
    late += [close(device) for device in list(decoding)]
    yield from sorted(late, key=lambda span: span.ts_ns)


def _span(
    run: Run, device: int, stage: str, start_s: float, took_s: float, started_ns: int,
    modality: Modality | None, **sizes: int,
) -> Span:  # fmt: skip
    return Span(
        ts_ns=started_ns + round(start_s * 1e9), node=NODE, device=run.devices[device].name,
        stream=stage, name=stage, kind="batch", stage=stage, modality=modality,
        duration_ns=round(took_s * 1e9), **sizes,
    )  # fmt: skip


def _readings(
    run: Run, model: Model, started_ns: int, interval_s: float
) -> Iterator[Reading | Link | Serving]:
    """Devices, links in use and the serving of the whole fleet at the end of each interval."""
    log, found, work = run.log, run.result, run.workload
    assert log is not None
    ticks = max(1, int(np.ceil(run.end_s / interval_s)))
    many = len(run.devices)
    busy = _busy(log.device, log.start_s, log.took_s, many, ticks, interval_s)
    free = np.tile([float(device.blocks) for device in run.devices], (ticks, 1))
    order = np.argsort(log.start_s, kind="stable")
    at = np.minimum((log.start_s[order] / interval_s).astype(int), ticks - 1)
    known = np.full((ticks, many), np.nan)
    known[at, log.device[order]] = log.free[order]  # the last step of an interval stands
    for tick in range(ticks):
        before = free[tick - 1] if tick else free[0]
        free[tick] = np.where(np.isnan(known[tick]), before, known[tick])
    edges = interval_s * np.arange(1, ticks + 1)
    arrived, begun, ended = (
        np.searchsorted(np.sort(column[column >= 0]), edges, side="right")
        for column in (work.arrival_s, found.started_s, found.finish_s)
    )
    refused = np.searchsorted(np.sort(work.arrival_s[found.device < 0]), edges, side="right")
    made = np.zeros(ticks)
    done = found.finish_s >= 0
    last = np.minimum((found.finish_s[done] / interval_s).astype(int), ticks - 1)
    np.add.at(made, last, work.output_tokens[done])
    moved = _moved(run, model, ticks, interval_s)
    blocks = float(sum(device.blocks for device in run.devices if device.role & (PREFILL | DECODE)))
    for tick in range(ticks):
        ts_ns = started_ns + round((tick + 1) * interval_s * 1e9)
        for i, device in enumerate(run.devices):
            yield _reading(device, model, ts_ns, float(busy[tick, i]), float(free[tick, i]))
        for (a, b), sent in moved.items():
            if sent[tick]:
                link = run.devices[a]
                yield Link(
                    ts_ns=ts_ns, node=NODE, a=link.name, b=run.devices[b].name,
                    link_class="modelled", latency_us=link.link_latency_s * 1e6,
                    bandwidth_bytes_per_s=link.link_bytes_per_s,
                    used_bytes_per_s=float(sent[tick]) / interval_s, basis="modelled",
                )  # fmt: skip
        held = sum(
            device.blocks - free[tick, i]
            for i, device in enumerate(run.devices) if device.role & (PREFILL | DECODE)
        )  # fmt: skip
        yield Serving(
            ts_ns=ts_ns, node=NODE, engine="simulated", instance=run.policy,
            running=int(begun[tick] - ended[tick]),
            waiting=int(arrived[tick] - begun[tick] - refused[tick]),
            kv_ratio=float(held / blocks) if blocks else None,
            generation_tokens_per_s=float(made[tick]) / interval_s,
        )  # fmt: skip


def _busy(
    device: Any, start_s: Any, took_s: Any, many: int, ticks: int, interval_s: float
) -> np.ndarray:
    """Share of each interval in which each device ran a step."""
    seconds = np.zeros((ticks, many))
    begin, end = np.asarray(start_s), np.asarray(start_s) + np.asarray(took_s)
    first = np.minimum((begin / interval_s).astype(int), ticks - 1)
    last = np.minimum((end / interval_s).astype(int), ticks - 1)
    for tick in range(int((last - first).max()) + 1 if len(first) else 0):
        at = first + tick
        inside = at <= last
        a, b = begin[inside], end[inside]
        here = at[inside]
        part = np.minimum(b, (here + 1) * interval_s) - np.maximum(a, here * interval_s)
        np.add.at(seconds, (here, np.asarray(device)[inside]), part)
    return np.clip(seconds / interval_s, 0.0, 1.0)


def _moved(
    run: Run, model: Model, ticks: int, interval_s: float
) -> dict[tuple[int, int], np.ndarray]:
    """Bytes a pair of devices sent in each interval: embeddings of images, and KV caches."""
    found, work = run.result, run.workload
    embedding = work.vision_tokens * float(model.hidden * model.bytes_per_value)
    cache = (work.vision_tokens + work.text_tokens) * float(model.kv_bytes_per_token)
    moved: dict[tuple[int, int], np.ndarray] = {}
    for a, b, moment, size in (
        (found.encoder, found.prefiller, found.encoded_s, embedding),
        (found.prefiller, found.device, found.first_s, cache),
    ):
        some = (a >= 0) & (b >= 0) & (a != b) & (moment >= 0)
        at = np.minimum((moment / interval_s).astype(int), ticks - 1)
        for pair in sorted(set(zip(a[some].tolist(), b[some].tolist(), strict=True))):
            mine = some & (a == pair[0]) & (b == pair[1])
            sent = moved.setdefault(pair, np.zeros(ticks))
            np.add.at(sent, at[mine], size[mine])
    return moved


def _reading(device: Any, model: Model, ts_ns: int, busy: float, free_blocks: float) -> Reading:
    total = used = None
    absent = {"bandwidth_ratio": "the simulation keeps one share of use, not one a resource"}
    if device.memory_bytes is not None:
        total = int(device.memory_bytes)
        kv = model.kv_bytes_per_token * BLOCK_TOKENS
        used = total - int(max(free_blocks, 0.0) * kv)
    else:
        absent["used_bytes"] = "the memory of the device is not known, only its KV blocks"
    power = None
    if device.power_w is not None:
        idle = device.idle_w or 0.0
        power = idle + (device.power_w - idle) * busy
    else:
        absent["power_w"] = "no peak power is known"
    return Reading(
        ts_ns=ts_ns, node=NODE, device=device.name, kind=device.kind, model=device.system,
        sm_ratio=busy, total_bytes=total, used_bytes=used, power_w=power, absent=absent,
    )  # fmt: skip
