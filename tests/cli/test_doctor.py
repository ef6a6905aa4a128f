"""``mmctl doctor``: stable ids, exit codes, fixes, and a bundle without secrets or prompts."""

from __future__ import annotations

import json
import os
import tarfile
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import tomli

from mmctl.engine import recording
from mmctl.engine.records import Event, Request
from mmctl.engine.sources import doctor as engine
from mmctl.engine.sources.bundle import HIDDEN, redacted

ALWAYS = {
    "profile.valid", "nvml.binding", "nvml.driver", "ascend.tool", "amd.tool", "host.pressure",
    "kernel.messages", "ebpf.capability", "hook.compiler", "extra.torch", "extra.otel",
    "state.folder", "source.nvml:", "source.host:",
}  # fmt: skip


def doctor(mmctl: Any, environment: dict[str, str], *more: str) -> tuple[int, dict[str, Any]]:
    done = mmctl("doctor", "-o", "json", *more, env=environment)
    assert "Traceback" not in done.stderr
    document = json.loads(done.stdout)
    assert (done.returncode == 3) == (document["problems"] > 0)
    return done.returncode, {check["id"]: check for check in document["checks"]}


def test_ids_stay_and_every_problem_has_a_fix(mmctl, nvml_stub) -> None:
    _, found = doctor(mmctl, nvml_stub("count=2"))
    assert found.keys() >= ALWAYS | {"nvml.device.gpu0", "nvml.device.gpu1"}
    assert found["nvml.driver"]["state"] == "ok" and found["source.nvml:"]["state"] == "ok"
    for check in found.values():
        assert check["state"] != "problem" or check["fix"], check


