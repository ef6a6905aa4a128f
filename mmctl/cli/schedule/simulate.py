"""``mmctl schedule simulate``: a workload on a fleet under one or several policies."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mmctl.cli.app import common, note, output
from mmctl.cli.main import Exit
from mmctl.cli.render import emit, to_json, to_table
from mmctl.engine import atomic, profiles
from mmctl.engine.errors import UsageError
from mmctl.engine.records import SCHEMA, encode

if TYPE_CHECKING:
    from mmctl.engine.schedule.costs import Model
    from mmctl.engine.schedule.fleet import Engine
    from mmctl.engine.schedule.simulate import Run
    from mmctl.engine.schedule.workload import Workload

Trace = Annotated[
    str,
    typer.Argument(
        metavar="[TRACE]",
        help="A trace file, a folder of ServeGen clients, a table of quantiles, or 'azure'.",
    ),
]


def simulate(
    trace: Trace = "",
    devices: Annotated[str, typer.Option(help="Devices: h100_sxm:4,l4:4@E, a folder …")] = "",
    model: Annotated[str, typer.Option(help="Model by name or config.json.")] = "",
    policy: Annotated[str, typer.Option(help="Policies by comma, or all.")] = "perception",
    rate: Annotated[float | None, typer.Option(help="Requests a second, generated.")] = None,
    count: Annotated[int, typer.Option(min=1, help="Requests to generate.")] = 2000,
    clients: Annotated[str, typer.Option(help="ServeGen clients by number: 0,3.")] = "",
    seed: Annotated[int, typer.Option(help="The same seed gives the same bytes.")] = 1,
    limit: Annotated[int | None, typer.Option(min=1, help="Read so many requests.")] = None,
    output_tokens: Annotated[
        int | None, typer.Option(min=1, help="For a trace that names no output length.")
    ] = None,
    sequences: Annotated[int | None, typer.Option(min=1, help="Running at once.")] = None,
    batched_tokens: Annotated[int | None, typer.Option(min=16, help="Tokens a step.")] = None,
    blocks: Annotated[int | None, typer.Option(min=1, help="KV blocks of 16 tokens.")] = None,
    compare: Annotated[Path | None, typer.Option(help="A measured run: errors against it.")] = None,
    fit: Annotated[bool, typer.Option("--fit", help="Fit the host overhead on it.")] = False,
    stages: Annotated[bool, typer.Option("--stages", help="Stage level, no decode steps.")] = False,
    receipts: Annotated[
        Path | None, typer.Option(help="Write why each request went where it went.")
    ] = None,
) -> int:
    """Simulate a workload on a fleet, step by step, and compare policies.

    Steps of continuous batching are simulated by vLLM's rules: chunked prefill, KV blocks,
    preemption, prefix cache, images encoded in micro-batches. Times are measured where the
    devices are folders of operation tables, else modelled from published peaks. Joules are
    modelled from busy time. -o ndjson gives records of the first policy for mmctl top -.

    \b
    Examples:
      mmctl schedule simulate azure --devices h100_sxm:8 --rate 10 --policy all
      mmctl schedule simulate trace.csv --devices l40s:4,l4:4 -o json
      mmctl schedule simulate --compare run/requests.jsonl --devices profiles/tp1
      mmctl schedule simulate azure --devices h100_sxm:8 --rate 8 -o ndjson | mmctl top -
    """
    from mmctl.engine.schedule import compare as comparing
    from mmctl.engine.schedule import figures, fleet, policies, simulate, workload

    form = output()
    settings = profiles.load(common().profile).profile.schedule
    engine = fleet.Engine(
        host_s=settings.host_overhead_s, collective_s=settings.collective_s,
        collective_bytes_per_s=settings.collective_bytes_per_s,
    )  # fmt: skip
    measured = None
    if compare is not None:
        engine = comparing.engine_of(compare, engine)
        measured = workload.read(compare, limit=limit)
    elif fit:
        raise UsageError("--fit needs --compare MEASURED: it fits the host overhead on that run")
    engine = _engine(engine, sequences, batched_tokens, blocks)
    work = measured if measured and not trace else _workload(
        trace, rate, count, clients, seed, limit, output_tokens
    )  # fmt: skip
    _tell_skipped(work)
    served = fleet.model(model) if model else None
    given = fleet.parse(devices or "h100_sxm:8", served, engine)
    served = served or _served(devices)
    mean = float(work.output_tokens.mean())
    chosen = policies.named("least_outstanding" if compare and policy == "perception" else policy)
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


def _engine(engine: Engine, sequences: int | None, tokens: int | None, blocks: int | None) -> Any:
    import msgspec

    given = {"sequences": sequences, "batched_tokens": tokens, "blocks": blocks}
    return msgspec.structs.replace(engine, **{k: v for k, v in given.items() if v is not None})


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
    }


def _served(devices: str) -> Any:
    """The model of the first folder of operation tables, else the usual one."""
    from mmctl.engine.schedule import fleet

    for part in devices.split(","):
        path = Path(part.strip().split("@")[0])
        if part.strip() and path.is_dir():
            return fleet.model_of(path)
    return fleet.model("qwen3-vl-8b")


def _workload(
    trace: str, rate: float | None, count: int, clients: str, seed: int, limit: int | None,
    output_tokens: int | None,
) -> Workload:  # fmt: skip
    from mmctl.engine.schedule import generate, workload

    if not trace:
        raise UsageError("no trace: name a file, a folder of ServeGen clients, or 'azure'")
    path = Path(trace)
    if trace in ("azure", "poisson"):
        if rate is None or rate <= 0:
            raise UsageError(f"'{trace}' is generated: say how many requests a second (--rate)")
        if trace == "poisson":
            return generate.poisson(rate_per_s=rate, count=count, seed=seed)
        return generate.from_quantiles(rate_per_s=rate, count=count, seed=seed)
    if path.is_dir():
        try:
            numbers = tuple(int(part) for part in clients.split(",") if part) or None
        except ValueError:
            raise UsageError(f"--clients '{clients}' is no list of numbers such as 0,3") from None
        return generate.from_servegen(
            path, count=count, seed=seed, rate_per_s=rate, clients=numbers
        )
    if generate.holds_quantiles(path):
        if rate is None or rate <= 0:
            raise UsageError(f"{path} holds quantiles: say how many requests a second (--rate)")
        return generate.from_quantiles(rate_per_s=rate, count=count, seed=seed, quantiles=path)
    return workload.read(path, output_tokens=output_tokens, limit=limit)


def _tell_skipped(work: Workload) -> None:
    if work.skipped:
        told = ", ".join(f"{count} × {reason}" for reason, count in work.skipped.items())
        note(f"{work.name}: {work.requests} requests used, skipped {told}")
    if work.reordered:
        note(f"{work.name}: {work.reordered} requests came out of order and were sorted in")


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
                "text ttft p99": flat["text_ttft_p99_s"],
                "vision ttft p99": flat["vision_ttft_p99_s"],
                "text itl p99": flat["text_itl_p99_s"],
                "in SLO": flat["slo_ratio"],
                "good/device-h": flat["goodput_per_device_hour"],
                "blocked s": flat["hol_blocking_s"],
                "encode": use["vision_encode"],
                "prefill": use["cross_attn_fusion"],
                "decode": use["text_decode_step"],
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
