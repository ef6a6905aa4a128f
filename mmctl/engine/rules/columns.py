"""Rules over whole recordings: the same truths as ``live``, computed on numpy columns.

Records are put into columns per subject; a rule's expression is then evaluated at once for
every record that could change it. Unknown is NaN; a truth is 1.0, 0.0 or NaN.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np

from mmctl.engine.rules import language
from mmctl.engine.rules.arrays import (
    ORDERED,
    ROLL,
    Array,
    Words,
    as_truth,
    compare,
    function,
    ordered,
    spread,
)  # fmt: skip
from mmctl.engine.rules.live import MODALITIES, concerns, occasional
from mmctl.engine.rules.rule import Rule
from mmctl.engine.rules.signals import KINDS, Signal, Value, getter
from mmctl.engine.rules.subjects import Route, Router, Subject, part
from mmctl.engine.rules.windows import COVERED, WHOLE


class Samples(NamedTuple):
    """A signal of one subject: positions in the recording, times, values (NaN is absent).

    ``words`` are the distinct values of a signal that is not a number, ``values`` then their
    places in that list.
    """

    positions: Array
    ts_ns: Array
    values: Array
    words: list[Any] | None = None


class Truths(NamedTuple):
    """A rule over one subject, wherever one of its signals had a new sample.

    ``truth`` and ``clear`` are 1.0, 0.0 or NaN for unknown; ``clear`` is None for a rule
    without a clear condition.
    """

    rule: Rule
    subject: Subject
    positions: Array
    ts_ns: Array
    truth: Array
    clear: Array | None


class Series:
    """The records of one series: their positions, and what the rules read of them."""

    def __init__(self, kind: str, signals: Iterable[Signal]) -> None:
        self.kind = kind
        self.positions: list[int] = []
        self.members: list[Any] = []  # not read yet
        self.columns: list[tuple[Signal, Callable[[Any], Value], list[Value]]] = [
            (signal, getter(signal), []) for signal in signals
        ]

    def read(self) -> None:
        """Take the rules' signals from the records that wait for it, and let those go."""
        members = self.members
        if self.kind in MODALITIES:
            members = [part(self.kind, record) for record in members]
        for _, read, values in self.columns:
            if self.kind in MODALITIES:
                values += [None if member is None else read(member) for member in members]
            else:
                values += map(read, members)
        self.members.clear()


_AT_ONCE = 4096  # records whose signals are read together


