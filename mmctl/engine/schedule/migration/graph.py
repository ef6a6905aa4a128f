"""One decode step as a graph of plain data: frozen by ``torch.export``, rebuilt on any device.

A frozen graph names operators, never code: rebuilding one takes only operators of the list
below, none of which reads, writes or calls anything, so that a stranger's graph cannot either.
It holds no device and no address.
"""

from __future__ import annotations

import operator
import warnings
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import msgspec

from mmctl.engine.errors import MmctlError

if TYPE_CHECKING:
    import torch
    from numpy import ndarray

    from mmctl.engine.model import VisionLanguageModel

NODES_MOST = 100_000
_PYTHON = {"add": operator.add, "getitem": operator.getitem}
_ATEN = frozenset({
    "add.Tensor", "arange.default", "arange.start", "cat.default", "cos.default",
    "embedding.default", "exp.default", "flatten.using_ints", "gelu.default",
    "layer_norm.default", "linear.default", "matmul.default", "mul.Tensor", "select.int",
    "sin.default", "slice.Tensor", "softmax.int", "sym_size.int", "to.dtype", "transpose.int",
    "unbind.int", "unsqueeze.default", "view.default",
})  # fmt: skip
_MAKES_ITS_OWN = frozenset({"arange.default", "arange.start"})  # told the device when rebuilt
_CHECKS_ONLY = "_assert_tensor_metadata.default"  # names the device it was exported on
_DTYPES = frozenset({"float32", "float16", "int64", "int32"})


class Node(msgspec.Struct, frozen=True, kw_only=True):
    """One call of ``op``; in ``args`` and ``kwargs``, ``{"node": name}`` is another's result and
    ``{"dtype": name}`` a type."""

    name: str
    op: str
    args: list[Any] = []
    kwargs: dict[str, Any] = {}


class Graph(msgspec.Struct, frozen=True, kw_only=True):
    """A decode step: the token and per layer keys, values and vision tokens in; logits
    ``[vocabulary]`` and the new rows ``[2 * layers, width]`` of the cache out.

    ``inputs`` are in the order ``token``, keys, values, cross; a cross input holds keys and
    values ``[2, vision tokens, width]`` in float16. ``weights`` maps a node to its tensor.
    """

    layers: int
    width: int
    vocabulary: int
    cross: bool
    inputs: list[str]
    weights: dict[str, str]
    nodes: list[Node]
    outputs: list[str]


