"""``mmctl probe snapshot``: every format against golden output, errors, heatmaps, messages.

The file is written by the allocator model's own recorder. ``MMCTL_UPDATE_GOLDEN=1`` rewrites
the golden files.
"""

from __future__ import annotations

import csv
import io
import json
import os
import pickle
import subprocess
import xml.etree.ElementTree as ET
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mmctl.benchmarks.recorder import MIB, Recorder, dump
from mmctl.engine.memory.allocator import OutOfMemory
from mmctl.engine.memory.settings import Settings

GOLDEN = Path(__file__).with_name("golden")
UPDATE = "MMCTL_UPDATE_GOLDEN" in os.environ  # read now: tests run in a clean environment
Run = Callable[..., subprocess.CompletedProcess[str]]


def fragmented() -> Recorder:
    """Text pins what vision left: 48 MiB free in holes of 8 MiB, and 40 MiB asked."""
    recorder = Recorder(capacity=96 * MIB)
    recorder.free(recorder.malloc(60 * MIB, kind="vision"))
    images = []
    for _ in range(6):
        images.append(recorder.malloc(8 * MIB, kind="vision"))
        recorder.malloc(2 * MIB, kind="text")
    for block in images:
        recorder.free(block)
    with pytest.raises(OutOfMemory):
        recorder.malloc(40 * MIB, kind="vision")
    return recorder


@pytest.fixture(scope="module")
def false_free(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return dump(tmp_path_factory.mktemp("pool") / "pool.pickle", fragmented().snapshot())


@pytest.mark.parametrize("form", ["table", "json", "ndjson", "csv"])
def test_golden_output(form: str, false_free: Path, mmctl: Run) -> None:
    done = mmctl("probe", "snapshot", "pool.pickle", "-o", form, cwd=false_free.parent)
    assert (done.returncode, done.stderr) == (3, "")
    golden = GOLDEN / f"snapshot.{form}"
    if UPDATE:
        golden.write_text(done.stdout, newline="")
    assert done.stdout == golden.read_bytes().decode()


def test_the_document_keeps_its_contract(false_free: Path, mmctl: Run) -> None:
    found = json.loads(mmctl("probe", "snapshot", str(false_free), "-o", "json").stdout)
    assert {"schema", "file", "era", "devices", "replay", "oom", "what_if", "lint"} <= set(found)
    (device,) = found["devices"]
    assert {
        "device", "reserved_bytes", "allocated_bytes", "active_bytes", "pending_bytes",
        "free_bytes", "releasable_bytes", "largest_free_bytes", "fragmentation_ratio", "segments",
        "blocks", "pools", "modalities", "stranded_bytes", "conflict_ratio", "pages",
    } <= set(device)  # fmt: skip
    assert set(device["modalities"]) == {"vision", "text", "other"}
    assert set(device["stranded_bytes"]) == {"vision", "text"}
    assert set(device["pages"]) == {"used", "partial", "free"}
    assert found["replay"]["exact"] == found["replay"]["allocs"] == 13
    (error,) = found["oom"]
    assert error["cause"] == "false_free"
    assert error["requested_bytes"] == 40 * MIB
    assert error["short_bytes"] == 4 * MIB
    assert error["avoided_by"] == ["mmctl:lifetime_pool:True", "mmctl:pool_per_modality:True"]
    assert "(torch has no such setting)" in error["explanation"]
    assert "expandable_segments" not in error["explanation"]  # its replay failed as well
    for outcome in found["what_if"]:
        assert {
            "setting", "capacity_bytes", "peak_reserved_bytes", "peak_reserved_spread",
            "largest_free_at_peak_bytes", "device_allocs", "oom",
        } <= set(outcome)  # fmt: skip
    in_force = [one for one in found["what_if"] if one["in_force"]]
    assert [one["oom"] for one in in_force] == [True]


def test_text_strands_what_vision_left(false_free: Path, mmctl: Run) -> None:
    done = mmctl("probe", "snapshot", str(false_free), "-o", "json", "--no-what-if")
    (device,) = json.loads(done.stdout)["devices"]
    assert device["modalities"]["text"] == 12 * MIB
    assert device["stranded_bytes"] == {"vision": 0, "text": 48 * MIB}
    assert device["conflict_ratio"] > 0.4
    assert device["pins"][0]["modality"] == "text"
    timeline = device["timeline"]
    assert max(timeline["vision_bytes"]) == 60 * MIB
    assert timeline["text_bytes"][-1] == 12 * MIB
    assert timeline["seconds"] == sorted(timeline["seconds"])


def test_a_moment_and_other_settings(false_free: Path, mmctl: Run) -> None:
    done = mmctl(
        "probe", "snapshot", str(false_free), "-o", "json", "--at", "16", "--capacity", "1GiB",
        "--conf", "expandable_segments:True,max_split_size_mb:128", "--conf", "",
    )  # fmt: skip
    found = json.loads(done.stdout)
    assert found["devices"][0]["modalities"]["vision"] > 0
    settings = [one["setting"] for one in found["what_if"]]
    assert settings == ["default", "expandable_segments:True,max_split_size_mb:128"]
    assert not any(one["oom"] for one in found["what_if"])
    assert {one["kind"] for one in found["lint"]} == {"conflict", "in_force"}


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("--conf", "expandable_segment:True"), 2, "did you mean 'expandable_segments'"),
        (("--conf", "max_split_size_mb:5"), 2, "at least 20"),
        (("--capacity", "16"), 2, "no unit"),
        (("--heatmap", "map.gif"), 2, ".svg or .png"),
        (("--at", "100000"), 2, "the trace has entries 0 to 28 (device 0)"),
        (("--max-entries", "3"), 1, "--max-entries"),
        (("--max-size", "10B"), 1, "--max-size"),
    ],
)  # fmt: skip
def test_errors_say_what_to_do(
    arguments: tuple[str, ...], code: int, words: str, false_free: Path, mmctl: Run
) -> None:
    done = mmctl("probe", "snapshot", str(false_free), *arguments)
    assert (done.returncode, done.stdout) == (code, "")
    assert words in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_hostile_file_is_one_line(tmp_path: Path, mmctl: Run) -> None:
    path = tmp_path / "evil.pickle"
    path.write_bytes(b"\x80\x04cos\nsystem\n\x8c\x04true\x85R.")
    done = mmctl("probe", "snapshot", str(path))
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == (
        f"mmctl: error: {path} was refused: it asks for the Python object os.system\n"
    )