class Columns:
    """A recording in columns, made for the signals of ``rules``."""

    def __init__(self, rules: tuple[Rule, ...], records: Iterable[Any]) -> None:
        self.rules = rules
        wanted: dict[str, list[Signal]] = {}
        for rule in rules:
            for signal in rule.signals:
                known = wanted.setdefault(signal.kind, [])
                if signal not in known:
                    known.append(signal)
        self._wanted = wanted
        self.router = Router()
        self.count = 0
        with without_collector():
            ts_list, series = self._read(records)
        self.ts_ns = np.array(ts_list, dtype=np.int64)
        # Time never goes back: a late record is judged at the newest time seen.
        self.now_ns = np.maximum.accumulate(self.ts_ns) if self.count else self.ts_ns
        self._samples: dict[tuple[Signal, Subject], Samples] = {}
        self._starts = {route: each.positions[0] for route, each in series.items()}
        for route, each in series.items():
            self._fill(route, each)

    def _read(self, records: Iterable[Any]) -> tuple[list[int], dict[Route, Series]]:
        """Times of all records, and what the rules read of them by the series they belong to.

        A few thousand records at a time: they are read while they are still in the cache, and
        never held all at once.
        """
        series: dict[Route, Series] = {}
        # By identity: the router gives the same tuple again, and hashing it would cost more
        # than all the rest. The tuples are kept so that no identity is used twice.
        targets: dict[int, tuple[Series, ...]] = {}
        kept: list[tuple[Route, ...]] = []
        route = self.router.route
        ts_list: list[int] = []
        position = -1
        for record in records:
            routes = route(record)
            if not routes:
                continue
            position += 1
            ts_list.append(record.ts_ns)
            places = targets.get(id(routes))
            if places is None:
                kept.append(routes)
                for each in routes:
                    if each not in series and self._is_wanted(each):
                        series[each] = Series(each.kind, self._wanted[each.kind])
                places = tuple(series[each] for each in routes if each in series)
                targets[id(routes)] = places
            for one in places:
                one.positions.append(position)
                one.members.append(record)
            if not position % _AT_ONCE:
                for one in series.values():
                    one.read()
        for one in series.values():
            one.read()
        self.count = len(ts_list)
        return ts_list, series

    def _is_wanted(self, route: Route) -> bool:
        return any(
            concerns(rule, route.subject)
            and any(signal.kind == route.kind for signal in rule.signals)
            for rule in self.rules
        )

    @classmethod
    def of(
        cls, rules: tuple[Rule, ...], subject: Subject, given: dict[Signal, tuple[Array, Array]]
    ) -> Columns:
        """Columns from arrays: for each signal of ``subject`` its times (ns, rising) and values."""
        columns = cls(rules, ())
        times = np.unique(np.concatenate([ts for ts, _ in given.values()]))
        columns.ts_ns = columns.now_ns = times
        columns.count = len(times)
        for signal, (ts, values) in given.items():
            positions = np.searchsorted(times, ts)
            columns._samples[signal, subject] = Samples(positions, ts, values)
            start = int(positions[0]) if len(positions) else 0
            route = Route(signal.kind, subject)
            columns._starts[route] = min(start, columns._starts.get(route, start))
        return columns

    def _fill(self, route: Route, series: Series) -> None:
        positions = np.array(series.positions, dtype=np.int64)
        ts = self.ts_ns[positions]
        in_order = bool((ts[1:] >= ts[:-1]).all())
        for signal, _, values in series.columns:
            samples = _samples(positions, ts, values)
            if occasional(signal):
                samples = _keep(samples, ~np.isnan(samples.values))
            if not in_order:
                late = samples.ts_ns < np.maximum.accumulate(samples.ts_ns)
                samples = _keep(samples, ~late)
            self._samples[signal, route.subject] = samples

    def truths(self) -> Iterator[Truths]:
        """Every rule over every subject that it concerns."""
        subjects = list(dict.fromkeys(route.subject for route in self._starts))
        for rule in self.rules:
            used = {signal.kind for signal in rule.signals}
            own = {kind for kind in used if KINDS[kind].scope == rule.scope}
            for subject in subjects:
                if not concerns(rule, subject):
                    continue
                # A rule begins to concern a subject with the first of its own records.
                first = [self._starts.get(Route(kind, subject)) for kind in own]
                starts = [start for start in first if start is not None]
                if starts:
                    yield _Evaluation(self, rule, subject, min(starts)).truths()

    def samples(self, signal: Signal, subject: Subject) -> Samples:
        """A signal's samples for ``subject``, empty where it has none."""
        found = self._samples.get((signal, subject))
        return found if found is not None else _EMPTY


_EMPTY = Samples(np.array([], np.int64), np.array([], np.int64), np.array([], np.float64))


def _samples(positions: Array, ts: Array, values: list[Any]) -> Samples:
    if isinstance(next((item for item in values if item is not None), None), (str, tuple)):
        places: dict[Any, float] = {None: np.nan}
        codes = [places.setdefault(item, float(len(places) - 1)) for item in values]
        return Samples(positions, ts, np.array(codes), list(places)[1:])
    return Samples(positions, ts, np.array(values, dtype=np.float64))


