"""From records to samples: heat by row, dry runs, throttling, staleness, sources."""

from __future__ import annotations

from typing import Any, get_args

import msgspec
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from mmctl.engine.export.metrics import INFO, LABELS, METRICS, SourceHealth, State, exposition
from mmctl.engine.records import Device, Event, Fits, Heat, Pool, Serving

SECOND = 10**9
NO_METRIC = {
    "ts_ns", "nvml_index", "unified", "xid", "repeated", "value", "vision_tokens", "text_tokens",
    "capacity_bytes", "device_free_bytes", "other_bytes",
}  # fmt: skip


def page(state: State, now_s: float, *sources: SourceHealth) -> dict[str, list[Any]]:
    text = exposition(state, sources, int(now_s * SECOND), 5.0).decode()
    found: dict[str, list[Any]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, []).append((sample.labels, sample.value))
    return found


def pool(second: float) -> Pool:
    heat = Heat(base_address=0, row_bytes=1, row_count=40, rows=(3, 17),
                cells=((0.25, 1, 1, 0, 0, 0), (0.75, 1, 1, 0, 0, 0)))  # fmt: skip
    return Pool(
        ts_ns=int(second * SECOND), node="n", device="gpu0", reserved_bytes=100, allocated_bytes=60,
        free_bytes=40, largest_free_bytes=8, releasable_bytes=0, fragmentation_ratio=0.8,
        conflict_ratio=0.5, heat=heat, fits=Fits(fits=False, allocations=3, peak_bytes=9),
    )  # fmt: skip


def test_a_pool_with_its_heat_and_its_dry_run() -> None:
    state = State()
    state.take(pool(1))
    found = page(state, 2)
    labels = {"node": "n", "device": "gpu0", "pool": "default"}
    assert found["mmctl_pool_heat_conflict_ratio"] == [
        (labels | {"row": "003"}, 0.25), (labels | {"row": "017"}, 0.75),
    ]  # fmt: skip
    assert found["mmctl_pool_fits"] == [(labels, 0.0)]
    assert found["mmctl_pool_fragmentation_ratio"] == [(labels, 0.8)]
    assert "mmctl_pool_headroom_bytes" not in found, "absent is no sample"


def test_what_is_stale_is_left_out_and_the_newest_wins() -> None:
    state = State()
    state.take(pool(1))
    assert "mmctl_pool_fits" not in page(state, 7)
    state.take(Serving(ts_ns=SECOND, node="n", engine="vllm", instance="a", running=1))
    state.take(Serving(ts_ns=2 * SECOND, node="n", engine="vllm", instance="a", running=5))
    ((_, running),) = page(state, 3)["mmctl_serving_running"]
    assert running == 5


def test_events_are_counted_and_sources_have_their_state() -> None:
    state = State()
    for _ in range(3):
        state.take(Event(ts_ns=1, what="trip", rule="stall", mode="observe"))
    state.take(Event(ts_ns=1, what="source", state="down"))
    found = page(
        state, 1, SourceHealth("nvml:", True, 0.5, None), SourceHealth("x:", False, None, "down")
    )
    assert found["mmctl_events_total"] == [
        ({"what": "trip", "rule": "stall", "mode": "observe"}, 3.0)
    ]
    assert found["mmctl_source_up"] == [({"source": "nvml:"}, 1.0), ({"source": "x:"}, 0.0)]
    assert found["mmctl_source_age_s"] == [({"source": "nvml:"}, 0.5)]


def test_labels_with_quotes_and_newlines_stay_one_line() -> None:
    state = State()
    model = 'odd "name"\nwith\\slash'
    state.take(Device(ts_ns=1, node="n", device="gpu0", kind="gpu", model=model))
    ((labels, _),) = page(state, 1)["mmctl_device_info"]
    assert labels["model"] == model


def test_a_number_of_a_record_has_a_metric_or_is_left_out_knowingly() -> None:
    for record in LABELS:
        shown = {metric.field for metric in METRICS if metric.record is record}
        shown |= {*LABELS[record], *INFO.get(record, ())}
        for field in msgspec.structs.fields(record):
            number = {int, float, bool} & {field.type, *get_args(field.type)}
            assert not number or field.name in shown | NO_METRIC, (record, field.name)
