"""Link costs: from files of measurements, or measured here between processes.

Measured: every rank is a process; all-to-all of each size runs in blocks that take turns, the
first runs of each block are warm-up, 5 % are trimmed at each end, the median of the rest is the
block's value (the numbers are the profile's ``[links]``).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from mmctl.engine.devices import collectives, links, pairs
from mmctl.engine.errors import MmctlError, NoSourceError, UsageError
from mmctl.engine.profiles import Profile
from mmctl.engine.records import SCHEMA, Link

Progress = Callable[[str, float], None]


class Inputs(NamedTuple):
    """What files hold: timings of collectives, links of a topology or of matrices, remarks."""

    timings: list[collectives.Timing]
    links: list[Link]
    notes: list[str]


def read(names: Sequence[str], profile: Profile, ranks: int | None = None) -> Inputs:
    """The timings, topologies and matrices in files, each known by its content.

    Raises NoSourceError for a file that is not there, MmctlError for one of no known kind.
    """
    from mmctl.engine.sources.files import source
    from mmctl.engine.sources.links import joined

    timings: list[collectives.Timing] = []
    found: list[Link] = []
    notes: list[str] = []
    for name in names:
        path = Path(name)
        head = _head(path)
        if collectives.is_table(head) or collectives.is_log(head):
            read_ = collectives.read(path, ranks)
            timings += read_.timings
            notes += read_.notes
        else:
            records = list(source(name, profile, threading.Event()))
            links_ = [record for record in records if isinstance(record, Link)]
            if not links_:
                raise MmctlError(
                    f"{name} holds neither timings of collectives nor links: give nccl-tests "
                    "logs, tables of timings, a topology or matrices of links"
                )
            found += links_
    return Inputs(timings, list(joined(found)), notes)


def _head(path: Path) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read(1 << 16)
    except FileNotFoundError:
        raise NoSourceError(f"no such file: {path}") from None
    except IsADirectoryError:
        raise NoSourceError(f"{path} is a folder; give a file") from None
    except OSError as error:
        raise MmctlError(f"cannot read {path}: {error.strerror}") from None


def from_files(
    names: Sequence[str], profile: Profile, operation: str | None = None, ranks: int | None = None
) -> dict[str, Any]:
    """The document of ``mmctl benchmark links`` for files; ``operation`` keeps one collective."""
    inputs = read(names, profile, ranks)
    timings = inputs.timings
    systems = {timing.system for timing in timings}
    if inputs.links and len(systems) > 1:
        raise UsageError(
            f"one topology cannot hold for {len(systems)} systems: give each its own call"
        )
    if operation is not None:
        wanted = collectives.operation(operation)
        timings = [timing for timing in timings if timing.operation == wanted]
        if not timings:
            there = sorted({timing.operation for timing in inputs.timings})
            raise UsageError(f"no timing of '{operation}' in the files: {', '.join(there)}")
    if timings:
        fits = links.fit(links.placed(timings, inputs.links))
    else:
        fits = pairs.fit(inputs.links, ", ".join(Path(name).stem for name in names))
    return {
        "schema": SCHEMA, "benchmark": "links", "files": list(names), "environment": None,
        "absent": {"environment": "read from files, not measured here"}, "notes": inputs.notes,
        **msgspec.to_builtins(fits),
    }  # fmt: skip


SIZES = tuple(1024 * 2**step for step in range(13))
"""Bytes that each rank sends in one all-to-all: 1 KiB to 4 MiB."""

_SECONDS = 45.0
_QUICK_SECONDS = 5.0
_QUICK_RUNS = 128
_FIT_DRAWS = 200


def measured(
    profile: Profile, world: Sequence[int], wanted: str | None, quick: bool,
    progress: Progress = lambda what, share: None,
) -> dict[str, Any]:  # fmt: skip
    """The document of ``mmctl benchmark links`` for this machine.

    Raises MmctlError when the ``wanted`` backend is not here or a rank fails.
    """
    from mmctl.benchmarks import ranks
    from mmctl.benchmarks.environment import environment
    from mmctl.benchmarks.intervals import resolution

    here = environment()
    least = resolution(here.busy_ratio)
    chosen, absent = ranks.backend(wanted)
    topology = _topology(profile) if chosen.name == "nccl" else []
    runs = _QUICK_RUNS if quick else profile.links.runs
    rows: list[dict[str, Any]] = []
    notes = list(here.remarks)
    counts = [count for count in sorted(set(world)) if count <= chosen.most_ranks]
    if not counts:
        raise UsageError(f"{chosen.name} has {chosen.most_ranks} devices here: fewer ranks")
    for number, count in enumerate(counts):
        what = f"{chosen.name}, {count} ranks"
        progress(what, number / len(counts))
        series = ranks.measure(
            chosen, count, SIZES, runs, (_QUICK_SECONDS if quick else _SECONDS) / len(counts) * 2,
            lambda share, n=number, w=what: progress(w, (n + share) / len(counts)),  # type: ignore[misc]
        )  # fmt: skip
        rows += [_point(one, count, chosen, profile.links.trim_ratio, least) for one in series]
    if chosen.name == "gloo" and max(counts) > here.cores:
        notes.append(
            f"{max(counts)} ranks share {here.cores} cores: what is measured is their "
            "turns, not a link"
        )
    timings = [_timing(row, here.processor or here.system) for row in rows]
    placed = links.placed(timings, topology)
    if chosen.name != "nccl":
        placed = [msgspec.structs.replace(p, link_class=chosen.link_class) for p in placed]
    document: dict[str, Any] = msgspec.to_builtins(links.fit(placed))
    for found in document["fits"]:
        found["absent"].pop("link_class", None)
        found |= _bounds([row for row in rows if row["ranks"] == found["ranks"]])
    return {
        "schema": SCHEMA, "benchmark": "links", "files": [], "backend": chosen.name,
        "environment": msgspec.to_builtins(here), "absent": absent, "notes": notes,
        "points": rows, "figures": _figures(rows, least), **document,
    }  # fmt: skip


def _figures(rows: list[dict[str, Any]], least: float) -> list[dict[str, Any]]:
    """Each point as ``benchmark compare`` reads it."""
    from mmctl.benchmarks.intervals import figure

    return [
        figure(
            f"{row['operation']}/{row['ranks']} ranks/{row['size_bytes']} B/latency_us",
            row["latency_us_blocks"],
            least=least,
        )
        for row in rows
    ]


def _topology(profile: Profile) -> list[Link]:
    from mmctl.engine.sources import links as reader
    from mmctl.engine.sources.host import node_name
    from mmctl.engine.sources.smi import Origin

    try:
        return list(reader.live(profile, Origin("nvml:", node_name(), 0)))
    except MmctlError:
        return []


def _point(series: Any, count: int, chosen: Any, trim_ratio: float, least: float) -> dict[str, Any]:
    """One size: the median of each block's trimmed runs, and the interval of their median."""
    import numpy as np

    from mmctl.benchmarks.intervals import estimate, trimmed

    blocks = [float(np.median(trimmed(runs, trim_ratio))) * 1e6 for runs in series.blocks]
    found = estimate(blocks, least)
    return {
        "operation": "alltoall", "link_class": chosen.link_class, "ranks": count,
        "size_bytes": series.size_bytes, "latency_us": found.value,
        "latency_us_low": found.low, "latency_us_high": found.high,
        "runs": sum(map(len, series.blocks)), "latency_us_blocks": blocks,
    }  # fmt: skip


