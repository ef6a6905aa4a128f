"""Rules over whole recordings: the same truths as ``live``, computed on numpy columns.

Records are put into columns per subject; a rule's expression is then evaluated at once for
every record that could change it. Unknown is NaN; a truth is 1.0, 0.0 or NaN.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from mmctl.engine.rules import language
from mmctl.engine.rules.live import MODALITIES, Rule, concerns, occasional
from mmctl.engine.rules.signals import KINDS, Signal, getter
from mmctl.engine.rules.subjects import Route, Router, Subject, part
from mmctl.engine.rules.windows import ACCUMULATORS, COVERED, WHOLE

Array: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"


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
            ts_list, grouped = self._group(records)
        self.ts_ns = np.array(ts_list, dtype=np.int64)
        # Time never goes back: a late record is judged at the newest time seen.
        self.now_ns = np.maximum.accumulate(self.ts_ns) if self.count else self.ts_ns
        self._samples: dict[tuple[Signal, Subject], Samples] = {}
        self._starts = {route: positions[0] for route, (positions, _) in grouped.items()}
        for route, (positions, members) in grouped.items():
            self._fill(route, np.array(positions, dtype=np.int64), members)

    def _group(
        self, records: Iterable[Any]
    ) -> tuple[list[int], dict[Route, tuple[list[int], list[Any]]]]:
        """Records by the series they belong to, each with its position in the recording."""
        grouped: dict[Route, tuple[list[int], list[Any]]] = {}
        # By identity: the router gives the same tuple again, and hashing it would cost more
        # than all the rest. The tuples are kept so that no identity is used twice.
        targets: dict[int, tuple[tuple[list[int], list[Any]], ...]] = {}
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
                places = targets[id(routes)] = tuple(
                    grouped.setdefault(each, ([], [])) for each in routes if self._is_wanted(each)
                )
            for positions, members in places:
                positions.append(position)
                members.append(record)
        self.count = len(ts_list)
        return ts_list, grouped

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

    def _fill(self, route: Route, positions: Array, members: list[Any]) -> None:
        ts = self.ts_ns[positions]
        if route.kind in MODALITIES:
            members = [part(route.kind, record) for record in members]
        in_order = bool((ts[1:] >= ts[:-1]).all())
        for signal in self._wanted[route.kind]:
            samples = _samples(signal, positions, ts, members)
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


def _samples(signal: Signal, positions: Array, ts: Array, members: list[Any]) -> Samples:
    read = getter(signal)
    if signal.kind in MODALITIES:
        column = [None if member is None else read(member) for member in members]
    else:
        column = list(map(read, members))
    if isinstance(next((item for item in column if item is not None), None), (str, tuple)):
        places: dict[Any, float] = {None: np.nan}
        codes = [places.setdefault(item, float(len(places) - 1)) for item in column]
        return Samples(positions, ts, np.array(codes), list(places)[1:])
    return Samples(positions, ts, np.array(column, dtype=np.float64))


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


class _Words(NamedTuple):
    """A column that is not numbers: places (NaN is unknown) in a list of distinct values."""

    places: Array
    distinct: list[Any]


class _Evaluation:
    """One rule over one subject."""

    def __init__(self, columns: Columns, rule: Rule, subject: Subject, start: int) -> None:
        self.columns, self.rule, self.subject, self.start = columns, rule, subject, start
        self.max_age_ns = round(rule.settings.max_age_s * 1e9)
        self.min_samples = max(1, rule.settings.min_samples)

    def truths(self) -> Truths:
        positions = self._positions(self.rule.signals)
        now = self.columns.now_ns[positions]
        truth = _as_truth(self._at(self.rule.when, positions, now))
        clear = self.rule.clear
        cleared = None
        if clear is not None:
            cleared = np.zeros(len(positions))
            if (truth == 1.0).any():  # what never held need not be cleared
                cleared = _as_truth(self._at(clear, positions, now))
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
            return _compare(node.operator, parts[0], parts[1], len(positions))
        return _function(node.name, [_spread(item, len(positions)) for item in parts])

    def _logic(self, node: language.Logic, positions: Array, now: Array) -> Array:
        """Kleene's logic; the costly parts last, and only where the others do not decide."""
        if node.operator == "not":
            only = _spread(self._at(node.parts[0], positions, now), len(positions))
            return np.where(np.isnan(only), np.nan, (only == 0).astype(np.float64))
        decides = 1.0 if node.operator == "or" else 0.0
        result = np.full(len(positions), 1.0 - decides)
        left = np.arange(len(positions))
        for inner in sorted(node.parts, key=_cost):
            item = _spread(self._at(inner, positions[left], now[left]), len(left))
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
        return known if samples.words is None else _Words(known, samples.words)

    def _window(self, node: language.Window, positions: Array, now: Array) -> Array:
        own = self._positions(language.signals(node.argument))
        values = _spread(self._at(node.argument, own, self.columns.now_ns[own]), len(own))
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
        if name in _ORDERED:
            result = _ordered(name, ts, values, low, high)
        else:
            result = _ROLL[name](ts, values, low, high)
        known = covered & (seen > 0)
        if name not in ("count", "sum"):
            known &= high - low >= needed
        newest = ts[np.maximum(seen - 1, 0)]
        known &= now - newest <= self.max_age_ns
        return np.where(known, result, np.nan)


