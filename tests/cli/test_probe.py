"""``mmctl probe`` on the host it runs on: formats, schedule, recording, imports, errors."""

from __future__ import annotations

import csv
import io
import json
import subprocess
import sys
from pathlib import Path

FORBIDDEN = ("torch", "textual", "numpy", "rich", "pydantic", "http.server")


def test_a_probe_imports_nothing_slow() -> None:
    script = f"""
import sys
from mmctl.cli.main import main
try:
    main(["probe", "host:", "-o", "json"])
finally:
    print(*[name for name in {FORBIDDEN} if name in sys.modules], file=sys.stderr)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0 and json.loads(done.stdout)["devices"]
    assert done.stderr.split() == []


def test_one_reading_has_rates_and_says_what_is_absent(mmctl) -> None:
    done = mmctl("probe", "host:", "-o", "json")
    document = json.loads(done.stdout)
    assert done.returncode == 0 and document["schema"] == 1
    (cpu,) = document["devices"]
    assert cpu["device"] == "cpu0" and 0 <= cpu["sm_ratio"] <= 1
    assert cpu["bandwidth_ratio"] is None and "bandwidth_ratio" in cpu["absent"]
    assert document["hosts"][0]["total_bytes"] == cpu["total_bytes"] > 0


def test_a_first_rate_is_absent_not_zero(mmctl) -> None:
    done = mmctl("probe", "host:", "--interval", "50ms", "--count", "2", "-o", "ndjson")
    first, second = (
        record for record in map(json.loads, done.stdout.splitlines()) if record["type"] == "device"
    )
    assert first["sm_ratio"] is None and "two readings" in first["absent"]["sm_ratio"]
    assert second["sm_ratio"] is not None


def test_csv_has_one_header_and_stable_columns(mmctl) -> None:
    once = mmctl("probe", "host:", "-o", "csv").stdout
    stream = mmctl("probe", "host:", "--interval", "50ms", "--count", "2", "-o", "csv").stdout
    rows = list(csv.DictReader(io.StringIO(stream)))
    assert [row["type"] for row in rows] == ["device", "host"] * 2
    assert once.splitlines()[0] == stream.splitlines()[0]


def test_a_recording_probes_like_its_source(mmctl, tmp_path: Path) -> None:
    path = tmp_path / "node.bin"
    done = mmctl("probe", "host:", "--interval", "50ms", "--count", "3", "--record", str(path))
    assert done.returncode == 0 and done.stdout == ""
    assert json.loads(path.read_bytes().splitlines()[0])["type"] == "recording"
    again = json.loads(mmctl("probe", str(path), "-o", "json").stdout)
    assert [device["device"] for device in again["devices"]] == ["cpu0"]


def test_exit_codes_of_sources(mmctl, tmp_path: Path) -> None:
    assert mmctl("probe", "hots:").returncode == 2
    done = mmctl("probe", str(tmp_path / "absent.ndjson"))
    assert done.returncode == 4 and done.stderr.startswith("mmctl: error: no such file")
    broken = tmp_path / "broken.ndjson"
    broken.write_text('{"type": "device"}\n' * 2)
    assert mmctl("probe", str(broken)).returncode == 1


def test_files_give_every_record_as_lines_and_the_last_as_a_document(mmctl, tmp_path: Path) -> None:
    path = tmp_path / "node"
    mmctl("probe", "host:", "--interval", "20ms", "--count", "5", "--record", str(path))
    lines = [
        json.loads(line) for line in mmctl("probe", str(path), "-o", "ndjson").stdout.splitlines()
    ]
    assert [line["type"] for line in lines] == ["device", "host"] * 5
    rows = list(csv.DictReader(io.StringIO(mmctl("probe", str(path), "-o", "csv").stdout)))
    assert [row["ts_ns"] for row in rows] == [str(line["ts_ns"]) for line in lines]
    document = json.loads(mmctl("probe", str(path), "-o", "json").stdout)
    assert document["devices"][0]["ts_ns"] == lines[-2]["ts_ns"]


def test_a_killed_recording_opens(tmp_path: Path, mmctl) -> None:
    path = tmp_path / "node.zst"
    command = [sys.executable, "-m", "mmctl", "probe", "host:", "--interval", "10ms"]
    with subprocess.Popen([*command, "--record", str(path), "-q"]) as process:
        while not path.exists() or path.stat().st_size < 3000:
            assert process.poll() is None
        process.kill()
    done = mmctl("probe", str(path), "-o", "ndjson")
    assert done.returncode == 0 and len(done.stdout.splitlines()) > 4


def test_a_stream_in_json_is_one_document_and_must_end(mmctl) -> None:
    document = json.loads(mmctl("probe", "host:", "--count", "2", "-o", "json").stdout)
    assert document["schema"] == 1 and len(document["records"]) > 2
    windows = mmctl("probe", "host:", "--count", "2", "--window", "1s", "-o", "json").stdout
    assert json.loads(windows)["windows"]
    endless = mmctl("probe", "host:", "--interval", "1s", "-o", "json")
    assert endless.returncode == 2 and "use -o ndjson, or --count N" in endless.stderr


def test_the_formats_offered_are_those_that_work(mmctl) -> None:
    assert "table, json, ndjson, csv, svg or text." in mmctl("top", "--help").stdout
    assert "table, ndjson or csv." in mmctl("breaker", "watch", "--help").stdout
