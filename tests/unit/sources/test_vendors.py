"""``ascend:`` by DCMI and by npu-smi, ``amd:`` by its tools, against stand-ins."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[2]
READERS = TESTS / "fixtures" / "readers"
MIB = 2**20


@pytest.fixture(scope="module")
def dcmi(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., dict[str, str]]:
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler for the DCMI stand-in")
    folder = tmp_path_factory.mktemp("dcmi")
    subprocess.run(
        [compiler, "-shared", "-fPIC", "-o", str(folder / "libdcmi.so"), str(TESTS / "dcmistub.c")],
        check=True, capture_output=True,
    )  # fmt: skip
    return lambda mode="": {**os.environ, "LD_LIBRARY_PATH": str(folder), "DCMISTUB": mode}


def test_npus_by_the_drivers_own_library(mmctl, dcmi) -> None:
    done = mmctl("probe", "ascend:", "-o", "json", env=dcmi())
    assert done.returncode == 0, done.stderr
    found = {device["device"]: device for device in json.loads(done.stdout)["devices"]}
    assert list(found) == ["npu0", "npu1", "npu2"]
    npu = found["npu0"]
    assert (npu["sm_ratio"], npu["bandwidth_ratio"], npu["power_w"]) == (0.88, 0.57, 162.4)
    assert (npu["used_bytes"], npu["total_bytes"]) == (3197 * MIB, 65536 * MIB)
    assert (npu["model"], npu["health"], npu["ecc_corrected"]) == ("910B4", "OK", 2)
    assert (
        found["npu2"]["power_w"] is None and "not supported" in found["npu2"]["absent"]["power_w"]
    )
    assert found["npu1"]["health"] == "Warning" and found["npu1"]["sm_clock_hz"] is None


def test_an_old_library_lacks_memory_and_says_so(mmctl, dcmi) -> None:
    done = mmctl("probe", "ascend:", "-o", "json", env=dcmi("old"))
    npu = json.loads(done.stdout)["devices"][0]
    assert npu["used_bytes"] is None and npu["absent"]["used_bytes"] and npu["sm_ratio"] == 0.88


@pytest.mark.parametrize(("mode", "said"), [("fail", "does not start"), ("hang", "hangs")])
def test_a_library_that_fails(mmctl, dcmi, mode, said) -> None:
    environment = {**dcmi(mode), "MMCTL_SOURCES_TIMEOUT": "300ms", "PATH": "/nowhere"}
    done = mmctl("probe", "ascend:", env=environment)
    assert done.returncode == 4 and said in done.stderr and done.stderr.count("\n") == 1


def tool(folder: Path, name: str, script: str) -> dict[str, str]:
    path = folder / name
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}"}


def test_npus_by_npu_smi_where_there_is_no_library(mmctl, tmp_path: Path) -> None:
    environment = tool(tmp_path, "npu-smi", f"cat {READERS / 'npu.txt'}")
    (npu,) = json.loads(mmctl("probe", "ascend:", "-o", "json", env=environment).stdout)["devices"]
    assert (npu["device"], npu["sm_ratio"]) == ("npu3", 0.07)


def test_amd_by_the_tool_that_works(mmctl, tmp_path: Path) -> None:
    tool(tmp_path, "amd-smi", "echo 'no such option' >&2; exit 2")
    environment = tool(tmp_path, "rocm-smi", f"cat {READERS / 'rocm.json'}")
    document = json.loads(mmctl("probe", "amd:", "-o", "json", env=environment).stdout)
    assert document["devices"][0]["sm_ratio"] == 0.31
    assert document["links"][0]["class"] == "XGMI"
    environment = tool(tmp_path, "amd-smi", f"cat {READERS / 'amd.json'}")
    document = json.loads(mmctl("probe", "amd:", "-o", "json", env=environment).stdout)
    assert document["devices"][0]["power_w"] == 140


@pytest.mark.parametrize(
    ("script", "said"),
    [("exit 3", "exit code 3"), ("sleep 30", "does not return"), ("echo nonsense", "not JSON")],
)  # fmt: skip
def test_a_tool_that_fails(mmctl, tmp_path: Path, script, said) -> None:
    tool(tmp_path, "rocm-smi", "exit 1")
    environment = tool(tmp_path, "amd-smi", script) | {"MMCTL_SOURCES_TIMEOUT": "100ms"}
    done = mmctl("probe", "amd:", env=environment)
    assert done.returncode == 4 and said in done.stderr


def test_no_tool_at_all(mmctl, tmp_path: Path) -> None:
    environment = {**os.environ, "PATH": str(tmp_path)}
    for uri in ("ascend:", "amd:"):
        done = mmctl("probe", uri, env=environment)
        assert done.returncode == 4 and "not installed" in done.stderr
