"""The network as ONNX files and as a repository for Triton (onnx, onnxruntime).

The graph is built node by node, so that all its shapes are known; only the batch may stay open
(Triton asks for that), and a session fixes it by an override. INT8 is calibrated on windows, and
the last bias makes up for what quantisation shifts where a logit decides.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from mmctl.benchmarks.detector.network import (
    CHANNELS,
    KERNEL,
    LIMIT,
    OUTPUTS,
    RECENT,
    STEP_SCALE,
    STRIDE,
    WIDTHS,
    Weights,
)
from mmctl.benchmarks.detector.windows import FEATURES, SAMPLES

INPUT, OUTPUT, LOGITS = "windows", "probabilities", "logits"
PLAIN = ("full_out_now", "full_out1", LOGITS)
"""Nodes that INT8 leaves in FP32: a conflict can hang on a small step of a single reading, and
the last layers are tiny."""
NEAREST = 256
MAX_BATCH = 32
MODEL = "memory_conflict"
OPSET = 17

Windows = NDArray[np.float32]


def graph(weights: Weights, half: bool = False) -> onnx.ModelProto:
    """The network as a graph; its batch is an open dimension named ``batch``.

    With ``half`` weights and arithmetic are FP16; what goes in and comes out stays FP32.
    """
    kind = np.float16 if half else np.float32
    features = len(FEATURES)
    constants = {name: array.astype(kind) for name, array in weights.items()}
    constants["inverse"] = (1 / weights["spread"]).astype(kind)
    # The first full layer in two parts, so that INT8 may leave the one that sees single readings.
    width = weights["full0.weight"].shape[1] - 3 * features
    constants["full0.history"], constants["full0.now"] = np.split(
        constants.pop("full0.weight"), [width], axis=1
    )
    del constants["spread"]
    constants["least"], constants["most"] = np.array(-LIMIT, kind), np.array(LIMIT, kind)
    constants["step_scale"] = np.array(STEP_SCALE, kind)
    bounds = {
        "newest": (-1, SAMPLES), "before": (-2, -1), "recent": (-RECENT, SAMPLES)
    }  # fmt: skip
    for name, (start, end) in bounds.items():
        constants[f"{name}_start"] = np.array([start], np.int64)
        constants[f"{name}_end"] = np.array([end], np.int64)
    constants["time"] = np.array([1], np.int64)

    def node(kind: str, inputs: list[str], output: str, **more: Any) -> onnx.NodeProto:
        return helper.make_node(kind, inputs, [output], name=output, **more)

    nodes = [node("Cast", [INPUT], "halved", to=TensorProto.FLOAT16)] if half else []
    nodes += [
        node("Sub", ["halved" if half else INPUT, "mean"], "centred"),
        node("Mul", ["centred", "inverse"], "scaled"),
        node("Clip", ["scaled", "least", "most"], "clipped"),
        node("Transpose", ["clipped"], "conv_in0", perm=[0, 2, 1]),
    ]
    for layer in range(3):
        parts = [f"conv_in{layer}", f"conv{layer}.weight", f"conv{layer}.bias"]
        nodes += [
            node("Conv", parts, f"conv_out{layer}", strides=[STRIDE]),
            node("Relu", [f"conv_out{layer}"], f"conv_in{layer + 1}"),
        ]
    nodes.append(node("Flatten", ["conv_in3"], "history"))
    for name in bounds:
        ends = [f"{name}_start", f"{name}_end", "time"]
        nodes.append(node("Slice", ["scaled", *ends], f"{name}_cut"))
        if name != "recent":
            nodes.append(node("Flatten", [f"{name}_cut"], name))
    nodes += [
        node("ReduceMean", ["recent_cut"], "recent", axes=[1], keepdims=0),
        node("Sub", ["newest", "before"], "difference"),
        node("Mul", ["difference", "step_scale"], "step"),
        node("Concat", ["newest", "step", "recent"], "now", axis=1),
        node("Gemm", ["history", "full0.history", "full0.bias"], "full_out_history", transB=1),
        node("Gemm", ["now", "full0.now"], PLAIN[0], transB=1),
        node("Add", ["full_out_history", PLAIN[0]], "full_out0"),
        node("Relu", ["full_out0"], "full_in1"),
        node("Gemm", ["full_in1", "full1.weight", "full1.bias"], "full_out1", transB=1),
        node("Relu", ["full_out1"], "full_in2"),
    ]
    last = "half_logits" if half else LOGITS
    nodes.append(node("Gemm", ["full_in2", "full2.weight", "full2.bias"], last, transB=1))
    if half:
        nodes.append(node("Cast", ["half_logits"], LOGITS, to=TensorProto.FLOAT))
    nodes.append(node("Sigmoid", [LOGITS], OUTPUT))
    model = helper.make_model(
        helper.make_graph(
            nodes, MODEL,
            [helper.make_tensor_value_info(INPUT, TensorProto.FLOAT, ["batch", SAMPLES, features])],
            [helper.make_tensor_value_info(OUTPUT, TensorProto.FLOAT, ["batch", len(OUTPUTS)])],
            [numpy_helper.from_array(array, name) for name, array in constants.items()],
        ),
        opset_imports=[helper.make_opsetid("", OPSET)], ir_version=9, producer_name="mmctl",
    )  # fmt: skip
    onnx.checker.check_model(model, full_check=True)
    return model


class _Calibration:
    """Windows for the calibration, a batch at a time."""

    def __init__(self, windows: Windows) -> None:
        self.batches: Iterator[Windows] = iter(np.array_split(windows, max(1, len(windows) // 64)))

    def get_next(self) -> dict[str, Windows] | None:
        batch = next(self.batches, None)
        return None if batch is None else {INPUT: np.ascontiguousarray(batch)}


def quantized(weights: Weights, windows: Windows, every: Windows, folder: Path) -> onnx.ModelProto:
    """The graph in INT8 (QDQ, weights per channel), its batch open, calibrated on ``windows``.

    ``every`` window that was learned from tells the last bias where to lie.

    ``folder`` takes the files that the quantiser wants to see.
    """
    plain = folder / "plain.onnx"
    whole = graph(weights)
    onnx.save(whole, plain)
    model = _quantize(plain, windows, folder)
    before, after = logits(whole, every), logits(model, every)
    (bias,) = (one for one in model.graph.initializer if one.name == "full2.bias")
    error = [_shift(before[:, n], after[:, n]) for n in range(len(OUTPUTS))]
    compensated = numpy_helper.to_array(bias) - np.array(error, np.float32)
    bias.CopyFrom(numpy_helper.from_array(compensated, bias.name))
    return model


def _shift(before: NDArray[np.float32], after: NDArray[np.float32]) -> float:
    """What to take from ``after`` so that it decides most often as ``before`` did; of several
    the one nearest to the median error of the windows whose logit was nearest to zero.

    Far from there, errors are as large as the logits, and mean nothing.
    """
    nearest = np.argsort(abs(before))[:NEAREST]
    errors = after[nearest] - before[nearest]
    middle = float(np.median(errors))
    shifts = [middle, *np.quantile(errors, np.linspace(0, 1, 41))]
    wrong = [int(((after - shift > 0) != (before > 0)).sum()) for shift in shifts]
    best = min(zip(wrong, (abs(shift - middle) for shift in shifts), shifts, strict=True))
    return float(best[2])


def fixed(model: onnx.ModelProto, batch: int) -> onnx.ModelProto:
    """``model`` with its open batch made a number."""
    shut = onnx.ModelProto()
    shut.CopyFrom(model)
    del shut.graph.value_info[:]
    for value in (*shut.graph.input, *shut.graph.output):
        value.type.tensor_type.shape.dim[0].dim_value = batch
    return onnx.shape_inference.infer_shapes(shut, strict_mode=True)


def flops() -> int:
    """Multiplications and additions for one window."""
    total, steps, channels = 0, SAMPLES, len(FEATURES)
    for _ in range(3):
        steps = (steps - KERNEL) // STRIDE + 1
        total += 2 * steps * CHANNELS * channels * KERNEL
        channels = CHANNELS
    widths = (CHANNELS * steps + 3 * len(FEATURES), *WIDTHS, len(OUTPUTS))
    return total + sum(2 * a * b for a, b in pairwise(widths))


def _quantize(plain: Path, windows: Windows, folder: Path) -> onnx.ModelProto:
    from onnxruntime import quantization

    target = folder / "int8.onnx"
    # It asks on the root logger for a preparation that a graph with all its shapes does not need.
    logging.disable(logging.WARNING)
    try:
        quantization.quantize_static(
            str(plain), str(target), _Calibration(windows),
            quant_format=quantization.QuantFormat.QDQ,
            activation_type=quantization.QuantType.QUInt8,
            weight_type=quantization.QuantType.QInt8,
            per_channel=True, op_types_to_quantize=["Conv", "Gemm"],
            nodes_to_exclude=list(PLAIN),
        )  # fmt: skip
    finally:
        logging.disable(logging.NOTSET)
    return onnx.load(target)


def logits(model: onnx.ModelProto, windows: Windows) -> NDArray[np.float32]:
    """What stands before the last Sigmoid, ``[n, 2]``."""
    cut = onnx.ModelProto()
    cut.CopyFrom(model)
    del cut.graph.output[:]
    shape = [None, len(OUTPUTS)]
    cut.graph.output.append(helper.make_tensor_value_info(LOGITS, TensorProto.FLOAT, shape))
    return _whole(cut, windows)


def probabilities(model: onnx.ModelProto, windows: Windows) -> NDArray[np.float32]:
    """What the exported model says of each window, ``[n, 2]``; its batch must be open."""
    return _whole(model, windows)


def _whole(model: onnx.ModelProto, windows: Windows) -> NDArray[np.float32]:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.log_severity_level = 3
    one = onnxruntime.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    parts = [
        one.run(None, {INPUT: np.ascontiguousarray(windows[at : at + 256])})[0]
        for at in range(0, len(windows), 256)
    ]
    return np.concatenate(parts)


def casts(model: onnx.ModelProto, folder: Path) -> int:
    """Casts that onnxruntime itself put into ``model`` on this machine: a hidden conversion."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC
    options.optimized_model_filepath = str(folder / "optimized.onnx")
    onnxruntime.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    seen = onnx.load(folder / "optimized.onnx").graph.node
    own = sum(bool(node.op_type == "Cast") for node in model.graph.node)
    return max(0, sum(bool(node.op_type == "Cast") for node in seen) - own)


