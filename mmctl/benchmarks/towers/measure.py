"""Two towers, run after run, bound and unbound: time, overlap, drift, and whether all agree."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from multiprocessing import get_context
from statistics import median
from typing import Any

import msgspec
import torch

from mmctl.benchmarks import processes
from mmctl.benchmarks.environment import check_torch_device
from mmctl.benchmarks.intervals import Estimate, estimate, figure
from mmctl.benchmarks.towers import device, graph, model
from mmctl.benchmarks.towers.device import PIECE, Array, Report, Shared, Way
from mmctl.benchmarks.towers.graph import Ran
from mmctl.engine.errors import MissingExtraError, MmctlError, UsageError
from mmctl.engine.records import Basis

BATCHES, QUICK_BATCHES = 16, 6
SIZE, QUICK_SIZE = 8, 4  # images, and texts, of a batch
ROUNDS, QUICK_ROUNDS = 10, 3
BUDGET_S, QUICK_BUDGET_S = 60.0, 7.0
TOLERANCE = 1e-5
"""How far logits may lie from those of one process, and gradients as a share of the largest."""


class Towers(msgspec.Struct, frozen=True, kw_only=True):
    """One way on one pair of devices; medians over rounds, intervals of 95 %.

    ``speedup_factor`` is the time run after run over this one's, per round. ``overlap_ratio``
    is the share of the time in which both towers computed. Drift is how long after one tower
    the other one was done with the same batch. ``waiting_bytes`` is what is held of features
    that wait for the other tower. ``crossings`` are passes between the devices in a run.
    """

    devices: tuple[str, str]
    way: str
    kind: str
    batches: int
    batch_size: int
    rounds: int
    time_ms: float
    time_ci: tuple[float, float]
    speedup_factor: float
    speedup_ci: tuple[float, float]
    image_ms: float
    text_ms: float
    overlap_ratio: float
    drift_ms: float
    largest_drift_ms: float
    waiting_bytes: int
    crossings: int
    logits_error: float
    gradients_error: float | None
    time_ms_blocks: tuple[float, ...]
    basis: Basis = "measured"
    absent: dict[str, str] = {}


def agrees(row: Towers) -> bool:
    """Whether a way gave what a single process gives."""
    return max(row.logits_error, row.gradients_error or 0.0) <= TOLERANCE


def ways(trains: bool) -> list[Way]:
    """Every way in the order of a round; with gradients where both devices can."""
    found = [
        Way("run after run", "inference", graph.inference(True, serial=True)),
        Way("bound T0", "inference", graph.inference(False)),
        Way("bound T1", "inference", graph.inference(True)),
        Way("unbound", "inference", None),
    ]
    if trains:
        found += [
            Way("training, run after run", "training", graph.training(True, serial=True)),
            Way("training, bound T1", "training", graph.training(True)),
        ]
    return found


def pairs(wanted: str | None) -> tuple[list[tuple[str, str]], dict[str, str]]:
    """The pairs of devices to run on, image's first, and why others are not.

    By default an accelerator of torch takes the images and an NPU or GPU of OpenVINO the texts,
    each the CPU where there is none; with OpenVINO and no accelerator, it stands in on the CPU.
    """
    if wanted is not None:
        names = [name.strip() for name in wanted.split(",")]
        if len(names) != 2 or not all(names):
            raise MmctlError(f"a pair is two devices with a comma between, not '{wanted}'")
        for name in names:
            _check(name)
        return [(names[0], names[1])], {}
    absent: dict[str, str] = {}
    image = next((name for name in ("cuda", "npu", "xpu") if _has(name)), "cpu")
    if image == "cpu":
        absent["accelerator"] = "torch reaches no GPU or NPU"
    found = [("cpu", "cpu")] if image == "cpu" else [(image, "cpu")]
    try:
        import openvino
    except ImportError:
        absent["openvino"] = "needs the extra 'openvino'"
        return found, absent
    known = openvino.Core().available_devices
    text = next((name for name in ("NPU", "GPU") if name in known), "CPU")
    if text == "CPU":
        absent["openvino NPU"] = f"OpenVINO reaches {', '.join(known) or 'no device'} only"
    return [*found, (image, f"openvino:{text}")], absent


def _has(name: str) -> bool:
    backend = getattr(torch, name, None)
    return backend is not None and bool(backend.is_available())


def _check(name: str) -> None:
    """UsageError when a device is not here, MissingExtraError when it cannot be asked for."""
    if name.startswith("openvino:"):
        try:
            import openvino
        except ImportError:
            raise MissingExtraError(f"the device {name}", "openvino") from None
        known = openvino.Core().available_devices
        if name.partition(":")[2] not in known:
            raise UsageError(f"no device '{name}': OpenVINO reaches {', '.join(known)}")
        return
    check_torch_device(name)


def measure(
    devices: tuple[str, str], quick: bool,
    tell: Callable[[str, float], None] = lambda name, share: None,
) -> list[Towers]:  # fmt: skip
    """All ways on one pair of devices, and one process's answers beside theirs."""
    batches, size = (QUICK_BATCHES, QUICK_SIZE) if quick else (BATCHES, SIZE)
    trains = not any(name.startswith("openvino:") for name in devices)
    chosen = ways(trains)
    context = get_context("spawn")
    floats = batches * size * model.JOINT
    shared = Shared(
        context.RawArray("f", floats), context.RawArray("f", floats), context.RawArray("f", 1),
        {way.name: graph.channels(way.tasks, context) for way in chosen if way.tasks},
        context.Barrier(2), context.RawValue("b", 0),
    )  # fmt: skip
    image, text = processes.run(
        device.run, 2,
        (devices, chosen, batches, size, QUICK_ROUNDS if quick else ROUNDS,
         QUICK_BUDGET_S if quick else BUDGET_S, shared),
        lambda name, share: tell(f"{', '.join(devices)}: {name}", share),
    )  # fmt: skip
    expected = model.reference(batches, size)
    serial = {
        kind: _times(image, text, next(way.name for way in chosen if way.kind == kind))
        for kind in {way.kind for way in chosen}
    }
    return [
        _row(devices, way, batches, size, image, text, serial[way.kind], expected) for way in chosen
    ]


