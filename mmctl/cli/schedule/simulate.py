"""``mmctl schedule simulate``: a workload on a fleet under one or several policies."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mmctl.cli import completion
from mmctl.cli.app import common, note, output, quantity, to_write
from mmctl.cli.main import Exit
from mmctl.cli.render import emit, percent, to_json, to_table
from mmctl.cli.schedule.trace import (
    Clients,
    Rate,
    Trace,
    clients_of,
    engine_of,
    spooled,
    tell_skipped,
)
from mmctl.engine import atomic, profiles
from mmctl.engine.errors import UsageError
from mmctl.engine.records import SCHEMA, encode
from mmctl.engine.units import show_seconds

if TYPE_CHECKING:
    from mmctl.engine.schedule.costs import Model
    from mmctl.engine.schedule.fleet import Engine
    from mmctl.engine.schedule.plan import Chosen
    from mmctl.engine.schedule.simulate import Run
    from mmctl.engine.schedule.workload import Workload


def simulate(
    trace: Trace = "",
    devices: Annotated[
        str,
        typer.Option(
            metavar="DEVICE:N,…",
            autocompletion=completion.devices,
            help="Devices: h100_sxm:4,l4:4@E, a result, a folder …",
        ),
    ] = "",
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
            metavar="NAME,…",
            autocompletion=completion.policies,
            help="Policies, or all; by default perception.",
        ),
    ] = "",
    plan: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="A plan file: its devices, policy and limits."),
    ] = None,
    rate: Rate = None,
    count: Annotated[int, typer.Option(metavar="N", min=1, help="Requests to generate.")] = 2000,
    clients: Clients = "",
    seed: Annotated[int, typer.Option(metavar="N", help="The same seed gives the same bytes.")] = 1,
    limit: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Read so many requests.")
    ] = None,
    output_tokens: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help="Output tokens where the trace names none."),
    ] = None,
    sequences: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Sequences running at once.")
    ] = None,
    batched_tokens: Annotated[
        int | None, typer.Option(metavar="N", min=16, help="Tokens computed in a step.")
    ] = None,
    blocks: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="KV blocks of 16 tokens.")
    ] = None,
    prefix_cache: Annotated[
        bool | None, typer.Option("--prefix-cache/--no-prefix-cache", help="Reuse known prompts.")
    ] = None,
    encoder_cache: Annotated[
        int | None, typer.Option(metavar="N", min=0, help="Tokens of encoded images that are kept.")
    ] = None,
    encode_budget: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help="Patches encoded in a step beside decoding."),
    ] = None,
    repeat_images: Annotated[
        str,
        typer.Option(metavar="SHARE", help="Share of generated images that were sent before: 30%."),
    ] = "",
    compare: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A measured run: errors against it.")
    ] = None,
    fit: Annotated[bool, typer.Option("--fit", help="Fit the host overhead to it.")] = False,
    stages: Annotated[bool, typer.Option("--stages", help="Stage level, no decode steps.")] = False,
    receipts: Annotated[Path | None, to_write("Write why each request went where it went.")] = None,
) -> int:
    """Simulate a workload on a fleet, step by step, and compare policies.

    Steps of continuous batching are simulated by vLLM's rules: chunked prefill, KV blocks,
    preemption, prefix cache, images encoded in micro-batches. Times are measured where the
    devices are folders of operation tables, else modelled from published peaks. Joules are
    modelled from busy time. Prompts and images that a trace names (hash_ids of 512 tokens,
    image_ids) are computed once while a device keeps them. -o ndjson gives records of the first
    policy for mmctl top -.

    \b
    Examples:
      mmctl schedule simulate azure --devices h100_sxm:8 --rate 10 --policy all
      mmctl schedule simulate trace.csv --devices l40s:4,l4:4 -o json
      mmctl schedule simulate --compare run/requests.jsonl --devices profiles/tp1 --fit
      mmctl schedule simulate azure --rate 8 --plan plan.json
      mmctl schedule simulate azure --devices h100_sxm:8 --rate 8 -o ndjson | mmctl top -
    """
    import msgspec

    from mmctl.engine.schedule import compare as comparing
    from mmctl.engine.schedule import figures, fleet, policies, simulate, sweep, workload

    form = output()
    settings = profiles.load(common().profile).profile.schedule
    engine = engine_of(settings)
    measured = None
    if compare is not None:
        engine = comparing.engine_of(compare, engine)
        measured = workload.read(compare, limit=limit)
    elif fit:
        raise UsageError("--fit needs --compare MEASURED: it fits the host overhead on that run")
    planned = _plan(plan, devices, policy) if plan is not None else None
    if planned is not None:
        devices, model = planned.devices, model or planned.model
        sequences = sequences or planned.sequences
        batched_tokens = batched_tokens or planned.batched_tokens
    engine = _engine(
        engine, sequences=sequences, batched_tokens=batched_tokens, blocks=blocks,
        prefix_caching=prefix_cache, encoder_cache_tokens=encoder_cache,
    )  # fmt: skip
    if measured is not None and not trace:
        work = measured
    else:
        work = _workload(trace, rate, count, clients, seed, limit, output_tokens, repeat_images)
    tell_skipped(work)
    devices = devices or "h100_sxm:8"
    served = fleet.model(model or fleet.model_for(devices))
    given = fleet.parse(devices, served if model else None, engine)
    mean = float(work.output_tokens.mean())
    if planned is not None:
        chosen = [sweep.policy_of(planned.settings())]
    else:
        usual = "least_outstanding" if compare else "perception"
        chosen = policies.named(policy or usual)
    if encode_budget is not None:
        chosen = [msgspec.structs.replace(one, encode_patches=encode_budget) for one in chosen]
    if stages:
        return _stages(work, given, served, engine, form)

    def once(which: Any, host_s: float) -> Run:
        placed = policies.place(which, given, served)
        rule = policies.rule(which, output_mean=mean, seed=seed)
        return simulate.run(
            work, placed, rule, served, _host(engine, host_s), policy=which.name,
            receipts=receipts is not None, log=form == "ndjson",
        )  # fmt: skip

    host_s = engine.host_s
    if fit and measured is not None:
        host_s = comparing.fit_host_s(lambda s: once(chosen[0], s), measured)
        note(f"fitted on {compare}: host overhead {host_s * 1e6:.0f} µs a step")
    runs = [once(which, host_s) for which in (chosen[:1] if form == "ndjson" else chosen)]
    if receipts is not None:
        _write_receipts(receipts, runs[0])
    if form == "ndjson":
        _stream(runs[0], served)
        return Exit.DONE
    rows = [
        figures.summary(run, ttft_slo_s=settings.ttft_slo_s, itl_slo_s=settings.itl_slo_s)
        for run in runs
    ]
    cpu_s = sum(run.cpu_s for run in runs)
    document: dict[str, Any] = {
        "schema": SCHEMA,
        "basis": "modelled",
        "trace": work.name, "requests": work.requests, "lost": max(row["lost"] for row in rows),
        "skipped": work.skipped, "reordered": work.reordered, "span_s": work.span_s, "seed": seed,
        "model": served.name,
        "devices": [
            {"device": d.name, "system": d.system, "stages": figures.stages(d),
             "kv_blocks": d.blocks, "basis": d.basis, "source": d.source}
            for d in given
        ],
        "engine": _told(engine, host_s, fit),
        "slo": {"ttft_s": settings.ttft_slo_s, "itl_s": settings.itl_slo_s},
        "policies": rows,
        "simulated_requests_per_s": work.requests * len(runs) / cpu_s if cpu_s > 0 else None,
        "compiled": runs[0].compiled,
    }  # fmt: skip
    table = _table(rows)
    if measured is not None:
        document["errors"] = comparing.errors(runs[0], measured)
        table += "\n\n" + _errors_table(document["errors"], host_s)
    emit(document, [_flat(row) for row in rows], form, table=table)
    return Exit.DONE


def _engine(engine: Engine, **given: Any) -> Engine:
    import msgspec

    return msgspec.structs.replace(engine, **{k: v for k, v in given.items() if v is not None})


def _plan(path: Path, devices: str, policy: str) -> Chosen:
    from mmctl.engine.schedule import plan as plans

    if devices or policy:
        raise UsageError("--plan names devices and policy itself: leave --devices and --policy out")
    return plans.read(path)


def _host(engine: Engine, host_s: float) -> Any:
    import msgspec

    return msgspec.structs.replace(engine, host_s=host_s)


def _told(engine: Engine, host_s: float, fitted: bool) -> dict[str, Any]:
    return {
        "sequences": engine.sequences,
        "batched_tokens": engine.batched_tokens,
        "asynchronous": engine.asynchronous,
        "prefix_caching": engine.prefix_caching,
        "host_overhead_s": host_s,
        "host_overhead_fitted": fitted,
        "collective_s": engine.collective_s,
        "collective_bytes_per_s": engine.collective_bytes_per_s,
        "link_s": engine.link_s,
        "link_bytes_per_s": engine.link_bytes_per_s,
    }


def _workload(
    trace: str, rate: float | None, count: int, clients: str, seed: int, limit: int | None,
    output_tokens: int | None, repeat: str,
) -> Workload:  # fmt: skip
    from mmctl.engine.schedule.source import Source

    ratio = quantity("--repeat-images", repeat, "ratio") if repeat else 0.0
    if not 0 <= ratio <= 1:
        raise UsageError("--repeat-images must be between 0 and 100 %")
    with spooled(trace) as path:
        return Source(
            trace=path, rate_per_s=rate, count=count, limit=limit, seed=seed,
            clients=clients_of(clients), output_tokens=output_tokens, repeat_ratio=ratio,
        ).read()  # fmt: skip


def _stages(work: Workload, devices: Any, model: Any, engine: Engine, form: str) -> int:
    import msgspec

    from mmctl.engine.schedule import figures, stages

    found = stages.run(work, devices, model, engine)
    rows = [msgspec.to_builtins(station) for station in found.stations]
    document = {
        "schema": SCHEMA, "basis": "modelled", "trace": work.name, "requests": work.requests,
        "lost": 0, "skipped": work.skipped, "stations": rows,
        "ttft_s": figures.spread(found.ttft_s), "e2e_s": figures.spread(found.e2e_s),
        "simulated_requests_per_s": work.requests / found.cpu_s if found.cpu_s > 0 else None,
    }  # fmt: skip
    flat = [
        {**{k: v for k, v in row.items() if k != "wait_s"},
         **{f"wait_{k}_s": v for k, v in (row["wait_s"] or {}).items()}}
        for row in rows
    ]  # fmt: skip
    emit(document, flat, form)
    return Exit.DONE


def _stream(run: Run, model: Model) -> None:
    import sys

    from mmctl.engine.recording import header
    from mmctl.engine.schedule import stream

    started_ns = 1_600_000_000_000_000_000  # one moment for all: the same seed, the same bytes
    head = header(stream.NODE, common().profile or profiles.selected()[0], started_ns)
    sys.stdout.write(encode(head).decode() + "\n")
    for record in stream.records(run, model, started_ns=started_ns):
        sys.stdout.write(encode(record).decode() + "\n")


def _write_receipts(path: Path, run: Run) -> None:
    from mmctl.engine.schedule import stream

    with atomic.replacing(path) as file:
        for r in range(run.workload.requests):
            placed = run.result.device[r] >= 0
            why = stream.receipt(run, r) if placed else {"refused": "no device could hold it"}
            device = run.devices[run.result.device[r]].name if placed else None
            file.write(to_json({"id": r, "device": device, **why}).encode() + b"\n")


def _flat(row: dict[str, Any]) -> dict[str, Any]:
    flat: dict[str, Any] = {"policy": row["policy"]}
    for modality, found in row["modalities"].items():
        for name in ("ttft", "itl", "e2e"):
            of = found[f"{name}_s"] or {}
            flat[f"{modality}_{name}_p50_s"] = of.get("p50")
            flat[f"{modality}_{name}_p99_s"] = of.get("p99")
    for key in (
        "slo_ratio", "goodput_per_device_hour", "hol_blocking_s", "joules_per_request",
        "device_hours", "preemptions", "lost",
    ):  # fmt: skip
        flat[key] = row[key]
    return flat


def _table(rows: list[dict[str, Any]]) -> str:
    shown = []
    for row in rows:
        flat = _flat(row)
        use = row["utilisation_ratio"]
        shown.append(
            {
                "policy": flat["policy"],
                "text ttft p99": show_seconds(flat["text_ttft_p99_s"]),
                "vision ttft p99": show_seconds(flat["vision_ttft_p99_s"]),
                "text itl p99": show_seconds(flat["text_itl_p99_s"]),
                "in SLO": percent(flat["slo_ratio"]),
                "good per device-h": flat["goodput_per_device_hour"],
                "blocked": show_seconds(flat["hol_blocking_s"]),
                "encode": percent(use["vision_encode"]),
                "prefill": percent(use["cross_attn_fusion"]),
                "decode": percent(use["text_decode_step"]),
                "J/request": flat["joules_per_request"],
                "lost": flat["lost"],
            }
        )
    return to_table(shown)


def _errors_table(errors: dict[str, Any], host_s: float) -> str:
    rows = [
        {"signed error": name, **{k: found[k] for k in ("mean", "p50", "p95", "p99")},
         "MAPE by request": found["mape"]}
        for name, found in errors.items()
    ]  # fmt: skip
    return to_table(rows) + f"\nhost overhead {host_s * 1e6:.0f} µs a step"
