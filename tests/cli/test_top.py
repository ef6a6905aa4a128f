"""``mmctl top`` from a shell: refusals, formats, and the picture without a terminal."""

from __future__ import annotations

import csv
import io
import json
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from mmctl.engine.records import encode
from tests.tui import scenes


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("top") / "burst.ndjson"
    path.write_bytes(b"".join(encode(record) + b"\n" for record in scenes.burst(31)))
    return path


def test_without_a_terminal_it_names_the_one_shot_form(mmctl, recording: Path) -> None:
    done = mmctl("top", str(recording))
    assert done.returncode == 2 and done.stdout == ""
    assert "needs a terminal" in done.stderr and "mmctl top --once" in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (("--once", "-o", "sgv"), "did you mean 'svg'"),
        (("--once", "--screen", "heatmp"), "did you mean 'heatmap'"),
        (("--once", "--theme", "calmer"), "did you mean 'calm'"),
        (("--once", "--mode", "enforced"), "did you mean 'enforce'"),
        (("--once", "--size", "wide"), "160x50"),
        (("--once", "--wait", "soon"), "number with a unit"),
        (("-o", "svg"), "add --once"),
        (("--size", "10x5"), "add --once"),
    ],
)
def test_mistakes_are_one_line_with_a_way_out(mmctl, recording, arguments, hint) -> None:
    done = mmctl("top", str(recording), *arguments)
    assert done.returncode == 2 and hint in done.stderr and done.stderr.count("\n") == 1


def test_a_file_that_is_not_there_is_no_source(mmctl) -> None:
    done = mmctl("top", "--once", "./nowhere.ndjson")
    assert done.returncode == 4 and "no such file" in done.stderr


def test_text_is_the_screen_at_the_size_asked_for(mmctl, recording: Path) -> None:
    done = mmctl("top", str(recording), "--once", "-o", "text", "--size", "100x30")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 30 and max(map(len, lines)) == 100
    assert "a17" in lines[0] and "CLOSED" in lines[0] and "Devices" in done.stdout


def test_a_moment_of_a_recording_is_drawn(mmctl, recording: Path) -> None:
    done = mmctl("top", str(recording), "--once", "-o", "text", "--at", "24.3s")
    assert "VERIFYING" in done.stdout.splitlines()[0] and "14:13:44" in done.stdout


def test_svg_stands_on_its_own(mmctl, recording: Path) -> None:
    done = mmctl("top", str(recording), "--once", "-o", "svg", "--screen", "heatmap")
    assert done.returncode == 0, done.stderr
    assert ElementTree.fromstring(done.stdout).tag.endswith("svg")
    assert "@font-face" not in done.stdout and "url(http" not in done.stdout


def test_json_ndjson_and_csv_give_the_data(mmctl, recording: Path) -> None:
    document = json.loads(mmctl("top", str(recording), "--once", "-o", "json").stdout)
    assert document["schema"] == 1 and document["state"] == "closed"
    assert [device["device"] for device in document["devices"]] == ["gpu0", "gpu1", "npu0"]
    assert document["devices"][2]["sm_ratio"] is None
    assert {event["what"] for event in document["events"]} >= {"trip", "verify", "close"}
    lines = mmctl("top", str(recording), "--once", "-o", "ndjson").stdout.splitlines()
    assert [json.loads(line)["device"] for line in lines] == ["gpu0", "gpu1", "npu0"]
    rows = list(
        csv.DictReader(io.StringIO(mmctl("top", str(recording), "--once", "-o", "csv").stdout))
    )
    assert rows[2]["device"] == "npu0" and rows[2]["sm_ratio"] == ""


def test_a_mode_decides_a_recording_anew(mmctl, recording: Path) -> None:
    kept = json.loads(mmctl("top", str(recording), "--once", "-o", "json").stdout)
    again = mmctl("top", str(recording), "--once", "-o", "json", "--mode", "observe")
    trips = [e for e in json.loads(again.stdout)["events"] if e["what"] == "trip"]
    assert [e["mode"] for e in kept["events"] if e["what"] == "trip"] == ["enforce"]
    assert trips and all(event["mode"] == "observe" for event in trips)


def test_records_come_from_standard_input(mmctl, recording: Path) -> None:
    done = mmctl("top", "-", "--once", "-o", "text", input=recording.read_text())
    assert done.returncode == 0 and "gpu1" in done.stdout
