"""``mmctl schedule queues``: the vision and the stream queue, live, recorded or simulated."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from mmctl.cli.app import common, output, seconds
from mmctl.cli.main import Exit
from mmctl.cli.render import emit, to_table
from mmctl.cli.schedule.listen import listen
from mmctl.engine import profiles, units
from mmctl.engine.errors import NoSourceError
from mmctl.engine.records import SCHEMA, Request


def queues(
    sources: Annotated[
        list[str], typer.Argument(metavar="SOURCE…", help="demo:, agent:PATH, a recording, -.")
    ],
    during: Annotated[
        str, typer.Option("--for", help="How long to listen to a live source: 10s.")
    ] = "10s",
) -> int:
    """Depth, wait and deadline misses of the two queues, and what other limits would change.

    Waits are measured from the requests' own records. What other limits would change is
    modelled: the same arrivals and service times through so many servers. Exit code 3 when a
    queue missed deadlines for more than one request in a hundred, or the downscale loop acts.

    \b
    Examples:
      mmctl schedule queues demo:burst --for 10s
      mmctl schedule simulate azure --rate 8 -o ndjson | mmctl schedule queues -
    """
    from mmctl.engine.schedule.queues import Limit, Queues

    form = output()
    length_s = seconds("--for", during)
    profile = profiles.load(common().profile).profile
    of = profile.schedule
    found = Queues(
        (Limit(queue="vision", batch=of.vision_batch, deadline_s=of.vision_deadline_s),
         Limit(queue="stream", batch=of.stream_batch, deadline_s=of.stream_deadline_s))
    )  # fmt: skip
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
