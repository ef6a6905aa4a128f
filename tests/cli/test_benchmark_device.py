"""``mmctl benchmark device``, ``stages`` and ``compare``: contracts, formats, mistakes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest


def test_published_figures_need_no_device(mmctl) -> None:
    done = mmctl("benchmark", "device", "--published", "-o", "json")
    rows = json.loads(done.stdout)["devices"]
    assert all(row["source"] and row["basis"] == "published" for row in rows)
    (claimed,) = [r for r in rows if r["device"] == "ascend310p" and r["precision"] == "int8"]
    assert claimed["claimed_tops_per_w"] == 36.7
    assert claimed["peak_tops_per_w"] == pytest.approx(140 / 72)


def test_devices_are_measured_and_what_is_absent_says_why(mmctl, tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="needs the extra 'torch'")
    done = mmctl("benchmark", "cpu0", "--quick", "--threads", "1", "-o", "json")
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert document["schema"] == 1 and document["environment"]["threads"] == 1
    rows = {row["precision"]: row for row in document["devices"]}
    assert set(rows) == {"fp32", "bf16", "fp16", "int8"}
    for row in rows.values():
        for field in ("flops_per_s", "peak_flops_per_s", "achieved_ratio", "power_w", "tops_per_w"):
            assert (row[field] is None) == (field in row["absent"]), (field, row)
        assert row["bandwidth_bytes_per_s"] > 0 and row["basis"] == "measured"
        assert bool(row["joules_per_token"]) != ("joules_per_token" in row["absent"])
    fp32 = rows["fp32"]
    assert fp32["flops_per_s_low"] <= fp32["flops_per_s"] <= fp32["flops_per_s_high"]
    assert {"mps", "cuda"} & set(document["absent"])
    path = tmp_path / "a.json"
    path.write_text(done.stdout)
    compared = mmctl("benchmark", "compare", str(path), str(path), "-o", "json")
    assert compared.returncode == 0, compared.stderr
    assert {row["verdict"] for row in json.loads(compared.stdout)["figures"]} == {"same"}


def result(path: Path, values: dict[str, list[float]], **more: object) -> str:
    figures = [
        {"figure": name, "blocks": blocks, "better": "higher" if "per_s" in name else "lower"}
        for name, blocks in values.items()
    ]
    document = {"schema": 1, "benchmark": "device", "figures": figures, "notes": [], **more}
    path.write_text(json.dumps(document))
    return str(path)


def test_regressions_are_a_finding_and_noise_is_none(mmctl, tmp_path: Path) -> None:
    steady = [10.0, 10.1, 9.9, 10.05, 9.95]
    before = result(
        tmp_path / "a.json", {"rate_per_s": steady, "time_s": steady, "noisy_s": [1.0, 9.0, 3.0]},
        environment={"cores": 2, "versions": {"torch": "2.4"}},
    )  # fmt: skip
    after = result(
        tmp_path / "b.json",
        {"rate_per_s": [0.8 * v for v in steady], "time_s": [0.8 * v for v in steady],
         "noisy_s": [2.0, 5.0, 4.0], "new_s": steady},
        environment={"cores": 4, "versions": {"torch": "2.5"}},
    )  # fmt: skip
    done = mmctl("benchmark", "compare", before, after, "-o", "json")
    assert done.returncode == 3, done.stderr
    document = json.loads(done.stdout)
    assert {row["figure"]: row["verdict"] for row in document["figures"]} == {
        "rate_per_s": "worse", "time_s": "better", "noisy_s": "same",
    }  # fmt: skip
    assert document["only_after"] == ["new_s"] and document["regressions"] == 1
    assert "cores differs: 2 and 4" in done.stderr and "torch 2.4 before" in done.stderr
    row = document["figures"][0]
    assert row["change_factor_low"] < row["change_factor"] < row["change_factor_high"] < 1
    assert mmctl("benchmark", "compare", before, after, "--threshold", "25%").returncode == 0


def test_mistakes_are_one_line(mmctl, tmp_path: Path) -> None:
    good = result(tmp_path / "a.json", {"x_s": [1.0, 2.0]})
    other = result(tmp_path / "b.json", {"y_s": [1.0]})
    links = tmp_path / "c.json"
    links.write_text('{"schema": 1, "benchmark": "links", "figures": []}')
    bad = result(tmp_path / "d.json", {"x_s": [0.0, -1.0]})
    text = tmp_path / "e.json"
    text.write_text("hello")
    table = tmp_path / "t.csv"
    table.write_text("batch_size,isl\n1,2\n")
    for arguments, code, said in (
        (["compare", good, other], 1, "no figure in common"),
        (["compare", good, str(links)], 1, "is of benchmark device"),
        (["compare", good, bad], 1, "values above zero"),
        (["compare", good, str(text)], 1, "no result of mmctl benchmark"),
        (["compare", good, "none.json"], 1, "none.json"),
        (["compare", good, good, "--threshold", "x"], 2, "--threshold"),
        (["device", "gpu99"], 2, "no device 'gpu99'"),
        (["stages", "none.parquet"], 4, "no such file"),
        (["stages", str(table)], 1, "lacks the columns"),
        (["stages", "--device", "nonsense"], 2, "no device 'nonsense'"),
    ):  # fmt: skip
        done = mmctl("benchmark", *arguments)
        assert done.returncode == code and said in done.stderr, (arguments, done.stderr)
        assert done.stderr.startswith("mmctl: error: ") and done.stderr.count("\n") == 1


def test_stages_from_a_table(mmctl, tmp_path: Path) -> None:
    path = tmp_path / "attention.csv"
    rows = ["device,batch_size,isl,num_heads,head_dim,attn_dtype,latency"]
    for heads in (2, 4, 8, 16):
        for images in (1, 2, 4, 8):
            for patches in (256, 1024):
                units = max(images * heads, 64 if patches == 256 else 1)
                rows.append(
                    f"X,{images},{patches},{heads},72,bfloat16,{1e-4 + units * patches**2 * 1e-9}"
                )
    path.write_text("\n".join(rows))
    done = mmctl("benchmark", "stages", str(path), "-o", "json")
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    (stage,) = document["stages"]
    assert stage["stage"] == "encoder_attention" and stage["mape"] < 0.15
    assert len(stage["points"]) == 32 and stage["model"]["held_out_heads"] == [4, 16]
    batches = {row["patches"]: row["batch"] for row in document["advice"]}
    assert batches == {256: 4, 1024: 1}
    held = mmctl("benchmark", "stages", str(path), "--hold-out", "8", "-o", "json")
    assert json.loads(held.stdout)["stages"][0]["model"]["held_out_heads"] == [8]
    assert mmctl("benchmark", "stages", str(path), "--hold-out", "x").returncode == 2
    assert "Images to encode at once" in mmctl("benchmark", "stages", str(path)).stdout


def test_stages_are_measured(mmctl) -> None:
    pytest.importorskip("torch", reason="needs the extra 'torch'")
    done = mmctl("benchmark", "stages", "--quick", "-o", "json")
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    by_name = {stage["stage"]: stage for stage in document["stages"]}
    assert set(by_name) == {"vision_encode", "alignment", "cross_attn_fusion", "text_decode_step"}
    for stage in by_name.values():
        for point in stage["points"]:
            assert point["flops"] > 0 and point["bytes"] > 0
            assert point["seconds_low"] <= point["seconds"] <= point["seconds_high"]
        assert stage["model"]["overhead_s"] >= 0
    alignment = by_name["alignment"]["points"]
    assert {p["flops"] / p["shape"]["tokens"] for p in alignment} == {2 * 768 * 4096}
    assert {row["patches"] for row in document["advice"] if "batch" in row} == {64, 144, 256, 576}
