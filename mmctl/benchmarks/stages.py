"""What the stages of a request cost on this device, over image sizes, batch and context.

The demo's model is measured (random weights: time does not depend on them), and the alignment
projection 768 → 4096 with its norm. Flops are torch's count, bytes what the operators read and
write if nothing stayed in a cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from mmctl.engine.devices import encoder
from mmctl.engine.devices import stages as model
from mmctl.engine.errors import NoSourceError
from mmctl.engine.records import SCHEMA

Progress = Callable[[str, float], None]

_SECONDS = 75.0
_QUICK_SECONDS = 5.0

_SIDES = (112, 168, 224, 336, 448)
_QUICK_SIDES = (112, 168, 224, 336)
_BATCHES = (1, 2, 4, 8)
_QUICK_BATCHES = (1, 8)
_CONTEXTS = (128, 512, 2048)
_MOST_PATCHES = 4096
"""Patches of a batch: a larger one would take seconds a call on a small CPU."""

ALIGNMENT = (768, 4096)
"""The published projection: 3.1 M parameters."""

_PROMPT_TOKENS = 32

HARDWARE = {
    "compute": "dense tensor cores (or matrix units) decide: use the device with the highest "
    "rate at its precision",
    "memory": "memory bandwidth decides: use the device with the most bytes per second",
    "overhead": "starting kernels costs more than their work: larger batches, or a captured graph",
}


class _Work(NamedTuple):
    """A stage at one shape, and the call that does it."""

    stage: str
    shape: dict[str, int]
    call: Callable[[], object]

    @property
    def name(self) -> str:
        return f"{self.stage} " + " ".join(f"{k}={v}" for k, v in self.shape.items())


def from_files(
    names: Sequence[str], heads: int, head_dim: int, most: int, hold_out: Sequence[int] | None
) -> dict[str, Any]:
    """The document of ``mmctl benchmark stages`` for tables of encoder attention."""
    stages, advice, notes = [], [], []
    for name in names:
        if not Path(name).exists():
            raise NoSourceError(f"no such file: {name}")
        system, measured, remarks = encoder.read(Path(name))
        stage, table = encoder.judged(system, measured, hold_out)
        stages.append(stage)
        advice += encoder.advice(system, measured, table, heads, head_dim, most)
        notes += remarks
    return {
        "schema": SCHEMA, "benchmark": "stages", "files": list(names), "environment": None,
        "absent": {"environment": "read from files, not measured here"}, "notes": notes,
        "stages": msgspec.to_builtins(stages), "advice": advice,
    }  # fmt: skip


def measured(
    device: str, threads: int, quick: bool, most: int,
    progress: Progress = lambda what, share: None,
) -> dict[str, Any]:  # fmt: skip
    """The document of ``mmctl benchmark stages`` for this machine's ``device``."""
    import torch

    from mmctl.benchmarks import rounds
    from mmctl.benchmarks.environment import environment
    from mmctl.benchmarks.intervals import estimate, figure, resolution
    from mmctl.benchmarks.products import waiter

    torch.set_num_threads(threads)
    here = environment()
    least = resolution(here.busy_ratio)
    kind = torch.device(device).type
    wait = waiter(device)
    with torch.inference_mode():
        works = list(_works(device, quick, most))
        counted = {work.name: _counted(work.call) for work in works}
        blocks = rounds.run(
            [rounds.Case(work.name, work.call, wait) for work in works],
            _QUICK_SECONDS if quick else _SECONDS, progress,
        )  # fmt: skip
    found: dict[str, list[model.Point]] = {}
    for work in works:
        flops, moved = counted[work.name]
        time = estimate(blocks[work.name], least)
        found.setdefault(work.stage, []).append(
            model.Point(
                stage=work.stage, shape=work.shape, flops=flops, bytes=moved, seconds=time.value,
                seconds_low=time.low, seconds_high=time.high,
            )
        )  # fmt: skip
    system = here.processor or "cpu" if kind == "cpu" else _name(torch, device)
    stages = [model.judged(stage, system, points) for stage, points in found.items()]
    return {
        "schema": SCHEMA, "benchmark": "stages", "files": [], "device": device,
        "environment": msgspec.to_builtins(here), "absent": {}, "notes": list(here.remarks),
        "figures": [
            figure(f"{work.name}/seconds", blocks[work.name], least=least) for work in works
        ],
        "stages": msgspec.to_builtins(stages),
        "advice": [*_batching(found["vision_encode"], system, most), *_placing(stages)],
    }  # fmt: skip


def _name(torch: Any, device: str) -> str:
    backend = getattr(torch, torch.device(device).type)
    getter = getattr(backend, "get_device_name", None)
    return str(getter(torch.device(device).index or 0)) if getter else device