def test_standard_input_takes_a_snapshot_or_a_log(false_free: Path, mmctl: Run) -> None:
    with open(false_free, "rb") as file:
        done = mmctl("probe", "snapshot", "-", "-o", "json", "--no-what-if", stdin=file)
    assert json.loads(done.stdout)["file"] == "-"
    log = (
        "INFO ok\ntorch.OutOfMemoryError: CUDA out of memory. Tried to allocate 48.00 MiB. GPU 0 "
        "has a total capacity of 23.65 GiB of which 43.00 MiB is free. Including non-PyTorch "
        "memory, this process has 23.60 GiB memory in use. Of the allocated memory 22.20 GiB is "
        "allocated by PyTorch, and 371.00 MiB is reserved by PyTorch but unallocated. If reserved"
    )
    done = mmctl("probe", "snapshot", "-", "-o", "json", input=log)
    (error,) = json.loads(done.stdout)["oom"]
    assert (done.returncode, error["device"], error["cause"]) == (3, 0, "false_free")
    assert error["absent"]["largest_free_bytes"] == "not in the message"


def test_heatmaps(false_free: Path, tmp_path: Path, mmctl: Run) -> None:
    svg = tmp_path / "map.svg"
    done = mmctl("probe", "snapshot", str(false_free), "--no-what-if", "-q", "--heatmap", str(svg))
    assert (done.returncode, done.stderr) == (3, "")
    cells = [one for one in ET.parse(svg).iter() if one.tag.endswith("title")]
    assert max(float((one.text or "").split()[-1]) for one in cells) > 0.4
    pytest.importorskip("PIL")
    png = svg.with_suffix(".png")
    mmctl("probe", "snapshot", str(false_free), "--no-what-if", "--heatmap", str(png))
    assert png.read_bytes().startswith(b"\x89PNG")


def test_real_messages_have_the_causes_of_their_figures(data: Path, mmctl: Run) -> None:
    done = mmctl("probe", "snapshot", str(data / "oom_messages.jsonl"), "-o", "csv")
    causes = [row["cause"] for row in csv.DictReader(io.StringIO(done.stdout))]
    assert causes == ["capacity", "split_free", "split_free", "unexplained"]


