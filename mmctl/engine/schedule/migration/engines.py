"""What runs a frozen step: torch on one of its devices, OpenVINO or onnxruntime, in float32.

An engine is named ``torch:cpu``, ``torch:cuda:0``, ``openvino:cpu``, ``onnxruntime:cpu``. It
holds the KV cache of one decode where it computes, and gives and takes rows of it as numpy
arrays ``[2 * layers, rows, width]``.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING, Protocol

from mmctl.engine.errors import MissingExtraError, UsageError, suggestion
from mmctl.engine.schedule.migration import onnx_form
from mmctl.engine.schedule.migration.graph import Graph, rebuild

if TYPE_CHECKING:
    from numpy import ndarray

_EXTRAS = {"torch": "torch", "openvino": "openvino", "onnxruntime": "onnx"}
PROVIDERS = {"cpu": "CPUExecutionProvider", "cuda": "CUDAExecutionProvider"}


class Engine(Protocol):
    """A rebuilt step and the KV cache that it attends to."""

    def open(self, capacity: int, cross: list[ndarray]) -> None:
        """Room for ``capacity`` tokens, and a request's vision tokens."""

    def step(self, token: int, past: int) -> tuple[ndarray, ndarray]:
        """Run ``token`` behind the first ``past`` rows: logits ``[vocabulary]`` and the token's
        own row, which is not written."""

    def write(self, start: int, rows: ndarray) -> None:
        """Put ``rows`` into the cache from ``start`` on."""

    def read(self, start: int, end: int) -> ndarray:
        """Rows ``start`` to ``end`` of the cache; not to be changed."""


def split(name: str) -> tuple[str, str]:
    """Engine and device of ``torch:cuda:0``; UsageError for an unknown engine."""
    engine, _, device = name.partition(":")
    if engine not in _EXTRAS:
        known = ("torch:cpu", "torch:cuda:0", "openvino:cpu", "onnxruntime:cpu")
        raise UsageError(f"unknown engine '{name}': {', '.join(known)}{suggestion(name, known)}")
    return engine, device.lower() or "cpu"


def is_engine(name: str) -> bool:
    """Whether ``name`` is an engine's, such as ``torch:cpu``."""
    return name.partition(":")[0] in _EXTRAS


def kind(name: str) -> tuple[str, str]:
    """What two places must share to be of one kind: the engine, and the kind of its device."""
    engine, device = split(name)
    return engine, device.partition(":")[0]


def require(name: str) -> None:
    """MissingExtraError when the engine is not installed."""
    engine, _ = split(name)
    if find_spec(engine) is None:
        raise MissingExtraError(f"running a decode on {engine}", _EXTRAS[engine])
    if engine == "openvino" and find_spec("onnx") is None:
        raise MissingExtraError("rebuilding the graph for openvino", "onnx")


def build(name: str, graph: Graph, weights: dict[str, ndarray], threads: int) -> Engine:
    """The engine ``name`` with the step rebuilt, ready but for a cache."""
    require(name)
    engine, device = split(name)
    if engine == "torch":
        return TorchEngine(graph, weights, device, threads)
    model = onnx_form.encode(graph, weights)
    if engine == "openvino":
        return OpenVinoEngine(graph, model, device, threads)
    return OnnxRuntimeEngine(graph, model, device, threads)


class TorchEngine:
    """The step as a torch module; cache and weights are on the device."""

    def __init__(
        self, graph: Graph, weights: dict[str, ndarray], device: str, threads: int
    ) -> None:
        import torch

        torch.set_num_threads(threads)
        self.graph, self.device = graph, device
        self._step = rebuild(graph, weights, device)

    def open(self, capacity: int, cross: list[ndarray]) -> None:
        """Make room for ``capacity`` tokens, with the vision tokens' keys and values ``cross``."""
        import torch

        shape = (2 * self.graph.layers, capacity, self.graph.width)
        self._cache = torch.zeros(shape, device=self.device)
        self._cross = [torch.tensor(one, device=self.device) for one in cross]

    def step(self, token: int, past: int) -> tuple[ndarray, ndarray]:
        """Logits ``[vocabulary]`` after ``token`` at position ``past``, and its row of the cache
        ``[2 * layers, 1, width]``, which is not yet written."""
        import torch

        with torch.inference_mode():
            logits, row = self._step(
                torch.tensor([token], device=self.device),
                *(one[:past] for one in self._cache), *self._cross,
            )  # fmt: skip
            return logits.cpu().numpy(), row[:, None].cpu().numpy()

    def write(self, start: int, rows: ndarray) -> None:
        """Put rows ``[2 * layers, n, width]`` into the cache from position ``start``."""
        import torch

        held = torch.tensor(rows, device=self.device)
        self._cache[:, start : start + rows.shape[1]] = held

    def read(self, start: int, end: int) -> ndarray:
        """Rows of the cache, positions ``start`` up to ``end``, ``[2 * layers, n, width]``."""
        rows: ndarray = self._cache[:, start:end].cpu().numpy()
        return rows


class _OnHost:
    """The cache of engines that take numpy arrays where they lie."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph

    def open(self, capacity: int, cross: list[ndarray]) -> None:
        import numpy as np

        shape = (2 * self.graph.layers, capacity, self.graph.width)
        self._cache = np.zeros(shape, np.float32)
        self._cross = cross

    def write(self, start: int, rows: ndarray) -> None:
        self._cache[:, start : start + rows.shape[1]] = rows

    def read(self, start: int, end: int) -> ndarray:
        return self._cache[:, start:end]

    def _inputs(self, token: int, past: int) -> dict[str, ndarray]:
        import numpy as np

        values = [np.array([token]), *(one[:past] for one in self._cache), *self._cross]
        return dict(zip(self.graph.inputs, values, strict=True))


class OpenVinoEngine(_OnHost):
    """The step compiled by OpenVINO, held to float32 where a device would take less."""

    def __init__(self, graph: Graph, model: bytes, device: str, threads: int) -> None:
        import openvino

        super().__init__(graph)
        hints = {
            "INFERENCE_PRECISION_HINT": "f32", "EXECUTION_MODE_HINT": "ACCURACY",
            "PERFORMANCE_HINT": "LATENCY",
        }  # fmt: skip
        if device == "cpu":
            hints["INFERENCE_NUM_THREADS"] = str(threads)
        core = openvino.Core()
        compiled = core.compile_model(core.read_model(model), device.upper(), hints)
        self._request = compiled.create_infer_request()

    def step(self, token: int, past: int) -> tuple[ndarray, ndarray]:
        """Logits ``[vocabulary]`` after ``token`` at position ``past``, and its row of the cache
        ``[2 * layers, 1, width]``, which is not yet written."""
        found = self._request.infer(self._inputs(token, past), share_inputs=True)
        return found[0], found[1][:, None]


class OnnxRuntimeEngine(_OnHost):
    """The step in an onnxruntime session."""

    def __init__(self, graph: Graph, model: bytes, device: str, threads: int) -> None:
        import onnxruntime

        super().__init__(graph)
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        options.log_severity_level = 3  # what fails is raised
        name, _, number = device.partition(":")
        provider = (PROVIDERS[name], {"device_id": number or "0"} if name == "cuda" else {})
        self._session = onnxruntime.InferenceSession(model, options, providers=[provider])

    def step(self, token: int, past: int) -> tuple[ndarray, ndarray]:
        """Logits ``[vocabulary]`` after ``token`` at position ``past``, and its row of the cache
        ``[2 * layers, 1, width]``, which is not yet written."""
        logits, row = self._session.run(None, self._inputs(token, past))
        return logits, row[:, None]