def _timing(row: dict[str, Any], system: str) -> collectives.Timing:
    return collectives.Timing(
        system=system, operation=row["operation"], dtype="uint8", ranks=row["ranks"],
        size_bytes=row["size_bytes"], latency_us=row["latency_us"],
    )  # fmt: skip


def _bounds(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Intervals of a fit's constants: fitted again to blocks drawn with replacement."""
    import numpy as np

    from mmctl.benchmarks.intervals import LEVEL
    from mmctl.engine.devices import regimes

    chooser = np.random.default_rng(0)
    sizes = [row["size_bytes"] for row in rows]
    blocks = np.array([row["latency_us_blocks"] for row in rows])
    first, last = [], []
    for _ in range(_FIT_DRAWS):
        drawn = np.median(blocks[:, chooser.integers(0, blocks.shape[1], blocks.shape[1])], axis=1)
        lines = regimes.fit(sizes, drawn.tolist()).regimes
        first.append(lines[0].intercept)
        last.append(lines[-1].slope * links.KIB)
    tail = (1 - LEVEL) / 2
    bounds = {}
    for name, values in (("intercept_us", first), ("us_per_kib", last)):
        low, high = np.quantile(values, [tail, 1 - tail])
        bounds[f"{name}_low"], bounds[f"{name}_high"] = float(low), float(high)
    return bounds
