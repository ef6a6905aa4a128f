"""What no command may do with odd input: pass it for good, end in a traceback, or run for ever."""

from __future__ import annotations

import gzip
import os
import subprocess
import sys
from pathlib import Path

import pytest

CLEAN_LOG = "[    1.000000] usb 1-1: new device\n[    2.000000] eth0: link up\n"


def _one_line(result: subprocess.CompletedProcess[str], code: int) -> str:
    assert result.returncode == code, result.stderr
    (line,) = result.stderr.splitlines()
    assert line.startswith("mmctl: error: ") and "unexpected" not in line
    return line


@pytest.mark.parametrize("command", ["replay", "evaluate"])
@pytest.mark.parametrize(
    "content",
    ["", "\n", "[]\n", "42\n", "\0" * 4096, "<?xml version='1.0'?>\n<log/>\n", "[" * 9999],
)
def test_what_is_no_recording_is_not_a_quiet_night(
    mmctl, tmp_path: Path, command: str, content: str
) -> None:
    path = tmp_path / "run.ndjson"
    path.write_text(content)
    assert "run.ndjson" in _one_line(mmctl("breaker", command, str(path)), 1)


def test_a_clean_log_is_a_quiet_night(mmctl, tmp_path: Path) -> None:
    path = tmp_path / "kern.log"
    path.write_text(CLEAN_LOG)
    assert mmctl("breaker", "replay", str(path)).returncode == 0


def test_nothing_on_standard_input_is_said(mmctl) -> None:
    for command in (("breaker", "replay", "-"), ("probe", "snapshot", "-")):
        _one_line(mmctl(*command, stdin=subprocess.DEVNULL), 1)


@pytest.mark.parametrize(
    "arguments",
    [
        ("probe", "--interval", "-1s"), ("probe", "--duration", "0s"), ("probe", "--window", "0s"),
        ("breaker", "watch", "--duration", "-1s"), ("breaker", "rules", "--duration", "-1s"),
        ("breaker", "log", "--since", "-1h"), ("top", "--once", "--wait", "-1s"),
        ("breaker", "hold", "gpu0", "--reason", "x", "--for", "-2h"),
        ("schedule", "queues", "demo:", "--for", "-1s"), ("probe", "http://[::1"),
    ],
)  # fmt: skip
def test_times_that_cannot_be_are_usage_errors(mmctl, arguments: tuple[str, ...]) -> None:
    _one_line(mmctl(*arguments), 2)


def test_a_cut_or_deep_trace_is_named(mmctl, tmp_path: Path) -> None:
    cut, deep = tmp_path / "cut.json.gz", tmp_path / "deep.json"
    whole = gzip.compress(os.urandom(4096))
    cut.write_bytes(whole[: len(whole) // 2])
    deep.write_text("[" * 200_000)
    for path in (cut, deep):
        assert path.name in _one_line(mmctl("fingerprint", "trace", str(path)), 1)
        assert path.name in _one_line(mmctl("probe", "kernels", str(path)), 1)
    assert "deep.json" in _one_line(mmctl("schedule", "simulate", str(deep)), 1)


def _shell(line: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", "-c", line, "bash", sys.executable], capture_output=True, text=True,
        env=os.environ | environment,
    )  # fmt: skip


@pytest.mark.parametrize("command", ["--version", "profile list"])
def test_output_that_cannot_be_written_is_one_line(command: str) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full here")
    for buffering in ("", "1"):
        full = _shell(f'"$1" -m mmctl {command} > /dev/full', PYTHONUNBUFFERED=buffering)
        _one_line(full, 1)
    assert _shell(f'"$1" -m mmctl {command} >&-').stderr == ""


def test_a_locale_without_the_marks_still_gets_its_table() -> None:
    plain = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    shown = _shell('"$1" -m mmctl breaker watch --help', **plain)
    assert shown.returncode == 0 and shown.stderr == "" and "off|observe|enforce" in shown.stdout
    listed = _shell('"$1" -m mmctl profile list', **plain)
    assert listed.returncode == 0 and "default" in listed.stdout


FILES = [
    "fingerprint trace {}", "fingerprint compare {} {}", "fingerprint contention {}",
    "fingerprint streams {} {}", "fingerprint paths {}", "fingerprint instrument {} --out out.ptx",
    "probe snapshot {}", "probe kernels {}", "probe model {}", "breaker replay {}",
    "breaker evaluate {} --labels {}", "breaker diagnose {}", "schedule simulate {}",
    "schedule split {}", "benchmark pool {}",
]  # fmt: skip
SOURCES = [
    "probe node {}", "probe links {}", "breaker watch {}", "schedule queues {}",
    "schedule route {}", "top {} --once",
]  # fmt: skip


@pytest.mark.parametrize(
    ("command", "code"), [(one, 1) for one in FILES] + [(one, 4) for one in SOURCES]
)
def test_a_file_that_is_not_there_is_named_in_one_line(mmctl, tmp_path, command, code):
    done = mmctl(
        *command.replace("{}", "absent.json").split(), cwd=tmp_path, stdin=subprocess.DEVNULL
    )
    assert "absent.json" in _one_line(done, code)
    assert done.stdout == ""
