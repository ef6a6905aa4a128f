"""``mmctl fingerprint compare`` and ``matrix``: alike, and in each other's way."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mmctl.cli import completion
from mmctl.cli.app import common, output, to_write
from mmctl.cli.fingerprint import load
from mmctl.cli.main import Exit
from mmctl.cli.render import emit
from mmctl.engine.errors import UsageError
from mmctl.engine.records import SCHEMA

if TYPE_CHECKING:
    from mmctl.engine.access.tasks import Comparison, Task

Cache = Annotated[
    str | None,
    typer.Option(
        metavar="NAME|SIZE",
        autocompletion=completion.caches,
        help="Whose last-level cache: h100, a100 …, or 50MiB/16.",
    ),
]
Recorded = Annotated[
    Path | None,
    to_write("Write the pairs as events for mmctl top.", "--record"),
]
Algorithm = Annotated[
    str,
    typer.Option(
        metavar="NAME",
        autocompletion=completion.words("locality", "classic"),
        help="locality or classic.",
    ),
]
_COLOURS = {"high": "41", "medium": "43;30", "low": "42;30"}


def compare(
    a: Annotated[str, typer.Argument(metavar="A", help="Trace, fingerprint file or source.")],
    b: Annotated[str, typer.Argument(metavar="B", help="The other.")],
    cache: Cache = None,
    algorithm: Algorithm = "locality",
    record: Recorded = None,
) -> int:
    """Two tasks: pattern similarity, and predicted extra misses when they share a cache.

    The band (high, medium, low: below 3 bits, 3 to 8, above) is pattern similarity and does not
    predict a collision. That is done from both reuse signatures: predicted_extra_misses_ratio is
    modelled, for equal traffic of both tasks on the named cache; baseline_ratio is what any
    company puts at risk. Exit 3 on a predicted collision.

    \b
    Examples:
      mmctl fingerprint compare vision.traceg text.traceg
      mmctl fingerprint compare a.json b.json --cache a100 -o json
      mmctl fingerprint compare agent:/run/engine.sock decode.json
    """
    from mmctl.engine.access import memory_models
    from mmctl.engine.access import tasks as engine

    wanted = output()
    profile = load.profile()
    found = load.tasks([a, b], algorithm, profile, split=False)
    if len(found) != 2:
        raise UsageError(f"'compare' takes two tasks, these files hold {len(found)}: see 'matrix'")
    model = memory_models.find(cache or profile.fingerprint.cache)
    result = engine.compare(found[0], found[1], model, profile.fingerprint)
    if record is not None:
        _record(record, [result])
    document = {"schema": SCHEMA, **_plain(result)}
    emit(document, [document], wanted, _text(result))
    return Exit.FINDING if result.collision else Exit.DONE


def _plain(result: Comparison) -> dict[str, Any]:
    from msgspec import to_builtins

    plain: dict[str, Any] = to_builtins(result)
    return plain


def _record(path: Path, pairs: Iterable[Comparison]) -> None:
    """The pairs as a recording: what ``mmctl top`` shows beside the streams that run together."""
    import time

    from mmctl.engine import profiles, recording
    from mmctl.engine.records import Event

    name = profiles.load(common().profile).name
    with recording.Writer(path, recording.header("", name)) as writer:
        for pair in pairs:
            told = f"{pair.a} and {pair.b}: {pair.predicted_extra_misses_ratio:.1%} more misses"
            evidence = {**_plain(pair), "basis": "modelled"}
            writer.write(
                Event(ts_ns=time.time_ns(), what="sharing", message=told, evidence=evidence)
            )


def _text(found: Comparison) -> str:
    lines = [
        f"{found.a}  ↔  {found.b}",
        f"pattern similarity  {found.band} ({found.distance} of 64 bits differ): {found.action}",
        f"sharing {found.cache} ({found.cache_bytes / 2**20:.4g} MiB), modelled: "
        f"{found.predicted_extra_misses_ratio:.1%} of the traffic misses more",
        f"  alone     {found.alone_miss_ratio[0]:.1%} and {found.alone_miss_ratio[1]:.1%} miss",
        f"  together  {found.together_miss_ratio[0]:.1%} and {found.together_miss_ratio[1]:.1%}",
        f"  baseline  {found.baseline_ratio:.1%} hits alone, so is at risk",
    ]
    if found.collision:
        lines += ["They are predicted to collide:", *(f"  - {advice}" for advice in found.advice)]
    return "\n".join(lines)


def matrix(
    sources: Annotated[
        list[str], typer.Argument(metavar="FILE...", help="Traces and fingerprint files.")
    ],
    cache: Cache = None,
    algorithm: Algorithm = "locality",
    by_stream: Annotated[bool, typer.Option("--by-stream", help="One task per stream.")] = False,
    record: Recorded = None,
) -> int:
    """All pairs of tasks, near ones together: bits apart, and predicted extra misses.

    Cells are coloured by pattern similarity; an exclamation mark stands for a predicted
    collision (modelled). csv and ndjson give a line per pair, for a scheduler to keep apart.
    Exit 3 when a pair is predicted to collide.

    \b
    Examples:
      mmctl fingerprint matrix *.traceg
      mmctl fingerprint matrix tasks.ndjson --cache l4 -o csv
      mmctl fingerprint matrix tasks.json -o ndjson > pairs.ndjson
      mmctl fingerprint matrix *.traceg --record pairs.rec; cat pairs.rec spans.rec | mmctl top -
    """
    from mmctl.engine.access import memory_models
    from mmctl.engine.access import tasks as engine

    wanted = output()
    profile = load.profile()
    found = load.tasks(sources, algorithm, profile, split=by_stream)
    if len(found) < 2:
        raise UsageError("a matrix needs two tasks or more")
    model = memory_models.find(cache or profile.fingerprint.cache)
    pairs = {
        (i, j): engine.compare(found[i], found[j], model, profile.fingerprint)
        for i, j in combinations(range(len(found)), 2)
    }

    def pair(i: int, j: int) -> Comparison | None:
        return pairs.get((min(i, j), max(i, j)))

    count = range(len(found))
    distances = [[p.distance if (p := pair(i, j)) else 0 for j in count] for i in count]
    order = engine.order(distances)
    document = {
        "schema": SCHEMA,
        "basis": "modelled",
        "cache": model.name,
        "names": [found[i].name for i in order],
        "distances": [[distances[i][j] for j in order] for i in order],
        "predicted_extra_misses_ratio": [
            [p.predicted_extra_misses_ratio if (p := pair(i, j)) else None for j in order]
            for i in order
        ],
        "pairs": list(pairs.values()),
    }
    if record is not None:
        _record(record, pairs.values())
    grid = _grid(found, [[pair(i, j) for j in order] for i in order], order)
    emit(document, [_plain(p) for p in pairs.values()], wanted, grid)
    return Exit.FINDING if any(p.collision for p in pairs.values()) else Exit.DONE


def _grid(found: list[Task], rows: list[list[Comparison | None]], order: list[int]) -> str:
    colour = common().color and sys.stdout.isatty()
    wide = max(len(found[i].name) for i in order)
    lines = [" " * wide + "  " + " ".join(f"{k + 1:>3}" for k in range(len(order)))]
    for i, row in zip(order, rows, strict=True):
        lines.append(f"{found[i].name:<{wide}}  {' '.join(_cell(pair, colour) for pair in row)}")
    lines.append("bits of 64 apart (pattern similarity); ! predicted to collide (modelled)")
    colliding = {(p.a, p.b): p for row in rows for p in row if p and p.collision}
    worst = sorted(colliding.values(), key=lambda p: -p.predicted_extra_misses_ratio)[:5]
    lines += [f"  {p.a} and {p.b}: {p.predicted_extra_misses_ratio:.1%} more misses" for p in worst]
    return "\n".join(lines)


def _cell(pair: Comparison | None, colour: bool) -> str:
    if pair is None:
        return "  ·"
    text = f"{pair.distance:>2}{'!' if pair.collision else ' '}"
    return f"\033[{_COLOURS[pair.band]}m{text}\033[0m" if colour else text
