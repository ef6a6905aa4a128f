"""The exporter as a process: its page, its health, a real Prometheus in front of it."""

from __future__ import annotations

import http.client
import json
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from mmctl.engine.export import dashboards
from mmctl.engine.export.metrics import METRICS


def free_port() -> int:
    with closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def get(port: int, path: str) -> tuple[int, str]:
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=5)) as connection:
        connection.request("GET", path)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()


def until(what: Callable[[], Any], seconds: float = 20) -> Any:
    """The first true answer; the last one when the time is over."""
    end = time.monotonic() + seconds
    while True:
        try:
            answer = what()
        except OSError:
            answer = None
        if answer or time.monotonic() > end:
            return answer
        time.sleep(0.05)


@contextmanager
def serving(*arguments: str, **more: Any) -> Iterator[int]:
    port = free_port()
    with subprocess.Popen(
        [sys.executable, "-m", "mmctl", "probe", "serve", *arguments,
         "--listen", f"127.0.0.1:{port}", "--interval", "100ms"],
        stderr=subprocess.PIPE, text=True, **more,
    ) as process:  # fmt: skip
        try:
            yield port
        finally:
            process.terminate()
            process.wait(timeout=10)
    assert process.returncode == 143
    assert "Traceback" not in (
        process.stderr.read() if process.stderr and not process.stderr.closed else ""
    )


def samples(page: str) -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = {}
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            found.setdefault(sample.name, []).append(sample)
    return found


def test_the_page_is_openmetrics_and_absent_values_are_no_samples(nvml_stub) -> None:
    environment = nvml_stub("count=2", "gpu0.util.gpu=40", "gpu0.energy_mj=9000", "gpu1.lost=1",
                            "gpu0.throttle=8", "gpu0.gpm=0")  # fmt: skip
    with serving("nvml:", "host:", env=environment) as port:
        until(lambda: "sm_ratio{" in get(port, "/metrics")[1])
        status, page = get(port, "/metrics")
        assert status == 200
        found = samples(page)
        (sm,) = [s for s in found["mmctl_device_sm_ratio"] if s.labels["kind"] == "gpu"]
        assert sm.labels["device"] == "gpu0" and sm.value == 0.4
        assert found["mmctl_device_energy_j_total"][0].value == 9
        assert found["mmctl_device_throttled"][0].labels["reason"] == "hw_slowdown"
        assert {s.labels["source"]: s.value for s in found["mmctl_source_up"]} == {
            "nvml:": 1, "host:": 1,
        }  # fmt: skip
        info = {s.labels["device"]: s.labels for s in found["mmctl_device_info"]}
        assert info["gpu0"]["uuid"].startswith("GPU-") and "uuid" not in info["gpu1"]
        assert any(s.labels["what"] == "fault" for s in found["mmctl_events_total"])
        assert json.loads(get(port, "/health")[1])["status"] == "ok"


def test_health_tells_of_a_source_that_went_stale(tmp_path: Path) -> None:
    with serving("host:", "http://127.0.0.1:9/metrics") as port:
        until(lambda: "mmctl_host" in get(port, "/metrics")[1])
        status, text = get(port, "/health")
        document = json.loads(text)
        assert status == 503 and document["status"] == "stale"
        bad = {source["uri"]: source for source in document["sources"]}[
            "http://127.0.0.1:9/metrics"
        ]
        assert bad["up"] is False and "nothing listens" in bad["message"]
        assert get(port, "/live")[0] == 200 and get(port, "/x")[0] == 404
        page = samples(get(port, "/metrics")[1])
        assert sorted(s.value for s in page["mmctl_source_up"]) == [0, 1]


def test_a_hanging_driver_leaves_no_old_values_on_the_page(nvml_stub, tmp_path: Path) -> None:
    state = tmp_path / "state"
    state.write_text("count=1\ngpu0.gpm=0\ngpu0.util.gpu=77\n")
    environment = nvml_stub(NVMLSTUB_FILE=str(state), MMCTL_SOURCES_TIMEOUT="300ms")
    environment["NVMLSTUB_SET"] = ""
    with serving("nvml:", env=environment) as port:
        assert until(lambda: "sm_ratio{" in get(port, "/metrics")[1])
        state.write_text("count=1\ngpu0.lost=1\n")
        assert until(lambda: "sm_ratio{" not in get(port, "/metrics")[1])


