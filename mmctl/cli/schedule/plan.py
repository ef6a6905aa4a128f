"""``mmctl schedule plan``: which stage on which device, how many replicas, which limits."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import typer

from mmctl.cli import completion
from mmctl.cli.app import note, output, to_write
from mmctl.cli.main import Exit
from mmctl.cli.render import emit, hanging, percent, to_json, to_table
from mmctl.cli.schedule import heldout
from mmctl.cli.schedule.trace import Clients, Rate, Trace, progress, spooled, step, task
from mmctl.engine import atomic, units
from mmctl.engine.records import SCHEMA


def plan(
    trace: Trace,
    devices: Annotated[
        str,
        typer.Option(
            metavar="DEVICE:N,…",
            autocompletion=completion.devices,
            help="What there is: h100_sxm:2,l40s:4.",
        ),
    ] = "h100_sxm:8",
    slo: Annotated[
        str, typer.Option(metavar="TARGETS", help="Objective: ttft=2s,itl=100ms,share=90%.")
    ] = "",
    model: Annotated[
        str,
        typer.Option(
            metavar="NAME|FILE",
            autocompletion=completion.models,
            help="Model by name or config.json.",
        ),
    ] = "",
    rate: Rate = None,
    count: Annotated[
        int, typer.Option(metavar="N", min=1, help="Requests, generated or read.")
    ] = 2000,
    clients: Clients = "",
    seed: Annotated[int, typer.Option(metavar="N", help="Seed of the generated workload.")] = 1,
    output_tokens: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help="Output tokens where the trace names none."),
    ] = None,
    budget: Annotated[int, typer.Option(metavar="N", min=1, help="Sets of limits to try.")] = 24,
    engine: Annotated[
        Literal["processes", "ray"],
        typer.Option(metavar="processes|ray", help="Where plans are simulated."),
    ] = "processes",
    workers: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Processes; by default one a core.")
    ] = None,
    address: Annotated[
        str | None,
        typer.Option(metavar="HOST:PORT", help="The Ray cluster to join; else one begins here."),
    ] = None,
    out: Annotated[Path | None, to_write("Write the plan to this file.")] = None,
) -> int:
    """Lay a model's stages over devices so that a workload keeps its objective, with reasons.

    Structures (colocated, queues by modality, E|PD, E|P|D) are simulated on parts of the
    devices; of those that keep the objective the one with the most good requests a device-hour
    is taken and its limits refined. Told beside it: what the next best would give, and what a
    split gains in time to the first token and loses in tokens a device. Figures are modelled
    as in simulate. Exit code 3 when no plan keeps the objective.

    \b
    Examples:
      mmctl schedule plan azure --rate 8 --devices h100_sxm:2,l40s:4,l4:2 --out plan.json
      mmctl schedule plan trace.csv --devices l40s:8 --slo ttft=1s,itl=50ms,share=95%
      mmctl schedule simulate trace.csv --plan plan.json
    """
    from mmctl.engine.schedule import planner, sweep

    form = output()
    objective = heldout.objective(slo)

    with spooled(trace) as path, sweep.runner(engine, workers, address) as jobs:
        given = task(
            path, devices, model, rate, count, seed, clients, output_tokens, slo=objective
        )  # fmt: skip
        found = planner.search(
            given, objective, lambda wanted: sweep.all_rows(jobs, wanted, progress),
            budget=budget, progress=step,
        )  # fmt: skip
        requests = given.source.read().requests
    chosen = msgspec.to_builtins(found.chosen)
    if out is not None:
        atomic.write(out, to_json(chosen, indent=2) + "\n")
        note(f"wrote {out}: mmctl schedule simulate TRACE --plan {out}")
    document = {
        "schema": SCHEMA, "basis": "modelled", "trace": trace, "requests": requests,
        "rate_per_s": rate, "seed": seed, "slo": msgspec.to_builtins(objective),
        "kept": found.kept, "plan": chosen, "expected": found.figures,
        "because": found.because, "alternatives": found.alternatives,
        "split_cost": found.split_cost, "simulations": found.simulations,
    }  # fmt: skip
    emit(document, found.alternatives, form, table=_table(found))
    return Exit.DONE if found.kept else Exit.FINDING


def _table(found: Any) -> str:
    chosen = found.chosen
    head = [
        f"devices   {chosen.devices}",
        f"policy    {chosen.policy}: {chosen.batched_tokens} tokens and {chosen.sequences} "
        f"sequences a step, {chosen.encode_images} images a micro-batch, "
        f"{chosen.encode_patches} patches beside decoding",
        *(f"          {line}" for line in _priorities(chosen)),
    ]
    limits = [
        {"queue": limit.queue, "requests/s": limit.requests_per_s,
         "wait p99": units.show_seconds(limit.wait_p99_s), "depth at most": limit.depth}
        for limit in chosen.queues
    ]  # fmt: skip
    others = [
        {"structure": row["structure"], "devices": row["devices"],
         "in SLO": percent(row["slo_ratio"]),
         "text p99": units.show_seconds(row["text_ttft_p99_s"]),
         "vision p99": units.show_seconds(row["vision_ttft_p99_s"]),
         "good per device-h": f"{row['goodput_per_device_hour']:,.0f}"}
        for row in found.alternatives
    ]  # fmt: skip
    splits = [
        {"on all devices": row["structure"], "ttft mean": units.show_seconds(row["ttft_mean_s"]),
         "against colocated": row["ttft_factor"], "tokens/s/device": row["tokens_per_s_per_device"],
         "of colocated": row["throughput_factor"], "in SLO": percent(row["slo_ratio"])}
        for row in found.split_cost
    ]  # fmt: skip
    parts = ["\n".join(hanging(line, 10) for line in head), to_table(limits),
             "\n".join(hanging(f"- {why}", 2) for why in found.because)]  # fmt: skip
    parts.append(
        "the fewest devices of each structure, with the first token's p99, modelled\n"
        + to_table(others)
    )
    if splits:
        parts.append("what a split costs, modelled\n" + to_table(splits))
    return "\n\n".join(parts)


def _priorities(chosen: Any) -> list[str]:
    told = []
    if chosen.age_s is not None:
        told.append(f"text before images, but none older than {units.show_seconds(chosen.age_s)}")
    if chosen.inline_images:
        told.append(f"up to {chosen.inline_images} images are encoded with the prefill")
    return told
