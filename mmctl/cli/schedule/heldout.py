"""``mmctl schedule sweep --held-out``: policies at their best, on workloads that none has seen."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mmctl.cli.app import common, note
from mmctl.cli.main import Exit
from mmctl.cli.render import emit, percent, to_table
from mmctl.cli.schedule.trace import progress, spooled, step, task
from mmctl.engine import profiles, units
from mmctl.engine.errors import UsageError
from mmctl.engine.records import SCHEMA

if TYPE_CHECKING:
    from mmctl.engine.schedule.plan import Slo
    from mmctl.engine.schedule.sweep import Job, Rows

BUDGET = 12  # plans for each policy
TUNING, HELD_OUT = 2, 3  # seeds of each


def objective(text: str) -> Slo:
    """``--slo`` over the profile's own."""
    from mmctl.engine.schedule import plan

    of = profiles.load(common().profile).profile.schedule
    return plan.slo(
        text, plan.Slo(ttft_s=of.ttft_slo_s, itl_s=of.itl_slo_s, share_ratio=of.slo_share)
    )


def judge(
    traces: Sequence[str], devices: str, model: str, names: Sequence[str], plans: int | None,
    count: int, seed: int, clients: str, slo: Slo, jobs: Callable[[Sequence[Job]], Rows],
    form: str,
) -> int:  # fmt: skip
    """Compare on every trace and print one document; Exit.FINDING where ours is beaten."""
    import msgspec

    from mmctl.engine.schedule import generate, heldout, sweep

    for needed in (heldout.OURS, heldout.FCFS):
        if needed not in names:
            raise UsageError(f"--held-out compares with '{needed}': name it in --policy, or all")
    for trace in traces:
        made = trace in ("azure", "poisson") or Path(trace).is_dir()
        if not made and not (Path(trace).is_file() and generate.holds_quantiles(Path(trace))):
            raise UsageError(
                f"--held-out draws new workloads by seed: '{trace}' is not generated; name azure, "
                "a folder of ServeGen clients or a table of quantiles"
            )
    seeds = heldout.Seeds(
        tuning=tuple(range(seed, seed + TUNING)),
        held_out=tuple(range(seed + 1000, seed + 1000 + HELD_OUT)),
    )
    found = []
    for trace in traces:
        with spooled(trace) as path:
            step(trace)
            of = task(path, devices, model, 1.0, count, seed, clients, slo=slo)
            found.append(
                {
                    "trace": trace,
                    **heldout.compare(
                        of, names, slo, seeds,
                        lambda wanted: sweep.all_rows(jobs, wanted, progress),
                        budget=plans or BUDGET, progress=step,
                    ),
                }
            )  # fmt: skip
    document = {
        "schema": SCHEMA, "basis": "modelled", "devices": devices, "requests": count,
        "slo": msgspec.to_builtins(slo), "seeds": msgspec.to_builtins(seeds),
        "plans_each": plans or BUDGET, "workloads": found,
    }  # fmt: skip
    rows = [{"trace": one["trace"], **_flat(row)} for one in found for row in one["policies"]]
    emit(document, rows, form, table="\n\n".join(_table(one, slo) for one in found))
    note("figures are modelled; every policy was tuned with the same number of simulations")
    return Exit.DONE if all(one["beats_every_baseline"] for one in found) else Exit.FINDING


def _flat(row: dict[str, Any]) -> dict[str, Any]:
    flat = {key: value for key, value in row.items() if not isinstance(value, dict)}
    for where in ("at_fcfs_limit", "at_low_load"):
        flat |= {f"{where}_{key}": value for key, value in row[where].items()}
    return {**flat, **row["parameters"]}


def _table(found: dict[str, Any], slo: Slo) -> str:
    rows = [
        {
            "policy": row["policy"], "limit req/s": row["limit_per_s"],
            "good per device-h there": row["goodput_per_device_hour"],
            "text ttft p99": units.show_seconds(row["at_fcfs_limit"]["text_ttft_p99_s"]),
            "vision ttft p99": units.show_seconds(row["at_fcfs_limit"]["vision_ttft_p99_s"]),
            "in SLO": percent(row["at_fcfs_limit"]["slo_ratio"]),
            "low: ttft mean": units.show_seconds(row["at_low_load"]["ttft_mean_s"]),
            "low: in SLO": percent(row["at_low_load"]["slo_ratio"]),
            "low: J/request": row["at_low_load"]["joules_per_request"],
        }
        for row in sorted(found["policies"], key=lambda row: -row["limit_per_s"])
    ]  # fmt: skip
    return "\n".join(
        (
            f"{found['trace']}, {slo.share_ratio:.0%} of the requests within "
            f"{units.show_seconds(slo.ttft_s)} and {units.show_seconds(slo.itl_s)} a token; "
            f"columns from 'text ttft' on at {found['fcfs_limit_per_s']:.2f} requests/s, the "
            "limit of colocated_fcfs on the tuning seeds, 'low' at a quarter of it",
            to_table(rows),
            *(f"- {line}" for line in _said(found)),
        )
    )


def _said(found: dict[str, Any]) -> list[str]:
    gain = found["goodput_factor"] - 1
    best = found["best_baseline"]
    told = [
        f"perception serves {gain:+.1%} against {best}, the best baseline"
        + ("" if found["beats_every_baseline"] else ": it does not beat every baseline here")
    ]
    factor = found["text_ttft_p99_factor"]
    if factor is None:
        told.append("no request without images: nothing to say of text")
    else:
        told.append(
            f"text P99 to the first token is {factor:.1f} × shorter than under colocated_fcfs"
            + ("" if found["text_three_times"] else ", less than the 3 × aimed at")
        )
    return told
