"""The device behind an engine's name, as the check of migratability describes places."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from mmctl.engine.errors import MmctlError
from mmctl.engine.schedule import migratable
from mmctl.engine.schedule.migration import engines, state
from mmctl.engine.schedule.migration.decode import Begin

_OPENVINO_TYPES = {
    "FP32": "float32", "FP16": "float16", "BF16": "bfloat16", "INT8": "int8",
}  # fmt: skip


class UnseenError(MmctlError):
    """The engine is there, the device is not."""


def check(
    source: str, target: str, needs: migratable.Needs
) -> tuple[str, list[migratable.Reason], list[migratable.Place]]:
    """Verdict and reasons for a load that moves as a graph between two engines, and both places."""
    needs = msgspec.structs.replace(needs, rebuilt_by=engines.split(target)[0])
    try:
        a, b = place(source), place(target)
    except UnseenError as error:
        absent = migratable.Reason(check="device", verdict="blocks", why=str(error))
        return "not_migratable", [absent], []
    return *migratable.check(a, b, needs), [a, b]


def place(name: str) -> migratable.Place:
    """The device of ``torch:cuda:0`` and the like, with the memory that is free there now.

    Raises MissingExtraError where the engine is not installed and UnseenError where it sees no
    such device.
    """
    engines.require(name)
    engine, device = engines.split(name)
    if device == "cpu":
        import psutil

        free = psutil.virtual_memory().available
        return msgspec.structs.replace(migratable.here(), name=name, memory_bytes=free)
    look = {"torch": _torch, "openvino": _openvino, "onnxruntime": _onnxruntime}[engine]
    return look(name, device)


def _torch(name: str, device: str) -> migratable.Place:
    import torch

    try:
        free, _ = torch.cuda.mem_get_info(device)
        major, minor = torch.cuda.get_device_capability(device)
    except Exception as error:
        raise _unseen("torch", name, error) from None
    return migratable.Place(
        name=name, kind="gpu", isa="cuda", sm=10 * major + minor, memory_bytes=free,
        dtypes=("float32", "float16", "bfloat16", "int8"),
    )  # fmt: skip


def _openvino(name: str, device: str) -> migratable.Place:
    import openvino

    core: Any = openvino.Core()
    try:
        able = core.get_property(device.upper(), "OPTIMIZATION_CAPABILITIES")
    except Exception as error:
        raise _unseen("openvino", name, error) from None
    types = tuple(_OPENVINO_TYPES[one] for one in able if one in _OPENVINO_TYPES)
    kind: Any = device.partition(".")[0]
    return migratable.Place(name=name, kind=kind, isa=f"openvino {device}", dtypes=types)


def _onnxruntime(name: str, device: str) -> migratable.Place:
    import onnxruntime

    provider = engines.PROVIDERS.get(device.partition(":")[0])
    if provider not in onnxruntime.get_available_providers():
        raise _unseen("onnxruntime", name, MmctlError(f"it was built without {device}"))
    return migratable.Place(name=name, kind="gpu", isa="cuda", dtypes=("float32", "float16"))


def _unseen(engine: str, name: str, error: Exception) -> UnseenError:
    first = str(error).strip().split("\n")[0][:200]
    return UnseenError(f"{engine} sees no device for '{name}': {first}; mmctl doctor shows devices")


def needs(begin: Begin, tokens: int) -> migratable.Needs:
    """What the demo's decode asks of a place: float32, its weights, a cache for all tokens."""
    from mmctl.engine import model as demo

    config = demo.Config()
    model = demo.build(config, device="meta")
    parts = (model.embedding, model.text_blocks, model.text_norm, model.head)
    weights = sum(one.numel() for part in parts for one in part.parameters())
    row = 2 * config.text_layers * config.text_dim
    vision = model.patches(begin.image_pixels, begin.image_pixels)
    floats = weights + row * (begin.cache_tokens + tokens)
    return migratable.Needs(dtypes=("float32",), memory_bytes=4 * floats + 2 * row * vision)


def needs_of(path: Path, tokens: int) -> migratable.Needs:
    """What a decode from a file asks of a place, with room for ``tokens`` more."""
    frozen = state.load(path)
    held = sum(one.nbytes for one in (*frozen.weights.values(), frozen.cache, *frozen.cross))
    return migratable.Needs(
        dtypes=("float32",), memory_bytes=held + tokens * frozen.cache[:, :1].nbytes
    )