@pytest.mark.parametrize(
    ("settings", "check", "said", "fix"),
    [
        (("err.nvmlInit=18",), "nvml.driver", "versions differ", "reboot"),
        (("err.nvmlInit=4",), "nvml.driver", "no permission", "root"),
        (("count=2", "gpu1.lost=1"), "nvml.device.gpu1", "is lost", "reset"),
        (("count=1", "gpu0.field230=4"), "nvml.device.gpu0", "drain_and_reset", "drain"),
        (("count=1", "gpu0.field144=1"), "nvml.device.gpu0", "row remap", "reset"),
        (("count=1", "gpu0.procs=3999999:5"), "nvml.processes", "PID namespace", "--pid=host"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_found(mmctl, nvml_stub, settings, check, said, fix) -> None:
    code, found = doctor(mmctl, nvml_stub(*settings))
    assert code == 3 and found[check]["state"] == "problem"
    assert said in found[check]["detail"] and fix in found[check]["fix"]


def test_no_compiler_and_a_source_that_is_not_there(mmctl, tmp_path: Path) -> None:
    environment = {**os.environ, "PATH": str(tmp_path)}
    code, found = doctor(mmctl, environment, "http://127.0.0.1:9/metrics")
    assert code == 3 and found["hook.compiler"]["state"] == "problem"
    assert "gcc" in found["hook.compiler"]["fix"]
    assert "nothing listens" in found["source.http://127.0.0.1:9/metrics"]["detail"]


def test_a_pynvml_that_hides_the_binding(mmctl, tmp_path: Path) -> None:
    shadow = tmp_path / "pynvml"
    shadow.mkdir()
    (shadow / "__init__.py").write_text("def nvmlInit(): pass\n")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    code, found = doctor(mmctl, environment)
    assert code == 3 and "hides nvidia-ml-py" in found["nvml.binding"]["detail"]
    done = mmctl("probe", "nvml:", env=environment)
    assert done.returncode == 4 and "pip uninstall pynvml" in done.stderr


def test_a_broken_profile_is_a_problem_not_a_failure(mmctl, tmp_path: Path) -> None:
    broken = tmp_path / "broken.toml"
    broken.write_text("[sampling]\nintervall = 3\n")
    code, found = doctor(mmctl, dict(os.environ), "--profile", str(broken))
    assert code == 3 and "intervall" in found["profile.valid"]["detail"]


def test_secrets_and_prompts_are_redacted() -> None:
    clean = redacted({
        "prompt": "what is on my medical scan?", "text_tokens": 12, "text_bytes": 3,
        "evidence": {"messages": [{"content": "hello"}], "url": "http://me:pw@host/x",
                     "header": "Authorization: Bearer abcdefghijklmnop", "api_key": "k",
                     "reason": "sk-abcdefgh12345678 was refused", "tokens": 5},
        "message": "gpu0 cannot be read",
    })  # fmt: skip
    text = json.dumps(clean)
    for secret in ("medical", "hello", "me:pw", "abcdefghijklmnop", '"k"', "sk-abc"):
        assert secret not in text
    assert clean["text_tokens"] == 12 and clean["evidence"]["tokens"] == 5
    assert clean["message"] == "gpu0 cannot be read" and clean["prompt"] == HIDDEN


def test_the_bundle_holds_what_a_colleague_needs(
    mmctl, nvml_stub, clean_home: Path, tmp_path: Path
) -> None:
    state = clean_home / "state" / "mmctl"
    state.mkdir()
    secret = "Bearer abcdefghijklmnopqrst"
    with recording.Writer(state / "audit.ndjson", recording.header("n", "default", 0)) as audit:
        audit.write(Event(ts_ns=1, what="trip", message=secret, evidence={"prompt": "private"}))
    named = tmp_path / "node.ndjson.zst"
    with recording.Writer(named, recording.header("n", "default", 0)) as writer:
        for number in range(100):
            writer.write(Request(ts_ns=number, id=f"r{number}"))
    out = tmp_path / "incident.tar.gz"
    environment = nvml_stub("count=2", MMCTL_SECRET="x", VLLM_API_KEY="sk-1234567890abcdef")
    done = mmctl("doctor", "--bundle", str(out), "--recording", str(named), env=environment)
    assert done.returncode in (0, 3), done.stderr
    assert out.stat().st_mode & 0o777 == 0o600
    with tarfile.open(out) as archive:
        parts: dict[str, bytes] = {}
        for entry in archive:
            content = archive.extractfile(entry)
            assert content is not None
            parts[Path(entry.name).name] = content.read()
    assert {"doctor.json", "versions.json", "profile.json", "reading.ndjson", "links.ndjson",
            "0-node.ndjson", "1-audit.ndjson"} <= parts.keys()  # fmt: skip
    assert parts["0-node.ndjson"].count(b"\n") == 101
    assert b'"class":"SYS"' in parts["links.ndjson"] and b"gpu1" in parts["reading.ndjson"]
    everything = b"".join(parts.values())
    for word in (b"abcdefghijklmnop", b"private", b"sk-1234567890", b'"x"'):
        assert word not in everything, word
    assert b"trip" in parts["1-audit.ndjson"]
    assert (
        mmctl(
            "doctor", "--bundle", str(tmp_path / "other.tar.gz"), "--recording", "absent"
        ).returncode
        == 4
    )


def test_what_is_absent_says_how_to_have_it(mmctl, monkeypatch) -> None:
    monkeypatch.setattr(engine, "_is_installed", lambda name: False)
    found = {check.id: check for check in engine._extras()}
    extras = tomli.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    declared = extras["optional-dependencies"].keys() - {"all", "test"}
    assert {id_.removeprefix("extra.") for id_ in found} == declared
    for id_, check in found.items():
        assert check.state == "absent"
        assert check.fix == f"pip install 'mmctl[{id_.removeprefix('extra.')}]'"
    shown = mmctl("doctor").stdout
    assert "::" not in shown and "source.host: " in shown
    lines = shown.splitlines()
    for line, following in pairwise(lines):
        if line.startswith("absent ") and ".tool: no " not in line:
            assert following.startswith("         to have it: "), line