def _cost(node: language.Expression) -> int:
    """Reads, then sums, then order statistics."""
    windows = [part for part in language.walk(node) if isinstance(part, language.Window)]
    return max((2 if window.name in _ORDERED else 1 for window in windows), default=0)


_ORDERED = frozenset({"median", "p50", "p95", "p99", "mad"})


def _sums(values: Array) -> Array:
    """Running sums with a leading 0, in the widest float there is."""
    total = np.empty(len(values) + 1, np.longdouble)
    total[0] = 0
    np.cumsum(values, dtype=np.longdouble, out=total[1:])
    return total


def _moments(name: str) -> Callable[[Array, Array, Array, Array], Array]:
    def roll(ts: Array, values: Array, low: Array, high: Array) -> Array:
        n = (high - low).astype(np.float64)
        if name == "count":
            return n
        base = values[0]
        shifted = values - base
        total = _sums(shifted)
        sums = (total[high] - total[low]).astype(np.float64)
        if name == "sum":
            return sums + n * base
        with np.errstate(invalid="ignore", divide="ignore"):
            mean = sums / n
            if name == "mean":
                return base + mean
            squares = _sums(shifted.astype(np.longdouble) ** 2)
            variance = (squares[high] - squares[low]) / n - mean.astype(np.longdouble) ** 2
            deviation = np.sqrt(np.maximum(variance, 0)).astype(np.float64)
            return np.where(n >= 2, deviation, np.nan)

    return roll


def _slope(ts: Array, values: Array, low: Array, high: Array) -> Array:
    t = ((ts - ts[0]) * 1e-9).astype(np.longdouble)
    y = values - values[0]
    parts = [_sums(part_) for part_ in (t, y, t * t, t * y)]
    st, sy, stt, sty = (total[high] - total[low] for total in parts)
    n = (high - low).astype(np.longdouble)
    with np.errstate(invalid="ignore", divide="ignore"):
        spread = stt - st * st / n
        slope = (sty - st * sy / n) / spread
    # One instant has no slope; what rounding leaves of its spread is not one.
    instant = ts[np.maximum(high - 1, 0)] <= ts[np.minimum(low, len(ts) - 1)]
    return np.where((n < 2) | instant, np.nan, slope).astype(np.float64)


def _extremum(operation: Any) -> Callable[[Array, Array, Array, Array], Array]:
    def roll(ts: Array, values: Array, low: Array, high: Array) -> Array:
        """Two overlapping runs of a power of two cover a window: one table per power."""
        result = np.full(len(low), np.nan)
        length = high - low
        table, power = values, 0
        level = np.where(length > 0, np.log2(np.maximum(length, 1)).astype(np.int64), -1)
        for power in range(int(level.max(initial=-1)) + 1):
            if power:
                half = 1 << (power - 1)
                table = operation(table[:-half], table[half:])
            at = np.flatnonzero(level == power)
            result[at] = operation(table[low[at]], table[high[at] - (1 << power)])
        return result

    return roll


def _ends(name: str) -> Callable[[Array, Array, Array, Array], Array]:
    def roll(ts: Array, values: Array, low: Array, high: Array) -> Array:
        last, first = np.maximum(high - 1, 0), np.minimum(low, len(ts) - 1)
        if name == "first":
            return values[first]
        if name == "delta":
            return values[last] - values[first]
        steps = np.diff(values)
        rises = _sums(np.where(steps >= 0, steps, values[1:]))
        seconds = (ts[last] - ts[first]) * 1e-9
        with np.errstate(invalid="ignore", divide="ignore"):
            rate = (rises[last] - rises[first]).astype(np.float64) / seconds
        return np.where(seconds > 0, rate, np.nan)

    return roll


