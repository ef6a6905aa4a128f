"""A simulated run as records, so that the dashboard and the rules see it as they see a node."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from mmctl.engine.records import AnyRecord, Event, Request, Serving
from mmctl.engine.schedule.simulate import Run

NODE = "simulated"


def records(run: Run, *, started_ns: int, interval_s: float = 1.0) -> Iterator[AnyRecord]:
    """Requests as they are queued, admitted and completed, placements as ``route`` events, and
    one ``serving`` reading of the fleet an interval, in order of time."""
    work = run.workload
    count = work.requests
    moments = np.concatenate([run.arrival_s, run.started_s, run.finish_s])
    which = np.repeat(np.arange(3), count)
    who = np.tile(np.arange(count), 3)
    known = moments >= 0
    moments, which, who = moments[known], which[known], who[known]
    order = np.lexsort((which, moments))
    tick = interval_s
    waiting = running = tokens = 0
    states = ("queued", "admitted", "completed")
    for at in order:
        now_s, kind, r = float(moments[at]), int(which[at]), int(who[at])
        while now_s >= tick:
            yield _reading(run, started_ns, tick, waiting, running, tokens / interval_s)
            tick += interval_s
            tokens = 0
        ts_ns = started_ns + round(now_s * 1e9)
        waiting += (1, -1, 0)[kind]
        running += (0, 1, -1)[kind]
        if kind == 2:
            tokens += int(work.output_tokens[r])
        yield Request(
            ts_ns=ts_ns, node=NODE, id=str(r), images=int(work.images[r]),
            vision_tokens=int(work.vision_tokens[r]), text_tokens=int(work.text_tokens[r]),
            output_tokens=int(work.output_tokens[r]), arrival_s=float(run.arrival_s[r]),
            state=states[kind], stages=_stages(run, r) if kind == 2 else {},
        )  # fmt: skip
        if kind == 0 and len(run.second) == count and run.device[r] >= 0:
            yield Event(
                ts_ns=ts_ns, node=NODE, what="route", device=run.devices[run.device[r]].name,
                message=f"request {r}", evidence=receipt(run, r),
            )  # fmt: skip
    yield _reading(run, started_ns, tick, waiting, running, tokens / interval_s)


def _reading(
    run: Run, started_ns: int, at_s: float, waiting: int, running: int, rate: float
) -> Serving:
    return Serving(
        ts_ns=started_ns + round(at_s * 1e9), node=NODE, engine="simulated", instance=run.policy,
        running=running, waiting=waiting, generation_tokens_per_s=rate,
        absent={"kv_ratio": "a simulated fleet keeps no reading of it by time"},
    )  # fmt: skip


def _stages(run: Run, r: int) -> dict[str, float]:
    """Seconds of a finished request by stage; they add up to its time from arrival to end."""
    begun = float(run.started_s[r])
    found = {"queue_wait_s": begun - float(run.arrival_s[r])}
    if run.encoded_s[r] >= 0:
        found["vision_encode"] = float(run.encoded_s[r]) - begun
        begun = float(run.encoded_s[r])
    found["cross_attn_fusion"] = float(run.first_s[r]) - begun
    found["text_decode_step"] = float(run.finish_s[r] - run.first_s[r])
    return found


def receipt(run: Run, r: int) -> dict[str, Any]:
    """Why request ``r`` went where it went: the chosen device's load against the next best."""
    second = int(run.second[r])
    return {
        "policy": run.policy,
        "encoder": run.devices[run.encoder[r]].name if run.encoder[r] >= 0 else None,
        "load": float(run.cost_s[r]),
        "next_best": run.devices[second].name if second >= 0 else None,
        "next_best_load": float(run.second_s[r]) if second >= 0 else None,
    }
