"""A frozen step in ONNX, for engines that know nothing of torch.

Written from the graph's plain data, so that a node that serves by OpenVINO or onnxruntime needs
no torch to take a decode over. Operators by the ONNX specification, opset 17.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from mmctl.engine.errors import MissingExtraError, MmctlError
from mmctl.engine.schedule.migration.graph import Graph, Node, shapes

if TYPE_CHECKING:
    from numpy import ndarray

OPSET = 17


def encode(graph: Graph, weights: dict[str, ndarray]) -> bytes:
    """The step as a serialised ONNX model, its inputs and outputs named as the graph names them.

    Raises MmctlError for an operator or a form of one that no decode step has.
    """
    try:
        import onnx
    except ImportError:
        raise MissingExtraError("rebuilding the graph for this engine", "onnx") from None
    types = onnx.TensorProto
    writer = _Writer(graph, weights)
    for node in graph.nodes:
        try:
            writer.write(node)
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise MmctlError(f"the graph's '{node.op[:80]}' has no form in ONNX: {error}") from None
    element = [types.INT64] + [types.FLOAT] * 2 * graph.layers
    element += [types.FLOAT16] * (len(graph.inputs) - len(element))
    inputs = [
        onnx.helper.make_tensor_value_info(
            name, kind, [f"{name}_{i}" if n is None else n for i, n in enumerate(shape)]
        )
        for (name, shape), kind in zip(shapes(graph), element, strict=True)
    ]
    outputs = [
        onnx.helper.make_tensor_value_info(name, types.FLOAT, shape)
        for name, shape in zip(
            graph.outputs, ([graph.vocabulary], [2 * graph.layers, graph.width]), strict=True
        )
    ]
    made = onnx.helper.make_graph(
        writer.nodes, "decode_step", inputs, outputs, initializer=writer.constants
    )
    model = onnx.helper.make_model(
        made, opset_imports=[onnx.helper.make_opsetid("", OPSET)], ir_version=8
    )
    return bytes(model.SerializeToString())


class _Writer:
    """Nodes and constants written so far, and the rank of every value."""

    def __init__(self, graph: Graph, weights: dict[str, ndarray]) -> None:
        self.nodes: list[Any] = []
        self.constants: list[Any] = []
        self.weights = {name: weights[weight] for name, weight in graph.weights.items()}
        self.rank = {name: len(shape) for name, shape in shapes(graph)}
        self.rank.update({name: weight.ndim for name, weight in self.weights.items()})
        self._kept: set[str] = set()
        self._parts: dict[str, tuple[str, int]] = {}  # what ``unbind`` cuts, and where

    def write(self, node: Node) -> None:
        name, args = node.name, node.args
        if node.op in _SAME:
            self._emit(_SAME[node.op], [self.value(args[0])], name)
            self.rank[name] = self._rank(args[0])
            return
        self.rank[name] = _WRITERS[node.op](self, name, args, node.kwargs)

    def value(self, argument: Any) -> str:
        """The name of a node's result, of a weight, or of a number made a constant."""
        import numpy as np

        if isinstance(argument, dict):
            found: str = argument["node"]
            if found in self.weights and found not in self._kept:
                self._keep(found, self.weights[found])
            return found
        if isinstance(argument, bool) or not isinstance(argument, (int, float)):
            raise TypeError(f"{argument!r} is no value")
        kind = np.int64 if isinstance(argument, int) else np.float32
        return self.constant(np.asarray(argument, kind))

    def constant(self, array: Any) -> str:
        name = f"constant_{len(self.constants)}"
        self._keep(name, array)
        return name

    def _keep(self, name: str, array: Any) -> None:
        from onnx import numpy_helper

        self.constants.append(numpy_helper.from_array(array, name))
        self._kept.add(name)

    def _emit(self, op: str, inputs: list[str], name: str = "", **attributes: Any) -> str:
        from onnx import helper

        name = name or f"value_{len(self.nodes)}"
        self.nodes.append(helper.make_node(op, inputs, [name], name=name, **attributes))
        return name

    def _rank(self, argument: Any) -> int:
        return self.rank[argument["node"]] if isinstance(argument, dict) else 0

    def _sizes(self, dims: list[Any]) -> str:
        """A shape as ``Reshape`` takes it: numbers, and results that are lengths."""
        import numpy as np

        if all(isinstance(one, int) for one in dims):
            return self.constant(np.asarray(dims, np.int64))
        axis = self.constant(np.asarray([0], np.int64))
        parts = [self._emit("Unsqueeze", [self.value(one), axis]) for one in dims]
        return self._emit("Concat", parts, axis=0)

    # One function an operator: it writes the node ``name`` and tells the rank of its result.

    def elementwise(self, op: str, name: str, args: Any) -> int:
        numbers = [float(a) if isinstance(a, int) else a for a in args]
        self._emit(op, [self.value(one) for one in numbers], name)
        return max(self._rank(one) for one in args)

    def lengths_added(self, name: str, args: Any, _: Any) -> int:
        self._emit("Add", [self.value(one) for one in args], name)
        return 0

    def length(self, name: str, args: Any, _: Any) -> int:
        import numpy as np

        shape = self._emit("Shape", [self.value(args[0])])
        self._emit("Gather", [shape, self.constant(np.asarray(args[1], np.int64))], name)
        return 0

    def arange(self, name: str, args: Any, kwargs: Any) -> int:
        start, end = (0, args[0]) if len(args) == 1 else args
        counted = self._emit("Range", [self.value(start), self.value(end), self.value(1)])
        return self._cast(counted, name, kwargs.get("dtype", {"dtype": "int64"}), 1)

    def to_dtype(self, name: str, args: Any, _: Any) -> int:
        return self._cast(self.value(args[0]), name, args[1], self._rank(args[0]))

    def _cast(self, value: str, name: str, dtype: Any, rank: int) -> int:
        from onnx import TensorProto

        kind = {"float32": TensorProto.FLOAT, "float16": TensorProto.FLOAT16}
        kind |= {"int64": TensorProto.INT64, "int32": TensorProto.INT32}
        self._emit("Cast", [value], name, to=kind[dtype["dtype"]])
        return rank

    def embedding(self, name: str, args: Any, _: Any) -> int:
        self._emit("Gather", [self.value(args[0]), self.value(args[1])], name, axis=0)
        return self._rank(args[1]) + 1

    def unsqueeze(self, name: str, args: Any, _: Any) -> int:
        import numpy as np

        axis = self.constant(np.asarray([args[1]], np.int64))
        self._emit("Unsqueeze", [self.value(args[0]), axis], name)
        return self._rank(args[0]) + 1

    def cat(self, name: str, args: Any, _: Any) -> int:
        axis = args[1] if len(args) > 1 else 0
        self._emit("Concat", [self.value(one) for one in args[0]], name, axis=axis)
        return self._rank(args[0][0])

    def linear(self, name: str, args: Any, _: Any) -> int:
        weight = self.weights[args[1]["node"]]
        turned = args[1]["node"] + "_turned"
        if turned not in self._kept:
            self._keep(turned, weight.T.copy())
        biased = len(args) > 2 and args[2] is not None
        product = self._emit("MatMul", [self.value(args[0]), turned], "" if biased else name)
        if biased:
            self._emit("Add", [product, self.value(args[2])], name)
        return self._rank(args[0])

    def layer_norm(self, name: str, args: Any, _: Any) -> int:
        inputs = [self.value(args[0]), self.value(args[2]), self.value(args[3])]
        axis = -len(args[1])
        self._emit("LayerNormalization", inputs, name, axis=axis, epsilon=float(args[4]))
        return self._rank(args[0])

    def view(self, name: str, args: Any, _: Any) -> int:
        self._emit("Reshape", [self.value(args[0]), self._sizes(args[1])], name)
        return len(args[1])

    def flatten(self, name: str, args: Any, _: Any) -> int:
        rank = self._rank(args[0])
        first = args[1] % rank
        if len(args) > 2 and args[2] % rank != rank - 1:
            raise ValueError("it keeps the last dimension")
        self._emit("Reshape", [self.value(args[0]), self._sizes([0] * first + [-1])], name)
        return first + 1

    def transpose(self, name: str, args: Any, _: Any) -> int:
        rank = self._rank(args[0])
        order = list(range(rank))
        a, b = args[1] % rank, args[2] % rank
        order[a], order[b] = b, a
        self._emit("Transpose", [self.value(args[0])], name, perm=order)
        return rank

    def matmul(self, name: str, args: Any, _: Any) -> int:
        self._emit("MatMul", [self.value(args[0]), self.value(args[1])], name)
        return max(self._rank(args[0]), self._rank(args[1]))

    def softmax(self, name: str, args: Any, _: Any) -> int:
        self._emit("Softmax", [self.value(args[0])], name, axis=args[1])
        return self._rank(args[0])

    def gelu(self, name: str, args: Any, _: Any) -> int:
        x = self.value(args[0])
        error = self._emit("Erf", [self._emit("Mul", [x, self.value(math.sqrt(0.5))])])
        share = self._emit("Add", [error, self.value(1.0)])
        self._emit("Mul", [self._emit("Mul", [x, self.value(0.5)]), share], name)
        return self._rank(args[0])

    def slice(self, name: str, args: Any, _: Any) -> int:
        import numpy as np

        start, end, axis = (
            self.constant(np.asarray([one], np.int64)) for one in (args[2], args[3], args[1])
        )
        self._emit("Slice", [self.value(args[0]), start, end, axis], name)
        return self._rank(args[0])

    def select(self, name: str, args: Any, _: Any) -> int:
        self._emit("Gather", [self.value(args[0]), self.value(args[2])], name, axis=args[1])
        return self._rank(args[0]) - 1

    def unbind(self, name: str, args: Any, _: Any) -> int:
        self._parts[name] = self.value(args[0]), args[1] if len(args) > 1 else 0
        return self._rank(args[0]) - 1

    def part(self, name: str, args: Any, _: Any) -> int:
        whole, axis = self._parts[args[0]["node"]]
        self._emit("Gather", [whole, self.value(args[1])], name, axis=axis)
        return self._rank(args[0])


_SAME = {"exp.default": "Exp", "sin.default": "Sin", "cos.default": "Cos"}
_WRITERS: dict[str, Callable[[_Writer, str, Any, Any], int]] = {
    "add": _Writer.lengths_added,
    "add.Tensor": lambda w, name, args, _: w.elementwise("Add", name, args),
    "arange.default": _Writer.arange,
    "arange.start": _Writer.arange,
    "cat.default": _Writer.cat,
    "embedding.default": _Writer.embedding,
    "flatten.using_ints": _Writer.flatten,
    "gelu.default": _Writer.gelu,
    "getitem": _Writer.part,
    "layer_norm.default": _Writer.layer_norm,
    "linear.default": _Writer.linear,
    "matmul.default": _Writer.matmul,
    "mul.Tensor": lambda w, name, args, _: w.elementwise("Mul", name, args),
    "select.int": _Writer.select,
    "slice.Tensor": _Writer.slice,
    "softmax.int": _Writer.softmax,
    "sym_size.int": _Writer.length,
    "to.dtype": _Writer.to_dtype,
    "transpose.int": _Writer.transpose,
    "unbind.int": _Writer.unbind,
    "unsqueeze.default": _Writer.unsqueeze,
    "view.default": _Writer.view,
}
