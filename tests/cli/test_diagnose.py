"""``mmctl breaker diagnose`` from a shell: formats, exit codes, one-line errors."""

from __future__ import annotations

import json
from pathlib import Path

FAILED = """[1.0] NVRM: Xid (PCI:0000:41:00): 31, pid=1, name=a, MMU Fault
[2.0] NVRM: Xid (PCI:0000:41:00): 109, pid=1, errorString CTX SWITCH TIMEOUT \x1b[31m
"""


def test_a_failure_is_a_finding_in_every_format(mmctl, tmp_path: Path) -> None:
    log = tmp_path / "kern.log"
    log.write_text(FAILED)
    done = mmctl("breaker", "diagnose", str(log), "-o", "json")
    assert done.returncode == 3 and done.stderr == ""
    document = json.loads(done.stdout)
    (chain,) = document["chains"]
    assert document["schema"] == 1 and document["leak"] == {}
    assert chain["root"] == "xid31" and chain["action"] and 0 < chain["confidence_ratio"] <= 1
    assert [(link["what"], link["line"]) for link in chain["links"]] == [
        ("xid31", 1),
        ("xid109", 2),
    ]
    assert chain["links"][0]["evidence"].startswith("[1.0] NVRM: Xid")
    table = mmctl("breaker", "diagnose", str(log))
    assert table.returncode == 3 and "xid31 → xid109" in table.stdout
    assert "\x1b" not in table.stdout
    assert mmctl("breaker", "diagnose", str(log), "-o", "csv").stdout.startswith("chain,link,what")
    assert len(mmctl("breaker", "diagnose", str(log), "-o", "ndjson").stdout.splitlines()) == 2


def test_clean_log_from_standard_input(mmctl) -> None:
    done = mmctl("breaker", "diagnose", "-", input="[1.0] usb 1-1: new device\n")
    assert done.returncode == 0 and done.stdout == "no failure in 1 lines\n"


def test_recordings_tell_of_leaks(mmctl, tmp_path: Path) -> None:
    path = tmp_path / "run.ndjson"
    path.write_text(
        '{"type":"recording","schema":1,"node":"n","started_ns":1,"profile":"default","mmctl":"0"}\n'
        '{"type":"device","ts_ns":1,"device":"gpu0","kind":"gpu","used_bytes":9000000000,'
        '"processes":[]}\n'
    )
    done = mmctl("breaker", "diagnose", str(path), "-o", "json")
    leak = json.loads(done.stdout)["leak"]
    assert done.returncode == 3 and leak["held_bytes"] == 9_000_000_000
    assert leak["growth_bytes_per_minute"] is None and leak["basis"] == "measured"


def test_what_cannot_be_read_is_said_in_one_line(mmctl, tmp_path: Path) -> None:
    missing = mmctl("breaker", "diagnose", str(tmp_path / "none"))
    assert missing.returncode == 1 and missing.stderr.count("\n") == 1
    binary = tmp_path / "binary"
    binary.write_bytes(b"\x00\x01\x02" * 100)
    done = mmctl("breaker", "diagnose", str(binary))
    assert done.returncode == 1 and "no text" in done.stderr
