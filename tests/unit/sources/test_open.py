"""Opening sources: schemes, standard input, plugins, one bad of several."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from mmctl.engine import profiles
from mmctl.engine.errors import MmctlError, NoSourceError, UsageError
from mmctl.engine.records import Device, Event, encode
from mmctl.engine.sources import SCHEMES, load, open_sources

FIXTURES = Path(__file__).parents[2] / "fixtures" / "readers"
PROFILE = profiles.load("default").profile


def test_every_scheme_has_its_function() -> None:
    for scheme in SCHEMES.values():
        for target in (scheme.target, *scheme.checks):
            assert callable(load(target)), target


@pytest.mark.parametrize("name", ["recording.ndjson", "engine.prom", "smi.xml", "topo.txt"])
def test_standard_input_is_recognised_by_content(name: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "mmctl", "probe", "-", "-o", "ndjson"],
        input=(FIXTURES / name).read_bytes(), capture_output=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[0])["type"] in ("device", "serving", "link")


def test_a_pipe_gives_its_records_as_they_come() -> None:
    with subprocess.Popen(
        [sys.executable, "-m", "mmctl", "probe", "-", "--count", "9", "-o", "ndjson"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    ) as process:  # fmt: skip
        assert process.stdin is not None and process.stdout is not None
        for line in (FIXTURES / "recording.ndjson").read_bytes().splitlines():
            process.stdin.write(line + b"\n")
            process.stdin.flush()
            if b'"recording"' not in line:
                assert json.loads(process.stdout.readline())["type"] in ("device", "event")
        process.stdin.close()
    assert process.returncode == 0


def test_one_bad_of_several_is_said_and_the_others_go_on() -> None:
    records = list(
        open_sources([str(FIXTURES / "engine.prom"), "http://127.0.0.1:9/x"], PROFILE,
                     threading.Event(), 1)
    )  # fmt: skip
    kinds = {type(record).__name__ for record in records}
    assert kinds == {"Serving", "Event"}
    (event,) = [record for record in records if isinstance(record, Event)]
    assert (event.what, event.state) == ("source", "down") and "nothing listens" in str(
        event.message
    )


def test_a_broken_file_is_an_error_beside_others(tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    broken.write_text('{"type":"device"}\n{"type":"device"}\n')
    with pytest.raises(MmctlError, match="line 1"):
        list(open_sources([str(FIXTURES / "engine.prom"), str(broken)], PROFILE, threading.Event()))


def test_a_source_at_its_own_pace_ends_after_a_few_readings(tmp_path: Path) -> None:
    """A plugin that never ends by itself, and one that never says anything."""
    (tmp_path / "tide.py").write_text(
        "from mmctl.engine.records import Device\n"
        "def source(rest, profile, stop):\n"
        "    number = 0\n"
        "    while not stop.wait(0.01):\n"
        "        number += 1\n"
        "        yield Device(ts_ns=number, device='gpu0', kind='gpu')\n"
    )
    info = tmp_path / "tide-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: tide\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[mmctl.sources]\ntide = tide:source\n")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-m", "mmctl", "probe", "tide:", "-o", "json"],
        capture_output=True, text=True, env=environment, timeout=60,
    )  # fmt: skip
    assert json.loads(done.stdout)["devices"][0]["ts_ns"] == 2
    done = subprocess.run(
        [sys.executable, "-m", "mmctl", "probe", "otlp:0", "-o", "json"],
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0 and json.loads(done.stdout)["devices"] == []


def test_a_scheme_that_is_none() -> None:
    with pytest.raises(UsageError, match="did you mean 'nvml:'"):
        open_sources(["nvlm:"], PROFILE, threading.Event())


def test_a_plugin_adds_a_scheme(tmp_path: Path) -> None:
    (tmp_path / "wind.py").write_text(
        "from mmctl.engine.records import Event\n"
        "def source(rest, profile, stop):\n"
        "    yield Event(ts_ns=1, what='wind', message=rest)\n"
    )
    info = tmp_path / "wind-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: wind\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[mmctl.sources]\nwind = wind:source\n")
    done = subprocess.run(
        [sys.executable, "-m", "mmctl", "probe", "wind:north", "-o", "json"],
        capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(tmp_path)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["events"][0]["message"] == "north"


@pytest.mark.parametrize(
    ("address", "page"),
    [
        ("127.0.0.1:8000", "127.0.0.1:8000/metrics"), ("localhost:8000/x", "localhost:8000/x"),
        ("gpu-1.example.com:80", "gpu-1.example.com:80/metrics"), ("[::1]:80", "[::1]:80/metrics"),
    ],
)  # fmt: skip
def test_an_address_without_its_scheme_gets_one(address: str, page: str, tmp_path, monkeypatch):
    with pytest.raises(UsageError, match=re.escape(f"give http://{page}")):
        list(open_sources([address], PROFILE, threading.Event()))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "localhost:80").write_bytes((FIXTURES / "topo.txt").read_bytes())
    assert list(open_sources(["localhost:80"], PROFILE, threading.Event()))


def test_a_server_is_waited_for_before_it_comes_and_after_it_has_gone(tmp_path: Path) -> None:
    path = tmp_path / "agent"

    def serve() -> None:
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(str(path))
            server.listen()
            client, _ = server.accept()
            client.recv(1024)  # the subscription: what closes before it was sent is not there
            client.sendall(encode(Device(ts_ns=1, node="n", device="gpu0", kind="gpu")) + b"\n")
            client.close()

    def begin() -> threading.Thread:
        path.unlink(missing_ok=True)
        server = threading.Thread(target=serve, daemon=True)
        server.start()
        return server

    stop = threading.Event()
    records = open_sources([f"agent:{path}"], PROFILE, stop, wait_s=30)
    told = [next(records)]
    first = begin()
    told += [next(records), next(records)]
    first.join()
    begin()
    told += [next(records), next(records), next(records)]
    stop.set()
    assert list(records) == []
    states = [r.state if isinstance(r, Event) else type(r).__name__ for r in told]
    assert states == ["waiting", "Device", "down", "up", "Device", "down"]
    assert isinstance(told[2], Event) and "has gone; it is waited for" in (told[2].message or "")


def test_what_never_comes_is_no_source_after_the_wait(tmp_path: Path) -> None:
    for uri in (f"agent:{tmp_path / 'agent'}", "http://127.0.0.1:9/x"):
        records = open_sources([uri], PROFILE, threading.Event(), 2, wait_s=0.3)
        waiting = next(records)
        assert isinstance(waiting, Event) and waiting.state == "waiting"
        with pytest.raises(NoSourceError):
            next(records)
