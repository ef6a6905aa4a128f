"""Published figures with their sources, and result files as devices and links."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mmctl.engine.devices import results, table
from mmctl.engine.errors import MmctlError, UsageError

DEVICE = {
    "schema": 1, "benchmark": "device",
    "devices": [
        {"device": "gpu0", "name": "NVIDIA L4", "precision": "fp32", "flops_per_s": 2e13,
         "bandwidth_bytes_per_s": 2.5e11, "memory_bytes": 24 << 30, "launch_s": 5e-6},
        {"device": "gpu0", "name": "NVIDIA L4", "precision": "bf16", "flops_per_s": 8e13,
         "bandwidth_bytes_per_s": 2.5e11, "memory_bytes": 24 << 30, "launch_s": 5e-6},
        {"device": "gpu0", "name": "NVIDIA L4", "precision": "int8", "flops_per_s": None},
        {"device": "cpu0", "name": "x", "precision": "fp32", "flops_per_s": 1e11,
         "bandwidth_bytes_per_s": 2e10, "memory_bytes": None, "launch_s": None},
    ],
}  # fmt: skip


def write(path: Path, document: object) -> Path:
    path.write_text(json.dumps(document))
    return path


def test_every_figure_names_its_source_and_is_of_the_right_size() -> None:
    known = table.table()
    assert {"a100_sxm", "h100_sxm", "h200_sxm", "b200_sxm", "l40s", "l4", "rtx4090", "mi300x",
            "gaudi3", "ascend310p", "ascend910b", "xeon"} <= set(known)  # fmt: skip
    for device in known.values():
        figures = [*device.rates.values(), device.bandwidth, device.memory, device.power]
        assert all(figure.source and figure.value > 0 for figure in figures)
        assert all(1e12 < rate.value < 1e16 for rate in device.rates.values()), device.key
        assert 1e11 < device.bandwidth.value < 1e13 and 10 < device.power.value < 2000
        rates = device.rates
        if {"bf16", "int8"} <= set(rates):
            assert rates["int8"].value == pytest.approx(2 * rates["bf16"].value, rel=1.01)


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("NVIDIA A100-SXM4-80GB", "a100_sxm"), ("NVIDIA A100 80GB PCIe", "a100_pcie"),
        ("NVIDIA H100 80GB HBM3", "h100_sxm"), ("NVIDIA H200", "h200_sxm"),
        ("NVIDIA L40S", "l40s"), ("NVIDIA L4", "l4"), ("NVIDIA GeForce RTX 4090", "rtx4090"),
        ("AMD Instinct MI300X", "mi300x"), ("Ascend910B3", "ascend910b"),
        ("Ascend310P3", "ascend310p"),
        ("NVIDIA B200", "b200_sxm"), ("Intel(R) Xeon(R) Platinum 8480+", "xeon"),
        ("Tesla T4", None),
        ("NVIDIA A100-SXM4-40GB", None), ("NVIDIA L40", None),
    ],
)  # fmt: skip
def test_devices_are_found_by_their_drivers_names(name: str, key: str | None) -> None:
    found = table.find(name)
    assert (found.key if found else None) == key


def test_a_processor_peaks_by_what_it_can_do() -> None:
    zen = {"avx512_f": True, "avx512_bf16": True, "avx512_vnni": True}
    rates = table.processor_rates(zen, "AuthenticAMD", 25, 2, 2.5e9)
    assert {name: rate.value for name, rate in rates.items()} == {
        "fp32": 160e9, "bf16": 320e9, "int8": 640e9,
    }  # fmt: skip
    assert all(rate.basis == "modelled" for rate in rates.values())
    xeon = {"avx512_f": True, "amx_bf16": True, "amx_int8": True}
    rates = table.processor_rates(xeon, "GenuineIntel", 6, 56, 2e9)
    published = table.table()["xeon"].rates
    for name in ("fp32", "bf16", "int8"):
        assert rates[name].value == pytest.approx(published[name].value, rel=0.01)
    assert "fp16" not in rates
    assert table.processor_rates(zen, "AuthenticAMD", 25, 2, None) == {}
    assert table.processor_rates({}, "x", 0, 2, 1e9) == {}


def test_a_device_from_a_result(tmp_path: Path) -> None:
    path = write(tmp_path / "d.json", DEVICE)
    assert results.is_result(path)
    found = results.device(path)
    assert (found.name, found.kind, found.precision) == ("NVIDIA L4", "gpu", "bf16")
    assert (found.flops_per_s, found.bandwidth_bytes_per_s) == (8e13, 2.5e11)
    assert found.power_w == 72 and found.overhead_s == 5e-6
    cpu = results.device(path, "cpu0")
    assert cpu.kind == "cpu" and cpu.power_w is None and cpu.memory_bytes is None
    with pytest.raises(UsageError, match="gpu0, cpu0"):
        results.device(path, "gpu7")


def test_a_link_from_a_result(tmp_path: Path) -> None:
    fits = [
        {"link_class": "NV12", "operation": "alltoall", "ranks": r, "intercept_us": 10.0 + r,
         "us_per_kib": 0.005}
        for r in (2, 8)
    ]  # fmt: skip
    path = write(tmp_path / "l.json", {"schema": 1, "benchmark": "links", "fits": fits})
    found = results.link(path)
    assert (found.ranks, found.latency_s) == (8, pytest.approx(18e-6))
    assert found.bytes_per_s == pytest.approx(1024 / 5e-9)
    with pytest.raises(MmctlError, match="no fit of all_reduce"):
        results.link(path, ("all_reduce",))
    with pytest.raises(MmctlError, match="holds no devices"):
        results.device(path)


@pytest.mark.parametrize(
    "content",
    ["", "[", "[]", "7", "[" * 9999, '{"a": 1}', '{"schema": 9, "benchmark": "device"}',
     '{"schema": 1, "benchmark": "device", "devices": 3}',
     '{"schema": 1, "benchmark": "device", "devices": [{"flops_per_s": 1}]}',
     '{"schema": 1, "benchmark": "device", "devices": [{"device": "a", "precision": "fp32", '
     '"flops_per_s": 1, "bandwidth_bytes_per_s": "x"}]}'],
)  # fmt: skip
def test_what_is_no_result_is_one_line(tmp_path: Path, content: str) -> None:
    path = tmp_path / "x.json"
    path.write_text(content)
    with pytest.raises(MmctlError) as error:
        results.device(path)
    assert "\n" not in str(error.value) and "x.json" in str(error.value)
