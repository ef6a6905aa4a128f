"""``mmctl schedule rebalance``: communication against compute, and what to change."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from mmctl.cli import completion
from mmctl.cli.app import common, output, seconds
from mmctl.cli.listen import listen
from mmctl.cli.main import Exit
from mmctl.cli.render import emit, to_table
from mmctl.engine import profiles, units
from mmctl.engine.errors import NoSourceError
from mmctl.engine.records import SCHEMA, Device, Span


def rebalance(
    sources: Annotated[
        list[str],
        typer.Argument(
            metavar="SOURCE…",
            autocompletion=completion.sources,
            help="nvml:, agent:PATH, a recording, -.",
        ),
    ],
    vision: Annotated[
        str,
        typer.Option(
            metavar="DEVICE,…", help="Devices that encode images: gpu0,gpu1; told by their spans."
        ),
    ] = "",
    gather_batch: Annotated[
        int | None,
        typer.Option(
            metavar="N", min=1, help="Items gathered at once now, to name the new number."
        ),
    ] = None,
    during: Annotated[
        str, typer.Option("--for", metavar="TIME", help="How long to listen to a live source: 10s.")
    ] = "10s",
) -> int:
    """A Pareto view of communication cost against compute load, with what to do about it.

    Collectives that take more than 7 ms on average ask for smaller gather batches, vision
    devices in use less than 70 % of the time for more vision work side by side ([schedule] of
    the profile). Signals are measured from the records; the points, what other gather batches
    and parallelism would give, are modelled. Exit code 3 when there is something to do.

    \b
    Examples:
      mmctl schedule rebalance nvml: --vision gpu0,gpu1 --for 30s
      mmctl probe kernels traces/ --record spans.ndjson; mmctl schedule rebalance spans.ndjson
      mmctl schedule simulate azure --rate 8 -o ndjson | mmctl schedule rebalance -
    """
    from mmctl.engine.schedule.rebalance import Limits, Signals

    form = output()
    length_s = seconds("--for", during)
    of = profiles.load(common().profile).profile.schedule
    signals = Signals(tuple(name.strip() for name in vision.split(",") if name.strip()))
    for record in listen(sources, length_s, lambda record: isinstance(record, (Device, Span))):
        signals.add(record)
    if not signals.known:
        raise NoSourceError(
            f"{', '.join(sources)} gave neither a collective nor a reading of a device: "
            "nvml: and 'mmctl probe kernels TRACE --record FILE' give them"
        )
    limits = Limits(
        collective_s=of.collective_limit_s, use_ratio=of.vision_use_floor, fixed_s=of.collective_s
    )
    report = signals.report(limits, gather_batch=gather_batch)
    document = {"schema": SCHEMA, "basis": "measured", "points_basis": "modelled", **report}
    emit(document, report["points"], form, table=_table(report))
    return Exit.FINDING if report["actions"] else Exit.DONE


def _table(report: dict[str, Any]) -> str:
    signals = report["signals"]
    use = signals["vision_use_ratio"]
    rows: list[dict[str, Any]] = [
        {"signal": "collective, mean", "value": units.show_seconds(signals["collective_mean_s"]),
         "limit": units.show_seconds(report["limits"]["collective_s"])},
        {"signal": "vision devices in use", "value": None if use is None else f"{use:.0%}",
         "limit": f"{report['limits']['use_ratio']:.0%} at least"},
    ]  # fmt: skip
    parts = [to_table(rows)]
    parts += [f"{name}: {why}" for name, why in signals["absent"].items()]
    for action in report["actions"]:
        factor = action["factor"]
        scale = "" if factor is None else f": {factor:.2g} × what runs now"
        to = "" if action["to"] is None else f", {action['from']} → {action['to']} items"
        parts.append(f"→ {action['action'].replace('_', ' ')}{scale}{to}\n  {action['why']}")
    if not report["actions"]:
        parts.append("nothing to do")
    front: list[dict[str, Any]] = [
        {"gather batch": f"× {point['gather_batch_factor']:g}",
         "vision side by side": f"× {point['vision_parallelism_factor']:g}",
         "collective, mean": units.show_seconds(point["collective_mean_s"]),
         "communication an item": point["communication_factor"],
         "vision in use": point["vision_use_ratio"], "within limits": point["within_limits"]}
        for point in report["points"] if point["front"]
    ]  # fmt: skip
    parts.append("points that no other beats, modelled\n" + to_table(front))
    return "\n".join(parts)
