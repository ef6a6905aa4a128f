"""Metrics pages over HTTP and as text: the parser against its oracle, rates, resets, failures."""

from __future__ import annotations

import contextlib
import http.server
import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from mmctl.engine import profiles
from mmctl.engine.errors import MmctlError, NoSourceError, UsageError
from mmctl.engine.records import Device, Serving
from mmctl.engine.sources import engines
from mmctl.engine.sources import page as pages
from mmctl.engine.sources.exposition import Reader, Sample
from mmctl.engine.sources.serving import Histogram


def all_samples(text: str) -> list[Sample]:
    return Reader(lambda name: name).read(text)


def oracle(text: str) -> list[tuple[str, dict[str, str], float]]:
    families = text_string_to_metric_families(text)
    return [(s.name, dict(s.labels), s.value) for family in families for s in family.samples]


def test_every_real_page_parses_as_the_library_parses_it(data: Path) -> None:
    for path in sorted((data / "prom").rglob("*.prom")):
        text = path.read_text()
        ours = sorted(map(comparable, all_samples(text)))
        theirs = sorted(comparable(Sample(*sample)) for sample in oracle(text))
        assert ours == theirs, path


def comparable(sample: Sample) -> tuple[str, list[tuple[str, str]], str]:
    """The library gives a counter back with _total; NaN equals itself as text."""
    labels = sorted(sample.labels.items())
    return sample.name.removesuffix("_total"), labels, repr(float(sample.value))


@given(
    st.lists(
        st.tuples(
            st.from_regex(r"[a-z_:][a-z0-9_:]{0,8}", fullmatch=True),
            st.dictionaries(
                st.from_regex(r"_?[a-z][a-z0-9_]{0,5}", fullmatch=True),  # __ is reserved
                st.text(st.characters(blacklist_categories=("Cs", "Cc")), max_size=8), max_size=3,
            ),
            st.floats(allow_nan=False),
        ),
        min_size=1, max_size=6,
    )
)  # fmt: skip
def test_generated_lines_parse_as_the_library_parses_them(rows: Any) -> None:
    def escaped(value: str) -> str:
        return value.replace("\\", "\\\\").replace('"', '\\"')

    lines = []
    for name, labels, value in rows:
        inner = ",".join(f'{k}="{escaped(v)}"' for k, v in labels.items())
        lines.append(f"{name}{'{' + inner + '}' if inner else ''} {value}")
    text = "\n".join(lines) + "\n"
    if any(" # " in line for line in lines):
        return  # in Prometheus' own format that is a label's text, in OpenMetrics an exemplar
    assert [(s.name, s.labels, s.value) for s in all_samples(text)] == oracle(text)


@pytest.mark.parametrize(
    "line", ["up{job=\"a} 1", "up", "up abc", "up 1 2 3", "up{=\"a\"} 1", "up{} 1 nan"]
)  # fmt: skip
def test_broken_samples_are_refused(line: str) -> None:
    with pytest.raises(MmctlError, match="not a metrics page"):
        all_samples(line)


def vllm(requests: int, *, running: int = 3, started: float | None = 100.0, **more: Any) -> str:
    """A small page of vLLM after so many requests, each 0.2 s to its first token."""
    name = 'model_name="m",engine="0"'
    le = {"0.1": 0, "0.25": requests, "+Inf": requests}
    buckets = "".join(
        f'vllm:time_to_first_token_seconds_bucket{{le="{bound}",{name}}} {count}\n'
        for bound, count in le.items()
    )
    clock = "" if started is None else f"process_start_time_seconds {started}\n"
    return (
        f"# TYPE vllm:num_requests_running gauge\n"
        f"vllm:num_requests_running{{{name}}} {running}\n"
        f"vllm:num_requests_waiting{{{name}}} 2\n"
        f"vllm:kv_cache_usage_perc{{{name}}} 0.5\n"
        f"vllm:generation_tokens_total{{{name}}} {requests * 100}\n{buckets}"
        f"vllm:time_to_first_token_seconds_sum{{{name}}} {requests * 0.2}\n"
        f"vllm:time_to_first_token_seconds_count{{{name}}} {requests}\n{clock}"
    )


def readings(*texts: str) -> list[Serving]:
    page = pages.Page("engine:8000", "node")
    found = [page.records(text, number * 10**9) for number, text in enumerate(texts)]
    return [record for records in found for record in records if isinstance(record, Serving)]


def test_quantiles_and_rates_are_of_the_interval() -> None:
    first, second, third = readings(vllm(1000), vllm(1010), vllm(1010))
    assert first.ttft_p50_s is None and "two readings" in first.absent["ttft_p50_s"]
    assert first.generation_tokens_per_s is None and first.running == 3
    assert second.generation_tokens_per_s == 1000
    assert second.ttft_p50_s == pytest.approx(0.1 + 0.15 * 0.5)
    assert third.ttft_p99_s is None and "no request" in third.absent["ttft_p99_s"]
    assert third.generation_tokens_per_s == 0