def _works(device: str, quick: bool, most: int) -> Iterator[_Work]:
    """Every stage at every shape; inputs are made now and live as long as the calls."""
    import torch

    from mmctl.engine.model import build

    vlm = build(device=device)
    config = vlm.config
    batches = sorted({b for b in (_QUICK_BATCHES if quick else _BATCHES) if b <= most} | {1, most})
    for side in _QUICK_SIDES if quick else _SIDES:
        patches = vlm.patches(side, side)
        for batch in batches:
            if batch * patches <= _MOST_PATCHES or batch == 1:
                images = torch.rand(batch, 3, side, side, device=device)
                shape = {"side": side, "patches": patches, "batch": batch}
                yield _Work("vision_encode", shape, partial(vlm.encode, images))
    narrow, wide = ALIGNMENT
    projection = torch.nn.Sequential(
        torch.nn.Linear(narrow, wide), torch.nn.LayerNorm(wide)
    ).to(device).requires_grad_(False)  # fmt: skip
    for tokens in (
        (1, 16, 64, 256, 512, 1024)
        if quick
        else (1, 2, 4, 8, 16, 32, 64, 96, 128, 192, 256, 384, 512, 1024)
    ):
        features = torch.rand(tokens, narrow, device=device)
        yield _Work("alignment", {"tokens": tokens}, partial(projection, features))
    for patches in (64, 256, 1024) if quick else (64, 144, 256, 576, 1024):
        for batch in batches[:: len(batches) - 1] if quick and len(batches) > 1 else batches:
            vision = torch.rand(batch, patches, config.text_dim, device=device)
            prompt = torch.rand(batch, _PROMPT_TOKENS, config.text_dim, device=device)
            shape = {"patches": patches, "batch": batch, "prompt_tokens": _PROMPT_TOKENS}
            yield _Work("cross_attn_fusion", shape, partial(_fuse, vlm, vision, prompt))
    for context in _CONTEXTS:
        for batch in batches:
            ids = torch.zeros(batch, dtype=torch.long, device=device)
            cache = BatchCache(config, batch, context, device)
            shape = {"context": context, "batch": batch}
            yield _Work("text_decode_step", shape, partial(decode_step, vlm, ids, cache))


def _fuse(vlm: Any, vision: Any, prompt: Any) -> Any:
    """Keys and values of the vision tokens, and the prompt's attention to them, in all layers."""
    for block in vlm.text_blocks:
        keys, values = block.cross.key(vision), block.cross.value(vision)
        prompt = prompt + block.cross(block.norm_cross(prompt), keys, values, None)
    return prompt


class BatchCache:
    """Keys and values of ``batch`` requests of one length, ``[batch, context + 1, dim]`` a layer.

    Takes the place of ``KvCache``: a step writes behind the context, and the next one again.
    """

    def __init__(self, config: Any, batch: int, context: int, device: str) -> None:
        import torch

        shape = (config.text_layers, 2, batch, context + 1, config.text_dim)
        self.context, self._kept = context, torch.rand(shape, device=device)

    def append(self, layer: int, keys: Any, values: Any) -> tuple[Any, Any]:
        """Store ``[batch, 1, dim]`` behind the context; all keys and values come back."""
        self._kept[layer, 0, :, -1:] = keys
        self._kept[layer, 1, :, -1:] = values
        return self._kept[layer, 0], self._kept[layer, 1]


def decode_step(vlm: Any, ids: Any, cache: BatchCache) -> Any:
    """One token of each request: logits ``[batch, vocabulary]``."""
    x = vlm.embedding(ids)[:, None]
    for layer, block in enumerate(vlm.text_blocks):
        x = block(x, layer, cache, None, None)
    return vlm.head(vlm.text_norm(x[:, -1]))


def _counted(call: Callable[[], object]) -> tuple[float, float]:
    """Flops by torch's counter, and bytes that the operators read and write."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves
    from torch.utils.flop_counter import FlopCounterMode

    class Traffic(TorchDispatchMode):  # type: ignore[no-untyped-call]
        moved = 0

        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            result = func(*args, **(kwargs or {}))
            if not func.is_view:
                for leaf in tree_leaves((args, kwargs, result)):
                    if isinstance(leaf, torch.Tensor):
                        self.moved += leaf.numel() * leaf.element_size()
            return result

    with FlopCounterMode(display=False) as counter:
        call()
    with Traffic() as traffic:  # type: ignore[no-untyped-call]
        call()
    return float(counter.get_total_flops()), float(traffic.moved)


def _batching(points: Sequence[model.Point], system: str, most: int) -> list[dict[str, Any]]:
    """How many images to encode at once, by their patches, from measured times."""
    rows = []
    for patches in sorted({point.shape["patches"] for point in points}):
        times = {p.shape["batch"]: p.seconds for p in points if p.shape["patches"] == patches}
        gains = {batch: batch * times[1] / time for batch, time in times.items()}
        chosen = model.batch_for(gains, most)
        largest = max(gains)
        rows.append(
            {
                "stage": "vision_encode", "system": system, "patches": patches, "batch": chosen,
                "throughput_factor": gains[chosen], "batch_most": largest,
                "throughput_factor_most": gains[largest], "pays": chosen == largest,
                "basis": "measured",
            }
        )  # fmt: skip
    return rows


def _placing(stages: Sequence[model.Stage]) -> list[dict[str, Any]]:
    """What limits each stage here, and so what kind of device suits it."""
    rows = []
    for stage in stages:
        says = HARDWARE[stage.bound or "compute"]
        if stage.stage == "alignment":
            says += "; it hands its result on whole: place it with a direct link to the decoder"
        rows.append(
            {"stage": stage.stage, "system": stage.system, "bound": stage.bound, "says": says,
             "basis": "measured"}
        )  # fmt: skip
    return rows
