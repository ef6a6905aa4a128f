"""``mmctl schedule sweep``: a grid of plans over a workload, and its Pareto front."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from mmctl.cli import completion
from mmctl.cli.app import note, output
from mmctl.cli.main import Exit
from mmctl.cli.render import emit, percent, to_table
from mmctl.cli.schedule import heldout
from mmctl.cli.schedule.trace import Clients, Rate, progress, spooled, task, traces
from mmctl.engine.errors import UsageError
from mmctl.engine.records import SCHEMA
from mmctl.engine.units import show_seconds


def sweep(
    trace: Annotated[
        list[str],
        typer.Argument(
            metavar="TRACE…",
            autocompletion=traces,
            help="A trace, as simulate takes it; several with --held-out.",
        ),
    ],
    devices: Annotated[
        str,
        typer.Option(
            metavar="DEVICE:N,…",
            autocompletion=completion.devices,
            help="Devices: h100_sxm:4,l4:4.",
        ),
    ] = "h100_sxm:8",
    model: Annotated[
        str,
        typer.Option(
            metavar="NAME|FILE",
            autocompletion=completion.models,
            help="Model by name or config.json.",
        ),
    ] = "",
    policy: Annotated[
        str,
        typer.Option(
            metavar="NAME,…", autocompletion=completion.policies, help="Policies, or all."
        ),
    ] = "all",
    plans: Annotated[
        int | None,
        typer.Option(
            metavar="N", min=1, help="Plans in all: 40; with --held-out for each policy: 12."
        ),
    ] = None,
    held_out: Annotated[
        bool, typer.Option("--held-out", help="Tune each policy, judge on unseen workloads.")
    ] = False,
    slo: Annotated[
        str, typer.Option(metavar="TARGETS", help="Objective: ttft=2s,itl=100ms,share=90%.")
    ] = "",
    rate: Rate = None,
    clients: Clients = "",
    count: Annotated[
        int, typer.Option(metavar="N", min=1, help="Requests, generated or read.")
    ] = 1000,
    seed: Annotated[int, typer.Option(metavar="N", help="Seed of the generated workload.")] = 1,
    engine: Annotated[
        Literal["processes", "ray"],
        typer.Option(metavar="processes|ray", help="Where the plans are run."),
    ] = "processes",
    workers: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Processes; by default one a core.")
    ] = None,
    address: Annotated[
        str | None,
        typer.Option(metavar="HOST:PORT", help="The Ray cluster to join; else one begins here."),
    ] = None,
    journal: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Keep rows here; a killed sweep goes on from it."),
    ] = None,
) -> int:
    """Simulate many plans and show which ones no other beats.

    Every policy gets the same number of plans around its usual parameters (tokens a step,
    sequences at once, patches encoded in a step, and what else it heeds). Rows marked in front are
    the Pareto front of joules a request, text P99 to the first token, and goodput per
    device-hour. Figures are modelled. Processes and Ray give the same table.

    --held-out asks which policy is worth most: each is tuned with the same budget on two
    workloads (seeds), then judged on three others by the goodput per device-hour at the highest
    rate at which it keeps the objective, and at the rate where first come, first served has its
    limit. The traces are generated ones. Exit code 3 where ours does not beat every baseline.

    \b
    Examples:
      mmctl schedule sweep azure --rate 10 --devices h100_sxm:2,l40s:4,l4:2 --plans 60
      mmctl schedule sweep trace.csv --journal sweep.ndjson --engine ray
      mmctl schedule sweep azure servegen/mm-image --held-out --devices h100_sxm:2,l40s:4,l4:2
    """
    from mmctl.engine.schedule import policies, sweep

    form = output()
    names = [named.name for named in policies.named(policy)]
    if held_out:
        with sweep.runner(engine, workers, address) as jobs:
            return heldout.judge(
                trace, devices, model, names, plans, count, seed, clients, heldout.objective(slo),
                jobs, form,
            )  # fmt: skip
    if len(trace) > 1:
        raise UsageError("one trace at a time; several are compared with --held-out")
    with spooled(trace[0]) as path:
        rows = sweep.run(
            task(path, devices, model, rate, count, seed, clients, slo=heldout.objective(slo)),
            sweep.grid(names, plans or 40), engine=engine, workers=workers, address=address,
            journal=journal, progress=progress,
        )  # fmt: skip
    front = set(sweep.pareto(rows))
    marked: list[dict[str, Any]] = [{**row, "front": i in front} for i, row in enumerate(rows)]
    best: dict[str, dict[str, Any]] = {}
    for row in marked:
        kept = best.get(row["policy"])
        if kept is None or row["goodput_per_device_hour"] > kept["goodput_per_device_hour"]:
            best[row["policy"]] = row
    document = {
        "schema": SCHEMA, "basis": "modelled", "trace": trace[0], "devices": devices, "seed": seed,
        "rate_per_s": rate, "requests": count, "plans": marked,
        "best": best,
    }  # fmt: skip
    note(f"the best of {len(rows)} plans by policy; -o csv gives all of them")
    emit(document, marked, form, table=to_table([_short(row) for row in best.values()]))
    return Exit.DONE


def _short(row: dict[str, Any]) -> dict[str, Any]:
    return {
        "policy": row["policy"], "stages": row["stages"], "tokens a step": row["batched_tokens"],
        "patches a step": row["encode_patches"], "images a batch": row["encode_images"],
        "text ttft p99": show_seconds(row["text_ttft_p99_s"]),
        "vision ttft p99": show_seconds(row["vision_ttft_p99_s"]),
        "in SLO": percent(row["slo_ratio"]), "good per device-h": row["goodput_per_device_hour"],
        "J/request": row["joules_per_request"], "front": row["front"],
    }  # fmt: skip
