"""Cuts of a graph: known flops, what crosses, an adapting threshold, torch's own export."""

from __future__ import annotations

import json

import pytest

from mmctl.engine import profiles
from mmctl.engine.errors import MmctlError
from mmctl.engine.schedule import split
from mmctl.engine.schedule.costs import Peaks
from mmctl.engine.schedule.split import Node

PEAKS = Peaks(
    name="round", kind="gpu", flops_per_s=1e12, bandwidth_bytes_per_s=1e11,
    memory_bytes=1 << 30, link_bytes_per_s=1e9, link_latency_s=1e-5,
)  # fmt: skip


def graph() -> list[Node]:
    return [
        Node(name="patch", flops=1e9, bytes=1e6, output_bytes=1000, modality="vision"),
        Node(name="ids", flops=0, bytes=10, output_bytes=7, modality="text"),
        Node(name="vit", flops=6e9, bytes=1e6, output_bytes=500, inputs=["patch"],
             modality="vision"),
        Node(name="fuse", flops=1e9, bytes=1e6, output_bytes=50, inputs=["vit", "ids"],
             modality="text"),
        Node(name="head", flops=2e9, bytes=1e9, output_bytes=5, inputs=["fuse"], modality="text"),
    ]  # fmt: skip


def test_candidates_are_those_past_the_threshold_and_the_boundary_comes_first() -> None:
    found = split.plan(graph(), PEAKS)
    # 1, 0, 6, 1 and 10 ms (head by its bytes) of 18 in all.
    assert found.budget_s == pytest.approx(18e-3, rel=1e-3)
    assert [(c.node, c.why) for c in found.cuts] == [
        ("fuse", "vision|language"), ("vit", "threshold"), ("head", "threshold"),
    ]  # fmt: skip
    boundary, vit, head = found.cuts
    assert boundary.crossing_bytes == 500
    assert boundary.transfer_s == pytest.approx(1e-5 + 500e-9)
    assert (boundary.before_s, boundary.after_s) == pytest.approx((7e-3, 11e-3), rel=1e-3)
    assert vit.crossing_bytes == 1000 + 7 and head.crossing_bytes == 50


def test_the_threshold_adapts_both_ways() -> None:
    flat = [Node(name=f"n{i}", flops=1e9) for i in range(40)]
    found = split.plan(flat, PEAKS)
    assert found.threshold_ratio < 0.15 and all(c.cost_ratio <= 1 / 39 for c in found.cuts)
    assert len(split.plan(graph(), PEAKS, budget_s=1e-3, most=1).cuts) <= 2


def test_broken_graphs_are_told() -> None:
    for nodes, told in (
        ([{"name": "a", "inputs": ["b"]}, {"name": "b", "inputs": ["a"]}], "cycle"),
        ([{"name": "a", "inputs": ["x"]}], "no node"),
        ([{"name": "a"}, {"name": "a"}], "twice"),
        ([{"name": "a", "flops": -1}], "negative"),
        ([], "no node"),
    ):
        with pytest.raises(MmctlError, match=told):
            split.from_json(json.dumps({"nodes": nodes}).encode(), "g.json")


def test_a_torch_model_has_the_flops_of_its_products() -> None:
    torch = pytest.importorskip("torch", reason="torch (the extra) is not installed")

    class Tower(torch.nn.Module):  # type: ignore[misc,name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.vision = torch.nn.Linear(64, 32)
            self.language_model = torch.nn.Linear(32, 128)

        def forward(self, x):  # type: ignore[no-untyped-def]
            return self.language_model(torch.relu(self.vision(x)))

    patterns = profiles.load("default").profile.modality
    nodes = split.from_torch(lambda: (Tower(), (torch.zeros(10, 64),)), patterns)
    by_op = {node.name: node for node in nodes}
    first, second = by_op["linear"], by_op["linear_1"]
    assert first.flops == 2 * 10 * 64 * 32 and second.flops == 2 * 10 * 32 * 128
    assert first.bytes == 4 * (10 * 64 + 64 * 32 + 32 + 10 * 32)
    assert (first.modality, second.modality) == ("vision", "text")
    cuts = split.plan(nodes, PEAKS).cuts
    assert cuts[0].why == "vision|language" and cuts[0].crossing_bytes == 4 * 10 * 32
    assert split.to_dot(split.plan(nodes, PEAKS)).startswith("digraph")
    assert "<svg" in split.to_svg(split.plan(nodes, PEAKS))