def write(folder: Path, models: dict[str, dict[int | str, onnx.ModelProto]]) -> list[str]:
    """Write the ONNX files, the Triton repository and TensorRT's description below ``folder``;
    their names come back. ``models`` are by precision and batch."""
    names = []
    for precision, by_batch in models.items():
        for batch, model in by_batch.items():
            name = (
                f"triton/{MODEL}_{precision}/1/model.onnx" if batch == "batch"
                else f"{MODEL}_{precision}_b{batch}.onnx"
            )  # fmt: skip
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(model.SerializeToString())
            names.append(name)
        name = f"triton/{MODEL}_{precision}/config.pbtxt"
        (folder / name).write_text(triton(precision))
        names.append(name)
    (folder / "tensorrt.json").write_text(json.dumps(tensorrt(models), indent=2) + "\n")
    return [*names, "tensorrt.json"]


def triton(precision: str) -> str:
    """``config.pbtxt`` of the model: dynamic batches of up to 32, no wait for one to fill."""
    return f"""\
name: "{MODEL}_{precision}"
platform: "onnxruntime_onnx"
max_batch_size: {MAX_BATCH}
input [
  {{
    name: "{INPUT}"
    data_type: TYPE_FP32
    dims: [ {SAMPLES}, {len(FEATURES)} ]
  }}
]
output [
  {{
    name: "{OUTPUT}"
    data_type: TYPE_FP32
    dims: [ {len(OUTPUTS)} ]
  }}
]
dynamic_batching {{
  preferred_batch_size: [ 8, 16, {MAX_BATCH} ]
  max_queue_delay_microseconds: 0
}}
instance_group [ {{ count: 1 }} ]
"""