def freeze(model: VisionLanguageModel, cross: bool) -> tuple[Graph, dict[str, ndarray]]:
    """The graph of ``model.decode`` for one token, with the weights that it uses.

    The cache and, with ``cross``, the vision tokens may have any length.
    """
    import torch
    from torch import nn

    from mmctl.engine.model import in_float32

    class Step(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, token: Any, keys: Any, values: Any, cross: Any) -> Any:
            past: Any = _Past(keys, values)
            logits = self.model.decode(token, past, in_float32(cross) if cross else None)
            return logits, torch.cat([*past.new_keys, *past.new_values])

    config = model.config
    layers, width = config.text_layers, config.text_dim
    rows = [torch.zeros(8, width) for _ in range(2 * layers)]
    vision = [torch.zeros(2, 16, width, dtype=torch.float16) for _ in range(layers if cross else 0)]
    grows = {0: torch.export.Dim("past", min=2, max=1 << 24)}
    images = {1: torch.export.Dim("vision", min=2, max=1 << 24)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = torch.export.export(
            Step().to("cpu"),
            (torch.tensor([1]), rows[:layers], rows[layers:], vision),
            dynamic_shapes=(None, [grows] * layers, [grows] * layers, [images] * len(vision)),
        )
    return _plain(program, config.vocabulary, layers, width, cross)


class _Past:
    """What ``decode`` takes for its cache while it is exported: old rows in, new rows out."""

    def __init__(self, keys: list[torch.Tensor], values: list[torch.Tensor]) -> None:
        self.keys, self.values, self.length = keys, values, keys[0].shape[0]
        self.new_keys: list[torch.Tensor] = []
        self.new_values: list[torch.Tensor] = []

    def append(self, layer: int, keys: Any, values: Any) -> tuple[Any, Any]:
        import torch

        self.new_keys.append(keys)
        self.new_values.append(values)
        return torch.cat([self.keys[layer], keys]), torch.cat([self.values[layer], values])


def _plain(
    program: Any, vocabulary: int, layers: int, width: int, cross: bool
) -> tuple[Graph, dict[str, ndarray]]:
    parameters = {
        **program.graph_signature.inputs_to_parameters, **program.graph_signature.inputs_to_buffers
    }  # fmt: skip
    inputs: list[str] = []
    used: dict[str, str] = {}
    nodes: list[Node] = []
    outputs: list[str] = []
    for node in program.graph.nodes:
        if node.op == "placeholder":
            if node.name not in parameters:
                inputs.append(node.name)
            elif node.users:  # the vision encoder's weights stay where they are
                used[node.name] = parameters[node.name]
        elif node.op == "output":
            outputs = [one.name for one in node.args[0]]
        elif (op := _name(node.target)) != _CHECKS_ONLY:
            kwargs = {k: _told(v) for k, v in node.kwargs.items() if k not in _PLACES}
            nodes.append(Node(name=node.name, op=op, args=_told(node.args), kwargs=kwargs))
    weights = {
        name: program.state_dict[name].detach().cpu().contiguous().numpy()
        for name in used.values()
    }  # fmt: skip
    graph = Graph(
        layers=layers, width=width, vocabulary=vocabulary, cross=cross, inputs=inputs,
        weights=used, nodes=nodes, outputs=outputs,
    )  # fmt: skip
    return graph, weights


_PLACES = ("device", "pin_memory", "layout")


def _name(target: Any) -> str:
    for name, function in _PYTHON.items():
        if target is function:
            return name
    return str(target).removeprefix("aten.")


def _told(value: Any) -> Any:
    """An argument as plain data."""
    import torch

    if isinstance(value, torch.fx.Node):
        return {"node": value.name}
    if isinstance(value, (list, tuple)):
        return [_told(one) for one in value]
    if isinstance(value, torch.dtype):
        return {"dtype": str(value).removeprefix("torch.")}
    if value is None or isinstance(value, (bool, int, float)):
        return value
    raise MmctlError(f"the step cannot be frozen: an argument is a {type(value).__name__}")


def rebuild(graph: Graph, weights: dict[str, ndarray], device: str) -> torch.fx.GraphModule:
    """The step as a torch module on ``device``, called with the graph's inputs in order.

    Raises MmctlError for a graph that is none, or that asks for anything but plain operators.
    """
    import torch

    made = torch.fx.Graph()
    root = torch.nn.Module()
    by_name: dict[str, torch.fx.Node] = {}
    if len(graph.nodes) > NODES_MOST:
        raise MmctlError(f"the graph has more than {NODES_MOST} nodes")
    for name in graph.inputs:
        by_name[name] = made.placeholder(_fit(name))
    for number, (node_name, weight) in enumerate(graph.weights.items()):
        if weight not in weights:
            raise MmctlError(f"the graph uses the weight '{weight[:80]}', which is not there")
        root.register_buffer(f"weight_{number}", torch.tensor(weights[weight], device=device))
        by_name[node_name] = made.get_attr(f"weight_{number}")
    for node in graph.nodes:
        kwargs = {key: _meant(value, by_name) for key, value in node.kwargs.items()}
        if node.op in _MAKES_ITS_OWN:
            kwargs["device"] = torch.device(device)
        by_name[node.name] = made.call_function(
            _function(node.op), tuple(_meant(value, by_name) for value in node.args), kwargs
        )
    made.output(tuple(_meant({"node": name}, by_name) for name in graph.outputs))
    made.lint()
    return torch.fx.GraphModule(root, made)


def _fit(name: str) -> str:
    if not name.isidentifier():
        raise MmctlError(f"'{name[:80]}' names no input")
    return name


def _function(op: str) -> Any:
    import torch

    if op in _PYTHON:
        return _PYTHON[op]
    if op not in _ATEN:
        raise MmctlError(f"the graph asks for the operator '{op[:80]}', which a step does not need")
    name, overload = op.split(".")
    return getattr(getattr(torch.ops.aten, name), overload)


def _meant(value: Any, by_name: dict[str, torch.fx.Node]) -> Any:
    """An argument back from plain data."""
    import torch

    if isinstance(value, list):
        return [_meant(one, by_name) for one in value]
    if isinstance(value, dict):
        if (name := value.get("node")) in by_name:
            return by_name[name]
        if (dtype := value.get("dtype")) in _DTYPES:
            return getattr(torch, dtype)
        raise MmctlError(f"an argument of the graph means nothing: {str(value)[:80]}")
    if value is None or isinstance(value, (bool, int, float)):
        return value
    raise MmctlError(f"an argument of the graph means nothing: {str(value)[:80]}")


def shapes(graph: Graph) -> Iterator[tuple[str, tuple[int | None, ...]]]:
    """Each input's name and shape; None where any length goes."""
    for number, name in enumerate(graph.inputs):
        if number == 0:
            yield name, (1,)
        elif number <= 2 * graph.layers:
            yield name, (None, graph.width)
        else:
            yield name, (2, None, graph.width)
