"""A package that adds a source, a rule, a response and a policy, installed as pip would."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "plugin"
Plugged = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that pip installed the package into."""
    pytest.importorskip("hatchling", reason="the extra 'test' builds the package")
    folder = tmp_path_factory.mktemp("site")
    subprocess.run(
        [sys.executable, "-m", "pip", "install", "-q", "--no-index", "--no-deps",
         "--no-build-isolation", "--target", str(folder), str(PACKAGE)],
        check=True, capture_output=True, timeout=120,
    )  # fmt: skip
    return folder


@pytest.fixture
def plugged(installed: Path, mmctl: Plugged) -> Plugged:
    """The command line where the package is installed."""

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return mmctl(*arguments, env={**os.environ, "PYTHONPATH": str(installed)})

    return run


def test_without_the_package_its_names_are_unknown(mmctl):
    for command, hint in [
        (("probe", "hwmon:npu0=x"), "no source 'hwmon:'"),
        (("profile", "show", "hwmon"), "unknown profile 'hwmon'"),
        (
            ("schedule", "simulate", "azure", "--rate", "8", "--policy", "two_encoders"),
            "unknown policy",
        ),
    ]:
        done = mmctl(*command)
        assert done.returncode == 2 and hint in done.stderr


def test_its_source_and_its_rule_trip_the_breaker(plugged, tmp_path):
    sensor = tmp_path / "temp1_input"
    sensor.write_text("91500\n")
    probed = plugged("probe", f"hwmon:npu0={sensor}", "-o", "json")
    (device,) = json.loads(probed.stdout)["devices"]
    assert (device["device"], device["temperature_c"]) == ("npu0", 91.5)
    watch = ("breaker", "watch", f"hwmon:npu0={sensor}", "--duration", "5s", "-o", "ndjson")
    tripped = plugged(*watch, "--profile", "hwmon")
    assert tripped.returncode == 3, tripped.stderr
    assert [e["rule"] for e in map(json.loads, tripped.stdout.splitlines())
            if e.get("what") == "trip"] == ["npu_hot"]  # fmt: skip
    sensor.write_text("71500\n")
    assert plugged(*watch, "--profile", "hwmon").returncode == 0


def test_its_profile_is_listed_and_valid(plugged):
    listed = json.loads(plugged("profile", "list", "-o", "json").stdout)
    assert "hwmon" in {one["name"] for one in listed["profiles"]}
    assert plugged("profile", "validate", "hwmon").returncode == 0


def test_its_policy_is_simulated_beside_ours(plugged, tmp_path):
    trace = tmp_path / "requests.ndjson"
    trace.write_text(
        "".join(
            json.dumps({"type": "request", "ts_ns": n * 10**8, "id": str(n), "images": n % 2,
                        "vision_tokens": n % 2 * 576, "text_tokens": 200, "output_tokens": 20})
            + "\n" for n in range(40)
        )
    )  # fmt: skip
    done = plugged("schedule", "simulate", str(trace), "--devices", "h100_sxm:4", "--policy",
                   "two_encoders,perception", "-o", "json")  # fmt: skip
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)["policies"]
    assert [row["policy"] for row in rows] == ["two_encoders", "perception"]


def test_its_response_gives_memory_back_in_the_demo(installed):
    pytest.importorskip("torch")
    command = [
        sys.executable, "-m", "mmctl", "breaker", "watch", "demo:burst", "--mode", "enforce",
        "--profile", "hwmon", "-o", "ndjson",
    ]  # fmt: skip
    environment = {**os.environ, "PYTHONPATH": str(installed)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment) as watch:
        assert watch.stdout is not None
        events = map(json.loads, watch.stdout)
        steps = next(event for event in events if event["what"] == "respond")["evidence"]["steps"]
        watch.terminate()
    freed = [step["freed_bytes"] for step in steps if step["response"] == "pair_tokens"]
    assert freed and min(freed) > 0, steps


def test_a_package_that_cannot_be_imported_is_named(mmctl, tmp_path):
    info = tmp_path / "broken-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: broken\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[mmctl.sources]\nbroken = broken_module:source\n")
    done = mmctl("probe", "broken:", env={**os.environ, "PYTHONPATH": str(tmp_path)})
    assert done.returncode == 1
    assert "the plugin 'broken' of broken cannot be loaded: ModuleNotFoundError" in done.stderr