@contextmanager
def without_collector() -> Iterator[None]:
    """Millions of new records are no garbage; looking for some would cost most of the time."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


def _keep(samples: Samples, mask: Array) -> Samples:
    return samples._replace(
        positions=samples.positions[mask], ts_ns=samples.ts_ns[mask], values=samples.values[mask]
    )


class _Evaluation:
    """One rule over one subject."""

    def __init__(self, columns: Columns, rule: Rule, subject: Subject, start: int) -> None:
        self.columns, self.rule, self.subject, self.start = columns, rule, subject, start
        self.max_age_ns = round(rule.settings.max_age_s * 1e9)
        self.min_samples = max(1, rule.settings.min_samples)

    def truths(self) -> Truths:
        positions = self._positions(self.rule.signals)
        now = self.columns.now_ns[positions]
        truth = as_truth(self._at(self.rule.when, positions, now), len(positions))
        clear = self.rule.clear
        cleared = None
        if clear is not None:
            cleared = np.zeros(len(positions))
            if (truth == 1.0).any():  # what never held need not be cleared
                cleared = as_truth(self._at(clear, positions, now), len(positions))
        return Truths(self.rule, self.subject, positions, now, truth, cleared)

    def _positions(self, signals: Iterable[Signal]) -> Array:
        """Where any of ``signals`` has a new sample, from the rule's beginning on."""
        parts = [self.columns.samples(signal, self.subject).positions for signal in signals]
        parts = [found for found in parts if len(found)]
        if not parts:
            return _EMPTY.positions
        first = parts[0]
        same = all(found is first or np.array_equal(found, first) for found in parts[1:])
        union = first if same else np.unique(np.concatenate(parts))
        return union[np.searchsorted(union, self.start) :]

    def _at(self, node: language.Expression, positions: Array, now: Array) -> Any:
        """``node`` as it stands at each of ``positions``: an array, words or a constant."""
        if isinstance(node, language.Constant):
            return node.value
        if isinstance(node, language.Read):
            return self._read(node.signal, positions, now)
        if isinstance(node, language.Window):
            return self._window(node, positions, now)
        if isinstance(node, language.Logic):
            return self._logic(node, positions, now)
        parts = [self._at(inner, positions, now) for inner in language.children(node)]
        if isinstance(node, language.Compare):
            return compare(node.operator, parts[0], parts[1], len(positions))
        return function(node.name, [spread(item, len(positions)) for item in parts])

    def _logic(self, node: language.Logic, positions: Array, now: Array) -> Array:
        """Kleene's logic; the costly parts last, and only where the others do not decide."""
        if node.operator == "not":
            only = spread(self._at(node.parts[0], positions, now), len(positions))
            return np.where(np.isnan(only), np.nan, (only == 0).astype(np.float64))
        decides = 1.0 if node.operator == "or" else 0.0
        result = np.full(len(positions), 1.0 - decides)
        left = np.arange(len(positions))
        for inner in sorted(node.parts, key=_cost):
            item = spread(self._at(inner, positions[left], now[left]), len(left))
            missing = np.isnan(item)
            decided = ~missing & ((item != 0) == bool(decides))
            result[left[missing]] = np.nan
            result[left[decided]] = decides
            left = left[~decided]
            if not len(left):
                break
        return result

    def _read(self, signal: Signal, positions: Array, now: Array) -> Any:
        samples = self.columns.samples(signal, self.subject)
        if not len(samples.positions):
            return np.full(len(positions), np.nan)
        if samples.positions is positions or np.array_equal(samples.positions, positions):
            values, seen = samples.values, samples.ts_ns
            fresh = now - seen <= self.max_age_ns
        else:
            place = np.searchsorted(samples.positions, positions, "right") - 1
            clipped = np.maximum(place, 0)
            values, seen = samples.values[clipped], samples.ts_ns[clipped]
            fresh = (place >= 0) & (now - seen <= self.max_age_ns)
        known = values if fresh.all() else np.where(fresh, values, np.nan)
        return known if samples.words is None else Words(known, samples.words)

    def _window(self, node: language.Window, positions: Array, now: Array) -> Array:
        own = self._positions(language.signals(node.argument))
        values = spread(self._at(node.argument, own, self.columns.now_ns[own]), len(own))
        ts = self.columns.ts_ns[own]
        late = ts < np.maximum.accumulate(ts) if len(ts) else np.array([], bool)
        keep = ~(np.isnan(values) | late)
        own, ts, values = own[keep], ts[keep], values[keep]
        if not len(own):
            return np.full(len(positions), np.nan)
        counts_truths = isinstance(node.argument, (language.Compare, language.Logic))
        name = "sum" if node.name == "count" and counts_truths else node.name
        return self._rolled(node, name, (own, ts, values), positions, now)

    def _rolled(
        self, node: language.Window, name: str, given: tuple[Array, Array, Array],
        positions: Array, now: Array,
    ) -> Array:  # fmt: skip
        own, ts, values = given
        lag_ns = round(node.lag_s * 1e9)
        same = own is positions or np.array_equal(own, positions)
        seen = np.arange(1, len(own) + 1) if same else np.searchsorted(own, positions, "right")
        high = np.minimum(seen, np.searchsorted(ts, now - lag_ns, "right")) if lag_ns else seen
        if node.seconds is None:
            assert node.samples is not None
            low, needed = np.maximum(high - node.samples, 0), node.samples
            covered = np.ones(len(positions), bool)
        else:
            length_ns = round(node.seconds * 1e9)
            low = np.minimum(np.searchsorted(ts, now - lag_ns - length_ns, "right"), high)
            needed = self.min_samples
            covered = ts[0] <= now - lag_ns - COVERED * length_ns
            if name not in WHOLE:
                covered = np.ones(len(positions), bool)
        if name in ORDERED:
            result = ordered(name, ts, values, low, high)
        else:
            result = ROLL[name](ts, values, low, high)
        known = covered & (seen > 0)
        if name not in ("count", "sum"):
            known &= high - low >= needed
        newest = ts[np.maximum(seen - 1, 0)]
        known &= now - newest <= self.max_age_ns
        return np.where(known, result, np.nan)


def _cost(node: language.Expression) -> int:
    """Reads, then sums, then order statistics."""
    windows = [part for part in language.walk(node) if isinstance(part, language.Window)]
    return max((2 if window.name in ORDERED else 1 for window in windows), default=0)
