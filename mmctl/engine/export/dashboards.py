"""A Grafana dashboard, Prometheus alert rules and a Kubernetes autoscaling manifest, all made
from the table of metrics."""

from __future__ import annotations

from typing import Any

from mmctl.engine.export.metrics import EVENTS, METRICS, SOURCE_UP, Metric
from mmctl.engine.records import Device, Host, Pool, Serving

_NAMES = {(metric.record, metric.field): metric.name for metric in METRICS}

_UNITS = (
    ("_ratio", "percentunit"), ("_bytes_per_s", "Bps"), ("_bytes", "bytes"), ("_c", "celsius"),
    ("_per_s", "ops"), ("_s", "s"), ("_w", "watt"), ("_hz", "hertz"), ("_j", "joule"),
)  # fmt: skip


def unit_of(metric: Metric) -> str:
    """Grafana's unit for a field, by the field's own unit."""
    return next((unit for end, unit in _UNITS if metric.field.endswith(end)), "short")


def grafana() -> dict[str, Any]:
    """A dashboard to import: the conflict heatmap first, then a panel a metric by record type."""
    panels: list[dict[str, Any]] = [_heatmap(), _events()]
    y = 10
    for kind in (Pool, Serving, Device, Host):
        panels.append({
            "id": len(panels) + 1, "type": "row", "title": kind.__name__, "collapsed": False,
            "gridPos": {"x": 0, "y": y, "w": 24, "h": 1}, "panels": [],
        })  # fmt: skip
        y += 1
        shown = [
            metric for metric in METRICS
            if metric.record is kind and metric.kind != "info"
            and metric.field != "heat_conflict_ratio"
        ]  # fmt: skip
        for place, metric in enumerate(shown):
            panels.append(_panel(len(panels) + 1, metric, 8 * (place % 3), y + 7 * (place // 3)))
        y += 7 * ((len(shown) + 2) // 3)
    return {
        "title": "mmctl", "uid": "mmctl", "schemaVersion": 39, "version": 1, "editable": True,
        "refresh": "5s", "time": {"from": "now-15m", "to": "now"}, "tags": ["mmctl"],
        "templating": {"list": [
            {"name": "datasource", "type": "datasource", "query": "prometheus"},
            {"name": "node", "type": "query", "multi": True, "includeAll": True, "refresh": 2,
             "datasource": _DATASOURCE,
              "query": f"label_values({_NAMES[Device, 'used_bytes']}, node)"},
        ]},
        "panels": panels,
    }  # fmt: skip


_DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}


def _expression(metric: Metric) -> str:
    selected = f'{metric.name}{{node=~"$node"}}'
    return f"rate({selected}[1m])" if metric.kind == "counter" else selected


def _panel(number: int, metric: Metric, x: int, y: int) -> dict[str, Any]:
    labels: dict[type, str] = {
        Device: "{{node}} {{device}}", Host: "{{node}}", Serving: "{{engine}} {{instance}}",
        Pool: "{{device}} {{pool}}",
    }  # fmt: skip
    limits = {"min": 0, "max": 1} if metric.field.endswith("_ratio") else {}
    return {
        "id": number, "type": "timeseries", "title": metric.help, "description": metric.name,
        "datasource": _DATASOURCE, "gridPos": {"x": x, "y": y, "w": 8, "h": 7},
        "targets": [{"refId": "A", "expr": _expression(metric), "datasource": _DATASOURCE,
                     "legendFormat": labels[metric.record]}],
        "fieldConfig": {"defaults": {"unit": unit_of(metric), "custom": {"spanNulls": False},
                                     **limits}, "overrides": []},
    }  # fmt: skip


def _heatmap() -> dict[str, Any]:
    name = _NAMES[Pool, "heat_conflict_ratio"]
    return {
        "id": 1, "type": "heatmap", "title": "Conflict of vision and text by address",
        "description": name, "datasource": _DATASOURCE,
        "gridPos": {"x": 0, "y": 0, "w": 16, "h": 10},
        "targets": [{
            "refId": "A", "datasource": _DATASOURCE, "format": "time_series",
            "expr": f'max by (row) ({name}{{node=~"$node"}})', "legendFormat": "{{row}}",
        }],
        "options": {
            "calculate": False, "rowsFrame": {"layout": "auto"},
            "color": {"mode": "scheme", "scheme": "Inferno", "min": 0, "max": 1, "steps": 64},
            "yAxis": {"axisLabel": "address row"}, "cellGap": 0,
        },
        "fieldConfig": {"defaults": {"unit": "percentunit"}, "overrides": []},
    }  # fmt: skip


def _events() -> dict[str, Any]:
    return {
        "id": 2, "type": "timeseries", "title": "Trips, faults and other events",
        "description": EVENTS, "datasource": _DATASOURCE,
        "gridPos": {"x": 16, "y": 0, "w": 8, "h": 10},
        "targets": [{"refId": "A", "datasource": _DATASOURCE,
                     "expr": f"sum by (what, rule, mode) (increase({EVENTS}[1m]))",
                     "legendFormat": "{{what}} {{rule}} {{mode}}"}],
        "fieldConfig": {"defaults": {"unit": "short"}, "overrides": []},
    }  # fmt: skip


ALERTS: tuple[tuple[str, str, str, str, str], ...] = (
    ("MmctlSourceDown", f"{SOURCE_UP} == 0", "1m", "warning",
     "source {{ $labels.source }} gives nothing"),
    ("MmctlNextBatchDoesNotFit", f"{_NAMES[Pool, 'fits']} == 0", "10s", "critical",
     "the next batch does not fit on {{ $labels.node }} {{ $labels.device }}"),
    ("MmctlConflictHigh", f"{_NAMES[Pool, 'conflict_ratio']} > 0.5", "1m", "warning",
     "vision and text interleave on {{ $labels.node }} {{ $labels.device }}"),
    ("MmctlStalled", f"{_NAMES[Serving, 'waiting']} > 0 and on (node, engine, instance) "
     f"{_NAMES[Serving, 'generation_tokens_per_s']} == 0", "30s", "critical",
     "requests wait and no token comes from {{ $labels.instance }}"),
    ("MmctlKvCacheFull", f"{_NAMES[Serving, 'kv_ratio']} > 0.95", "1m", "warning",
     "the KV cache of {{ $labels.instance }} is nearly full"),
    ("MmctlSlowFirstToken", f"{_NAMES[Serving, 'ttft_p99_s']} > 5", "5m", "warning",
     "first tokens of {{ $labels.instance }} come late"),
    ("MmctlDeviceThrottled",
     f"max by (node, device) ({_NAMES[Device, 'throttled']}"
     '{reason=~"hw_slowdown|hw_thermal_slowdown|hw_power_brake|sw_thermal_slowdown"})'
     " == 1", "1m", "warning", "{{ $labels.node }} {{ $labels.device }} is throttled"),
    ("MmctlDeviceMemoryErrors", f"increase({_NAMES[Device, 'ecc_uncorrected']}[10m]) > 0", "0s",
     "critical", "uncorrected memory errors on {{ $labels.node }} {{ $labels.device }}"),
    ("MmctlRemapPending", f"{_NAMES[Device, 'remap_pending']} == 1", "0s", "warning",
     "a row remap of {{ $labels.node }} {{ $labels.device }} waits for a reset"),
    ("MmctlHostMemoryPressure", f"{_NAMES[Host, 'memory_full_pressure_ratio']} > 0.1", "1m",
     "warning", "tasks of {{ $labels.node }} wait for memory"),
    ("MmctlTripped", f'increase({EVENTS}{{what="trip",mode="enforce"}}[5m]) > 0', "0s", "critical",
     "rule {{ $labels.rule }} tripped"),
)  # fmt: skip


def alerts() -> str:
    """Alert rules in Prometheus' YAML."""
    lines = ["groups:", "  - name: mmctl", "    rules:"]
    for name, expression, hold, severity, summary in ALERTS:
        lines += [
            f"      - alert: {name}", f"        expr: {_quoted(expression)}",
            f"        for: {hold}", "        labels:", f"          severity: {severity}",
            "        annotations:", f"          summary: {_quoted(summary)}",
        ]  # fmt: skip
    return "\n".join(lines) + "\n"


def hpa(deployment: str = "vlm-server") -> str:
    """A HorizontalPodAutoscaler on the custom metrics, from 2 to 12 replicas, with the adapter's
    rule that makes them known to Kubernetes."""
    latency, waiting = _NAMES[Serving, "e2e_p95_s"], _NAMES[Serving, "waiting"]
    return f"""\
apiVersion: autoscaling/v2
kind: HorizontalPodAutoscaler
metadata:
  name: {deployment}
spec:
  scaleTargetRef:
    apiVersion: apps/v1
    kind: Deployment
    name: {deployment}
  minReplicas: 2
  maxReplicas: 12
  metrics:
    - type: Pods
      pods:
        metric:
          name: {latency}
        target:
          type: AverageValue
          averageValue: 1500m
    - type: Pods
      pods:
        metric:
          name: {waiting}
        target:
          type: AverageValue
          averageValue: "4"
  behavior:
    scaleUp:
      stabilizationWindowSeconds: 30
    scaleDown:
      stabilizationWindowSeconds: 300
---
# Rules for prometheus-adapter: which series are the metrics above.
apiVersion: v1
kind: ConfigMap
metadata:
  name: adapter-config
data:
  config.yaml: |
    rules:
      - seriesQuery: '{{__name__=~"{latency}|{waiting}",namespace!="",pod!=""}}'
        resources:
          overrides:
            namespace: {{resource: namespace}}
            pod: {{resource: pod}}
        metricsQuery: max(<<.Series>>{{<<.LabelMatchers>>}}) by (<<.GroupBy>>)
"""


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"
