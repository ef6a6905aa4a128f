"""``mmctl breaker evaluate``: trips against labels, real OOMs and simulated streams."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from mmctl.cli.app import common, output
from mmctl.cli.breaker.replay import MapOption, open_file
from mmctl.cli.main import Exit
from mmctl.cli.render import emit, to_table
from mmctl.engine import profiles
from mmctl.engine.errors import UsageError, suggestion
from mmctl.engine.records import SCHEMA

File = Annotated[str, typer.Argument(metavar="[RECORDING|CSV]")]
Labels = Annotated[Path | None, typer.Option(metavar="FILE", help="Intervals, JSON or CSV.")]
Rules = Annotated[str, typer.Option(metavar="NAME,…", help="Only these rules.")]


def evaluate(
    file: File = "",
    labels: Labels = None,
    rules: Rules = "",
    map_: MapOption = "",
    requests: Annotated[
        str, typer.Option(metavar="RATE,…", help="Simulate streams of so many requests/s.")
    ] = "",
    distribution: Annotated[
        str, typer.Option(metavar="NAME", help="lognormal, gamma, pareto, weibull or mixed.")
    ] = "lognormal",
    hours: Annotated[float, typer.Option(help="Simulated hours.")] = 24.0,
    seed: Annotated[int, typer.Option(help="Seed of the simulation.")] = 0,
) -> int:
    """How many labelled episodes the rules find, how late, and how often they cry wolf.

    Labels are intervals in which an alarm is right (NAB's combined_windows.json too); without
    them every oom event of the recording is an episode. Alarms within 12 samples are one.
    Streams of --requests are simulated: stationary, then with ten incidents of 30 s an hour in
    which everything takes three times as long. Exit 3 when an episode was missed.

    \b
    Examples:
      mmctl breaker evaluate run.ndjson --labels incidents.json
      mmctl breaker evaluate series.csv --labels combined_windows.json --rules series_outlier
      mmctl breaker evaluate --requests 10,50,200 --hours 24 --seed 7 --distribution gamma
    """
    loaded = profiles.load(common().profile)
    profile = _only(loaded.profile, rules)
    if requests:
        return _simulated(profile, requests, distribution, hours, seed)
    if not file:
        raise UsageError("nothing to evaluate: name a recording or CSV, or --requests RATE")
    from mmctl.engine.breaker.evaluate import observe, read_labels, scores

    truth = None if labels is None else read_labels(labels, Path(file).name)
    observed = observe(open_file(file, map_, profile), profile)
    found = list(scores(observed, truth, [rule.name for rule in profile.breaker.rules]))
    rows = [msgspec.to_builtins(item) for item in found]
    document = {"schema": SCHEMA, "file": file, "profile": loaded.name, "scores": rows}
    shown = [
        "rule", "episodes", "found", "missed", "alarms", "false_alarms", "false_per_hour",
        "false_per_1000_samples", "delay_p50_s", "oom_lead_p50_s", "accuracy_ratio",
        "accuracy_ci_ratio", "false_trip_ratio", "false_trip_ci_ratio",
    ]  # fmt: skip
    emit(document, rows, output(), table=to_table(rows, shown))
    return Exit.FINDING if found[-1].missed else Exit.DONE


def _only(profile: profiles.Profile, names: str) -> profiles.Profile:
    """``profile`` with the rules named alone."""
    wanted = [name.strip() for name in names.split(",") if name.strip()]
    if not wanted:
        return profile
    known = {rule.name: rule for rule in profile.breaker.rules}
    for name in wanted:
        if name not in known:
            raise UsageError(f"no rule '{name}'{suggestion(name, known)}")
    kept = tuple(known[name] for name in wanted)
    breaker = msgspec.structs.replace(profile.breaker, rules=kept)
    return msgspec.structs.replace(profile, breaker=breaker)


def _simulated(
    profile: profiles.Profile, rates: str, distribution: str, hours: float, seed: int
) -> int:
    from mmctl.engine.breaker.simulate import DISTRIBUTIONS, evaluate_stream

    if distribution not in DISTRIBUTIONS:
        raise UsageError(
            f"unknown distribution '{distribution}': one of {', '.join(DISTRIBUTIONS)}"
            f"{suggestion(distribution, DISTRIBUTIONS)}"
        )
    rows: list[dict[str, Any]] = []
    for text in rates.split(","):
        try:
            rate = float(text)
        except ValueError:
            raise UsageError(f"--requests: '{text}' is no rate") from None
        rows += [
            msgspec.to_builtins(evaluate_stream(profile, rate, hours, seed, distribution, incident))
            for incident in (False, True)
        ]
    emit({"schema": SCHEMA, "basis": "modelled", "streams": rows}, rows, output())
    return Exit.FINDING if any(row["missed"] for row in rows) else Exit.DONE
