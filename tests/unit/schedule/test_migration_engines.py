"""The frozen step against the model that it was frozen from, on every engine."""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec
import numpy as np
import pytest

from mmctl.engine.schedule import migratable
from mmctl.engine.schedule.migration import engines
from mmctl.engine.schedule.migration.graph import Graph

torch = pytest.importorskip("torch")

from mmctl.engine import model as demo  # noqa: E402
from mmctl.engine.schedule.migration import graph as graphs  # noqa: E402

CONFIG = demo.Config(text_layers=2, vision_layers=1)


class Step(NamedTuple):
    """A frozen step and the model behind it."""

    model: Any
    graph: Graph
    weights: dict[str, np.ndarray]


@pytest.fixture(scope="module", params=[True, False], ids=["image", "text"])
def step(request: pytest.FixtureRequest) -> Step:
    model = demo.build(CONFIG)
    frozen, weights = graphs.freeze(model, request.param)
    # By way of JSON, as it travels.
    return Step(model, msgspec.json.decode(msgspec.json.encode(frozen), type=Graph), weights)


def inputs(past: int, vision: int) -> tuple[np.ndarray, list[np.ndarray]]:
    random = np.random.default_rng(past)
    rows = random.standard_normal((2 * CONFIG.text_layers, past, CONFIG.text_dim))
    cross = random.standard_normal((CONFIG.text_layers, 2, vision, CONFIG.text_dim))
    return rows.astype(np.float32), list(cross.astype(np.float16))


def eager(step: Step, token: int, rows: np.ndarray, cross: list[np.ndarray]) -> Any:
    """Logits and the token's own row, by the model's own decode."""
    cache = demo.KvCache(CONFIG, "cpu")
    held = [torch.tensor(one) for one in rows]
    cache.keys, cache.values = held[: CONFIG.text_layers], held[CONFIG.text_layers :]
    cache.length = past = rows.shape[1]
    vision = demo.in_float32([torch.tensor(one) for one in cross]) if cross else None
    with torch.inference_mode():
        logits = step.model.decode(torch.tensor([token]), cache, vision)
    new = [one[past : past + 1].numpy() for one in (*cache.keys, *cache.values)]
    return logits.numpy(), np.stack(new)


@pytest.mark.parametrize("name", ["torch:cpu", "openvino:cpu", "onnxruntime:cpu"])
def test_the_step_is_the_models(step: Step, name: str) -> None:
    pytest.importorskip(name.partition(":")[0])
    engine = engines.build(name, step.graph, step.weights, 1)
    for past, vision in ((3, 4), (40, 9), (41, 2)):
        rows, cross = inputs(past, vision)
        cross = cross if step.graph.cross else []
        engine.open(past + 8, cross)
        engine.write(0, rows)
        logits, row = engine.step(7, past)
        wanted, wanted_row = eager(step, 7, rows, cross)
        allowed = 1e-6 if name == "torch:cpu" else 2.3e-5
        assert np.linalg.norm(logits - wanted) < allowed
        assert row.shape == (2 * CONFIG.text_layers, 1, CONFIG.text_dim)
        assert np.linalg.norm(row - wanted_row) < allowed * 10
        assert np.array_equal(engine.read(0, past), rows)


def test_nothing_of_the_device_is_in_the_graph(step: Step) -> None:
    text = msgspec.json.encode(step.graph).decode()
    assert "cpu" not in text and "cuda" not in text and "0x" not in text
    assert not any("vision" in name for name in step.weights)  # the encoder stays


def test_engines_by_name() -> None:
    assert engines.split("torch:cuda:1") == ("torch", "cuda:1")
    assert engines.split("openvino") == ("openvino", "cpu")
    assert engines.kind("torch:cuda:0") == engines.kind("torch:cuda:1")
    assert engines.kind("torch:cpu") != engines.kind("openvino:cpu")
    with pytest.raises(migratable.UsageError, match="did you mean 'torch:cpu'"):
        engines.split("troch:cpu")
