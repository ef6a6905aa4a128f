"""Every kind of file that is recognised by content, on small files written for these tests; and
any damage to them, which must end in a message."""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import random
import resource
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mmctl.engine import profiles, recording
from mmctl.engine.errors import MmctlError
from mmctl.engine.records import Device, Event, Link, Request, Serving
from mmctl.engine.sources import files

FIXTURES = Path(__file__).parents[2] / "fixtures" / "readers"
NAMES = sorted(path.name for path in FIXTURES.iterdir())
MIB = 2**20


def read(name: str) -> list[Any]:
    return files.read((FIXTURES / name).read_text("utf-8"), name, 10**18)


@pytest.mark.parametrize("name", ["smi.xml", "smi-q.txt"])
def test_nvidia_smi_q_in_both_forms(name: str) -> None:
    gpu, instance = read(name)
    assert (gpu.device, gpu.model, gpu.uuid) == ("gpu0", "NVIDIA L4", "GPU-22")
    assert (gpu.used_bytes, gpu.total_bytes, gpu.reserved_bytes) == (
        1034 * MIB,
        23034 * MIB,
        500 * MIB,
    )
    assert (gpu.sm_ratio, gpu.temperature_c, gpu.power_w) == (0.64, 51, 60.5)
    assert gpu.bandwidth_ratio is None and gpu.absent["bandwidth_ratio"].startswith(
        "nvidia-smi says"
    )
    assert gpu.throttle[0] == "hw_slowdown" and gpu.processes[0].name == "server"
    assert (instance.device, instance.parent, instance.total_bytes) == (
        "gpu0.mig0",
        "gpu0",
        1000 * MIB,
    )


def test_nvidia_smi_csv() -> None:
    first, second = read("smi.csv")
    assert (first.sm_ratio, first.used_bytes, first.throttle) == (
        0.64,
        1034 * MIB,
        ("hw_slowdown",),
    )
    assert first.power_w is None and first.absent["power_w"] == "nvidia-smi says: N/A"
    assert second.sm_ratio is None and "Unknown Error" in second.absent["sm_ratio"]
    assert second.absent["used_bytes"] == "nvidia-smi says: ERR!" and second.power_w == 60.5
    assert "Function Not Found" in second.absent["throttle"]
    assert first.ts_ns % 10**9 == 5 * 10**8


def test_csv_without_units_prints_percent_and_mebibytes() -> None:
    text = (
        "index, utilization.gpu [%], memory.used [MiB], clocks.current.sm [MHz]\n0, 1, 300, 345\n"
    )
    (gpu,) = files.read(text, "x", 0)
    assert isinstance(gpu, Device)
    assert (gpu.sm_ratio, gpu.used_bytes, gpu.sm_clock_hz) == (0.01, 300 * MIB, 345e6)


def test_nvidia_smi_tables_and_monitors() -> None:
    first, second = read("smi-table.txt")
    assert (first.model, first.power_w, first.used_bytes) == ("Tesla T4", 25, 300 * MIB)
    assert first.processes[0].pid == 1234 and second.power_w is None
    last = read("dmon.txt")[-1]
    assert (last.device, last.sm_ratio, last.used_bytes) == ("gpu0", 0.99, 310 * MIB)
    assert last.pcie_rx_bytes_per_s == 11e6 and last.memory_temperature_c is None
    one, other = read("pmon.txt")
    assert one.processes[0].name == "python" and other.processes == ()
    idle, load = read("capture.txt")
    assert (idle.sm_ratio, load.sm_ratio, load.used_bytes) == (0.12, 0.98, 2000 * MIB)


def test_captures_of_several_gpus_whose_uuids_are_masked() -> None:
    rule = "#" * 40
    masked = "GPU-00000000-0000-0000-0000-000000000000"
    rows = "".join(f"{n}, L4, {masked}, 00000000:0{n}:00.0, {10 * n} %\n" for n in range(3))
    apps = f"L4, {masked}, 00000000:02:00.0, 77, server, 100 MiB\n"
    text = (
        f"{rule}\n# load :: query-gpu\n# $ nvidia-smi --query-gpu=index\n{rule}\n"
        f"index, name, uuid, pci.bus_id, utilization.gpu [%]\n{rows}"
        f"{rule}\n# load :: apps\n# $ nvidia-smi --query-compute-apps=pid\n{rule}\n"
        f"gpu_name, gpu_uuid, gpu_bus_id, pid, process_name, used_gpu_memory [MiB]\n{apps}"
    )
    found = {record.device: record for record in files.read(text, "x", 0)}
    assert [found[f"gpu{n}"].sm_ratio for n in range(3)] == [0, 0.1, 0.2]
    assert [bool(found[f"gpu{n}"].processes) for n in range(3)] == [False, False, True]


