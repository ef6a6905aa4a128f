"""``mmctl schedule`` as a person types it."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

Run = Callable[..., "subprocess.CompletedProcess[str]"]


def test_simulate_keeps_its_contract(mmctl: Run) -> None:
    found = mmctl(
        "schedule", "simulate", "azure", "--rate", "4", "--count", "120", "--devices",
        "h100_sxm:2,l4:2", "--policy", "colocated_fcfs,perception", "-o", "json",
    )  # fmt: skip
    assert found.returncode == 0, found.stderr
    document = json.loads(found.stdout)
    assert document["requests"] == 120 and document["lost"] == 0 and document["schema"] == 1
    assert document["simulated_requests_per_s"] > 0 and document["basis"] == "modelled"
    for policy in document["policies"]:
        for modality in ("vision", "text"):
            for name in ("ttft_s", "itl_s", "e2e_s"):
                assert set(policy["modalities"][modality][name]) == {"mean", "p50", "p95", "p99"}
        for key in ("goodput_per_device_hour", "slo_ratio", "hol_blocking_s", "device_hours"):
            assert policy[key] >= 0
        assert all(0 <= share <= 1 for share in policy["utilisation_ratio"].values())


def test_simulate_streams_the_same_records_every_time(mmctl: Run, tmp_path: Path) -> None:
    call = ("schedule", "simulate", "azure", "--rate", "4", "--count", "40", "-o", "ndjson")
    a, b = mmctl(*call), mmctl(*call)
    assert a.returncode == 0 and a.stdout == b.stdout
    records = [json.loads(line) for line in a.stdout.splitlines()]
    times = [record["ts_ns"] for record in records[1:]]
    assert records[0]["type"] == "recording" and times == sorted(times)
    states = [r["state"] for r in records if r["type"] == "request"]
    assert states.count("queued") == states.count("completed") == 40
    assert sum(r["type"] == "event" and r["what"] == "route" for r in records) == 40


def test_simulate_says_what_is_wrong(mmctl: Run, tmp_path: Path) -> None:
    found = mmctl("schedule", "simulate", "azure", "--rate", "1", "--policy", "perceptoin")
    assert found.returncode == 2 and "did you mean 'perception'?" in found.stderr
    empty = tmp_path / "empty.csv"
    empty.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n")
    found = mmctl("schedule", "simulate", str(empty))
    assert found.returncode == 1 and "no usable request" in found.stderr


def test_route_answers_line_by_line(mmctl: Run) -> None:
    asks = '{"id": 1, "images": 1, "vision_tokens": 900}\nnonsense\n{"id": 2, "text_tokens": 9}\n'
    found = mmctl("schedule", "route", "--devices", "gpu0,gpu1", input=asks)
    assert found.returncode == 0, found.stderr
    first, wrong, last = map(json.loads, found.stdout.splitlines())
    assert first["queue"] == "vision" and last["queue"] == "stream" and "error" in wrong
    assert first["device"] != last["device"]
    assert mmctl("schedule", "route", input="").returncode == 2


def test_a_simulated_day_goes_through_the_queues(mmctl: Run, tmp_path: Path) -> None:
    day = mmctl("schedule", "simulate", "azure", "--rate", "4", "--count", "60", "-o", "ndjson")
    recording = tmp_path / "day.ndjson"
    recording.write_text(day.stdout)
    found = mmctl("schedule", "queues", str(recording), "-o", "json")
    assert found.returncode in (0, 3), found.stderr
    vision, stream = json.loads(found.stdout)["queues"]
    assert vision["finished"] + stream["finished"] == 60
    assert vision["depth"] == stream["depth"] == 0


def test_split_reads_a_graph_and_draws_it(mmctl: Run, tmp_path: Path) -> None:
    graph = tmp_path / "g.json"
    graph.write_text(
        json.dumps(
            {
                "nodes": [
                    {"name": "vit", "flops": 5e12, "output_bytes": 4096, "modality": "vision"},
                    {"name": "lm", "flops": 9e12, "inputs": ["vit"], "modality": "text"},
                ]
            }
        )
    )
    picture = tmp_path / "g.svg"
    found = mmctl("schedule", "split", str(graph), "--out", str(picture), "-o", "json")
    assert found.returncode == 0, found.stderr
    cuts = json.loads(found.stdout)["cuts"]
    assert cuts[0]["why"] == "vision|language" and cuts[0]["crossing_bytes"] == 4096
    assert picture.read_text().startswith("<svg")


def test_migrate_says_whether_and_why(mmctl: Run) -> None:
    found = mmctl("schedule", "migrate", "--check", "xeon", "ascend310p", "-o", "json")
    document = json.loads(found.stdout)
    assert found.returncode == 3 and document["verdict"] == "not_migratable"
    assert any(r["verdict"] == "blocks" and "rebuilt" in r["why"] for r in document["reasons"])
    found = mmctl("schedule", "migrate", "--check", "l4", "l40s", "--memory", "20GiB")
    assert found.returncode == 0 and "migratable" in found.stdout


def test_a_fleet_that_lacks_a_stage_is_a_usage_error(mmctl: Run) -> None:
    found = mmctl("schedule", "simulate", "azure", "--rate", "2", "--devices", "h100_sxm@E")
    assert found.returncode == 2 and "no device does prefill" in found.stderr


def test_plan_writes_a_plan_that_simulate_takes(mmctl: Run, tmp_path: Path) -> None:
    out = tmp_path / "plan.json"
    workload = ("azure", "--rate", "4", "--count", "120")
    found = mmctl(
        "schedule", *workload, "--devices", "h100_sxm:1,l40s:2", "--budget", "3", "--workers", "1",
        "--out", str(out), "-o", "json",
    )  # fmt: skip
    assert found.returncode in (0, 3), found.stderr
    document = json.loads(found.stdout)
    assert document["kept"] is (found.returncode == 0) and document["basis"] == "modelled"
    assert document["because"] and document["alternatives"] and document["split_cost"]
    again = mmctl("schedule", "simulate", *workload, "--plan", str(out), "-o", "json")
    assert again.returncode == 0, again.stderr
    (row,) = json.loads(again.stdout)["policies"]
    assert row["slo_ratio"] == document["expected"]["slo_ratio"]
    both = mmctl("schedule", "simulate", *workload, "--plan", str(out), "--policy", "random")
    assert both.returncode == 2 and "--plan names" in both.stderr


def test_a_trace_comes_from_standard_input_as_from_a_file(mmctl: Run, tmp_path: Path) -> None:
    lines = "".join(
        json.dumps({"timestamp": 100 * i, "input_length": 900, "output_length": 5}) + "\n"
        for i in range(30)
    )
    trace = tmp_path / "stdin"
    trace.write_text(lines)
    piped = mmctl("schedule", "simulate", "-", "-o", "csv", input=lines)
    named = mmctl("schedule", "simulate", str(trace), "-o", "csv")
    assert piped.returncode == named.returncode == 0, piped.stderr
    assert piped.stdout == named.stdout
    empty = mmctl("schedule", "simulate", "-", input="")
    assert empty.returncode == 1 and "standard input is no trace" in empty.stderr
    for command in ("simulate", "sweep", "plan"):
        absent = mmctl("schedule", command, str(tmp_path / "absent.csv"))
        assert absent.returncode == 1 and "cannot read" in absent.stderr


def test_rebalance_reads_a_recording_and_says_what_to_do(mmctl: Run, tmp_path: Path) -> None:
    day = mmctl("schedule", "simulate", "azure", "--rate", "3", "--count", "40", "-o", "ndjson")
    slow = {
        "type": "span", "ts_ns": 1_600_000_000_000_000_000, "device": "gpu0", "stream": "7",
        "name": "all_gather", "kind": "collective", "duration_ns": 20_000_000,
    }  # fmt: skip
    recording = tmp_path / "day.ndjson"
    recording.write_text(day.stdout + json.dumps(slow) + "\n")
    found = mmctl("schedule", "rebalance", str(recording), "--gather-batch", "16", "-o", "json")
    assert found.returncode == 3, found.stderr
    document = json.loads(found.stdout)
    actions = {action["action"]: action for action in document["actions"]}
    assert actions["smaller_gather_batch"]["to"] < 16
    assert any(point["front"] for point in document["points"])
    nothing = tmp_path / "nothing.ndjson"
    nothing.write_text(day.stdout.splitlines()[0] + "\n")
    assert mmctl("schedule", "rebalance", str(nothing)).returncode == 4
    assert mmctl("schedule", "rebalance", str(tmp_path / "absent")).returncode == 4


def test_results_of_benchmarks_stand_for_devices_and_links(mmctl, tmp_path) -> None:
    device = tmp_path / "mine.json"
    row = {"device": "gpu0", "name": "Some GPU", "precision": "bf16", "flops_per_s": 4e14,
           "bandwidth_bytes_per_s": 3e12, "memory_bytes": 80 << 30, "launch_s": 5e-6}  # fmt: skip
    device.write_text(json.dumps({"schema": 1, "benchmark": "device", "devices": [row]}))
    links = tmp_path / "links.json"
    fit = {"link_class": "NV18", "operation": "alltoall", "ranks": 8, "intercept_us": 9.0,
           "us_per_kib": 0.003}  # fmt: skip
    links.write_text(json.dumps({"schema": 1, "benchmark": "links", "fits": [fit]}))
    profile = tmp_path / "own.toml"
    profile.write_text(f'extends = "default"\n[schedule]\nlinks = "{links}"\n')
    arguments = ["schedule", "simulate", "azure", "--count", "40", "--rate", "2", "-o", "json"]
    done = mmctl(*arguments, "--devices", f"{device}:2", "--profile", str(profile))
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert document["requests"] == 40 and document["lost"] == 0
    assert document["engine"]["collective_s"] == pytest.approx(9e-6)
    assert "Some GPU measured at bf16" in done.stdout
    wrong = mmctl(*arguments, "--devices", str(links))
    assert wrong.returncode == 1 and "holds no devices" in wrong.stderr


def test_both_published_queues_on_the_images_of_client_0(mmctl: Run, data: Path) -> None:
    folder = data / "servegen_mm" / "mm-image"
    found = mmctl("schedule", "queues", "--trace", str(folder), "--clients", "0", "-o", "json")
    assert found.returncode == 0, found.stderr
    vision, stream = json.loads(found.stdout)["queues"]
    assert vision["utilisation_ratio"] >= 0.92 and vision["wait_s"]["mean"] <= 0.142
    assert stream["utilisation_ratio"] >= 0.67 and stream["wait_s"]["mean"] <= 0.028
    assert vision["met"] and stream["met"] and vision["rate_per_s"] > 0
    assert mmctl("schedule", "queues").returncode == 2


def test_route_without_a_request_prints_a_valid_empty_document(mmctl: Run) -> None:
    found = mmctl("schedule", "route", "--devices", "gpu0", "-o", "json", input="")
    assert found.returncode == 0, found.stderr
    assert json.loads(found.stdout)["decisions"] == []
    asks = '{"id": 1, "text_tokens": 9}\nnonsense\n'
    found = mmctl("schedule", "route", "--devices", "gpu0", "-o", "json", input=asks)
    document = json.loads(found.stdout)
    assert document["decided"] == document["refused"] == 1
    assert document["decisions"][0]["device"] == "gpu0" and "error" in document["decisions"][1]


def test_split_reads_standard_input_and_says_what_is_absent(mmctl: Run, tmp_path: Path) -> None:
    graph = json.dumps({"nodes": [{"name": "vit", "flops": 5e12, "modality": "vision"}]})
    found = mmctl("schedule", "split", "-", "-o", "json", input=graph)
    assert found.returncode == 0, found.stderr
    absent = mmctl("schedule", "split", str(tmp_path / "absent.json"))
    assert absent.returncode == 1 and "cannot read" in absent.stderr
    plan = mmctl("schedule", "simulate", "azure", "--rate", "1", "--plan", str(tmp_path / "no"))
    assert plan.returncode == 1 and "cannot read" in plan.stderr
    for wrong in (("--compare", "no.jsonl"), ("--devices", "no.json"), ("--model", "no.json")):
        told = mmctl("schedule", "simulate", "poisson", "--rate", "1", wrong[0],
                     str(tmp_path / wrong[1]))  # fmt: skip
        assert told.returncode == 1 and "cannot read" in told.stderr


def test_held_out_wants_workloads_that_can_be_drawn_again(mmctl: Run) -> None:
    fixed = mmctl("schedule", "sweep", "trace.csv", "--held-out")
    assert fixed.returncode == 2 and "not generated" in fixed.stderr
    lacking = mmctl("schedule", "sweep", "azure", "--held-out", "--policy", "random")
    assert lacking.returncode == 2 and "perception" in lacking.stderr
