"""Two results of one benchmark, figure by figure: what got better, what worse, what is noise."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mmctl.benchmarks.intervals import RESOLUTION, change
from mmctl.engine.devices import results
from mmctl.engine.errors import MmctlError
from mmctl.engine.records import SCHEMA

_CONDITIONS = ("processor", "cores", "memory_bytes", "accelerators", "threads", "on_battery")


def compare(before: Path, after: Path, threshold: float) -> dict[str, Any]:
    """The document of ``mmctl benchmark compare``.

    A figure has changed where the interval of the quotient leaves 1 out and the quotient is
    further than ``threshold`` from it. Raises MmctlError for a file that is no result, for
    results of different benchmarks and for results without a common figure.
    """
    old, new = results.read(before), results.read(after)
    if old.get("benchmark") != new.get("benchmark"):
        raise MmctlError(
            f"{before} is of benchmark {old.get('benchmark')}, {after} of {new.get('benchmark')}"
        )
    first, second = _figures(old, before), _figures(new, after)
    common = [name for name in first if name in second]
    if not common:
        raise MmctlError(f"{before} and {after} have no figure in common")
    rows = [_row(name, first[name], second[name], threshold) for name in common]
    notes = _differences(old, new)
    for name, document in ((before, old), (after, new)):
        notes += [f"{name}: {remark}" for remark in document.get("notes") or ()]
    return {
        "schema": SCHEMA, "benchmark": "compare", "of": old.get("benchmark"),
        "before": str(before), "after": str(after), "threshold_ratio": threshold,
        "regressions": sum(row["verdict"] == "worse" for row in rows),
        "improvements": sum(row["verdict"] == "better" for row in rows),
        "only_before": sorted(set(first) - set(second)),
        "only_after": sorted(set(second) - set(first)), "notes": notes, "figures": rows,
    }  # fmt: skip


def _figures(document: dict[str, Any], path: Path) -> dict[str, dict[str, Any]]:
    found = {}
    for figure in document.get("figures") or ():
        try:
            blocks = [float(block) for block in figure["blocks"]]
            if not blocks or not all(0 < block < float("inf") for block in blocks):
                raise ValueError
            found[str(figure["figure"])] = {
                "blocks": blocks, "better": str(figure["better"]),
                "least": float(figure.get("resolution_ratio", RESOLUTION)),
            }  # fmt: skip
        except (KeyError, TypeError, ValueError):
            raise MmctlError(f"{path} has a figure without blocks of values above zero") from None
    if not found:
        raise MmctlError(
            f"{path} has no figures to compare: give results that were measured, in JSON "
            "(mmctl benchmark … -o json > FILE)"
        )
    return found


def _row(name: str, old: dict[str, Any], new: dict[str, Any], threshold: float) -> dict[str, Any]:
    quotient = change(old["blocks"], new["blocks"], max(old["least"], new["least"]))
    moved = (quotient.low > 1 or quotient.high < 1) and abs(quotient.value - 1) > threshold
    rose = quotient.value > 1
    good = rose == (new["better"] == "higher")
    return {
        "figure": name, "before": _median(old["blocks"]), "after": _median(new["blocks"]),
        "change_factor": quotient.value, "change_factor_low": quotient.low,
        "change_factor_high": quotient.high, "better": new["better"],
        "verdict": "same" if not moved else "better" if good else "worse",
    }  # fmt: skip


def _median(values: list[float]) -> float:
    from statistics import median

    return float(median(values))


def _differences(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """What of the machine, its software or its threads differs: no regression of the code."""
    one, two = old.get("environment") or {}, new.get("environment") or {}
    notes = [
        f"{name} differs: {one.get(name)} and {two.get(name)}"
        for name in _CONDITIONS
        if one.get(name) != two.get(name)
    ]
    versions = (one.get("versions") or {}), (two.get("versions") or {})
    notes += [
        f"{name} {versions[0].get(name)} before, {versions[1].get(name)} after"
        for name in sorted({*versions[0], *versions[1]})
        if versions[0].get(name) != versions[1].get(name)
    ]
    return notes
