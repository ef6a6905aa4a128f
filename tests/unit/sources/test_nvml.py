"""NVML by way of the command line, against a stand-in library that can be told to fail."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from mmctl.engine.records import Device
from mmctl.engine.sources.identity import torch_ordinals

MANY = ("-o", "ndjson", "--interval", "100ms")


def probe(mmctl: Any, environment: dict[str, str], *more: str) -> dict[str, Any]:
    done = mmctl("probe", "nvml:", "-o", "json", *more, env=environment)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    document: dict[str, Any] = json.loads(done.stdout)
    document["gpus"] = {device["device"]: device for device in document["devices"]}
    return document


def absent_has_reasons(device: dict[str, Any]) -> None:
    """No silent absence: what a reading of a GPU should have is there or has a reason."""
    for field in ("sm_ratio", "bandwidth_ratio", "used_bytes", "temperature_c", "power_w",
                  "throttle", "nvlink_rx_bytes_per_s", "ecc_uncorrected", "recovery_action",
                  "processes", "torch_index"):  # fmt: skip
        assert device[field] is not None or device["absent"].get(field), field


def test_two_gpus_with_counters_links_and_throttling(mmctl, nvml_stub) -> None:
    gpus = probe(mmctl, nvml_stub(
        "count=2", "gpu0.mem.used=75161927680", "gpu0.mem.reserved=545259520", "gpu0.temp=67",
        "gpu0.power_mw=612345", "gpu0.throttle=0x45", "gpu0.gpm2=87.5", "gpu0.gpm3=41.25",
        "gpu0.gpm10=63", "gpu0.gpm60=20480", "gpu0.gpm61=20992", "gpu1.util.gpu=12",
        "gpu1.util.mem=3", "gpu1.nvlink.count=4", "gpu1.nvlink.rx_kib=rate:1000:1048576",
        "gpu0.pcie.tx_bytes=rate:0:5000000", "gpu0.ecc.dbe.vol=2", "gpu0.field230=4",
        "gpu0.field144=1", "gpu1.nvlink2.err1=7", "gpu0.energy_mj=5000",
    ))["gpus"]  # fmt: skip
    a, b = gpus["gpu0"], gpus["gpu1"]
    assert (a["sm_ratio"], a["bandwidth_ratio"], a["occupancy_ratio"]) == (0.875, 0.63, 0.4125)
    assert a["counters"] == "gpm" and a["nvlink_rx_bytes_per_s"] == 20480 * 2**20
    assert a["used_bytes"] == 75161927680 and a["reserved_bytes"] == 545259520
    assert a["temperature_c"] == 67 and a["power_w"] == 612.345 and a["energy_j"] == 5
    assert a["throttle"] == ["sw_power_cap", "hw_thermal_slowdown"]
    assert a["ecc_uncorrected"] == 2 and a["recovery_action"] == "drain_and_reset"
    assert a["remap_pending"] is True and a["pcie_tx_bytes_per_s"] == pytest.approx(5e6, rel=0.2)
    assert b["counters"] == "utilization" and (b["sm_ratio"], b["bandwidth_ratio"]) == (0.12, 0.03)
    assert b["nvlink_rx_bytes_per_s"] == pytest.approx(2**30, rel=0.2) and b["nvlink_errors"] == 7
    assert (a["torch_index"], b["torch_index"]) == (0, 1) and a["uuid"].startswith("GPU-")
    for device in gpus.values():
        absent_has_reasons(device)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (("gpu3.lost=1",), "the GPU is lost"),
        (("gpu3.err.*=999",), "unknown error"),
        (("gpu3.err.nvmlDeviceGetHandleByIndex_v2=15",), "the GPU is lost"),
        (("gpu3.err.*=16",), "requires a reset"),
    ],
)  # fmt: skip
def test_one_bad_gpu_of_eight_does_not_hide_seven(mmctl, nvml_stub, settings, said) -> None:
    document = probe(mmctl, nvml_stub("count=8", "gpu0.util.gpu=40", *settings))
    assert sorted(document["gpus"]) == [f"gpu{index}" for index in range(8)]
    bad = document["gpus"].pop("gpu3")
    assert bad["used_bytes"] is None and said in bad["absent"]["used_bytes"]
    absent_has_reasons(bad)
    assert all(gpu["used_bytes"] == 2**30 for gpu in document["gpus"].values())
    (event,) = [event for event in document["events"] if event["what"] == "fault"]
    assert event["device"] == "gpu3" and event["state"] == "lost"


def test_memory_that_is_not_supported_is_absent_or_unified(mmctl, nvml_stub) -> None:
    no_memory = ("count=1", "gpu0.err.nvmlDeviceGetMemoryInfo=3",
                 "gpu0.err.nvmlDeviceGetMemoryInfo_v2=3")  # fmt: skip
    h100 = probe(mmctl, nvml_stub(*no_memory))["gpus"]["gpu0"]
    assert h100["used_bytes"] is None and h100["unified"] is None
    assert "not supported" in h100["absent"]["used_bytes"]
    spark = probe(mmctl, nvml_stub(*no_memory, "gpu0.name=NVIDIA GB10"))["gpus"]["gpu0"]
    assert spark["unified"] is True and spark["total_bytes"] == os.sysconf(
        "SC_PHYS_PAGES"
    ) * os.sysconf("SC_PAGE_SIZE")


def test_a_mig_parent_has_no_utilisation_and_its_instances_have_memory(mmctl, nvml_stub) -> None:
    gpus = probe(mmctl, nvml_stub(
        "count=1", "gpu0.mig=1", "gpu0.mig.count=2", "gpu0.err.nvmlDeviceGetUtilizationRates=3",
        "gpu0.mig0.mem.total=42949672960", "gpu0.mig0.mem.used=17179869184",
    ))["gpus"]  # fmt: skip
    assert list(gpus) == ["gpu0", "gpu0.mig0", "gpu0.mig1"]
    assert gpus["gpu0"]["sm_ratio"] is None and "MIG" in gpus["gpu0"]["absent"]["sm_ratio"]
    instance = gpus["gpu0.mig0"]
    assert instance["parent"] == "gpu0" and instance["uuid"].startswith("MIG-")
    assert instance["used_bytes"] == 17179869184 and instance["sm_ratio"] is None
    assert "not supported" in instance["absent"]["sm_ratio"]


def test_counters_of_mig_instances(mmctl, nvml_stub) -> None:
    gpus = probe(mmctl, nvml_stub(
        "count=1", "gpu0.mig=1", "gpu0.mig.count=1", "gpu0.err.nvmlDeviceGetUtilizationRates=3",
        "gpu0.gpm2=40", "gpu0.gpm10=20",
    ))["gpus"]  # fmt: skip
    assert (gpus["gpu0.mig0"]["sm_ratio"], gpus["gpu0.mig0"]["counters"]) == (0.4, "gpm")


def test_one_process_on_two_gpus_is_one_instance(mmctl, nvml_stub) -> None:
    me = os.getpid()
    gpus = probe(mmctl, nvml_stub("count=2", f"gpu0.procs={me}:100", f"gpu1.procs={me}:200"))[
        "gpus"
    ]
    assert [gpu["processes"][0]["used_bytes"] for gpu in gpus.values()] == [100, 200]
    assert gpus["gpu0"]["group"] == gpus["gpu1"]["group"] is not None


def test_an_old_driver_lacks_functions(mmctl, nvml_stub) -> None:
    old = nvml_stub("count=1", "gpu0.util.gpu=33", "gpu0.temp=55", "gpu0.throttle=8",
                    omit=("V2MEM", "TEMPV", "EVENTREASONS", "GPM"))  # fmt: skip
    gpu = probe(mmctl, old)["gpus"]["gpu0"]
    assert gpu["temperature_c"] == 55 and gpu["throttle"] == ["hw_slowdown"]
    assert gpu["sm_ratio"] == 0.33 and gpu["counters"] == "utilization"
    assert gpu["used_bytes"] == 2**30 + 545259520 and gpu["reserved_bytes"] is None
    assert "too old" in gpu["absent"]["reserved_bytes"]


def test_numbers_that_cannot_be_are_absent(mmctl, nvml_stub) -> None:
    gpus = probe(mmctl, nvml_stub(
        "count=2", "gpu0.temp=4294967295", "gpu0.mem.used=18446744073709551615",
        "gpu0.util.gpu=4294967295", "gpu0.pcie.tx_bytes=18446744073709551615",
        "gpu1.power_mw=4294967295", "gpu1.mem.total=0", "gpu1.energy_mj=18446744073709551615",
    ))["gpus"]  # fmt: skip
    impossible = {
        "gpu0": ("temperature_c", "used_bytes", "sm_ratio", "pcie_tx_bytes_per_s"),
        "gpu1": ("power_w", "total_bytes", "used_bytes", "energy_j"),
    }
    for name, fields in impossible.items():
        for field in fields:
            assert gpus[name][field] is None, field
            assert "cannot be" in gpus[name]["absent"][field], field


def test_a_call_that_hangs_costs_its_own_value_only(mmctl, nvml_stub, monkeypatch) -> None:
    environment = nvml_stub(
        "count=2", "gpu1.delay.nvmlDeviceGetUtilizationRates=30000", "gpu0.util.gpu=5"
    )
    started = time.monotonic()
    document = probe(mmctl, {**environment, "MMCTL_SOURCES_TIMEOUT": "300ms"})
    assert time.monotonic() - started < 15
    healthy, hung = document["gpus"]["gpu0"], document["gpus"]["gpu1"]
    assert healthy["sm_ratio"] == 0.05
    assert hung["sm_ratio"] is None and "does not return" in hung["absent"]["sm_ratio"]
    assert hung["used_bytes"] == 2**30 and hung["temperature_c"] == 35


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (("count=0",), "finds no GPU"),
        (("err.nvmlInit=4",), "no permission"),
        (("err.nvmlInit=9",), "not loaded"),
        (("err.nvmlInit=18",), "versions differ"),
        (("delay.nvmlDeviceGetCount_v2=30000",), "does not return"),
    ],
)  # fmt: skip
def test_without_any_gpu_nvml_is_no_source_and_the_host_still_shows(
    mmctl, nvml_stub, settings, said
) -> None:
    environment = {**nvml_stub(*settings), "MMCTL_SOURCES_TIMEOUT": "300ms"}
    done = mmctl("probe", "nvml:", env=environment)
    assert done.returncode == 4 and said in done.stderr and done.stderr.count("\n") == 1
    done = mmctl("probe", "-o", "json", env=environment)
    document = json.loads(done.stdout)
    assert done.returncode == 0 and [d["device"] for d in document["devices"]] == ["cpu0"]
    assert document["errors"][0]["source"] == "nvml:" and said in document["errors"][0]["message"]


def test_no_library(mmctl, tmp_path: Path) -> None:
    if Path("/usr/lib/x86_64-linux-gnu/libnvidia-ml.so.1").exists():
        pytest.skip("this machine has the library")
    done = mmctl("probe", "nvml:", env={**os.environ, "LD_LIBRARY_PATH": str(tmp_path)})
    assert done.returncode == 4 and "libnvidia-ml.so.1 was not found" in done.stderr


def test_processes_by_pid_name_and_namespace(mmctl, nvml_stub) -> None:
    ranks = [subprocess.Popen(["sleep", "60"]) for _ in range(2)]
    try:
        a, b = (rank.pid for rank in ranks)
        gpus = probe(mmctl, nvml_stub(
            "count=3", f"gpu0.procs={a}:1000,3999999:-1", f"gpu1.procs={b}:2000",
            "gpu2.procs=3999998:5",
        ))["gpus"]  # fmt: skip
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    mine, strange = sorted(gpus["gpu0"]["processes"], key=lambda process: process["pid"])
    assert mine["name"] == "sleep" and mine["used_bytes"] == 1000
    assert strange["name"] is None and strange["used_bytes"] is None
    assert "namespace" in gpus["gpu0"]["absent"]["processes.name"]
    # Two ranks that one parent started are one instance; a pid from elsewhere is in no group.
    assert gpus["gpu0"]["group"] == gpus["gpu1"]["group"] is not None
    assert gpus["gpu2"]["group"] is None


def stream(nvml_stub: Any, state: Path, *steps: tuple[str, str]) -> list[dict[str, Any]]:
    """Records of a probe during which the state of the stand-in changes: each step holds until
    a record of that state (of a device record: ``device``) has come."""
    environment = nvml_stub(NVMLSTUB_FILE=str(state)) | {"NVMLSTUB_SET": ""}
    state.write_text(steps[0][0])
    records = []
    with subprocess.Popen(
        [sys.executable, "-m", "mmctl", "probe", "nvml:", *MANY], env=environment,
        stdout=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        for settings, until in steps:
            fresh = state.with_suffix(".new")
            fresh.write_text(settings)
            fresh.replace(state)
            for line in process.stdout:
                records.append(json.loads(line))
                kind = records[-1]["type"]
                if until == (kind if kind == "device" else records[-1]["state"]
                             or records[-1]["what"]):  # fmt: skip
                    break
        process.terminate()
    assert process.returncode == 143
    return records


def test_an_xid_then_a_lost_gpu_that_comes_back(nvml_stub, tmp_path: Path) -> None:
    records = stream(
        nvml_stub, tmp_path / "state", ("count=2", "device"), ("count=2\ngpu1.xid=79", "xid"),
        ("count=2\ngpu1.xid=79\ngpu1.lost=1", "lost"), ("count=2", "back"), ("count=2", "device"),
    )  # fmt: skip
    events = [record for record in records if record["type"] == "event"]
    assert [(event["what"], event["state"]) for event in events] == [
        ("xid", None), ("fault", "lost"), ("fault", "back"),
    ]  # fmt: skip
    assert events[0]["evidence"]["xid"] == 79 and events[1]["evidence"]["last_xid"] == 79
    with_xid = [r["device"] for r in records if r["type"] == "device" and r["xid"] == 79]
    assert with_xid == ["gpu1"]
    assert all(r["used_bytes"] for r in records if r["type"] == "device" and r["device"] == "gpu0")


def test_a_driver_that_is_unbound_and_comes_back_is_picked_up(nvml_stub, tmp_path: Path) -> None:
    records = stream(
        nvml_stub, tmp_path / "state", ("count=1", "device"),
        ("count=1\nerr.nvmlInit=9\ngpu0.err.*=9", "down"), ("count=1\ngpu0.temp=50", "up"),
        ("count=1\ngpu0.temp=50", "device"),
    )  # fmt: skip
    assert records[-1]["temperature_c"] == 50


def test_a_gpu_that_the_driver_no_longer_lists_is_said_to_be_gone(nvml_stub, tmp_path) -> None:
    state = tmp_path / "state"
    state.write_text("count=2\ngpu1.lost=1\n")
    script = f"""
