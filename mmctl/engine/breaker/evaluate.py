"""How good is a breaker? Its trips over a recording, against labelled episodes and real OOMs.

A trip is what the observed breaker says; an alarm lasts from a trip to its clearing, and alarms
of one rule that follow each other within 12 samples are one. Truth is the labels (intervals in
which an alarm is right) or, where there are none, the ``oom`` events of the recording.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from mmctl.engine.breaker.loop import run, without_changes
from mmctl.engine.breaker.tables import clock
from mmctl.engine.errors import MmctlError, UsageError, suggestion
from mmctl.engine.profiles import Profile
from mmctl.engine.records import AnyRecord, Event, Recording

MERGE_SAMPLES = 12
Interval = tuple[int, int]


class Alarm(NamedTuple):
    """A rule's alarm for one subject, from its trip to its clearing (or the end)."""

    rule: str
    device: str | None
    start_ns: int
    end_ns: int


class Observed(NamedTuple):
    """What an observing breaker saw in a recording."""

    alarms: tuple[Alarm, ...]
    ooms_ns: tuple[int, ...]
    samples: int
    start_ns: int
    end_ns: int


class Score(msgspec.Struct, frozen=True, kw_only=True):
    """Alarms against truth. Ratios have 95 % confidence intervals (Wilson)."""

    rule: str
    samples: int
    hours: float
    episodes: int
    found: int
    missed: int
    alarms: int
    false_alarms: int
    false_per_hour: float | None
    false_per_1000_samples: float | None
    delay_p50_s: float | None
    oom_lead_p50_s: float | None
    accuracy_ratio: float | None
    accuracy_ci_ratio: tuple[float, float] | None
    false_trip_ratio: float | None
    false_trip_ci_ratio: tuple[float, float] | None


def observe(records: Iterable[AnyRecord], profile: Profile) -> Observed:
    """Run the breaker over ``records`` in observe mode and collect its alarms."""
    opened: dict[tuple[str, str, str | None], int] = {}
    alarms: list[Alarm] = []
    ooms: list[int] = []
    samples = 0
    start = end = None
    for record in run(without_changes(records), profile, "observe"):
        if isinstance(record, Recording):
            continue
        if not isinstance(record, Event):
            samples += 1
        end = record.ts_ns if end is None else max(end, record.ts_ns)
        start = record.ts_ns if start is None else start
        if isinstance(record, Event):
            key = (record.rule or "", record.node, record.device)
            if record.what == "trip":
                opened[key] = record.ts_ns
            elif record.what == "clear" and key in opened:
                alarms.append(Alarm(key[0], record.device, opened.pop(key), record.ts_ns))
            elif record.what == "oom":
                ooms.append(record.ts_ns)
    end = end or 0
    alarms += [Alarm(rule, device, at, end) for (rule, _, device), at in opened.items()]
    alarms.sort(key=lambda alarm: alarm.start_ns)
    return Observed(tuple(alarms), tuple(ooms), samples, start or 0, end)


def score(observed: Observed, truth: list[Interval] | None, rule: str | None = None) -> Score:
    """Count hits, misses and false alarms, of one rule or (None) of all together.

    Without labels every ``oom`` is an episode that lasts a minute before it.
    """
    if truth is None:
        truth = [(at - 60 * 10**9, at) for at in observed.ooms_ns]
    alarms = [alarm for alarm in observed.alarms if rule in (None, alarm.rule)]
    interval = (observed.end_ns - observed.start_ns) / max(1, observed.samples - 1)
    merged = _merge(alarms, round(MERGE_SAMPLES * interval))
    delays, leads = [], []
    for start, end in truth:
        # An alarm that begins inside is a find; one that was there before is found at once.
        hits = [a for a in alarms if a.start_ns <= end and a.end_ns >= start]
        if hits:
            delays.append(max(0, hits[0].start_ns - start) / 1e9)
    for at in observed.ooms_ns:
        before = [a.start_ns for a in alarms if a.start_ns <= at]
        if before:
            leads.append((at - max(before)) / 1e9)
    false = sum(not any(start <= e and end >= s for s, e in truth) for start, end in merged)
    gaps = _gaps(truth, observed)
    noisy = sum(any(start <= e and end >= s for start, end in merged) for s, e in gaps)
    judged = len(truth) + len(gaps)
    right = len(delays) + len(gaps) - noisy
    hours = (observed.end_ns - observed.start_ns) / 3.6e12
    return Score(
        rule=rule or "all", samples=observed.samples, hours=hours, episodes=len(truth),
        found=len(delays), missed=len(truth) - len(delays), alarms=len(merged),
        false_alarms=false, false_per_hour=false / hours if hours else None,
        false_per_1000_samples=1000 * false / observed.samples if observed.samples else None,
        delay_p50_s=median(delays), oom_lead_p50_s=median(leads),
        accuracy_ratio=right / judged if judged else None,
        accuracy_ci_ratio=wilson(right, judged),
        false_trip_ratio=noisy / len(gaps) if gaps else None,
        false_trip_ci_ratio=wilson(noisy, len(gaps)),
    )  # fmt: skip


