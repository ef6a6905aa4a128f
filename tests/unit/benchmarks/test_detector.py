"""The detector: windows and their truth, training, the exported graph, the two servers."""

from __future__ import annotations

import random
import struct
from collections.abc import Iterator

import numpy as np
import pytest

from mmctl.benchmarks.detector import windows
from mmctl.benchmarks.detector.windows import FEATURES, SAMPLES, Series
from mmctl.engine import profiles
from mmctl.engine.errors import MmctlError, UsageError
from mmctl.engine.records import AnyRecord, Event, Fits, Pool, Serving

START, STEP = 10**18, 10**8
CAPACITY = 2**28


def records(count: int, seed: int) -> Iterator[AnyRecord]:
    """A pool in which every image of more than 2,048 tokens finds no room; in the next reading
    memory is then out."""
    draw = random.Random(seed)
    for number in range(count):
        now = START + number * STEP
        large = draw.random() < 0.1
        yield Pool(
            ts_ns=now, node="n", device="gpu0", reserved_bytes=CAPACITY, allocated_bytes=2**27,
            free_bytes=2**27, largest_free_bytes=2**24, releasable_bytes=0,
            capacity_bytes=CAPACITY, device_free_bytes=0, fragmentation_ratio=0.875,
            vision_tokens=draw.randint(3500, 4000) if large else draw.randint(100, 300),
            fits=Fits(fits=not large, allocations=1, peak_bytes=1),
        )  # fmt: skip
        yield Serving(ts_ns=now, node="n", engine="e", instance="i", running=number % 5)
        if large:
            yield Event(ts_ns=now + STEP, node="n", device="gpu0", what="oom")


def made(count: int = 300, seed: int = 0, horizon_s: float = 0.1) -> Series:
    profile = profiles.load(None).profile
    (one,) = windows.series(records(count, seed), profile, horizon_s, f"r{seed}", f"f{seed}")
    return one


def test_a_window_ends_with_its_reading_and_knows_what_came_after() -> None:
    one = made(200)
    seen = one.windows()
    assert seen.shape == (200, SAMPLES, len(FEATURES))
    tokens = FEATURES.index("vision_tokens")
    large = seen[:, -1, tokens] > 2048 / 4096
    assert 5 < large.sum() < 60
    assert (one.conflict == large).all()
    # With a horizon of one step, what is out in the next reading is what did not fit in this.
    assert (one.oom == large).all()
    ahead = made(200, horizon_s=0.3).oom
    assert (ahead == large | np.append(large[1:], False) | np.append(large[2:], [False] * 2)).all()


def test_what_a_recording_does_not_have_is_not_zero() -> None:
    bare = Pool(
        ts_ns=1, device="gpu0", reserved_bytes=2**20, allocated_bytes=2**19, free_bytes=2**19,
        largest_free_bytes=2**19, releasable_bytes=0, fragmentation_ratio=0.0,
    )  # fmt: skip
    row = dict(zip(FEATURES, windows.reading(bare, None), strict=True))
    assert row["running"] == row["vision_tokens"] == row["device_free_ratio"] == windows.ABSENT
    assert row["allocated_ratio"] == 0.5
    assert row["known_ratio"] == pytest.approx(8 / 15)


def test_recordings_held_back_are_not_learned_from() -> None:
    pytest.importorskip("torch", reason="needs the extra 'torch'")
    pytest.importorskip("onnxruntime", reason="needs the extra 'onnx'")
    from mmctl.benchmarks.detector import measure

    learned, held = measure.divided([made(seed=n) for n in range(4)])
    assert [one.name for one in learned] == ["r0", "r1"]
    assert [one.name for one in held] == ["r2", "r3"]
    (first,), (rest,) = measure.divided([made(300)])
    assert len(first.conflict) == 200 and len(rest.conflict) == 100
    assert (rest.windows()[-1] == made(300).windows()[-1]).all()
    with pytest.raises(MmctlError, match="too few"):
        measure.divided([made(150)])
    with pytest.raises(MmctlError, match="no 'pool' record"):
        measure.divided([])

    taken = measure.takes(("fragmentation", "burst:4"))
    assert {take.family for take in taken if not take.held} == {"calm", "burst", "leak"}
    assert {"fragmentation", "burst:4"} <= {take.family for take in taken if take.held}
    assert not {take[:4] for take in taken if take.held} & {t[:4] for t in taken if not t.held}
    with pytest.raises(UsageError, match="did you mean 'burst'"):
        measure.takes(("brust",))
    with pytest.raises(UsageError, match="none is left"):
        measure.takes(("burst", "leak", "fragmentation"))


@pytest.fixture(scope="module")
def trained():
    pytest.importorskip("torch", reason="needs the extra 'torch'")
    import torch

    from mmctl.benchmarks.detector import network

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield network.train([made(400, seed=n) for n in (0, 1)], epochs=60)
    torch.set_num_threads(before)


