"""``mmctl benchmark links``: the contract's fields, files of every kind, mistakes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

TOPOLOGY = """\tGPU0\tGPU1\tCPU Affinity\tNUMA Affinity
GPU0\t X \tNV12\t0-23\t0
GPU1\tNV12\t X \t0-23\t0
"""


def table(path: Path) -> Path:
    rows = [
        f"A100,alltoall,half,2,{2**n},{(10 + 0.004 * 2 * 2**n / 1024) / 1e3}" for n in range(8, 28)
    ]
    path.write_text("\n".join(["device,op_name,nccl_dtype,num_gpus,message_size,latency", *rows]))
    return path


def test_the_contract_from_a_table_and_a_topology(mmctl, tmp_path: Path) -> None:
    topology = tmp_path / "topo.txt"
    topology.write_text(TOPOLOGY)
    done = mmctl("benchmark", "links", str(table(tmp_path / "n.csv")), str(topology), "-o", "json")
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    (fit,) = document["fits"]
    assert fit["link_class"] == "NV12" and fit["ranks"] == 2
    assert fit["intercept_us"] == pytest.approx(10) and fit["us_per_kib"] == pytest.approx(0.004)
    assert fit["numa_us"] is None and fit["absent"]["numa_us"] and fit["r2"] == pytest.approx(1)
    assert document["schema"] == 1 and document["mape"] < 1e-6 and document["mape_small"] < 1e-6
    assert document["outliers"] == [] and len(document["buckets"]) >= 5
    assert document["published"]["r2"] == pytest.approx(1)
    assert document["published"]["constants_mape"] > 0.5


def test_every_format(mmctl, tmp_path: Path) -> None:
    path = str(table(tmp_path / "n.csv"))
    assert "held out" in mmctl("benchmark", "links", path).stdout
    (row,) = mmctl("benchmark", "links", path, "-o", "ndjson").stdout.splitlines()
    assert json.loads(row)["operation"] == "alltoall"
    assert mmctl("benchmark", "links", path, "-o", "csv").stdout.count("\n") == 2


def test_mistakes_are_one_line(mmctl, tmp_path: Path) -> None:
    odd = tmp_path / "odd.csv"
    odd.write_text("a,message_size\n1,2\n")
    text = tmp_path / "x.txt"
    text.write_text("hello\n")
    path = str(table(tmp_path / "n.csv"))
    for arguments, code, said in (
        ([str(odd)], 1, "lacks the columns"), ([str(text)], 1, "of no known kind"),
        ([str(tmp_path / "none")], 4, "no such file"), ([str(tmp_path)], 4, "folder"),
        ([path, "--operation", "all_reduce"], 2, "alltoall"), (["--ranks", "1"], 2, "two ranks"),
        (["--backend", "mpi"], 1, "no backend 'mpi'"),
    ):  # fmt: skip
        done = mmctl("benchmark", "links", *arguments)
        assert done.returncode == code and said in done.stderr, (arguments, done.stderr)
        assert done.stderr.startswith("mmctl: error: ") and done.stderr.count("\n") == 1


def test_measured_between_two_processes(mmctl) -> None:
    pytest.importorskip("torch", reason="needs the extra 'torch'")
    done = mmctl("benchmark", "links", "--quick", "--ranks", "2", "-o", "json")
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert document["backend"] == "gloo" or document["fits"][0]["link_class"] != "loopback"
    assert document["environment"]["cores"] >= 1
    assert [row["size_bytes"] for row in document["points"]] == [1024 * 2**n for n in range(13)]
    for row in document["points"]:
        assert 0 < row["latency_us_low"] <= row["latency_us"] <= row["latency_us_high"]
        assert len(row["latency_us_blocks"]) == 8 and row["runs"] >= 32
    assert {fit["ranks"] for fit in document["fits"]} == {2}
    assert set(document["absent"]) <= {"nccl", "hccl"}


def test_matrices_take_their_classes_from_a_topology(mmctl, data: Path) -> None:
    files = [
        data / "p2p/rtx4090_6gpu_phb_sys_p2p.txt",
        data / "topo/rtx4090_8gpu_pix_sys_mlx5bond.txt",
    ]
    done = mmctl("benchmark", "links", *map(str, files), "-o", "json")
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert {fit["link_class"] for fit in document["fits"]} == {"PIX", "SYS"}
    for fit in document["fits"]:
        assert fit["operation"] == "pair" and fit["intercept_us"] is None
        assert "no latency" in fit["absent"]["intercept_us"]
        assert fit["us_per_kib"] == pytest.approx(1024 / 10e9 * 1e6, rel=0.05)
    assert document["mape"] < 0.05 and document["r2"] is None
