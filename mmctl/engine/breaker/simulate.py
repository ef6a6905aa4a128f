"""Simulated request streams: how often latency rules cry wolf, and how soon they see incidents.

Requests complete as a Poisson process; their latencies are drawn independently. In an incident
everything takes three times as long. All of it is modelled; the rules are the profile's own,
evaluated on columns, hour by hour with enough of the hour before to warm the windows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec
import numpy as np

from mmctl.engine.breaker.evaluate import median, wilson
from mmctl.engine.errors import UsageError
from mmctl.engine.profiles import Profile
from mmctl.engine.rules.arrays import Array
from mmctl.engine.rules.columns import Columns, Truths
from mmctl.engine.rules.rule import Rule, compile_rules
from mmctl.engine.rules.signals import SIGNALS
from mmctl.engine.rules.subjects import Subject

SECOND_NS = 10**9
WARM_S = 900.0
INCIDENTS_PER_HOUR, INCIDENT_S, SLOWER = 10, 30.0, 3.0
MEDIAN_LATENCY_S = 0.4

Draw = Callable[[Any, int], Array]

# Latency in units of its median; spreads as wide as real serving traces have them.
DISTRIBUTIONS: dict[str, Draw] = {
    "lognormal": lambda random, n: np.exp(0.5 * random.standard_normal(n)),
    "gamma": lambda random, n: random.gamma(2.0, 1 / 1.678, n),
    "pareto": lambda random, n: (1 + random.pareto(2.5, n)) / 1.32,
    "weibull": lambda random, n: random.weibull(1.5, n) / 0.783,
    "mixed": lambda random, n: np.exp(0.4 * random.standard_normal(n)),
}
VISION_SHARE = 0.3  # of the requests of "mixed"; these take four times as long
VISION_FACTOR = 4.0


class StreamScore(msgspec.Struct, frozen=True, kw_only=True):
    """One simulated stream. ``false_per_hour`` counts trips outside incidents."""

    requests_per_s: float
    distribution: str
    seed: int
    hours: float
    incidents: int
    found: int
    missed: int
    found_ratio: float | None
    found_ci_ratio: tuple[float, float] | None
    delay_p50_s: float | None
    delay_p95_s: float | None
    false_trips: int
    false_per_hour: float
    basis: str = "modelled"


class Stretch(NamedTuple):
    """Requests of one hour, warm-up before it included."""

    ts_ns: Array
    latency_s: Array
    vision: Array
    incidents: list[tuple[int, int]]


def evaluate_stream(
    profile: Profile, rate: float, hours: float, seed: int, distribution: str, incidents: bool
) -> StreamScore:
    """Run the profile's request rules over a simulated stream."""
    if not 0 < rate <= 10_000 or not 0 < hours <= 10_000:
        raise UsageError("a stream has up to 10,000 requests/s and up to 10,000 hours")
    rules = tuple(
        rule
        for rule in compile_rules(profile.breaker.rules)
        if all(signal.kind == "request" for signal in rule.signals)
    )
    if not rules:
        raise UsageError("no rule of this profile looks at requests alone")
    delays: list[float] = []
    total = false = 0
    whole, rest = divmod(hours, 1.0)
    lengths = [3600.0] * int(whole) + ([3600.0 * rest] if rest > 1e-9 else [])
    before: Stretch | None = None
    for number, length_s in enumerate(lengths):
        stretch = _hour(number, length_s, rate, seed, distribution, incidents)
        warm = _tail(before)
        trips = sorted(at for rule in rules for at in _trips(rule, _join(warm, stretch)))
        trips = [at for at in trips if at >= number * 3600 * SECOND_NS]
        used: set[int] = set()
        for start, end in stretch.incidents:
            total += 1
            inside = [at for at in trips if start <= at <= end + 3 * SECOND_NS]
            used.update(inside)
            if inside:
                delays.append((inside[0] - start) / 1e9)
        # Several rules may tell of the same thing: within a minute it is one false trip.
        false += _separate([at for at in trips if at not in used], 60 * SECOND_NS)
        before = stretch
    return StreamScore(
        requests_per_s=rate, distribution=distribution, seed=seed, hours=hours,
        incidents=total, found=len(delays), missed=total - len(delays),
        found_ratio=len(delays) / total if total else None,
        found_ci_ratio=wilson(len(delays), total), delay_p50_s=median(delays),
        delay_p95_s=float(np.percentile(delays, 95)) if delays else None,
        false_trips=false, false_per_hour=false / hours,
    )  # fmt: skip


