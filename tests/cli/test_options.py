"""What holds for the options and arguments of every command."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from mmctl.cli.app import load
from tests.cli.examples.lines import leaves

COMMANDS = {path: load(path[-1], leaf) for path, leaf in leaves()}
WRITING = [
    (path, option)
    for path, command in COMMANDS.items()
    for option in command.params
    if option.name in command.written
]


@pytest.mark.parametrize("path", COMMANDS, ids=" ".join)
def test_each_is_explained_and_each_value_has_a_name(path: tuple[str, ...]) -> None:
    for parameter in COMMANDS[path].params:
        told = getattr(parameter, "help", None)
        assert told and told.endswith((".", "…")), f"{parameter.name}: {told!r}"
        assert parameter.type.name == "boolean" or parameter.metavar, parameter.name


@pytest.mark.parametrize(("path", "option"), WRITING, ids=lambda part: getattr(part, "name", None))
def test_what_is_there_is_not_written_over(mmctl, tmp_path: Path, path, option) -> None:
    there = tmp_path / "there"
    if option.metavar == "FOLDER":
        there.mkdir()
        there = there / "kept"
    there.write_text("kept")
    target = there.parent if option.metavar == "FOLDER" else there
    needed = []
    for one in COMMANDS[path].params:
        if one.required and one is not option:
            needed += ["x"] if one.param_type_name == "argument" else [one.opts[0], "x"]
    done = mmctl(*path, *needed, max(option.opts, key=len), str(target))
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr == (
        f"mmctl: error: {target} is there already: name another, or replace it by --force\n"
    )
    assert there.read_text() == "kept"


def test_force_replaces_an_empty_file_is_nothing_and_a_folder_must_be_there(
    mmctl, tmp_path: Path
) -> None:
    probe = ("probe", "host:", "--count", "1", "-q", "--record")
    path = tmp_path / "run.ndjson"
    path.touch()
    assert mmctl(*probe, str(path)).returncode == 0
    first = path.read_bytes()
    assert mmctl(*probe, str(path)).returncode == 1 and path.read_bytes() == first
    assert mmctl(*probe, str(path), "--force").returncode == 0
    assert first.splitlines()[0] not in path.read_bytes()
    absent = mmctl(*probe, str(tmp_path / "no" / "run.ndjson"))
    assert absent.returncode == 1 and f"there is no folder {tmp_path / 'no'}" in absent.stderr


def test_a_recording_that_rotates_keeps_what_an_earlier_run_left(mmctl, tmp_path: Path) -> None:
    probe = ("probe", "host:", "--count", "1", "-q", "--rotate", "1MiB", "--record")
    path = tmp_path / "run.ndjson"
    for _ in range(2):
        assert mmctl(*probe, str(path)).returncode == 0
    first, second = (tmp_path / "run.ndjson.1").read_text(), path.read_text()
    assert first.count("\n") == second.count("\n") > 1 and first != second


@pytest.mark.parametrize("target", ["-", "/dev/stdout", ">(cat)", "pipe"])
def test_a_recording_goes_down_a_pipe(tmp_path: Path, target: str) -> None:
    os.mkfifo(tmp_path / "pipe")
    reads = "cat pipe & " if target == "pipe" else ""
    line = f"{reads}{sys.executable} -m mmctl probe host: --count 2 -q --record {target}; wait"
    done = subprocess.run(["bash", "-c", line], cwd=tmp_path, capture_output=True, text=True)
    assert done.stderr == "" and done.stdout.startswith('{"type":"recording"')
    assert done.stdout.count('"type":"device"') == 2


def test_a_pipe_that_closes_ends_a_recording_silently(tmp_path: Path) -> None:
    line = f"{sys.executable} -m mmctl probe host: --interval 50ms -q --record - | head -1"
    done = subprocess.run(["bash", "-o", "pipefail", "-c", line], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "") and done.stdout.count("\n") == 1


@pytest.mark.parametrize(
    ("line", "meant"),
    [
        ("schedule simulate azure --rate 1 --devices h100_smx:2", "h100_sxm"),
        ("schedule plan azure --rate 1 --devices H100_SMX:2", "h100_sxm"),
        ("schedule split graph.json --device h100_smx", "h100_sxm"),
        ("schedule simulate azure --rate 1 --model qwen2.5-vl-7", "qwen2.5-vl-7b"),
        ("schedule sweep azure --rate 1 --policy perceptoin", "perception"),
        ("schedule plan azure --rate 1 --slo tfft=2s", "ttft"),
        ("schedule simulate azur --rate 1", "azure"),
        ("schedule migrate torch:cpu openvno:cpu", "openvino:cpu"),
        ("schedule migrate --check a100_smx h100_sxm", "a100_sxm"),
        ("schedule route --devices gpu0,gpu1 --encoders gpuO", "gpu1"),
        ("benchmark device cpuO", "cpu0"),
        ("benchmark stages --device cud", "cuda"),
        ("benchmark fingerprints --cache h10", "h100"),
        ("breaker watch demo:brust", "burst"),
        ("breaker watch nvlm:", "nvml:"),
        ("breaker run --input nvlm: -- true", "nvml:"),
        ("breaker watch host: --mode enfroce", "enforce"),
        ("breaker evaluate x.csv --rules fit", "fits"),
        ("breaker evaluate --requests 10 --distribution lognromal", "lognormal"),
        ("breaker evaluate --scenarios --only brust", "burst"),
        ("breaker log --what tripp", "trip"),
        ("breaker replay x.csv --map ts=time,temp=temprature_c", "temperature_c"),
        ("probe serve --print grafan", "grafana"),
        ("probe --profile defualt", "default"),
        ("top demo --theme clam", "calm"),
        ("profile list -o jsn", "json"),
    ],
)
def test_a_slip_in_a_name_gets_the_name_that_was_meant(mmctl, tmp_path, line, meant) -> None:
    if "benchmark" in line or "--scenarios" in line:
        pytest.importorskip("torch", reason="needs the extra 'torch'")
    (tmp_path / "x.csv").write_text("time,temp\n1,2\n")
    done = mmctl(*line.split(), cwd=tmp_path, stdin=subprocess.DEVNULL)
    assert done.returncode in (1, 2) and f"did you mean '{meant}'?" in done.stderr, done.stderr
    assert done.stderr.count("\n") == 1 and len(done.stderr) < 200