def _rounds(image: Report, text: Report, name: str) -> list[tuple[list[Ran], list[Ran]]]:
    """What both devices ran in each round of a way."""
    first, second = (
        [spell.ran for spell in report.spells if spell.way == name] for report in (image, text)
    )
    return list(zip(first, second, strict=True))


def _times(image: Report, text: Report, name: str) -> list[float]:
    """From the first begin to the last end on both devices, per round."""
    return [
        max(item.end_s for item in (*a, *b)) - min(item.start_s for item in (*a, *b))
        for a, b in _rounds(image, text, name)
    ]


def _row(
    devices: tuple[str, str], way: Way, batches: int, size: int, image: Report, text: Report,
    serial: Sequence[float], expected: model.Reference,
) -> Towers:  # fmt: skip
    rounds = _rounds(image, text, way.name)
    times = _times(image, text, way.name)
    took = estimate(times)
    speedup = estimate([a / b for a, b in zip(serial, times, strict=True)])
    drifts = [drift(a, b) for a, b in rounds]
    got = {**image.gradients[way.name], **text.gradients[way.name]}
    absent = {}
    if way.kind != "training":
        absent["gradients_error"] = "no gradients in inference"
    return Towers(
        devices=devices, way=way.name, kind=way.kind, batches=batches, batch_size=size,
        rounds=len(rounds),
        time_ms=1e3 * took.value, time_ci=_ms(took),
        speedup_factor=speedup.value, speedup_ci=(speedup.low, speedup.high),
        image_ms=1e3 * median(_spent(a, "image") for a, _ in rounds),
        text_ms=1e3 * median(_spent(b, "text") for _, b in rounds),
        overlap_ratio=median(
            overlap(a, b) / wall for (a, b), wall in zip(rounds, times, strict=True)
        ),
        drift_ms=1e3 * median(sum(each) / len(each) for each in drifts),
        largest_drift_ms=1e3 * median(max(each) for each in drifts),
        waiting_bytes=PIECE * size * model.JOINT * (2 * batches if way.tasks is None
                                                    else graph.SLOTS),
        crossings=0 if way.tasks is None else _crossings(way, batches),
        logits_error=float(abs(image.logits[way.name] - expected.logits.numpy()).max()),
        gradients_error=None if way.kind != "training" else _error(got, expected.gradients),
        time_ms_blocks=tuple(1e3 * seconds for seconds in times), absent=absent,
    )  # fmt: skip


def figures(rows: Sequence[Towers]) -> list[dict[str, Any]]:
    """Each way as ``benchmark compare`` reads it."""
    return [
        figure(f"{' and '.join(row.devices)}/{row.way}/time_ms", row.time_ms_blocks) for row in rows
    ]


def _ms(took: Estimate) -> tuple[float, float]:
    return 1e3 * took.low, 1e3 * took.high


def _spent(ran: Sequence[Ran], task: str) -> float:
    return sum(item.end_s - item.start_s for item in ran if item.task == task)


def _crossings(way: Way, batches: int) -> int:
    once = {task.name for task in way.tasks or () if task.once}
    return sum(1 if edge[0] in once else batches for edge in graph.crossing(way.tasks or ()))


def drift(image: Sequence[Ran], text: Sequence[Ran]) -> list[float]:
    """Per batch, seconds between the ends of the two towers."""
    ends = {item.batch: item.end_s for item in text if item.task == "text"}
    return [abs(item.end_s - ends[item.batch]) for item in image if item.task == "image"]


def overlap(first: Sequence[Ran], second: Sequence[Ran]) -> float:
    """Seconds in which both devices computed."""
    return sum(
        max(0.0, min(a.end_s, b.end_s) - max(a.start_s, b.start_s)) for a in first for b in second
    )


def _error(got: Mapping[str, Array], expected: Mapping[str, torch.Tensor]) -> float:
    """The largest difference of a gradient, as a share of the largest gradient of its tensor."""
    if got.keys() != expected.keys():
        raise MmctlError("the towers did not bring back a gradient of every parameter")
    errors = []
    for name, tensor in expected.items():
        right = tensor.numpy()
        errors.append(float(abs(got[name] - right).max() / max(abs(right).max(), 1e-12)))
    return max(errors)
