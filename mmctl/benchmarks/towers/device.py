"""What a device's process does: its tower, its tasks, and the ways of running them in turn."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mmctl.benchmarks import processes
from mmctl.benchmarks.towers import graph, model
from mmctl.benchmarks.towers.graph import Channel, Edge, Ran, Task

Array = NDArray[np.float32]
PIECE = 4  # bytes of a float32


class Way(NamedTuple):
    """A way to run both towers: its tasks, or None where nothing binds the processes."""

    name: str
    kind: str  # inference or training
    tasks: list[Task] | None


class Shared(NamedTuple):
    """What both processes see: buffers, the channels of every way, a barrier, a word to stop."""

    features: Any
    back: Any
    temperature: Any
    channels: dict[str, dict[Edge, Channel]]
    barrier: Any
    stop: Any


class Spell(NamedTuple):
    """One way in one round, as one device saw it."""

    way: str
    ran: list[Ran]
    end_s: float


class Report(NamedTuple):
    """What a device's process brings back: all spells, and of the last round of each way the
    logits (image's device) and gradients, as arrays, which outlive their process."""

    spells: list[Spell]
    logits: dict[str, Array]
    gradients: dict[str, dict[str, Array]]


def run(
    rank: int, tell: Callable[[str, float], None], names: tuple[str, str], ways: list[Way],
    batches: int, size: int, rounds: int, budget_s: float, shared: Shared,
) -> Report:  # fmt: skip
    """The process of one device: image tower on rank 0, text tower on rank 1."""
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    torch.set_num_threads(1)
    one = _Device(rank, names[rank], batches, size, shared)
    spells: list[Spell] = []
    logits: dict[str, Array] = {}
    found: dict[str, dict[str, Array]] = {}
    began = time.monotonic()
    for number in range(-1, rounds):  # the first round warms up
        if rank == 0:
            shared.stop.value = number >= 3 and time.monotonic() - began > budget_s
        for way in ways:
            shared.barrier.wait(graph.PATIENCE_S)
            if shared.stop.value:
                break
            if way.tasks is not None and names[rank] in ("cpu", "openvino:CPU"):
                processes.pin(rank)
            one.begin(way)
            shared.barrier.wait(graph.PATIENCE_S)
            ran = one.free(shared.barrier) if way.tasks is None else one.bound(way)
            if cores:
                os.sched_setaffinity(0, cores)
            if number >= 0:
                spells.append(Spell(way.name, ran, max(item.end_s for item in ran)))
                tell(way.name, (number + ways.index(way) / len(ways)) / rounds)
            logits[way.name] = one.logits.numpy().copy()
            found[way.name] = one.gradients()
        if shared.stop.value:
            break
    return Report(spells, logits if rank == 0 else {}, found)


class _Device:
    """A tower on its device, with the tasks of the graph as functions of the batch."""

    def __init__(self, rank: int, name: str, batches: int, size: int, shared: Shared) -> None:
        self.rank, self.batches, self.shared = rank, batches, shared
        self.tower = model.image_tower() if rank == 0 else model.text_tower()
        make = model.images if rank == 0 else model.texts
        self.given = [make(batch, size) for batch in range(batches)]
        self.device = torch.device("cpu" if name.startswith("openvino:") else name)
        self.tower.to(self.device)
        self.given = [batch.to(self.device) for batch in self.given]
        self.compiled = (
            compiled(self.tower, self.given[0], name) if name.startswith("openvino:") else None
        )
        shape = (batches, size, model.JOINT)
        self.features = torch.frombuffer(shared.features, dtype=torch.float32).view(shape)
        self.back = torch.frombuffer(shared.back, dtype=torch.float32).view(shape)
        self.passed = torch.frombuffer(shared.temperature, dtype=torch.float32)
        self.logits = torch.zeros(batches, size, size)
        self.trains = False
        self.made: Tensor = torch.empty(0)
        self.temperature = torch.tensor(model.TEMPERATURE, device=self.device)
        self.work: dict[str, Callable[[int], None]] = {
            "image": self.forward, "text": self.text, "temperature": self.pass_temperature,
            "contrast": self.contrast, "image_backward": self.image_backward,
            "text_backward": self.text_backward, "end": lambda batch: None,
        }  # fmt: skip

    def begin(self, way: Way) -> None:
        """Nothing is left of the way before."""
        self.trains = way.kind == "training"
        self.tower.zero_grad(set_to_none=True)
        self.temperature = torch.tensor(
            model.TEMPERATURE, device=self.device, requires_grad=self.trains
        )
        self.told = any(task.name == "temperature" for task in way.tasks or ())
        self.logits.zero_()

    def bound(self, way: Way) -> list[Ran]:
        """The device's part of the graph."""
        assert way.tasks is not None
        return graph.run(
            way.tasks, self.rank, self.batches, self.shared.channels[way.name], self.work
        )

    def free(self, barrier: Any) -> list[Ran]:
        """All batches as fast as they go; the contrasts when the other tower is done as well."""
        found = []
        for batch in range(self.batches):
            start = time.monotonic()
            self.forward(batch)
            (self.kept if self.rank == 0 else self.features)[batch] = self.made.detach()
            name = "text" if self.rank else "image"
            found.append(Ran(name, batch, start, time.monotonic()))
        barrier.wait(graph.PATIENCE_S)
        for batch in range(self.batches) if self.rank == 0 else ():
            start = time.monotonic()
            self.made = self.kept[batch]
            self.contrast(batch, self.features[batch])
            found.append(Ran("contrast", batch, start, time.monotonic()))
        return found

    @property
    def kept(self) -> Tensor:
        """Where features of the image tower lie that wait for those of the texts."""
        return self.back

    def forward(self, batch: int) -> None:
        """The tower's features of a batch, ``made``."""
        if self.compiled is not None:
            self.made = torch.from_numpy(self.compiled(self.given[batch].numpy())[0])
            return
        with torch.set_grad_enabled(self.trains):
            self.made = self.tower(self.given[batch])

    def text(self, batch: int) -> None:
        """The text tower's features, put into their slot."""
        self.forward(batch)
        self.features[batch % graph.SLOTS] = self.made.detach()

    def pass_temperature(self, batch: int) -> None:
        """The one temperature, for the device that scales by it."""
        self.passed[0] = model.TEMPERATURE

    def contrast(self, batch: int, text: Tensor | None = None) -> None:
        """Logits of a batch; with gradients, back to the features of both towers."""
        slot = batch % graph.SLOTS
        text = self.features[slot] if text is None else text
        if self.told and not batch:
            with torch.no_grad():
                self.temperature.copy_(self.passed[0])
        text = text.to(self.device).clone().requires_grad_(self.trains)
        image = self.made.detach().requires_grad_(self.trains)
        with torch.set_grad_enabled(self.trains):
            logits = model.contrast(image, text, self.temperature)
        self.logits[batch] = logits.detach()
        if self.trains:
            model.loss(logits).backward()  # type: ignore[no-untyped-call]
            assert image.grad is not None and text.grad is not None
            self.image_gradient = image.grad
            self.back[slot] = text.grad

    def image_backward(self, batch: int) -> None:
        """The image tower's way back."""
        self.made.backward(self.image_gradient)  # type: ignore[no-untyped-call]

    def text_backward(self, batch: int) -> None:
        """The text tower's way back, from the gradient in its slot."""
        gradient = self.back[batch % graph.SLOTS].to(self.device).clone()
        self.made.backward(gradient)  # type: ignore[no-untyped-call]

    def gradients(self) -> dict[str, Array]:
        """The sums over all batches, on the host."""
        found = model.gradients(
            self.tower if self.rank == 0 else None, self.tower if self.rank else None,
            self.temperature if self.rank == 0 else None,
        )  # fmt: skip
        return {name: gradient.cpu().numpy() for name, gradient in found.items()}


def compiled(tower: model.Tower, example: Tensor, name: str) -> Any:
    """The tower for an OpenVINO device (``openvino:NPU``), in FP32 where the device keeps it."""
    import openvino

    core = openvino.Core()
    with torch.no_grad():
        converted = openvino.convert_model(tower.eval(), example_input=example)
    converted.reshape(list(example.shape))
    device = name.partition(":")[2]
    options: dict[str, Any] = {"INFERENCE_PRECISION_HINT": "f32"}
    if device == "CPU":
        options |= {"INFERENCE_NUM_THREADS": 1, "ENABLE_CPU_PINNING": False}
    return core.compile_model(converted, device, options)
