"""``mmctl benchmark fingerprints``: how far the fingerprints can be trusted."""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer

from mmctl.cli import completion
from mmctl.cli.app import common, note, output
from mmctl.cli.main import Exit
from mmctl.cli.render import emit, to_table
from mmctl.engine import profiles


def fingerprints(
    cache: Annotated[
        str | None,
        typer.Option(
            metavar="NAME|SIZE",
            autocompletion=completion.caches,
            help="Last-level cache to predict for.",
        ),
    ] = None,
    hta: Annotated[
        str | None,
        typer.Option(metavar="PYTHON", help="Compare trace reading with HTA in this environment."),
    ] = None,
) -> int:
    """Uniqueness, stability and collision prediction over real model architectures.

    Traces one forward pass of each model (random weights, meta device; needs torch and
    transformers), and prints the published algorithm beside ours. Families marked held out took
    no part in fitting the code. Simulated misses are modelled by a set-associative cache. With
    --hta PYTHON, an interpreter with HolisticTraceAnalysis, measures both readers on a trace of
    a million events instead.

    \b
    Examples:
      mmctl benchmark fingerprints
      mmctl benchmark fingerprints --cache a100 -o json
      mmctl benchmark fingerprints --hta hta-env/bin/python
    """
    wanted = output()
    if hta is not None:
        from mmctl.benchmarks import timelines

        measured = timelines.compare(hta)
        rows = [{"program": name, **measured[name]} for name in ("mmctl", "hta")]
        text = (
            f"{to_table(rows)}\n{measured['cpu_factor']:.1f} × less CPU, "
            f"{measured['memory_factor']:.1f} × less memory on {measured['events']} events"
        )
        emit(measured, rows, wanted, text)
        return Exit.DONE
    from mmctl.benchmarks import fingerprints as benchmark
    from mmctl.engine.access import memory_models

    profile = profiles.load(common().profile).profile
    model = memory_models.find(cache or profile.fingerprint.cache)
    found = benchmark.evaluate(model.l2_bytes, _progress)
    emit(found, _rows(found), wanted, _text(found))
    return Exit.DONE


def _progress(message: str) -> None:
    if sys.stderr.isatty():
        note(message)


def _rows(found: dict[str, Any]) -> list[dict[str, Any]]:
    rows = []
    for name, part in (
        ("locality", found["locality"]),
        ("locality, held out", found["locality"]["held_out"]),
        ("classic", found["classic"]),
    ):
        rows.append(
            {
                "algorithm": name,
                "distinct_ratio": part["distinct_ratio"],
                "pairs_above_8_ratio": part["pairs_above_8_ratio"],
                "pairs": part["pairs"],
                "other_process_bits_max": part.get("other_process", {}).get("bits_max"),
                "dropped_bits_p50": part.get("dropped", {}).get("bits_p50"),
                "dropped_bits_max": part.get("dropped", {}).get("bits_max"),
            }
        )
    return rows


def _text(found: dict[str, Any]) -> str:
    c = found["collision"]
    return "\n".join(
        [
            f"{found['models']} models; held out: {', '.join(found['held_out_families'])}",
            to_table(_rows(found)),
            f"classic uses {found['classic']['bits_used']} of its 64 bits and changes with every "
            "access that is missed",
            f"Extra misses of {c['pairs']} held-out pairs on {c['cache_bytes'] >> 20} MiB "
            "(modelled), rank correlation with simulation:",
            f"  predicted {c['predicted_rank_correlation']:.3f}, hit rate at risk "
            f"{c['baseline_rank_correlation']:.3f}, pattern similarity "
            f"{c['similarity_rank_correlation']:.3f}",
        ]
    )