def _ordered(name: str, ts: Array, values: Array, low: Array, high: Array) -> Array:
    """Order statistics, by the same sorted list that live windows keep."""
    accumulator = ACCUMULATORS[name](name)
    items = values.tolist()
    result = np.full(len(low), np.nan)
    left = right = 0
    for i, (a, b) in enumerate(zip(low.tolist(), high.tolist(), strict=True)):
        while right < b:
            accumulator.add(0.0, items[right])
            right += 1
        while left < min(a, right):
            accumulator.remove(0.0, items[left])
            left += 1
        value = accumulator.result()
        if value is not None:
            result[i] = value
    return result


_ROLL: dict[str, Callable[[Array, Array, Array, Array], Array]] = {
    "mean": _moments("mean"), "std": _moments("std"), "sum": _moments("sum"),
    "count": _moments("count"), "slope": _slope, "min": _extremum(np.minimum),
    "max": _extremum(np.maximum), "rate": _ends("rate"), "first": _ends("first"),
    "delta": _ends("delta"),
}  # fmt: skip


def _spread(item: Any, count: int) -> Array:
    """A constant or a column as numbers; words are numbers only in so far as they are there."""
    if isinstance(item, _Words):
        return np.where(np.isnan(item.places), np.nan, 1.0)
    if isinstance(item, np.ndarray):
        return item
    if isinstance(item, str):
        return np.full(count, np.nan)
    return np.full(count, float(item))


def _as_truth(item: Any) -> Array:
    values = _spread(item, 0)
    return np.where(np.isnan(values), np.nan, (values != 0).astype(np.float64))


_COMPARE: dict[str, Any] = {
    "<": np.less, "<=": np.less_equal, ">": np.greater, ">=": np.greater_equal,
    "==": np.equal, "!=": np.not_equal,
}  # fmt: skip


def _compare(operator: str, left: Any, right: Any, count: int) -> Array:
    if isinstance(left, (str, _Words)) or isinstance(right, (str, _Words)):
        return _compare_words(operator, left, right, count)
    if operator in ("in", "not in"):
        return np.full(count, np.nan)
    a, b = _spread(left, count), _spread(right, count)
    result = _COMPARE[operator](a, b).astype(np.float64)
    unknown = np.isnan(a) | np.isnan(b)
    return np.where(unknown, np.nan, result) if unknown.any() else result


def _compare_words(operator: str, left: Any, right: Any, count: int) -> Array:
    """Each pair of distinct values is compared once, by the live comparison."""
    from mmctl.engine.rules.live import compare

    (a_places, a_items), (b_places, b_items) = _distinct(left, count), _distinct(right, count)
    pair: list[Any] = [None, None]
    truth = compare(operator, lambda _: pair[0], lambda _: pair[1])
    table = np.empty((len(a_items), len(b_items)))
    for i, pair[0] in enumerate(a_items):
        for j, pair[1] in enumerate(b_items):
            answer = truth(0)
            table[i, j] = np.nan if answer is None else float(answer)
    unknown = np.isnan(a_places) | np.isnan(b_places)
    if not table.size:
        return np.full(count, np.nan)
    rows, columns = (np.where(unknown, 0, p).astype(np.int64) for p in (a_places, b_places))
    return np.where(unknown, np.nan, table[rows, columns])


def _distinct(side: Any, count: int) -> tuple[Array, list[Any]]:
    if isinstance(side, _Words):
        return side.places, side.distinct
    if not isinstance(side, np.ndarray):
        return np.zeros(count), [side]
    known = ~np.isnan(side)
    items, inverse = np.unique(side[known], return_inverse=True)
    places = np.full(count, np.nan)
    places[known] = inverse
    return places, items.tolist()


def _function(name: str, parts: list[Array]) -> Array:
    with np.errstate(all="ignore"):
        if name == "known":
            return (~np.isnan(parts[0])).astype(np.float64)
        if name == "time_to":
            level, value, slope = parts
            rising = np.where(slope > 0, (level - value) / slope, np.inf)
            result = np.where(value >= level, 0.0, rising)
            return np.where(np.isnan(level) | np.isnan(value) | np.isnan(slope), np.nan, result)
        if name == "/":
            return np.where(parts[1] == 0, np.nan, parts[0] / parts[1])
        if name == "log":
            return np.where(parts[0] > 0, np.log(parts[0]), np.nan)
        if name in _UNARY:
            return _UNARY[name](parts[0])
        return _BINARY[name](parts[0], parts[1])


_UNARY: dict[str, Any] = {"negate": np.negative, "abs": np.abs, "sqrt": np.sqrt}
_BINARY: dict[str, Any] = {
    "+": np.add, "-": np.subtract, "*": np.multiply,
    "at_least": np.maximum, "at_most": np.minimum,
}  # fmt: skip