def test_every_signal_of_every_engine_is_a_field_of_the_record() -> None:
    known = {field.name for field in msgspec.structs.fields(Serving)}
    for name, engine in engines.ENGINES.items():
        for signal in {*engine.signals, *engine.missing} - {*engines.VISION}:
            made = f"{signal}_p50_s" if signal in engines.QUANTILES else signal
            assert made in known, (name, signal)


def test_a_restart_is_no_negative_rate() -> None:
    _, restarted, after = readings(vllm(1000), vllm(5, started=900.0), vllm(6, started=900.0))
    assert restarted.generation_tokens_per_s is None
    assert "reset" in restarted.absent["generation_tokens_per_s"]
    assert after.generation_tokens_per_s == 100


def test_counters_that_go_back_without_a_clock_are_a_reset() -> None:
    _, back = readings(vllm(1000, started=None), vllm(5, started=None))
    assert back.generation_tokens_per_s is None and back.ttft_p50_s is None
    assert "reset" in back.absent["ttft_p50_s"]


def test_workers_that_answer_in_turn_are_no_restart() -> None:
    found = readings(
        vllm(1000, started=1.0), vllm(20, started=2.0), vllm(1010, started=1.0),
        vllm(22, started=2.0),
    )  # fmt: skip
    assert [record.generation_tokens_per_s for record in found[2:]] == [500, 100]


def test_one_series_a_pid_is_one_reading() -> None:
    text = "".join(
        f'vllm:kv_cache_usage_perc{{engine="0",pid="{pid}"}} {value}\n'
        f'vllm:num_requests_running{{engine="0",pid="{pid}"}} {value * 10}\n'
        for pid, value in ((1, 0.0), (2, 0.7), (3, 0.0))
    )
    (record,) = readings(text)
    assert record.kv_ratio == 0.7 and record.running == 7


def test_ranks_are_one_engine_and_replicas_are_several() -> None:
    rank = 'sglang:num_running_reqs{{engine_type="unified",tp_rank="{}",dp_rank="{}"}} {}\n'
    found = readings("".join(rank.format(tp, dp, 5 + dp) for tp in range(4) for dp in range(2)))
    assert [(record.instance, record.running) for record in found] == [
        ("engine:8000/dp_rank=0,engine_type=unified", 5),
        ("engine:8000/dp_rank=1,engine_type=unified", 6),
    ]  # fmt: skip


def test_shares_that_are_none_are_absent() -> None:
    (record,) = readings('vllm:kv_cache_usage_perc{engine="0"} NaN\nvllm:num_requests_running 1\n')
    assert record.kv_ratio is None and record.absent["kv_ratio"]
    (record,) = readings('vllm:kv_cache_usage_perc{engine="0"} 87\n')
    assert record.kv_ratio is None and "no share" in record.absent["kv_ratio"]


def test_dcgm_names_before_and_since_the_renaming() -> None:
    label = '{gpu="1",UUID="GPU-x",modelName="L4",hostname="n7"}'
    page = pages.Page("dcgm", "here")
    (old,) = page.records(
        f"DCGM_FI_PROF_SM_ACTIVE{label} 0.5\nDCGM_FI_DEV_GPU_TEMP{label} 60\n"
        f"DCGM_FI_DEV_POWER_USAGE{label} 70\nDCGM_FI_DEV_CLOCKS_EVENT_REASONS{label} 72\n"
        f"DCGM_FI_DEV_FB_USED{label} 100\nDCGM_FI_DEV_FB_FREE{label} 900\n", 0,
    )  # fmt: skip
    (new,) = page.records(
        f"DCGM_FI_PROF_SM_UTIL_RATIO{label} 0.5\nDCGM_FI_DEV_GPU_TEMP_CELSIUS{label} 60\n"
        f"DCGM_FI_DEV_BOARD_POWER_WATTS{label} 70\nDCGM_FI_DEV_CLOCKS_EVENT_REASONS{label} 72\n"
        f"DCGM_FI_DEV_FB_USED{label} 100\nDCGM_FI_DEV_FB_FREE{label} 900\n", 0,
    )  # fmt: skip
    assert old == new and isinstance(old, Device)
    assert (old.device, old.node, old.model) == ("gpu1", "n7", "L4")
    assert old.throttle == ("hw_slowdown", "hw_thermal_slowdown")
    assert old.total_bytes == 1000 * 2**20


def test_a_quantile_beyond_the_last_bound_is_that_bound() -> None:
    histogram = Histogram((1.0, 2.0, float("inf")), (1.0, 1.0, 10.0), 100.0)
    assert histogram.quantile(0.99) == 2.0 and histogram.quantile(0.05) == 0.5


def test_triton_names_its_gpus_too() -> None:
    (gpu,) = pages.Page("triton", "here").records(
        'nv_gpu_utilization{gpu_uuid="GPU-7"} 0.5\nnv_gpu_memory_used_bytes{gpu_uuid="GPU-7"} 10\n'
        'nv_gpu_memory_total_bytes{gpu_uuid="GPU-7"} 40\n', 0,
    )  # fmt: skip
    assert isinstance(gpu, Device) and (gpu.sm_ratio, gpu.used_bytes) == (0.5, 10)