import pathlib, threading
from mmctl.engine import profiles
from mmctl.engine.sources import nvml
nvml._REOPEN_S = 0.0
readings = nvml.readings("", profiles.load("default").profile)
first = next(readings)
pathlib.Path({str(state)!r}).write_text("count=1\\n")
rest = [record for _ in range(4) for record in next(readings)]
print(*[f"{{r.what}}-{{r.state}}-{{r.device}}" for r in first + rest if hasattr(r, "what")])
print(len([r for r in next(readings) if hasattr(r, "kind")]))
readings.close()
"""
    environment = nvml_stub(NVMLSTUB_FILE=str(state)) | {"NVMLSTUB_SET": ""}
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True
    )
    assert done.stdout.split() == ["fault-lost-gpu1", "fault-gone-gpu1", "1"], done.stderr


def test_values_of_one_nvml_window_are_marked_as_repeated(mmctl, nvml_stub) -> None:
    done = mmctl("probe", "nvml:", *MANY, "--count", "4",
                 env=nvml_stub("count=1", "gpu0.util.gpu=seq:50,50,60", "gpu0.gpm=0"))  # fmt: skip
    records = [json.loads(line) for line in done.stdout.splitlines()]
    assert [(r["sm_ratio"], r["repeated"]) for r in records] == [
        (0.5, False), (0.5, True), (0.6, False), (0.6, True),
    ]  # fmt: skip


def device(name: str, uuid: str, model: str = "H100", **more: Any) -> Device:
    return Device(ts_ns=0, device=name, kind="gpu", uuid=uuid, model=model, **more)


@pytest.mark.parametrize(
    ("visible", "ordinals"),
    [
        (None, [0, 1, 2]), ("2,0", [1, None, 0]), ("GPU-b", [None, 0, None]),
        ("1,-1,0", [None, 0, None]), ("", [None, None, None]), ("0,0", [None, None, None]),
        ("GPU-", [None, None, None]), ("7", [None, None, None]),
    ],
)  # fmt: skip
def test_torch_ordinals_follow_cuda_visible_devices(visible, ordinals) -> None:
    devices = [device("gpu0", "GPU-a1"), device("gpu1", "GPU-b1"), device("gpu2", "GPU-c1")]
    environ = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    found = torch_ordinals(devices, environ)
    assert [found.get(d.device, (None, ""))[0] for d in devices] == ordinals


def test_unlike_gpus_have_no_ordinal_unless_the_order_is_the_bus() -> None:
    devices = [device("gpu0", "GPU-a", "L4"), device("gpu1", "GPU-b", "H100")]
    assert torch_ordinals(devices, {})["gpu0"][0] is None
    assert torch_ordinals(devices, {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"})["gpu1"] == (1, None)