def tensorrt(models: dict[str, dict[int | str, onnx.ModelProto]]) -> dict[str, Any]:
    """What TensorRT needs beside the files: the shapes to build for, and INT8's ranges, which the
    file carries as QuantizeLinear nodes."""
    shape = f"{SAMPLES}x{len(FEATURES)}"
    most = f"{MAX_BATCH}x{shape}"
    flags = {"fp32": "", "fp16": " --fp16", "int8": " --int8 --fp16"}
    return {
        "input": INPUT, "output": OUTPUT, "features": FEATURES, "outputs": OUTPUTS,
        "profile": {"min": f"1x{shape}", "opt": most, "max": most},
        "build": {
            precision: (
                f"trtexec --onnx=triton/{MODEL}_{precision}/1/model.onnx{flags[precision]} "
                f"--minShapes={INPUT}:1x{shape} --optShapes={INPUT}:{most} "
                f"--maxShapes={INPUT}:{most}"
            )
            for precision in models
        },
        "int8_scales": {
            node.input[0]: float(numpy_helper.to_array(array))
            for model in (models.get("int8") or {}).values()
            for constants in [{one.name: one for one in model.graph.initializer}]
            for node in model.graph.node
            if node.op_type == "QuantizeLinear"
            and (array := constants.get(node.input[1])) is not None
            and not array.dims
        },
        "basis": "not built here: TensorRT is not on this machine",
    }  # fmt: skip
