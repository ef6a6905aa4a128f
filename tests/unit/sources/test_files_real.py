"""Real captures and pages of every kind: what is known to be true of them."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mmctl.engine.errors import NoSourceError
from mmctl.engine.records import Device, Link, Serving
from mmctl.engine.sources import files

MIB = 2**20


@pytest.fixture
def read(data: Path) -> Callable[[str], list[Any]]:
    def one(name: str) -> list[Any]:
        return files.read((data / name).read_text("utf-8", "replace"), name, 0)

    return one


def devices(records: list[Any]) -> dict[str, Device]:
    return {record.device: record for record in records if isinstance(record, Device)}


def links(records: list[Any]) -> dict[tuple[str, str], Link]:
    return {(record.a, record.b): record for record in records if isinstance(record, Link)}


def serving(records: list[Any]) -> list[Serving]:
    return [record for record in records if isinstance(record, Serving)]


@pytest.mark.parametrize(
    ("name", "engine", "running", "waiting", "kv_ratio"),
    [
        ("vllm/gen-vllm-0.6.6.post1-V0", "vllm", 10, 16, None),
        ("vllm/gen-vllm-0.10.0-V1", "vllm", 10, 4, None),
        ("vllm/gen-vllm-0.14.1-V1", "vllm", 10, 4, None),
        ("sglang/gen-sglang-0.4.3.post4", "sglang", 20, 4, 0.3948),
        ("sglang/gen-sglang-0.5.9", "sglang", 20, 32, 0.3948),
        ("sglang/gen-sglang-0.5.23", "sglang", 20, 9, None),
        ("gen-trtllm-2026", "trtllm", 3435, 7574, None),
        ("tensorrtllm-backend-nv_trt_llm", "triton", 0, 1, 0.4875),
        ("gen-lmdeploy-1263d5c", "lmdeploy", 25, 22, 0.9425),
    ],
)  # fmt: skip
def test_pages_of_engines(read, data: Path, name, engine, running, waiting, kv_ratio) -> None:
    (record,) = serving(read(f"prom/{name}.prom"))
    assert (record.engine, record.running, record.waiting) == (engine, running, waiting)
    assert record.kv_ratio is not None and kv_ratio in (None, record.kv_ratio)
    assert record.ttft_p99_s is None and record.absent["ttft_p99_s"]
    assert record.queue_wait_s is None and record.absent["queue_wait_s"]


def test_the_newer_of_two_names_wins(read, data: Path) -> None:
    (record,) = serving(read("prom/vllm/gen-vllm-0.10.0-V1.prom"))
    page = (data / "prom/vllm/gen-vllm-0.10.0-V1.prom").read_text()
    (line,) = [li for li in page.splitlines() if li.startswith("vllm:kv_cache_usage_perc{")]
    assert record.kv_ratio == float(line.split()[-1])


def test_data_parallel_engines_are_two_instances(read) -> None:
    first, second = serving(read("prom/vllm/gen-vllm-0.33.0-V1-dp2.prom"))
    assert (first.running, first.waiting, first.kv_ratio) == (1, 13, 0.382067)
    assert (second.running, second.waiting, second.kv_ratio) == (2, 13, 0.744167)
    assert first.instance != second.instance and first.model == "Qwen/Qwen2.5-VL-7B-Instruct"


def test_tgi_has_no_kv_and_says_so(read) -> None:
    (record,) = serving(read("prom/gen-tgi-db931fc.prom"))
    assert (record.running, record.waiting) == (159, 481)
    assert record.kv_ratio is None and "TGI" in record.absent["kv_ratio"]


def test_pages_of_dcgm_exporter(read) -> None:
    found = devices(read("prom/gen-dcgm-h100x8-Hostname.prom"))
    assert sorted(found) == [f"gpu{n}" for n in range(8)]
    gpu = found["gpu0"]
    assert gpu.counters == "dcgm" and gpu.used_bytes == 78900 * MIB and gpu.node != ""
    assert gpu.total_bytes == 81559 * MIB and 0 <= (gpu.sm_ratio or -1) <= 1
    assert gpu.sm_clock_hz is not None and 1e8 < gpu.sm_clock_hz < 4e9
    instances = devices(read("prom/gen-dcgm-h100x2-mig-hostname.prom"))
    assert len(instances) == 6 and instances["gpu0.gi2"].parent == "gpu0"
    assert instances["gpu0.gi2"].sm_ratio == 0.780219


def test_sentinels_of_dcgm_are_absent(read) -> None:
    (gpu,) = read("prom/dcgm-exporter-readme-sentinel.prom")
    assert gpu.memory_temperature_c is None
    assert "sentinel" in gpu.absent["memory_temperature_c"] and gpu.sm_clock_hz == 139e6
    found = devices(read("prom/netdata-dcgm-small.prom"))
    assert found["gpu0"].xid == 31 and found["gpu0"].memory_temperature_c is None
    assert found["gpu0"].sm_ratio == 0.8 and found["gpu0.gi2"].sm_ratio == 0.6
    assert found["gpu0"].pcie_tx_bytes_per_s == 123456 and found["gpu0"].nvlink_errors == 4


def test_pages_of_other_exporters(read) -> None:
    (h100,) = devices(
        read("prom/linux-x86_64__nvidia-h100-80gb-hbm3__590.48.01__load.prom")
    ).values()
    assert h100.used_bytes == 20780679168 and h100.reserved_bytes == 502267904
    assert h100.power_w == 631.95 and h100.fabric == "completed" and h100.throttle == ()
    assert [process.pid for process in h100.processes or ()] == [11327, 11328, 11345]
    npus = devices(read("prom/npu-exporter-910A-doc-sample.prom"))
    assert len(npus) == 8 and npus["npu3"].pci == "0000:3E:00.0" and npus["npu3"].sm_clock_hz == 1e9
    assert npus["npu3"].ts_ns == 1723621884682 * 10**6
    (amd,) = read("prom/device-metrics-exporter-mini.prom")
    assert amd.power_w == 41 and amd.total_bytes == 68702 * 10**6 and amd.sm_ratio == 0


@pytest.mark.parametrize(
    ("name", "model", "used_mib", "total_mib", "power_w", "temperature_c"),
    [
        ("xml/rtx-3080-v13.xml", "NVIDIA GeForce RTX 3080", 9184, 10240, 139.62, 27),
        ("xml/a100-sxm4-v12.xml", "NVIDIA A100-SXM4-80GB", 50, 81920, 67.03, 27),
        ("xml/quadro-p400.xml", "Quadro P400", None, None, None, 33),
    ],
)  # fmt: skip
def test_xml_of_three_driver_ages(
    read, name, model, used_mib, total_mib, power_w, temperature_c
) -> None:
    gpu = devices(read(f"nvidia-smi/{name}"))["gpu0"]
    assert (gpu.model, gpu.power_w, gpu.temperature_c) == (model, power_w, temperature_c)
    if used_mib is not None:
        assert (gpu.used_bytes, gpu.total_bytes) == (used_mib * MIB, total_mib * MIB)
    else:
        assert gpu.absent["power_w"] == "nvidia-smi says: N/A"


def test_xml_details(read) -> None:
    gpu = devices(read("nvidia-smi/xml/rtx-3080-v13.xml"))["gpu0"]
    assert (gpu.sm_ratio, gpu.bandwidth_ratio, gpu.throttle) == (0.65, 0.09, ())
    assert gpu.pcie_rx_bytes_per_s == 14742333e3 and gpu.power_instant_w == 142.33
    assert gpu.recovery_action == "none" and gpu.remap_pending is None
    found = devices(read("nvidia-smi/xml/a100-sxm4-v12.xml"))
    assert list(found) == ["gpu0", "gpu0.mig0", "gpu0.mig1", "gpu0.mig2", "gpu0.mig3"]
    assert found["gpu0"].sm_ratio is None and found["gpu0.mig0"].total_bytes == 19968 * MIB


def test_captures_join_their_sections_and_end_with_the_load(read) -> None:
    found = read("nvidia-smi/captures/linux-x86_64__nvidia-h100-80gb-hbm3__590.48.01.txt")
    phases = [record for record in found if isinstance(record, Device)]
    idle, load = phases
    assert idle.sm_ratio == 0 and load.sm_ratio == 1.0 and idle.ts_ns < load.ts_ns
    assert load.used_bytes == 19818 * MIB and load.reserved_bytes == 479 * MIB
    assert load.model == "NVIDIA H100 80GB HBM3" and load.uuid is not None
    assert [(p.pid, p.name, p.used_bytes) for p in load.processes or ()] == [
        (11327, "memhog", 2566 * MIB), (11328, "memhog", 1542 * MIB),
        (11345, "gpu_burn", 15690 * MIB),
    ]  # fmt: skip
    mig = devices(read("nvidia-smi/captures/linux-x86_64__nvidia-h200-mig__590.48.01.txt"))
    assert list(mig) == ["gpu0", *(f"gpu0.mig{n}" for n in range(5))]
    assert mig["gpu0"].sm_ratio is None and mig["gpu0.mig0"].total_bytes == 71424 * MIB
    windows = read("nvidia-smi/captures/windows-x86_64__nvidia-geforce-rtx-2080-super__591.86.txt")
    assert devices(windows)["gpu0"].model == "NVIDIA GeForce RTX 2080 SUPER"


def test_odd_outputs(read) -> None:
    found = devices(read("nvidia-smi/odd/recreated-nvidia-smi-err.txt"))
    assert found["gpu6"].power_w == 5 and found["gpu7"].power_w is None
    assert "ERR!" in found["gpu7"].absent["power_w"] and found["gpu7"].sm_ratio == 0.93
    spark = devices(read("nvidia-smi/odd/recreated-nvidia-smi-gb10.txt"))["gpu0"]
    assert spark.used_bytes is None and spark.unified and spark.sm_ratio == 0.17
    (row,) = read("nvidia-smi/odd/recreated-query-gpu-gb10.csv")
    assert (row.sm_ratio, row.power_w, row.temperature_c, row.used_bytes) == (0.03, 12.4, 37, None)
    for name in ("no-driver.exit9.txt", "handle-unknown-error.stderr.txt"):
        with pytest.raises(NoSourceError, match="nvidia-smi said"):
            read(f"nvidia-smi/odd/recreated-nvidia-smi-{name}")


def test_npu_smi_in_its_layouts(read) -> None:
    busy = devices(read("npu-smi/npu_smi_info_910B2C_4npu_busy.txt"))
    assert list(busy) == ["npu12", "npu13", "npu14", "npu15"]
    assert busy["npu12"].used_bytes == 52675 * MIB and busy["npu12"].power_w == 91.3
    assert [p.pid for p in busy["npu13"].processes or ()] == [79095]
    new = devices(read("npu-smi/recreated-npu-smi-25.2-910B4-1.txt"))
    assert new["npu1"].health == "Warning" and new["npu1"].processes == ()
    dies = devices(read("npu-smi/recreated-npu-smi-26.0-A3-two-die.txt"))
    assert list(dies) == ["npu0", "npu1"] and dies["npu1"].power_w is None
    assert dies["npu1"].absent["power_w"] == "npu-smi says: -"
    assert dies["npu1"].used_bytes == 15242 * MIB and dies["npu1"].sm_ratio == 0.09
    assert [p.used_bytes for p in dies["npu1"].processes or ()] == [12140 * MIB]
    (page,) = read("npu-smi/recreated-npu-smi-t-usages-910B1.txt")
    assert (page.device, page.sm_ratio, page.bandwidth_ratio) == ("npu1", 0.94, 0.57)
    assert page.total_bytes == 65536 * MIB


def test_rocm_smi(read) -> None:
    records = read("rocm-smi/mi100_rocm602.json")
    found = devices(records)
    assert len(found) == 4 and found["gpu0"].total_bytes == 34342961152
    assert found["gpu0"].temperature_c == 55 and found["gpu0"].power_w == 36
    joined = links(records)
    assert len(joined) == 6 and joined["gpu0", "gpu1"].hops == 2
    small = devices(read("rocm-smi/rx6700xt_rocm430.json"))["gpu0"]
    assert small.uuid is None and small.used_bytes == 1622728704


@pytest.mark.parametrize(
    ("name", "count", "some"),
    [
        ("a100_8gpu_nv12", 28, {("gpu0", "gpu7"): "NV12"}),
        ("h200_8gpu_nv18_8nic", 120, {("gpu0", "gpu1"): "NV18", ("gpu0", "mlx5_4"): "PIX"}),
        ("rtx3090_4gpu_nv4_pairs_phb_node", 6,
         {("gpu0", "gpu2"): "NV4", ("gpu0", "gpu1"): "PHB", ("gpu0", "gpu3"): "NODE"}),
        ("rtx4090_8gpu_pix_sys_mlx5bond", 36, {("gpu0", "gpu4"): "SYS", ("gpu0", "nic0"): "PIX"}),
        ("unknown_2gpu_nv12_8nic_no_affinity", 45, {("gpu0", "nic6"): "PXB"}),
        ("unknown_2gpu_phb", 1, {("gpu0", "gpu1"): "PHB"}),
        ("unknown_8gpu_node_sys_p2p_disabled", 28, {("gpu0", "gpu4"): "SYS"}),
        ("v100sxm2_4gpu_nv2_full_mesh_odd_cpulist", 10, {("gpu0", "mlx5_0"): "NODE"}),
        ("v100sxm2_8gpu_hcm_2nic_mixed_tabs", 45,
         {("gpu0", "gpu1"): "NV1", ("gpu0", "gpu2"): "NV2", ("gpu0", "gpu4"): "SYS"}),
    ],
)  # fmt: skip
def test_topologies(read, name, count, some) -> None:
    found = links(read(f"topo/{name}.txt"))
    assert len(found) == count
    assert {pair: found[pair].link_class for pair in some} == some
    for link in found.values():
        assert link.crosses_numa is (link.link_class == "SYS") and link.hops is not None


def test_ascend_topologies(read) -> None:
    found = links(read("npu-smi/npu_smi_topo_910B3_8npu_hccs.txt"))
    assert len(found) == 28 and {link.link_class for link in found.values()} == {"HCCS"}
    assert list(links(read("npu-smi/npu_smi_topo_A5_ub_nic_no_affinity.txt"))) == [("npu0", "npu1")]


def test_measured_matrices(read) -> None:
    pairs = links(read("p2p/a100pcie_4gpu_nv12_pairs_p2p.txt"))
    assert len(pairs) == 12
    assert pairs["gpu0", "gpu1"].bandwidth_bytes_per_s == pytest.approx(275.07e9)
    assert pairs["gpu1", "gpu0"].latency_us == 2.22 and pairs["gpu0", "gpu2"].latency_us == 19.85
    read_ce = links(read("p2p/a6000_6gpu_nvbandwidth_d2d_read_ce.txt"))
    assert len(read_ce) == 30
    assert read_ce["gpu3", "gpu0"].bandwidth_bytes_per_s == pytest.approx(21.82e9)
    host = links(read("p2p/rtx4090_8gpu_nvbandwidth_host.txt"))
    assert len(host) == 16
    assert host["cpu0", "gpu3"].bandwidth_bytes_per_s == pytest.approx(26.30e9)
    assert host["gpu3", "cpu0"].bandwidth_bytes_per_s == pytest.approx(26.63e9)


@pytest.mark.parametrize("name", ["nvbandwidth-full.json", "nvbandwidth-with-log-noise.json.txt"])
def test_nvbandwidth_json_even_behind_a_log(read, name) -> None:
    found = links(read(f"nvbandwidth/{name}"))
    assert found["cpu0", "gpu0"].bandwidth_bytes_per_s == pytest.approx(12.3964e9)
    assert found["cpu0", "gpu0"].latency_us == pytest.approx(0.649879)


def test_every_file_of_these_kinds_is_read(data: Path) -> None:
    folders = ("prom", "nvidia-smi", "npu-smi", "rocm-smi", "topo", "p2p", "nvbandwidth")
    names = itertools.chain.from_iterable((data / folder).rglob("*.*") for folder in folders)
    count = 0
    for path in names:
        if "stderr" in path.name or "no-driver" in path.name:
            continue
        records = files.read(path.read_text("utf-8", "replace"), path.name, 0)
        count += 1
        for record in records:
            if isinstance(record, Device):
                for field in ("sm_ratio", "used_bytes", "temperature_c", "power_w"):
                    assert getattr(record, field) is not None or record.absent.get(field), path
    assert count >= 40