def test_waiting_by_reason_alone_is_summed() -> None:
    (record,) = readings(
        'vllm:num_requests_running{engine="0"} 1\n'
        'vllm:num_requests_waiting_by_reason{engine="0",reason="capacity"} 2\n'
        'vllm:num_requests_waiting_by_reason{engine="0",reason="deferred"} 3\n'
    )
    assert record.waiting == 5


class Engine(http.server.BaseHTTPRequestHandler):
    """Answers /metrics by what its server says, /health always with 200."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        server: Any = self.server
        status, body = server.answers.get(self.path, (404, ""))
        if callable(body):
            body = body()
        content = body.encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        with contextlib.suppress(BrokenPipeError):
            self.wfile.write(content)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def engine() -> Iterator[Any]:
    server: Any = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Engine)
    server.answers = {"/health": (200, "")}
    server.url = f"http://127.0.0.1:{server.server_port}/metrics"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_page_that_fails_gives_absence_with_its_reason(engine) -> None:
    engine.answers["/metrics"] = (200, vllm(10))
    found = pages.readings(engine.url, profiles.load("default").profile)
    (seen,) = next(found)
    engine.answers["/metrics"] = (500, "oops")
    (silent,) = next(found)
    assert isinstance(silent, Serving) and isinstance(seen, Serving)
    assert silent.instance == seen.instance and silent.running is None
    assert (
        "HTTP 500" in silent.absent["running"] and "the engine serves" in silent.absent["running"]
    )
    engine.answers["/metrics"] = (200, vllm(20))
    (back,) = next(found)
    assert isinstance(back, Serving) and back.generation_tokens_per_s is not None


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ((500, ""), "HTTP 500; its /health says 200"), ((404, ""), "is its metrics option on"),
        ((200, ""), "gives no metrics"), ((200, "# TYPE x gauge\nx 1\n"), "no metric of a known"),
        ((401, ""), "credentials"), ((301, ""), "moved"),
    ],
)  # fmt: skip
def test_a_page_never_seen_is_no_source(engine, mmctl, answer, said) -> None:
    engine.answers["/metrics"] = answer
    done = mmctl("probe", engine.url)
    assert done.returncode == 4 and said in done.stderr and done.stderr.count("\n") == 1


def test_one_connection_serves_all_readings(engine) -> None:
    engine.answers["/metrics"] = (200, vllm(10))
    client = pages.Client(engine.url, 2.0)
    assert client.get("/metrics")[0] == 200
    first = client.connection
    assert client.get("/metrics")[0] == 200 and client.get("/nowhere")[0] == 404
    assert client.connection is first is not None
    client.close()


def test_trtllm_has_json_where_others_have_the_page(engine) -> None:
    engine.answers["/metrics"] = (200, "[]")
    engine.answers["/prometheus/metrics"] = (200, "trtllm_num_requests_running 4\n")
    (record,) = next(pages.readings(engine.url, profiles.load("default").profile))
    assert isinstance(record, Serving) and record.running == 4


def test_nobody_there_and_no_url(mmctl) -> None:
    done = mmctl("probe", "http://127.0.0.1:9/metrics")
    assert done.returncode == 4 and "nothing listens" in done.stderr
    assert mmctl("probe", "http:///x").returncode == 2
    with pytest.raises(UsageError):
        pages.Client("ftp://x", 1)


def test_a_page_that_never_ends_is_given_up(engine) -> None:
    def slowly() -> str:
        time.sleep(1.5)
        return ""

    engine.answers["/metrics"] = (200, slowly)
    with pytest.raises(NoSourceError, match="took too long"):
        import msgspec

        profile = profiles.load("default").profile
        quick = msgspec.structs.replace(profile.sources, timeout_s=0.3)
        next(pages.readings(engine.url, msgspec.structs.replace(profile, sources=quick)))


def test_two_pages_and_a_host_in_one_document(engine, mmctl) -> None:
    engine.answers["/metrics"] = (200, vllm(10))
    done = mmctl("probe", "host:", engine.url, "-o", "json")
    document = json.loads(done.stdout)
    assert done.returncode == 0, done.stderr
    assert document["serving"][0]["running"] == 3 and document["devices"][0]["device"] == "cpu0"


def test_cost_of_a_page_of_500_kilobytes_is_printed(data: Path, capsys: Any) -> None:
    text = (data / "prom/vllm/gen-vllm-0.33.0-V1-dp2.prom").read_text()
    parts = [
        text.replace('engine="1"', f'engine="{n + 9}"').replace('engine="0"', f'engine="{n}"')
        for n in range(5)
    ]
    page = pages.Page("big", "node")
    costs = []
    for _ in range(3):
        start = time.process_time()
        records = page.records("".join(parts), time.time_ns())
        costs.append(1000 * (time.process_time() - start))
    assert len(records) == 10
    with capsys.disabled():
        print(f"\n500 KB page: {costs[0]:.1f} ms CPU at first, {min(costs[1:]):.1f} ms again")
