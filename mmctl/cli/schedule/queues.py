"""``mmctl schedule queues``: the vision and the stream queue, live, recorded or simulated."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mmctl.cli import completion
from mmctl.cli.app import common, output, seconds, to_read
from mmctl.cli.listen import listen
from mmctl.cli.main import Exit
from mmctl.cli.render import emit, to_table
from mmctl.cli.schedule.trace import Clients, clients_of, engine_of, spooled, traces
from mmctl.engine import profiles, units
from mmctl.engine.errors import NoSourceError, UsageError
from mmctl.engine.records import SCHEMA, Request

if TYPE_CHECKING:
    from mmctl.engine.schedule.queues import Limit


def queues(
    sources: Annotated[list[str] | None, to_read("demo:, agent:PATH, a recording, -.")] = None,
    trace: Annotated[
        str,
        typer.Option(
            metavar="TRACE",
            autocompletion=traces,
            help="Simulate instead: a folder of ServeGen clients, or azure.",
        ),
    ] = "",
    clients: Clients = "",
    devices: Annotated[
        str,
        typer.Option(
            metavar="DEVICE:N,…",
            autocompletion=completion.devices,
            help="With --trace: one for images, one for text.",
        ),
    ] = "h100_sxm@E,h100_sxm@PD",
    count: Annotated[
        int, typer.Option(metavar="N", min=100, help="With --trace: how many requests.")
    ] = 8000,
    seed: Annotated[int, typer.Option(metavar="N", help="With --trace: seed of the workload.")] = 1,
    during: Annotated[
        str, typer.Option("--for", metavar="TIME", help="How long to listen to a live source: 10s.")
    ] = "10s",
) -> int:
    """Depth, wait and deadline misses of the two queues, and what other limits would change.

    Waits are measured from the requests' own records. What other limits would change is
    modelled: the same arrivals and service times through so many servers. Exit code 3 when a
    queue missed deadlines for more than one request in a hundred, or the downscale loop acts.

    --trace simulates both queues instead, each at the rate that fills its device to the
    published share of its time (vision 92 %, stream 67 %), and sets the mean time beside the
    published one (142 ms, 28 ms); modelled from the devices' costs. Exit code 3 when a mark is
    not met.

    \b
    Examples:
      mmctl schedule queues demo:burst --for 10s
      mmctl schedule simulate azure --rate 8 -o ndjson | mmctl schedule queues -
      mmctl schedule queues --trace servegen/mm-image --clients 0 --devices h100_sxm@E,h100_sxm@PD
    """
    from mmctl.engine.schedule.queues import Limit, Queues

    form = output()
    length_s = seconds("--for", during)
    profile = profiles.load(common().profile).profile
    of = profile.schedule
    limits = (
        Limit(queue="vision", batch=of.vision_batch, deadline_s=of.vision_deadline_s),
        Limit(queue="stream", batch=of.stream_batch, deadline_s=of.stream_deadline_s),
    )
    if trace:
        if sources:
            raise UsageError("name sources or --trace, one of them")
        return _simulated(trace, clients, devices, count, seed, limits, form)
    if not sources:
        raise UsageError("name a source such as demo: or a recording, or --trace to simulate")
    found = Queues(limits)
    for record in listen(sources, length_s, lambda record: isinstance(record, Request)):
        found.add(record)
    report = found.report()
    if not any(entry["finished"] or entry["depth"] or entry["running"] for entry in report):
        raise NoSourceError(
            f"{', '.join(sources)} gave no request record: demo, an agent and simulate give them"
        )
    document = {
        "schema": SCHEMA, "basis": "measured", "queues": report,
        "downscale": {
            "baseline_s": found.downscale.baseline_s, "decisions": found.downscale.decisions,
            "absent": {} if found.downscale.cpu_ratio is not None
            else {"decisions": "no reading of the CPU's use: add host:"},
        },
    }  # fmt: skip
    rows = [_flat(entry) for entry in report]
    emit(document, rows, form, table=_table(report))
    late = any((entry["late_ratio"] or 0.0) > 0.01 for entry in report)
    return Exit.FINDING if late or found.downscale.decisions else Exit.DONE


def _simulated(
    trace: str, clients: str, devices: str, count: int, seed: int, limits: tuple[Limit, Limit],
    form: str,
) -> int:  # fmt: skip
    import msgspec

    from mmctl.engine.schedule import filled, fleet
    from mmctl.engine.schedule.layout import ENCODE, PREFILL
    from mmctl.engine.schedule.source import Source
    from mmctl.engine.schedule.workload import Workload

    engine = engine_of(profiles.load(common().profile).profile.schedule)
    model = fleet.model(fleet.model_for(devices))
    fleet_ = fleet.parse(devices, model, engine)
    encoder = next((device for device in fleet_ if device.role & ENCODE), None)
    prefiller = next((device for device in reversed(fleet_) if device.role & PREFILL), None)
    if encoder is None or prefiller is None:
        raise UsageError("--devices: one that encodes (@E) and one that prefills (@PD)")
    with spooled(trace) as path:

        def work(rate: float) -> Workload:
            return Source(
                trace=path, rate_per_s=rate, count=count, seed=seed, clients=clients_of(clients)
            ).read()

        if path not in ("azure", "poisson") and not Path(path).is_dir():
            raise UsageError(f"--trace '{trace}' cannot be had at any rate: name ServeGen or azure")
        found = [
            filled.vision(work, encoder, limits[0]),
            filled.stream(work, prefiller, limits[1], engine),
        ]
    rows = [msgspec.to_builtins(entry) for entry in found]
    document = {
        "schema": SCHEMA, "basis": "modelled", "trace": trace, "clients": clients, "seed": seed,
        "model": model.name, "queues": rows,
    }  # fmt: skip
    shown = [
        {
            "queue": one.queue, "device": one.device, "requests/s": one.rate_per_s,
            "batch": one.batch, "in use": one.utilisation_ratio,
            "mean wait": units.show_seconds(one.wait_s["mean"] if one.wait_s else None),
            "mean till done": units.show_seconds(one.e2e_s["mean"] if one.e2e_s else None),
            "p99": units.show_seconds(one.e2e_s["p99"] if one.e2e_s else None),
            "late": one.late_ratio,
            "published": f"{units.show_seconds(one.published['mean_s'])} at "
            f"{one.published['utilisation_ratio']:.0%}",
            "met": one.met,
        }
        for one in found
    ]  # fmt: skip
    told = "\n".join(f"{one.queue}: {one.source}" for one in found)
    emit(document, [_flat(row) for row in rows], form, table=f"{to_table(shown)}\n{told}, modelled")
    return Exit.DONE if all(one.met for one in found) else Exit.FINDING


def _flat(entry: dict[str, Any]) -> dict[str, Any]:
    flat = {k: v for k, v in entry.items() if not isinstance(v, (dict, list))}
    for name in ("wait", "e2e"):
        flat |= {f"{name}_{k}_s": v for k, v in (entry[f"{name}_s"] or {}).items()}
    return flat


def _table(report: list[dict[str, Any]]) -> str:
    rows, others = [], []
    for entry in report:
        wait = entry["wait_s"] or {}
        rows.append(
            {
                "queue": entry["queue"], "finished": entry["finished"], "depth": entry["depth"],
                "most": entry["most_depth"],
                "wait p50": units.show_seconds(wait.get("p50")),
                "wait p99": units.show_seconds(wait.get("p99")),
                "deadline": units.show_seconds(entry["deadline_s"]), "late": entry["late_ratio"],
                "in use": entry["utilisation_ratio"],
            }
        )  # fmt: skip
        others += [
            {
                "queue": entry["queue"], "with servers": other["servers"],
                "wait p50": units.show_seconds(other["wait_s"]["p50"]),
                "wait p99": units.show_seconds(other["wait_s"]["p99"]),
                "late": other["late_ratio"],
            }
            for other in entry["alternatives"]
        ]  # fmt: skip
    return to_table(rows) + "\n\nmodelled, the same work with other limits\n" + to_table(others)
