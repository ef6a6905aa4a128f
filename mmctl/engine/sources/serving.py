"""Samples of one page → ``serving`` records: instances told apart, rates and quantiles taken
over the time since the reading before, never since the engine started."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple, get_args

import msgspec

from mmctl.engine.records import Latencies, Serving
from mmctl.engine.sources.engines import (
    ENGINES,
    MODEL_LABELS,
    QUANTILES,
    STARTED,
    VISION,
    Engine,
    Signal,
)  # fmt: skip
from mmctl.engine.sources.exposition import Sample

WARMING = "warming up: it is taken between two readings"
_QUIET = "no request in this interval; a longer --interval sees more"
_RESET = "the engine's counters were reset since the last reading"
_SHARES = ((0.5, "p50"), (0.95, "p95"), (0.99, "p99"))
_MAX_WORKERS = 32

_FIELDS = {
    name: tuple(f"{name}_{p}_s" for _, p in _SHARES) if name in QUANTILES else (name,)
    for engine in ENGINES.values() for name in engine.signals if name not in VISION
}  # fmt: skip
"""Signal → fields of the record."""

_COUNTS = {field.name for field in msgspec.structs.fields(Serving) if int in get_args(field.type)}
"""Fields that are taken as they stand; any other of a counter is its rate."""

_MODALITIES = "the engine does not tell vision tokens from text tokens"


class Histogram(NamedTuple):
    """Cumulative counts at upper bounds, the last bound infinite, and the sum of what was seen."""

    bounds: tuple[float, ...]
    counts: tuple[float, ...]
    total: float

    def since(self, before: Histogram) -> Histogram | None:
        """What was added since ``before``; None when it is no continuation of it."""
        if self.bounds != before.bounds:
            return None
        counts = tuple(a - b for a, b in zip(self.counts, before.counts, strict=True))
        if min(counts, default=0) < 0:
            return None
        return Histogram(self.bounds, counts, self.total - before.total)

    def quantile(self, share: float) -> float | None:
        """By linear interpolation inside a bucket, as Prometheus' histogram_quantile does: a
        quantile beyond the last finite bound is that bound. None when nothing was seen."""
        if not self.counts or self.counts[-1] <= 0:
            return None
        rank = share * self.counts[-1]
        below_bound, below_count = 0.0, 0.0
        for bound, count in zip(self.bounds, self.counts, strict=True):
            if count >= rank:
                if bound == float("inf"):
                    return below_bound
                if count == below_count or (bound <= 0 and below_count == 0):
                    return bound
                share_inside = (rank - below_count) / (count - below_count)
                return below_bound + (bound - below_bound) * share_inside
            below_bound, below_count = bound, count
        return below_bound


class Snapshot(NamedTuple):
    """All a page says about one instance at one time."""

    time_s: float
    values: dict[str, float]
    histograms: dict[str, Histogram]


class Instances:
    """The serving instances of one page, with what was read of each before."""

    def __init__(self, base: str, node: str) -> None:
        self.base, self.node = base, node
        self.before: dict[tuple[str, tuple[str, ...]], dict[float, Snapshot]] = {}
        self.known: dict[str, Serving] = {}

    def records(self, samples: Iterable[Sample], ts_ns: int) -> list[Serving]:
        """One record an instance, each rate over the time since its last reading."""
        families: dict[str, list[Sample]] = {}
        worker = 0.0
        for sample in samples:
            if sample.name == STARTED:
                worker = sample.value
            name = engine_of(sample.name)
            if name is not None:
                families.setdefault(name, []).append(sample)
        records: list[Serving] = []
        for name, found in families.items():
            engine = ENGINES[name]
            split = _split(engine, found)
            for key, (label, model, own) in split.items():
                instance = f"{self.base}{'/' + label if label else ''}"
                snapshot = _snapshot(engine, own, ts_ns / 1e9)
                # Several workers may answer behind one address in turn: each continues its own.
                workers = self.before.setdefault((name, key), {})
                started = worker or _created(own)
                record = self._record(
                    name, instance, model, snapshot, workers.get(started),
                    bool(workers) and started not in workers, ts_ns,
                )  # fmt: skip
                workers[started] = snapshot
                if len(workers) > _MAX_WORKERS:
                    del workers[next(iter(workers))]
                self.known[instance] = record
                records.append(record)
        return records

    def silent(self, reason: str, ts_ns: int) -> list[Serving]:
        """A record for every instance known, with ``reason`` in the place of each value."""
        fields = [field for names in _FIELDS.values() for field in names]
        return [
            Serving(
                ts_ns=ts_ns, node=self.node, engine=known.engine, instance=known.instance,
                model=known.model, absent=dict.fromkeys(fields, reason),
            )
            for known in self.known.values()
        ]  # fmt: skip

    def _record(
        self, name: str, instance: str, model: str | None, now: Snapshot,
        before: Snapshot | None, restarted: bool, ts_ns: int,
    ) -> Serving:  # fmt: skip
        engine = ENGINES[name]
        values: dict[str, Any] = {}
        untold = {"vision_tokens", "text_tokens"} - engine.signals.keys()
        absent: dict[str, str] = dict.fromkeys(sorted(untold), _MODALITIES)
        for signal_name, fields in _FIELDS.items():
            signal = engine.signals.get(signal_name)
            if signal is None:
                why = engine.missing.get(signal_name, f"{name} does not give it")
                absent.update(dict.fromkeys(fields, why))
                continue
            found, why = _value(signal_name, signal, now, before, restarted)
            for field in fields:
                if found.get(field) is None:
                    absent[field] = why
                else:
                    values[field] = found[field]
        vision = _vision(engine, now, before)
        return Serving(
            ts_ns=ts_ns, node=self.node, engine=name, instance=instance, model=model,
            modalities={"vision": vision} if vision is not None else {}, absent=absent, **values,
        )  # fmt: skip


def engine_of(metric: str) -> str | None:
    """The serving engine whose metric this is, by its prefix; None if none."""
    for name, engine in ENGINES.items():
        if metric.startswith(engine.prefixes):
            return name
    return None


def _split(
    engine: Engine, samples: list[Sample]
) -> dict[tuple[str, ...], tuple[str, str | None, list[Sample]]]:
    """Samples by instance; one without the telling labels belongs to the only instance."""
    groups: dict[tuple[str, ...], list[Sample]] = {}
    for sample in samples:
        key = tuple(sample.labels.get(label, "") for label in engine.instance)
        groups.setdefault(key, []).append(sample)
    telling = [key for key in groups if any(key)]
    if len(telling) == 1 and len(groups) > 1:
        groups = {telling[0]: [sample for group in groups.values() for sample in group]}
    elif len(telling) > 1:
        shared = [key for key in groups if not all(key) and key not in _complete(groups)]
        for key in shared:
            groups.pop(key)
    found: dict[tuple[str, ...], tuple[str, str | None, list[Sample]]] = {}
    for key, own in sorted(groups.items()):
        named = [
            f"{label}={value}"
            for label, value in zip(engine.instance, key, strict=True)
            if value and (len(groups) > 1 or label in ("engine", "dp_rank"))
        ]
        models = (sample.labels.get(label) for sample in own for label in MODEL_LABELS)
        found[key] = (",".join(named), next((model for model in models if model), None), own)
    return found


def _complete(groups: dict[tuple[str, ...], list[Sample]]) -> set[tuple[str, ...]]:
    """The keys that have as many labels as any has: those that are instances."""
    most = max(sum(map(bool, key)) for key in groups)
    return {key for key in groups if sum(map(bool, key)) == most}


def _created(samples: list[Sample]) -> float:
    """When the counters began, to tell one worker from another where nothing else does."""
    return min((s.value for s in samples if s.name.endswith("_created")), default=0.0)


def _snapshot(engine: Engine, samples: list[Sample], time_s: float) -> Snapshot:
    by_name: dict[str, list[Sample]] = {}
    for sample in samples:
        by_name.setdefault(sample.name, []).append(sample)
    values: dict[str, float] = {}
    histograms: dict[str, Histogram] = {}
    for name, signal in engine.signals.items():
        if signal.kind == "histogram":
            for candidate in signal.names:
                if f"{candidate}_bucket" in by_name:
                    histograms[name] = _histogram(engine, signal, candidate, by_name)
                    break
        elif signal.kind == "mean":
            if signal.names[0] in by_name and signal.also[0] in by_name:
                total = _merged(engine, signal, by_name[signal.names[0]]) or 0.0
                count = _merged(engine, signal, by_name[signal.also[0]]) or 0.0
                histograms[name] = Histogram((float("inf"),), (count,), total * signal.scale)
        else:
            for candidate in signal.names:
                value = _merged(engine, signal, by_name.get(candidate, []))
                if value is not None:
                    extra = (
                        _merged(engine, signal, by_name.get(a, [])) or 0.0 for a in signal.also
                    )
                    values[name] = (value + sum(extra)) * signal.scale
                    break
    return Snapshot(time_s, values, histograms)


def _merged(engine: Engine, signal: Signal, samples: list[Sample]) -> float | None:
    """One number of several series: the sum over labels, the largest over processes and ranks,
    since each of those reports the whole (and all but one may report 0)."""
    where = [s for s in samples if not _foreign(signal, s)]
    by_rank: dict[tuple[str, ...], float] = {}
    for sample in where:
        if sample.value == sample.value:
            rank = tuple(sample.labels.get(label, "") for label in engine.ranks)
            by_rank[rank] = by_rank.get(rank, 0.0) + sample.value
    return max(by_rank.values(), default=None)


def _foreign(signal: Signal, sample: Sample) -> bool:
    """Whether a label says that the sample is another thing; one without the label is not."""
    return any(sample.labels.get(label, value) != value for label, value in signal.where)


def _histogram(
    engine: Engine, signal: Signal, name: str, by_name: dict[str, list[Sample]]
) -> Histogram:
    ranks: dict[tuple[str, ...], dict[float, float]] = {}
    for sample in by_name[f"{name}_bucket"]:
        try:
            bound = float(sample.labels.get("le", "nan")) * signal.scale
        except ValueError:
            continue
        if bound == bound and sample.value == sample.value and not _foreign(signal, sample):
            rank = tuple(sample.labels.get(label, "") for label in engine.ranks)
            counts = ranks.setdefault(rank, {})
            counts[bound] = counts.get(bound, 0.0) + sample.value
    best = max(ranks.values(), key=lambda counts: max(counts.values(), default=0.0), default={})
    bounds = tuple(sorted(best))
    total = _merged(engine, signal, by_name.get(f"{name}_sum", [])) or 0.0
    return Histogram(bounds, tuple(best[bound] for bound in bounds), total * signal.scale)


def _value(
    name: str, signal: Signal, now: Snapshot, before: Snapshot | None, restarted: bool
) -> tuple[dict[str, Any], str]:
    """Fields of one signal, and why those that are not there are absent."""
    fields = _FIELDS[name]
    if signal.kind in ("histogram", "mean"):
        current = now.histograms.get(name)
        if current is None:
            return {}, "the page does not have it"
        if before is None or name not in before.histograms:
            return {}, _RESET if restarted else WARMING
        added = current.since(before.histograms[name])
        if added is None:
            return {}, _RESET
        if not added.counts or added.counts[-1] <= 0:
            return {}, _QUIET
        if name not in QUANTILES:
            return {fields[0]: max(added.total, 0.0) / added.counts[-1]}, ""
        return {f: added.quantile(s) for f, (s, _) in zip(fields, _SHARES, strict=True)}, _QUIET
    value = now.values.get(name)
    if value is None:
        return {}, "the page does not have it"
    if name.endswith("_ratio"):
        if not 0 <= value <= 1.001:
            return {}, f"the engine gave {value:g}, which is no share"
        return {name: min(value, 1.0)}, ""
    if name in _COUNTS:
        if not 0 <= value < 1e15:
            return {}, f"the engine gave {value:g}, which is no count"
        return {fields[0]: round(value)}, ""
    if before is None or name not in before.values:
        return {}, _RESET if restarted else WARMING
    if value < before.values[name]:
        return {}, _RESET
    elapsed_s = now.time_s - before.time_s
    if elapsed_s <= 0:
        return {}, WARMING
    return {fields[0]: (value - before.values[name]) / elapsed_s}, ""


def _vision(engine: Engine, now: Snapshot, before: Snapshot | None) -> Latencies | None:
    """What an engine with an encoder of its own says about images."""
    if before is None:
        return None
    values: dict[str, float | None] = {}
    for name, field in VISION.items():
        if name in now.histograms and name in before.histograms:
            added = now.histograms[name].since(before.histograms[name])
            if added is None or not added.counts or added.counts[-1] <= 0:
                continue
            if field not in QUANTILES:
                values[field] = max(added.total, 0.0) / added.counts[-1]
            else:
                values |= {f"{field}_{p}_s": added.quantile(s) for s, p in _SHARES}
    return Latencies(**values) if values else None
