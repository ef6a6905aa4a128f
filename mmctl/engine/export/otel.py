"""OTLP export by the OpenTelemetry SDK (extra ``otel``): ``hw.*`` and ``gen_ai.*`` names where
the semantic conventions have one, the record's own name under ``mmctl.`` where they have none."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from mmctl.engine.errors import MissingExtraError, UsageError
from mmctl.engine.export.metrics import METRICS, Metric, samples_of
from mmctl.engine.records import AnyRecord, Device, Serving


class Convention(NamedTuple):
    """A name of the semantic conventions: unit by UCUM, and attributes that go with it."""

    name: str
    unit: str
    attributes: dict[str, str]


CONVENTIONS: dict[tuple[type, str], Convention] = {
    (Device, "sm_ratio"): Convention("hw.gpu.utilization", "1", {"hw.gpu.task": "general"}),
    (Device, "used_bytes"): Convention("hw.gpu.memory.usage", "By", {}),
    (Device, "total_bytes"): Convention("hw.gpu.memory.limit", "By", {}),
    (Device, "temperature_c"): Convention("hw.temperature", "Cel", {"hw.type": "gpu"}),
    (Device, "power_w"): Convention("hw.power", "W", {"hw.type": "gpu"}),
    (Device, "energy_j"): Convention("hw.energy", "J", {"hw.type": "gpu"}),
    (Device, "ecc_corrected"): Convention("hw.errors", "{error}", {"error.type": "corrected"}),
    (Device, "ecc_uncorrected"): Convention("hw.errors", "{error}", {"error.type": "uncorrected"}),
    (Device, "pcie_rx_bytes_per_s"): Convention(
        "hw.gpu.io.rate", "By/s", {"network.io.direction": "receive"}),
    (Device, "pcie_tx_bytes_per_s"): Convention(
        "hw.gpu.io.rate", "By/s", {"network.io.direction": "transmit"}),
    **{
        (Serving, f"{signal}_{share}_s"): Convention(name, "s", {"quantile": share})
        for signal, name in (
            ("ttft", "gen_ai.server.time_to_first_token"),
            ("itl", "gen_ai.server.time_per_output_token"),
            ("e2e", "gen_ai.server.request.duration"),
        )
        for share in ("p50", "p95", "p99")
    },
}  # fmt: skip
"""The conventions make the last three histograms; a reading has quantiles, so they are gauges
with the quantile as an attribute."""


def convention(metric: Metric) -> Convention:
    """OpenTelemetry's own name for a metric where it has one, else one below ``mmctl.``."""
    known = CONVENTIONS.get((metric.record, metric.field))
    if known is not None:
        return known
    word = metric.field or "info"
    return Convention(f"mmctl.{metric.record.__name__.lower()}.{word}", "", {})


def start(
    url: str, interval_s: float, records: Callable[[], Iterable[AnyRecord]]
) -> Callable[[], None]:
    """Export the current records to an OTLP/HTTP collector; the function that ends it.

    Raises MissingExtraError without the SDK, UsageError for a URL that is none.
    """
    try:
        from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
        from opentelemetry.metrics import Observation
        from opentelemetry.sdk.metrics import MeterProvider
        from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
        from opentelemetry.sdk.resources import Resource
    except ImportError:
        raise MissingExtraError("OTLP export", "otel") from None
    if not url.startswith(("http://", "https://")):
        raise UsageError(f"'{url}' is no URL such as http://127.0.0.1:4318/v1/metrics")
    exporter = OTLPMetricExporter(endpoint=url, timeout=5)
    reader = PeriodicExportingMetricReader(
        exporter, export_interval_millis=max(interval_s, 1.0) * 1000, export_timeout_millis=5000
    )
    resource = Resource.create({"service.name": "mmctl"})
    provider = MeterProvider(metric_readers=[reader], resource=resource)
    meter = provider.get_meter("mmctl")
    groups: dict[str, list[tuple[Metric, Convention]]] = {}
    for metric in METRICS:
        if metric.kind != "info":
            groups.setdefault(convention(metric).name, []).append((metric, convention(metric)))
    for name, members in groups.items():

        def observe(_: Any, members: Any = members) -> Iterable[Any]:
            current = list(records())
            for metric, named in members:
                for labels, value in samples_of(metric, current):
                    yield Observation(value, {**_attributes(metric, labels), **named.attributes})

        first = members[0]
        make = (
            meter.create_observable_counter if first[0].kind == "counter"
            else meter.create_observable_gauge
        )  # fmt: skip
        make(name, callbacks=[observe], unit=first[1].unit, description=first[0].help)
    return provider.shutdown


def _attributes(metric: Metric, labels: dict[str, str]) -> dict[str, str]:
    if metric.record is Device:
        names = {"node": "host.name", "device": "hw.id", "kind": "hw.type"}
    elif metric.record is Serving:
        names = {
            "node": "host.name",
            "engine": "gen_ai.provider.name",
            "instance": "server.address",
        }
    else:
        names = {"node": "host.name"}
    return {names.get(label, label): value for label, value in labels.items()}
