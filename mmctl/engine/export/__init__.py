"""OpenMetrics, OpenTelemetry, dashboards."""
