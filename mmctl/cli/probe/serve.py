"""``mmctl probe serve``: an OpenMetrics exporter, and what goes with it elsewhere."""

from __future__ import annotations

import sys
import threading
from typing import Annotated

import msgspec
import typer

from mmctl.cli import completion
from mmctl.cli.app import common, host_port, note, seconds, to_read
from mmctl.cli.main import Exit
from mmctl.cli.render import to_json
from mmctl.engine import profiles
from mmctl.engine.errors import UsageError, suggestion

PRINTS = ("grafana", "alerts", "hpa")


def serve(
    sources: Annotated[list[str] | None, to_read("URIs or files.")] = None,
    listen: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help="Where to listen; loopback by default.")
    ] = None,
    interval: Annotated[
        str | None, typer.Option(metavar="TIME", help="Time between readings.")
    ] = None,
    otlp: Annotated[
        str | None, typer.Option(metavar="URL", help="Export by OTLP/HTTP as well (extra otel).")
    ] = None,
    duration: Annotated[
        str | None, typer.Option(metavar="TIME", help="Stop after so long, such as 30s or 5min.")
    ] = None,
    print_: Annotated[
        str | None,
        typer.Option(
            "--print",
            metavar="grafana|alerts|hpa",
            autocompletion=completion.words("grafana", "alerts", "hpa"),
            help="Print a manifest and end.",
        ),
    ] = None,
) -> int:
    """Serve every reading as OpenMetrics on /metrics; /health and /live say how the sources are.

    /health answers 200 when every source is fresh and 503 with the reasons otherwise; /live
    answers 200 while the exporter itself works. A value that is absent has no sample, a stale
    one is left out. --print writes a Grafana dashboard (with the conflict heatmap), Prometheus
    alert rules or a Kubernetes autoscaler made from the same table of metrics.

    \b
    Examples:
      mmctl probe serve
      mmctl probe serve nvml: http://127.0.0.1:8000/metrics --interval 1s
      mmctl probe serve nvml: --otlp http://127.0.0.1:4318
      mmctl probe serve --print grafana > mmctl-dashboard.json
    """
    if print_ is not None:
        return _print(print_)
    from mmctl.engine.export import otel
    from mmctl.engine.sources.exporter import Exporter

    profile = profiles.load(common().profile).profile
    interval_s = seconds("--interval", interval) if interval else 1.0
    sampling = msgspec.structs.replace(profile.sampling, interval_s=max(interval_s, 0.05))
    profile = msgspec.structs.replace(profile, sampling=sampling)
    address = listen or profile.export.listen
    if listen is None and not _is_loopback(address):
        raise UsageError(f"[export] listen is no loopback: say so with --listen {address}")
    host, port = host_port(address)
    stop = threading.Event()
    exporter = Exporter(sources or list(profile.sources.default), profile, stop)
    server = exporter.bind(host, port)
    end_otlp = otel.start(otlp, interval_s, exporter.fresh) if otlp else None
    note(f"serving http://{host}:{server.server_port}/metrics; Ctrl-C ends it")
    try:
        limit_s = seconds("--duration", duration) if duration else None
        exporter.run(server, limit_s)
    finally:
        stop.set()
        if end_otlp is not None:
            end_otlp()
    return Exit.DONE


def _print(what: str) -> int:
    from mmctl.engine.export import dashboards

    if what not in PRINTS:
        hint = f"one of {', '.join(PRINTS)}{suggestion(what, PRINTS)}"
        raise UsageError(f"nothing to print named '{what}': {hint}")
    if what == "grafana":
        print(to_json(dashboards.grafana(), indent=2))
    else:
        sys.stdout.write(dashboards.alerts() if what == "alerts" else dashboards.hpa())
    return Exit.DONE


def _is_loopback(address: str) -> bool:
    host = address.rpartition(":")[0].strip("[]")
    return host in ("localhost", "::1", "") or host.startswith("127.")