def test_it_learns_what_decides(trained) -> None:
    import torch

    held = made(seed=9)
    said = trained(torch.from_numpy(held.windows().copy())).numpy() > 0
    assert (said[:, 0] == held.conflict).mean() > 0.95
    assert said[held.conflict, 0].mean() > 0.8


def test_the_exported_graph_says_what_the_network_says(trained, tmp_path) -> None:
    pytest.importorskip("onnx", reason="needs the extra 'onnx'")
    import onnx
    import torch

    from mmctl.benchmarks.detector import export

    seen = np.ascontiguousarray(made(seed=5).windows())
    expected = trained(torch.from_numpy(seen)).sigmoid().numpy()
    weights = trained.weights()
    plain = export.graph(weights)
    assert abs(export.probabilities(plain, seen) - expected).max() < 1e-5
    half = export.graph(weights, half=True)
    assert abs(export.probabilities(half, seen) - expected).max() < 0.05
    int8 = export.quantized(weights, seen, seen, tmp_path)
    kinds = [node.op_type for node in int8.graph.node]
    assert kinds.count("DequantizeLinear") > 5
    said = export.probabilities(int8, seen) > 0.5
    assert (said == (expected > 0.5)).mean() > 0.95
    shape = export.fixed(int8, 32).graph.input[0].type.tensor_type.shape
    assert [one.dim_value for one in shape.dim] == [32, SAMPLES, len(FEATURES)]

    names = export.write(tmp_path, {"int8": {"batch": int8, 32: export.fixed(int8, 32)}})
    assert all((tmp_path / name).stat().st_size for name in names)
    for name in names:
        if name.endswith(".onnx"):
            onnx.checker.check_model(onnx.load(tmp_path / name), full_check=True)
    config = (tmp_path / "triton/memory_conflict_int8/config.pbtxt").read_text()
    assert "max_batch_size: 32" in config and "dynamic_batching" in config
    assert config.count("{") == config.count("}")
    opened = onnx.load(tmp_path / "triton/memory_conflict_int8/1/model.onnx")
    assert opened.graph.input[0].type.tensor_type.shape.dim[0].dim_param == "batch"
    parameters = sum(p.numel() for p in trained.parameters())
    assert parameters < export.flops()  # a convolution uses its weights more than once


@pytest.mark.parametrize("mode", ["naive", "batched"])
def test_each_client_gets_the_answer_to_its_own_window(trained, tmp_path, mode: str) -> None:
    pytest.importorskip("onnxruntime", reason="needs the extra 'onnx'")
    from mmctl.benchmarks.detector import export, serving

    model = export.graph(trained.weights())
    path = tmp_path / "m.onnx"
    path.write_bytes(model.SerializeToString())
    seen = np.ascontiguousarray(made(seed=3).windows()[: 2 * serving.CLIENTS])
    expected = export.probabilities(model, seen)
    told: list[str] = []
    with serving.serve(path, mode, told) as clients:
        for start in (0, serving.CLIENTS):
            part = range(start, start + serving.CLIENTS)
            for number, client in zip(part, clients, strict=True):
                client.sendall(seen[number].tobytes())
            for number, client in zip(part, clients, strict=True):
                answer = struct.unpack("2f", client.recv(8))
                assert answer == pytest.approx(expected[number], abs=1e-5)
    requests, calls = map(int, told[0].split())
    assert requests == 2 * serving.CLIENTS
    assert calls == requests if mode == "naive" else calls < requests


def test_agreement_counts_each_recording_once() -> None:
    pytest.importorskip("torch", reason="needs the extra 'torch'")
    pytest.importorskip("onnxruntime", reason="needs the extra 'onnx'")
    from mmctl.benchmarks.detector.measure import agreement

    held = [made(seed=n) for n in (0, 1)]
    right = [np.stack([one.conflict, one.oom], 1) for one in held]
    silent = [np.zeros_like(answer) for answer in right]
    rows = {
        (row["precision"], row["target"], row["family"]): row
        for row in agreement(held, {"fp32": right, "int8": silent})
    }
    assert rows["fp32", "rules", "all"]["agreement_ratio"] == 1
    assert rows["fp32", "rules", "f0"]["recordings"] == 1
    lost = rows["int8", "rules", "all"]
    assert lost["agreement_ratio"] == pytest.approx(lost["never_ratio"])
    assert lost["never_ratio"] < 1 and lost["recall_ratio"] == 0
    assert lost["precision_ratio"] is None
    assert lost["points_from_fp32"] == pytest.approx(100 * (lost["never_ratio"] - 1))
    low, high = lost["agreement_ci_ratio"]
    assert low <= lost["agreement_ratio"] <= high