def _merge(alarms: Iterable[Alarm], gap_ns: int) -> list[Interval]:
    merged: list[Interval] = []
    for alarm in sorted(alarms, key=lambda alarm: alarm.start_ns):
        if merged and alarm.start_ns - merged[-1][1] <= gap_ns:
            merged[-1] = (merged[-1][0], max(merged[-1][1], alarm.end_ns))
        else:
            merged.append((alarm.start_ns, alarm.end_ns))
    return merged


def _gaps(truth: list[Interval], observed: Observed) -> list[Interval]:
    """The quiet stretches: before, between and after the episodes."""
    gaps, at = [], observed.start_ns
    for start, end in sorted(truth):
        if start - 1 > at:
            gaps.append((at, start - 1))
        at = max(at, end + 1)
    if at < observed.end_ns:
        gaps.append((at, observed.end_ns))
    return gaps


def median(values: list[float]) -> float | None:
    """The middle value, None of none."""
    if not values:
        return None
    ordered = sorted(values)
    middle = len(ordered) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2


def wilson(hits: int, trials: int, z: float = 1.96) -> tuple[float, float] | None:
    """Wilson's 95 % interval of a share: sensible at 0 and 1, where all the interest is."""
    if not trials:
        return None
    share = hits / trials
    centre = share + z * z / (2 * trials)
    spread = z * (share * (1 - share) / trials + z * z / (4 * trials * trials)) ** 0.5
    scale = 1 + z * z / trials
    return max(0.0, (centre - spread) / scale), min(1.0, (centre + spread) / scale)


def read_labels(path: Path, series: str) -> list[Interval]:
    """Intervals of a JSON or CSV file; of NAB's ``combined_windows.json`` those of ``series``.

    JSON: a list of pairs or of objects with ``start`` and ``end``, or an object from series'
    names to such lists. CSV: columns ``start`` and ``end``.
    """
    try:
        text = path.read_text("utf-8-sig")
    except OSError as error:
        raise MmctlError(f"cannot read the labels {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise MmctlError(f"cannot read the labels {path}: not UTF-8 text") from None
    if text.lstrip()[:1] in ("[", "{"):
        try:
            content: Any = msgspec.json.decode(text)
        except msgspec.DecodeError as error:
            raise MmctlError(f"{path} is not JSON: {error}") from None
        if isinstance(content, dict) and not {"start", "end"} <= content.keys():
            content = _of_series(content, series, path)
        return [_interval(item, path) for item in content]
    rows = list(csv.DictReader(text.splitlines()))
    return [_interval(row, path) for row in rows]


def _of_series(content: dict[str, Any], series: str, path: Path) -> Any:
    if "labels" in content or "intervals" in content:
        return content.get("labels", content.get("intervals"))
    names = {Path(name).name: name for name in content}
    if series not in names:
        raise UsageError(f"{path} has no labels of '{series}'{suggestion(series, names)}")
    return content[names[series]]


def _interval(item: Any, path: Path) -> Interval:
    moment = clock(None)
    try:
        start, end = (item["start"], item["end"]) if isinstance(item, dict) else item
        return moment(str(start)), moment(str(end))
    except (KeyError, TypeError, ValueError):
        raise MmctlError(f"{path}: '{str(item)[:60]}' is no interval of start and end") from None


def scores(
    observed: Observed, truth: list[Interval] | None, rules: Iterable[str]
) -> Iterator[Score]:
    """The score of every rule that alarmed, and of all together at the end."""
    for rule in rules:
        if any(alarm.rule == rule for alarm in observed.alarms):
            yield score(observed, truth, rule)
    yield score(observed, truth)
