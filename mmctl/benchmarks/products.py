"""The devices that torch reaches, and matrix products that run on their own kernels."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

_PRODUCT_S = 0.03
"""Matrices grow until one product takes so long: a smaller one does not fill a device."""

_LEAST_SIDE = 256
_MOST_SIDE = 16384
_SIZE_TRIES = 4
_TYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "int8": "int8"}


class Target(NamedTuple):
    """A device to measure: its id here, the maker's name, torch's word for it."""

    id: str
    name: str
    torch_device: str


def targets() -> tuple[list[Target], dict[str, str]]:
    """Every device that torch reaches, and why each other kind is not there."""
    import torch

    from mmctl.benchmarks.environment import processor

    found = [Target("cpu0", processor() or "cpu", "cpu")]
    absent = {}
    for kind in ("cuda", "npu", "xpu"):
        backend = getattr(torch, kind, None)
        if backend is None or not backend.is_available():
            absent[kind] = f"torch {torch.__version__} reaches no {kind} device"
            continue
        prefix = "npu" if kind == "npu" else "gpu"
        found += [
            Target(f"{prefix}{i}", str(backend.get_device_name(i)), f"{kind}:{i}")
            for i in range(backend.device_count())
        ]
    if torch.backends.mps.is_available():
        found.append(Target("gpu0", "Apple GPU", "mps"))
    else:
        absent["mps"] = f"torch {torch.__version__} reaches no mps device"
    return found, absent


class Product(NamedTuple):
    """A product of two square matrices of ``side`` rows."""

    precision: str
    side: int
    call: Callable[[], object]

    @property
    def operations(self) -> float:
        """Of one square product: a multiplication and an addition per term."""
        return 2.0 * self.side**3


def waiter(device: str) -> Callable[[], object]:
    """What returns when ``device``, as torch names it, has done all that was started on it."""
    import torch

    kind = device.split(":")[0]
    if kind == "cpu":
        return lambda: None
    if kind == "mps":
        return torch.mps.synchronize
    module = getattr(torch, kind)
    return lambda: module.synchronize(device)


def sized_product(
    target: Target, precision: str, wait: Callable[[], object], quick: bool
) -> Product | str:
    """A square matrix product large enough to fill the device, or why there is none."""
    if reason := missing(target, precision):
        return reason
    side, made = _LEAST_SIDE, None
    limit_s = _PRODUCT_S / (2 if quick else 1)
    while side <= _MOST_SIDE:
        try:
            call = multiply(target.torch_device, precision, side)
            took_s = float("inf")
            for _ in range(_SIZE_TRIES):
                begun = time.perf_counter()
                call()
                wait()
                took_s = min(took_s, time.perf_counter() - begun)
        except (RuntimeError, NotImplementedError, TypeError, MemoryError) as error:
            if made is not None and "memory" in str(error).lower():
                return made
            return f"torch: {str(error).splitlines()[0][:160]}"
        made = Product(precision, side, call)
        if took_s >= limit_s:
            break
        side *= 2
    return made if made is not None else "no product ran"


def multiply(device: str, precision: str, side: int) -> Callable[[], object]:
    """A call that multiplies on ``device``; the inputs are made now."""
    import torch

    if precision == "int8":
        a = torch.randint(-128, 127, (side, side), dtype=torch.int8, device=device)
        b = torch.randint(-128, 127, (side, side), dtype=torch.int8, device=device)
        b = b if device == "cpu" else b.t()  # matrix units of GPUs take it column by column
        return lambda: torch._int_mm(a, b)
    dtype = getattr(torch, _TYPES[precision])
    x = torch.randn(side, side, device=device).to(dtype)
    y = torch.randn(side, side, device=device).to(dtype)
    out = torch.empty(side, side, device=device, dtype=dtype)
    return lambda: torch.mm(x, y, out=out)


def missing(target: Target, precision: str) -> str | None:
    """Why a precision has no kernel of its own on this device; None where it has."""
    import torch

    kind = target.torch_device.split(":")[0]
    if kind == "cpu":
        flags = torch.cpu.get_capabilities()
        if flags.get("architecture", "") not in ("x86_64", "AMD64"):
            return None if precision == "fp32" else (
                "whether this processor computes it without conversion is not known here"
            )  # fmt: skip
        needs = {
            "bf16": ("avx512_bf16", "amx_bf16"), "fp16": ("avx512_fp16", "amx_fp16"),
            "int8": ("avx512_vnni", "avx_vnni", "amx_int8"),
        }.get(precision, ())  # fmt: skip
        if needs and not any(flags.get(name) for name in needs):
            return f"this processor has none of {', '.join(needs)}: torch would convert"
        if precision != "fp32" and not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
            return "this torch has no oneDNN: its own loops would convert"
    if kind == "cuda" and torch.version.cuda is not None:
        major, minor = torch.cuda.get_device_capability(target.torch_device)
        needed = {"bf16": (8, 0), "fp16": (7, 0), "int8": (7, 5)}.get(precision, (0, 0))
        if (major, minor) < needed:
            return f"compute capability {major}.{minor} has no {precision} matrix units"
        if precision == "fp32" and torch.backends.cuda.matmul.allow_tf32:
            torch.backends.cuda.matmul.allow_tf32 = False
    return None