def test_other_addresses_only_by_flag(mmctl, tmp_path: Path) -> None:
    profile = tmp_path / "open.toml"
    profile.write_text('[export]\nlisten = "0.0.0.0:9477"\n')
    done = mmctl("probe", "serve", "--profile", str(profile))
    assert done.returncode == 2 and "--listen 0.0.0.0:9477" not in done.stdout
    assert "no loopback" in done.stderr
    with closing(socket.socket()) as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        done = mmctl("probe", "serve", "host:", "--listen", address)
        assert done.returncode == 1 and "choose another" in done.stderr
    assert mmctl("probe", "serve", "host:", "--listen", "nowhere").returncode == 2
    assert mmctl("probe", "serve", "hots:").returncode == 2


def test_names_are_unique_and_carry_their_units() -> None:
    names = [metric.name for metric in METRICS]
    assert len(set(names)) == len(names)
    for metric in METRICS:
        assert metric.field == "" or metric.field in metric.record.__struct_fields__ or (
            metric.field in ("throttled", "heat_conflict_ratio")
        )  # fmt: skip


def test_manifests_are_made_from_the_table(mmctl) -> None:
    dashboard = json.loads(mmctl("probe", "serve", "--print", "grafana").stdout)
    heatmaps = [panel for panel in dashboard["panels"] if panel["type"] == "heatmap"]
    assert len(heatmaps) == 1 and "heat_conflict_ratio" in heatmaps[0]["targets"][0]["expr"]
    known = {metric.name for metric in METRICS} | {"mmctl_events_total"}
    for panel in dashboard["panels"]:
        assert panel["type"] == "row" or panel["description"] in known
    ids = [panel["id"] for panel in dashboard["panels"]]
    assert len(set(ids)) == len(ids)
    yaml = pytest.importorskip("yaml")

    manifests = list(yaml.safe_load_all(mmctl("probe", "serve", "--print", "hpa").stdout))
    spec = manifests[0]["spec"]
    assert (spec["minReplicas"], spec["maxReplicas"]) == (2, 12)
    assert {m["pods"]["metric"]["name"] for m in spec["metrics"]} <= known
    rules = yaml.safe_load(mmctl("probe", "serve", "--print", "alerts").stdout)
    assert len(rules["groups"][0]["rules"]) == len(dashboards.ALERTS)
    assert mmctl("probe", "serve", "--print", "grafna").returncode == 2


@pytest.fixture
def promtool() -> str:
    tool = shutil.which("promtool")
    if tool is None:
        pytest.skip("promtool is not installed (Debian package prometheus)")
    return tool