def _separate(times: list[int], gap_ns: int) -> int:
    count, last = 0, -gap_ns
    for at in times:
        if at - last >= gap_ns:
            count += 1
            last = at
    return count


def _hour(
    number: int, length_s: float, rate: float, seed: int, distribution: str, incidents: bool
) -> Stretch:
    random = np.random.default_rng([seed, number, round(rate * 1000)])
    count = random.poisson(rate * length_s)
    at_s = np.sort(random.uniform(0.0, length_s, count))
    latency = MEDIAN_LATENCY_S * DISTRIBUTIONS[distribution](random, count)
    vision = np.zeros(count, bool)
    if distribution == "mixed":
        vision = random.random(count) < VISION_SHARE
        latency = np.where(vision, VISION_FACTOR * latency, latency)
    spans: list[tuple[int, int]] = []
    base_ns = number * 3600 * SECOND_NS
    if incidents:
        # One in each sixth of a minute-grid, so that they never touch and never come on the hour.
        slot_s = 3600.0 / INCIDENTS_PER_HOUR
        for slot in range(int(length_s // slot_s)):
            start_s = slot * slot_s + random.uniform(0.2, 0.7) * slot_s
            inside = (at_s >= start_s) & (at_s < start_s + INCIDENT_S)
            latency = np.where(inside, SLOWER * latency, latency)
            start_ns = base_ns + round(start_s * 1e9)
            spans.append((start_ns, start_ns + round(INCIDENT_S * 1e9)))
    ts_ns = base_ns + (at_s * 1e9).astype(np.int64)
    return Stretch(ts_ns, latency, vision, spans)


def _tail(stretch: Stretch | None) -> Stretch | None:
    if stretch is None or not len(stretch.ts_ns):
        return None
    keep = stretch.ts_ns >= stretch.ts_ns[-1] - round(WARM_S * 1e9)
    return Stretch(stretch.ts_ns[keep], stretch.latency_s[keep], stretch.vision[keep], [])


def _join(before: Stretch | None, now: Stretch) -> Stretch:
    if before is None:
        return now
    return Stretch(
        np.concatenate([before.ts_ns, now.ts_ns]),
        np.concatenate([before.latency_s, now.latency_s]),
        np.concatenate([before.vision, now.vision]),
        now.incidents,
    )


_SELECTED: dict[str, Callable[[Stretch], Array]] = {
    "request_latency_s": lambda s: np.ones(len(s.ts_ns), bool),
    "vision.request_latency_s": lambda s: s.vision,
    "text.request_latency_s": lambda s: ~s.vision,
}


def _trips(rule: Rule, stretch: Stretch) -> list[int]:
    given = {}
    for signal in rule.signals:
        if signal.name not in _SELECTED:
            return []
        chosen = _SELECTED[signal.name](stretch)
        if not chosen.any():
            return []
        given[SIGNALS[signal.name]] = (stretch.ts_ns[chosen], stretch.latency_s[chosen])
    columns = Columns.of((rule,), Subject("node", "simulated"), given)
    return [at for truths in columns.truths() for at in trips(truths)]


def trips(truths: Truths) -> list[int]:
    """Times at which a rule trips: held for its hold time, and cleared since the last trip."""
    hold_ns = round(truths.rule.settings.hold_s * 1e9)
    when = truths.truth == 1.0
    over = truths.clear == 1.0 if truths.clear is not None else truths.truth == 0.0
    found, place, count = [], 0, len(when)
    rises = np.flatnonzero(when & ~np.r_[False, when[:-1]])
    while place < count:
        index = int(np.searchsorted(rises, place))
        start = place if when[place] else (int(rises[index]) if index < len(rises) else count)
        if start >= count:
            break
        ends = np.flatnonzero(~when[start:])
        end = start + int(ends[0]) if len(ends) else count
        held = start + int(
            np.searchsorted(truths.ts_ns[start:end], truths.ts_ns[start] + hold_ns, "left")
        )
        if held >= end:
            place = end
            continue
        found.append(int(truths.ts_ns[held]))
        later = np.flatnonzero(over[held + 1 :])
        place = held + 1 + int(later[0]) if len(later) else count
    return found