def test_other_vendors() -> None:
    (npu,) = read("npu.txt")
    assert (npu.device, npu.sm_ratio, npu.used_bytes, npu.health) == (
        "npu3",
        0.07,
        5267 * MIB,
        "OK",
    )
    assert npu.processes[0].used_bytes == 4938 * MIB
    (usages,) = read("npu-usages.txt")
    assert (usages.device, usages.used_bytes, usages.bandwidth_ratio) == ("npu4", 32768 * MIB, 0.1)
    card, link = read("rocm.json")
    assert (card.sm_ratio, card.used_bytes, card.temperature_c) == (0.31, 400, 61)
    assert card.absent["power_w"] == "the tool says: N/A" and link.link_class == "XGMI"
    (amd,) = read("amd.json")
    assert (amd.sm_ratio, amd.bandwidth_ratio, amd.power_w) == (0.31, 0.05, 140)
    assert amd.total_bytes == 196592 * MIB


def test_links() -> None:
    topology = {(link.a, link.b): link for link in read("topo.txt")}
    assert (
        topology["gpu0", "gpu1"].link_class == "NV4" and not topology["gpu0", "gpu1"].crosses_numa
    )
    assert (
        topology["gpu1", "mlx5_0"].link_class == "SYS" and topology["gpu1", "mlx5_0"].crosses_numa
    )
    measured = {(link.a, link.b): link for link in read("p2p.txt")}
    assert measured["gpu0", "gpu1"].bandwidth_bytes_per_s == 25e9
    assert measured["gpu1", "gpu0"].latency_us == 1.6
    text = {(link.a, link.b): link for link in read("nvbandwidth.txt")}
    assert text.keys() == {("gpu0", "gpu1"), ("gpu1", "gpu0")}
    written = {(link.a, link.b): link for link in read("nvbandwidth.json")}
    assert written["gpu1", "gpu0"].bandwidth_bytes_per_s == 20.5e9
    nccl = {(link.a, link.b): link for link in read("nccl.xml")}
    assert nccl["gpu0", "gpu1"].link_class == "NV18"
    assert nccl["gpu0", "mlx5_0"].link_class == "PIX" and nccl["gpu1", "mlx5_0"].link_class == "SYS"


def test_a_topology_and_a_measurement_are_one_table(mmctl) -> None:
    done = mmctl(
        "probe", "links", str(FIXTURES / "topo.txt"), str(FIXTURES / "p2p.txt"), "-o", "json"
    )
    links = {(link["a"], link["b"]): link for link in json.loads(done.stdout)["links"]}
    assert links["gpu0", "gpu1"]["class"] == "NV4" and links["gpu0", "gpu1"]["latency_us"] == 1.5
    back = links["gpu1", "gpu0"]
    assert (back["class"], back["hops"], back["bandwidth_bytes_per_s"]) == ("NV4", 1, 24.5e9)
    assert links["gpu0", "mlx5_0"]["latency_us"] is None and links["gpu0", "mlx5_0"]["absent"]


def test_links_by_nvml(mmctl, nvml_stub) -> None:
    stub = nvml_stub("count=3", "gpu0.nvlink.count=4", "gpu1.nvlink.count=4", "topo.0.2=30")
    done = mmctl("probe", "links", "-o", "json", env=stub)
    links = {(link["a"], link["b"]): link for link in json.loads(done.stdout)["links"]}
    assert links["gpu0", "gpu1"]["class"] == "NV4" and links["gpu0", "gpu2"]["class"] == "PHB"
    assert links["gpu1", "gpu2"]["class"] == "SYS" and links["gpu1", "gpu2"]["crosses_numa"]
    assert mmctl("probe", "links", env=nvml_stub("count=1")).returncode == 4


def test_pages_spans_and_logs() -> None:
    (engine,) = read("engine.prom")
    assert isinstance(engine, Serving) and (engine.running, engine.waiting) == (4, 2)
    assert engine.model == "small-vl" and engine.kv_ratio == 0.25
    found = {record.device: record for record in read("devices.prom")}
    assert found["gpu0"].total_bytes == 4000 * MIB and found["gpu0"].temperature_c is None
    assert found["npu1"].sm_ratio == 0.33 and found["gpu2"].sm_ratio == 0.12
    (request,) = read("spans.json")
    assert isinstance(request, Request) and request.state == "failed"
    assert request.stages["e2e_s"] == 1.5 and request.text_tokens == 900
    events = read("kernel.log")
    assert all(isinstance(event, Event) for event in events)
    assert any(event.what == "xid79" for event in events)