def test_alert_rules_pass_the_tool_of_prometheus(mmctl, promtool: str, tmp_path: Path) -> None:
    rules = tmp_path / "rules.yml"
    rules.write_text(mmctl("probe", "serve", "--print", "alerts").stdout)
    done = subprocess.run([promtool, "check", "rules", str(rules)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


class Engine:
    """A page of vLLM that moves on with each scrape."""

    def __init__(self) -> None:
        import http.server
        import threading

        owner = self
        self.count = 0

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                owner.count += 10
                name = '{model_name="m",engine="0"}'
                body = (
                    f"vllm:num_requests_running{name} 7\nvllm:num_requests_waiting{name} 3\n"
                    f"vllm:kv_cache_usage_perc{name} 0.25\n"
                    f"vllm:generation_tokens_total{name} {owner.count * 50}\n"
                ).encode()
                self.send_response(200)
                self.send_header("Content-Type", "text/plain; version=0.0.4")
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: Any) -> None:
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.port = self.server.server_port
        threading.Thread(target=self.server.serve_forever, args=(0.05,), daemon=True).start()


def test_a_fleet_through_a_real_prometheus(mmctl, nvml_stub, tmp_path: Path) -> None:
    server = shutil.which("prometheus")
    if server is None:
        pytest.skip("no Prometheus server (Debian package prometheus)")
    engine = Engine()
    with serving("nvml:", env=nvml_stub("count=2", "gpu1.util.gpu=31", "gpu1.gpm=0")) as exporter:
        port = free_port()
        config = tmp_path / "prometheus.yml"
        config.write_text(
            "global: {scrape_interval: 1s}\nscrape_configs:\n"
            f"  - job_name: mmctl\n    static_configs: [{{targets: ['127.0.0.1:{exporter}']}}]\n"
            f"  - job_name: vllm\n    static_configs: [{{targets: ['127.0.0.1:{engine.port}']}}]\n"
        )
        with subprocess.Popen(
            [server, f"--config.file={config}", f"--storage.tsdb.path={tmp_path / 'data'}",
             f"--web.listen-address=127.0.0.1:{port}"],
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        ) as process:  # fmt: skip
            try:

                def query(text: str) -> Any:
                    """The answer, or nothing while the server still starts."""
                    status, body = get(port, f"/api/v1/query?query={text}")
                    return json.loads(body)["data"]["result"] if status == 200 else []

                assert until(lambda: len(query("up==1")) == 2, 60), "both targets are scraped"
                assert (
                    until(lambda: query('mmctl_device_sm_ratio{device="gpu1"}'))[0]["value"][1]
                    == "0.31"
                )
                until(lambda: engine.count >= 40)
                done = mmctl("probe", f"prom:http://127.0.0.1:{port}", "--interval", "2s",
                             "--count", "2", "-o", "ndjson")  # fmt: skip
            finally:
                process.terminate()
                process.wait(timeout=20)
    engine.server.shutdown()
    engine.server.server_close()
    assert done.returncode == 0, done.stderr
    records = [json.loads(line) for line in done.stdout.splitlines()]
    found = [record for record in records if record["type"] == "serving"]
    assert found and found[-1]["engine"] == "vllm"
    assert found[-1]["instance"] == f"127.0.0.1:{engine.port}/engine=0"
    assert (found[-1]["running"], found[-1]["waiting"], found[-1]["kv_ratio"]) == (7, 3, 0.25)
    assert found[-1]["generation_tokens_per_s"] > 0


def test_a_server_that_is_no_prometheus(mmctl) -> None:
    done = mmctl("probe", "prom:http://127.0.0.1:9")
    assert done.returncode == 4 and "nothing listens" in done.stderr
    engine = Engine()
    done = mmctl("probe", f"prom:http://127.0.0.1:{engine.port}")
    engine.server.shutdown()
    engine.server.server_close()
    assert done.returncode == 4 and done.stderr.count("\n") == 1


def test_otlp_export_uses_the_conventions(nvml_stub) -> None:
    pytest.importorskip("opentelemetry.sdk", reason="the extra otel is not installed")
    metrics_service = pytest.importorskip(
        "opentelemetry.proto.collector.metrics.v1.metrics_service_pb2"
    )
    import http.server
    import threading

    bodies: list[bytes] = []

    class Collector(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if self.headers.get("Content-Encoding") == "gzip":
                import gzip

                body = gzip.decompress(body)
            bodies.append(body)
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    collector = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Collector)
    threading.Thread(target=collector.serve_forever, args=(0.05,), daemon=True).start()
    url = f"http://127.0.0.1:{collector.server_port}/v1/metrics"
    with serving(
        "nvml:", "--otlp", url, env=nvml_stub("count=1", "gpu0.gpm=0", "gpu0.util.gpu=60")
    ):
        assert until(lambda: bodies)
    collector.shutdown()
    collector.server_close()
    points: dict[str, Any] = {}
    for body in bodies:
        request = metrics_service.ExportMetricsServiceRequest.FromString(body)
        for metric in request.resource_metrics[0].scope_metrics[0].metrics:
            points[metric.name] = metric
    gauge = points["hw.gpu.utilization"].gauge.data_points[0]
    assert gauge.as_double == 0.6
    assert {a.key: a.value.string_value for a in gauge.attributes}["hw.id"] == "gpu0"
    assert points["hw.gpu.memory.usage"].unit == "By"
