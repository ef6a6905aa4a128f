"""Matrix products on OpenVINO's devices, in the precision that its kernels really run at.

OpenVINO takes a hint and may compute in another precision; what the compiled graph says of its
MatMul decides, and a product that was converted is absent.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from mmctl.benchmarks import rounds
from mmctl.engine.devices.table import PRECISIONS

_SIDE = 1024
_QUICK_SIDE = 512
_ACCEPTED = {"fp32": ("f32",), "bf16": ("bf16",), "fp16": ("f16",), "int8": ("i8", "u8")}
_HINTS = {"fp32": "f32", "bf16": "bf16", "fp16": "f16", "int8": "f32"}


class Result(NamedTuple):
    """One precision of one device: seconds a product in each block, or why there are none."""

    device: str
    name: str
    precision: str
    side: int
    blocks: list[float]
    reason: str

    @property
    def operations(self) -> float:
        """Of one square product: a multiplication and an addition per term."""
        return 2.0 * self.side**3


def names() -> tuple[list[str], dict[str, str]]:
    """The devices as ``openvino:NAME``, and why there are none."""
    try:
        import openvino
    except ImportError:
        return [], {"openvino": "the extra 'openvino' is not installed"}
    return [f"openvino:{name}" for name in openvino.Core().available_devices], {}


def measure(device: str, threads: int, budget_s: float, quick: bool) -> list[Result]:
    """Every precision of one device."""
    import openvino

    core = openvino.Core()
    plain = device.partition(":")[2]
    full = str(core.get_property(plain, "FULL_DEVICE_NAME"))
    side = _QUICK_SIDE if quick else _SIDE
    found, cases = [], []
    for precision in PRECISIONS:
        try:
            call, ran = _compiled(core, plain, precision, side, threads)
        except RuntimeError as error:
            reason = f"OpenVINO: {str(error).splitlines()[0][:160]}"
            found.append(Result(device, full, precision, side, [], reason))
            continue
        if ran in _ACCEPTED[precision]:
            cases.append(rounds.Case(precision, call))
        else:
            reason = f"OpenVINO computes it in {ran or 'another precision'} on this device"
            found.append(Result(device, full, precision, side, [], reason))
    blocks = rounds.run(cases, budget_s) if cases else {}
    found += [
        Result(device, full, precision, side, times, "") for precision, times in blocks.items()
    ]
    return sorted(found, key=lambda result: PRECISIONS.index(result.precision))


def _compiled(core: Any, device: str, precision: str, side: int, threads: int) -> tuple[Any, str]:
    """A call that multiplies, and the precision that the compiled MatMul runs at."""
    import numpy as np
    import openvino
    from openvino import opset13 as ops

    chooser = np.random.default_rng(0)
    weights = chooser.uniform(-1, 1, (side, side)).astype(np.float32)
    given = ops.parameter([side, side], np.float32, name="x")
    left, right = given, ops.constant(weights)
    if precision == "int8":
        ends = [np.float32(-1), np.float32(1)]
        left = ops.fake_quantize(given, *ends, *ends, 256)
        right = ops.fake_quantize(right, *ends, *ends, 255)
    model = openvino.Model([ops.matmul(left, right, False, False)], [given], "product")
    settings: dict[str, Any] = {"INFERENCE_PRECISION_HINT": _HINTS[precision]}
    if device == "CPU":
        settings["INFERENCE_NUM_THREADS"] = threads
    compiled = core.compile_model(model, device, settings)
    request = compiled.create_infer_request()
    request.set_input_tensor(openvino.Tensor(chooser.uniform(-1, 1, (side, side)).astype("f4")))
    return request.infer, _ran_at(compiled)


def _ran_at(compiled: Any) -> str:
    """The precision of the MatMul's inputs in the compiled graph."""
    for node in compiled.get_runtime_model().get_ops():
        info = node.get_rt_info()
        kind = str(info["layerType"].astype(str)) if "layerType" in info else ""
        if kind in ("MatMul", "FullyConnected", "Gemm", "gemm", "fully_connected"):
            return str(info["runtimePrecision"].astype(str))
    return ""