@pytest.mark.parametrize("name", NAMES)
def test_each_is_known_under_any_name_and_with_any_line_ends(tmp_path: Path, name: str) -> None:
    plain = tmp_path / "x"
    plain.write_bytes((FIXTURES / name).read_bytes().replace(b"\n", b"\r\n"))
    profile = profiles.load("default").profile
    assert list(files.source(str(plain), profile, threading.Event()))


def test_what_is_no_reading_says_what_it_is_not(mmctl, tmp_path: Path) -> None:
    for content, code, said in (
        (b"", 1, "is empty"), (b"hello\n", 1, "of no known kind"), (b"\0\1\2", 1, "is binary"),
        (gzip.compress(b"x"), 1, "is binary"), (b'{"type": 3}\n', 1, "of no known kind"),
        (b"NVIDIA-SMI has failed because it couldn't communicate", 4, "nvidia-smi said"),
        (b"timestamp, index, utilization.gpu [%]\n1, 2\n", 1, "cells under"),
        (b"<nvidia_smi_log><gpu>", 1, "not well-formed"),
        (b'<!DOCTYPE a [<!ENTITY b "c">]><nvidia_smi_log/>', 1, "entities"),
    ):  # fmt: skip
        path = tmp_path / "x"
        path.write_bytes(content)
        done = mmctl("probe", str(path))
        assert done.returncode == code and said in done.stderr, (content, done.stderr)
        assert done.stderr.startswith("mmctl: error: ") and done.stderr.count("\n") == 1
    assert mmctl("probe", str(tmp_path)).returncode == 4


def damaged(chooser: random.Random, seeds: list[bytes]) -> Iterator[bytes]:
    """One seed after another with a few cuts, flips, repeats, extreme numbers and splices."""
    extremes = [
        b"-1", b"0", b"1e309", b"NaN", b"18446744073709551615", b"9" * 400, b"\xff\xfe", b"{", b"}",
        b"[" * 200, b'"', b"\\", b"\n", b"|", b",", b"\0", "é漢".encode(), b"<", b"&amp;", b"N/A",
        b"[N/A]", b" : ", b"\t", b"0x", b"%s", b"None",
    ]  # fmt: skip
    while True:
        content = bytearray(chooser.choice(seeds))
        for _ in range(chooser.randint(1, 4)):
            if not content:
                break
            at = chooser.randrange(len(content))
            end = min(at + chooser.randint(1, 40), len(content))
            kind = chooser.randrange(7)
            if kind == 0:
                content[at] = chooser.randrange(256)
            elif kind == 1:
                del content[at:end]
            elif kind == 2:
                content[at:at] = chooser.choice(extremes)
            elif kind == 3:
                content[at:end] = chooser.choice(extremes)
            elif kind == 4:
                content[at:at] = content[at:end] * chooser.randint(1, 8)
            elif kind == 5:
                del content[at:]
            else:
                other = chooser.choice(seeds)
                content[at:end] = other[at % len(other) :][:80]
        yield bytes(content)


def attempt(content: bytes) -> None:
    """Read as a file would be; only a message for the user may come of damage."""
    if content.startswith(b'{"type"'):
        with contextlib.suppress(MmctlError):
            list(recording.decode_lines(content.splitlines(keepends=True), "x"))
        return
    try:
        records = files.read(content.decode("utf-8-sig", "replace"), "x", 0)
    except MmctlError:
        return
    for record in records:
        if isinstance(record, (Device, Link, Serving)):
            for name in ("sm_ratio", "bandwidth_ratio", "kv_ratio"):
                share = getattr(record, name, None)
                assert share is None or 0 <= share <= 1, (name, share)


def test_damage_of_any_kind_ends_in_a_message(tmp_path: Path) -> None:
    """100,000 inputs from a fixed seed; MMCTL_FUZZ asks for more."""
    chooser = random.Random(20260410)
    seeds = [(FIXTURES / name).read_bytes() for name in NAMES]
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    inputs = damaged(chooser, seeds)
    for number in range(int(os.environ.get("MMCTL_FUZZ", "100000"))):
        content = next(inputs)
        try:
            attempt(content)
        except Exception as error:
            (tmp_path / "input").write_bytes(content)
            raise AssertionError(f"input {number}: {error!r}: {content[:300]!r}") from error
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown < 200 * 1024, f"{grown >> 10} MiB more"