def test_the_one_real_error_is_capacity(data: Path, mmctl: Run) -> None:
    path = data / "snapshots" / "oom_expandable_no_frames.pickle"
    done = mmctl("probe", "snapshot", str(path), "-o", "json", "--no-what-if")
    (error,) = json.loads(done.stdout)["oom"]
    assert (done.returncode, error["cause"], error["device"]) == (3, "capacity", 1)
    assert error["short_bytes"] / 2**30 == pytest.approx(4.7, abs=0.05)
    (burst,) = error["warnings"]
    assert (burst["events"], burst["allocations_before"]) == (6, 1)
    assert "release burst" in error["explanation"]


FIGURES = {
    "verl_megatron_vllm_pools": (127, 638, 24_976, 23_762),
    "sd_img2img_two_gpu": (499, 2_974, 15_484, 8_152),
    "kivi_kvcache_llama": (259, 868, 16_340, 15_638),
    "flexgen_oom_2023": (176, 463, None, None),
    "flexgen_opt1.3b_2023": (266, 791, None, None),
}


@pytest.mark.parametrize("name", FIGURES)
def test_states_of_real_snapshots(name: str, data: Path, mmctl: Run) -> None:
    path = data / "snapshots" / f"{name}.pickle"
    found: dict[str, Any] = json.loads(
        mmctl("probe", "snapshot", str(path), "-o", "json", "--no-what-if").stdout
    )
    (device,) = found["devices"]
    segments, blocks, reserved, allocated = FIGURES[name]
    assert (device["segments"], device["blocks"]) == (segments, blocks)
    if reserved is not None:
        assert round(device["reserved_bytes"] / MIB) == reserved
        assert round(device["allocated_bytes"] / MIB) == allocated
    assert found["replay"] is None
    assert found["replay_absent"]


def test_lint_of_what_a_snapshot_had_in_force(tmp_path: Path, mmctl: Run) -> None:
    recorder = Recorder(Settings(expandable_segments=True, max_split_bytes=128 * MIB))
    recorder.malloc(64 * MIB)
    path = dump(tmp_path / "conflict.pickle", recorder.snapshot())
    found = json.loads(mmctl("probe", "snapshot", str(path), "-o", "json").stdout)
    assert [one["kind"] for one in found["lint"]] == ["conflict"]
    assert "grows with every cycle" in found["lint"][0]["message"]


def test_a_bare_list_of_segments(tmp_path: Path, mmctl: Run) -> None:
    path = tmp_path / "bare.pickle"
    path.write_bytes(pickle.dumps(fragmented().snapshot()["segments"], 2))
    done = mmctl("probe", "snapshot", str(path), "-o", "json")
    found = json.loads(done.stdout)
    assert (done.returncode, found["replay"]) == (3, None)
    assert found["devices"][0]["pools"][0]["false_free"] is True


def test_benchmark_prints_the_published_peaks(mmctl: Run) -> None:
    done = mmctl("benchmark", "pool", "--pairs", "100", "-o", "json")
    found = json.loads(done.stdout)
    assert done.returncode == 0
    assert len(found["published"]) == 6
    assert all(row["equal"] for row in found["published"])
    assert [row["pool"] for row in found["pools"]] == [
        "default", "expandable_segments", "lifetime_pool",
    ]  # fmt: skip
    assert found["bound"]["published_pairs_factor"] == 1.82
    assert found["bound"]["basis"] == "modelled"
    assert found["bound"]["pairs_factor"] >= max(row["pairs_factor"] for row in found["pools"])


def test_settings_that_help_are_named_with_the_variable_that_sets_them() -> None:
    from mmctl.engine.memory.causes import Figures, explain

    figures = Figures(
        need_bytes=40 * MIB, segment_bytes=40 * MIB, free_bytes=48 * MIB, all_free_bytes=48 * MIB,
        pending_bytes=0, device_free_bytes=36 * MIB, other_process_bytes=0, releasable_bytes=0,
        largest_free_bytes=8 * MIB,
    )  # fmt: skip
    helped = ["expandable_segments:True", "max_split_size_mb:256", "mmctl:lifetime_pool:True"]
    said = explain(figures, "false_free", None, {}, helped, helped)
    assert (
        "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True or max_split_size_mb:256 or the" in said
    )
    assert "the modelled mmctl:lifetime_pool:True (torch has no such setting)" in said
