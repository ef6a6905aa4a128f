"""Two towers: the graph, its order and semaphores, and that nothing changes what comes out."""

from __future__ import annotations

import threading

import pytest

pytest.importorskip("torch", reason="needs the extra 'torch'")

import torch

from mmctl.benchmarks.towers import graph, measure, model
from mmctl.benchmarks.towers.device import Report, Shared, Way, _Device
from mmctl.benchmarks.towers.graph import Ran, Task
from mmctl.engine.errors import MmctlError


def test_a_graph_is_ordered_and_only_edges_between_devices_synchronise() -> None:
    tasks = graph.training(shared=True)
    names = [task.name for task in graph.order(tasks)]
    for task in tasks:
        assert all(names.index(before) < names.index(task.name) for before in task.after)
    assert set(graph.crossing(tasks)) == {
        ("text", "contrast"), ("temperature", "contrast"), ("contrast", "text_backward"),
    }  # fmt: skip
    assert graph.crossing(graph.inference(shared=False)) == [("text", "contrast")]
    with pytest.raises(MmctlError, match="depend on each other"):
        graph.order([Task("a", 0, ("b",)), Task("b", 1, ("a",))])
    with pytest.raises(MmctlError, match="'b', which is no task"):
        graph.order([Task("a", 0, ("b",))])


def both(tasks: list[Task], batches: int, work) -> dict[int, list[Ran]]:
    """Run both devices of a graph, here as threads."""
    joined = graph.channels(tasks, threading)
    found: dict[int, list[Ran]] = {}

    def one(device: int) -> None:
        found[device] = graph.run(tasks, device, batches, joined, work)

    threads = [threading.Thread(target=one, args=(device,), daemon=True) for device in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert set(found) == {0, 1}
    for edge, channel in joined.items():  # every slot was given back
        assert not channel.ready.acquire(blocking=False), edge
        assert all(channel.free.acquire(blocking=False) for _ in range(graph.SLOTS))
    return found


@pytest.mark.parametrize("serial", [False, True])
def test_dependencies_hold_for_every_batch_and_the_temperature_passes_once(serial: bool) -> None:
    done: list[tuple[str, int]] = []
    lock = threading.Lock()

    def note(name: str):
        def work(batch: int) -> None:
            with lock:
                done.append((name, batch))

        return work

    tasks = graph.training(shared=True, serial=serial)
    both(tasks, 6, {task.name: note(task.name) for task in tasks})
    assert [batch for name, batch in done if name == "temperature"] == [0]
    for task in tasks:
        for batch in range(1 if task.once else 6):
            for before in task.after:
                at = 0 if before == "temperature" else batch
                assert done.index((before, at)) < done.index((task.name, batch))
    # A tower is no further ahead than its slots.
    for batch in range(graph.SLOTS, 6):
        assert done.index(("contrast", batch - graph.SLOTS)) < done.index(("text", batch))
    if serial:
        order = [name for name, batch in done if batch == 3]
        assert order == ["image", "text", "contrast", "image_backward", "text_backward", "end"]


@pytest.mark.parametrize("kind", ["inference", "training"])
def test_bound_towers_give_what_one_process_gives(kind: str) -> None:
    batches, size = 5, 2
    tasks = (graph.training if kind == "training" else graph.inference)(True)
    way = Way("bound", kind, tasks)
    floats = batches * size * model.JOINT
    shared = Shared(
        bytearray(4 * floats), bytearray(4 * floats), bytearray(4),
        {"bound": graph.channels(tasks, threading)}, None, None,
    )  # fmt: skip
    towers = [_Device(rank, "cpu", batches, size, shared) for rank in (0, 1)]
    for tower in towers:
        tower.begin(way)
    threads = [threading.Thread(target=tower.bound, args=(way,)) for tower in towers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    expected = model.reference(batches, size)
    assert (towers[0].logits - expected.logits).abs().max() <= 1e-5
    if kind == "training":
        got = {**towers[0].gradients(), **towers[1].gradients()}
        assert measure._error(got, expected.gradients) <= 1e-5
        wrong = {name: array * 1.001 for name, array in got.items()}
        assert measure._error(wrong, expected.gradients) > 1e-5


def test_drift_and_overlap_are_of_the_clock() -> None:
    image = [Ran("image", 0, 0.0, 1.0), Ran("contrast", 0, 2.0, 2.5), Ran("image", 1, 2.5, 3.5)]
    text = [Ran("text", 0, 0.0, 2.0), Ran("text", 1, 2.25, 3.25)]
    assert measure.drift(image, text) == [1.0, 0.25]
    assert measure.overlap(image, text) == pytest.approx(1.0 + 0.25 + 0.75)


def test_a_row_compares_rounds_and_reports_the_way() -> None:
    from mmctl.benchmarks.towers.device import Spell

    logits = torch.zeros(2, 1, 1)
    expected = model.Reference(logits, {})
    ran = {
        0: [Ran("image", 0, 0, 1), Ran("image", 1, 1, 2), Ran("contrast", 1, 2, 2.5)],
        1: [Ran("text", 0, 0, 1), Ran("text", 1, 1, 2)],
    }
    way = Way("bound T1", "inference", graph.inference(True))
    image, text = (
        Report([Spell(way.name, ran[rank], 0.0)] * 3, {way.name: logits.numpy() + 1e-3},
               {way.name: {}})
        for rank in (0, 1)
    )  # fmt: skip
    row = measure._row(("cpu", "cpu"), way, 2, 1, image, text, [5.0] * 3, expected)
    assert row.time_ms == 2500 and row.speedup_factor == 2 and row.rounds == 3
    assert row.overlap_ratio == pytest.approx(0.8)
    assert row.crossings == 3  # two batches of features, and the temperature once
    assert row.gradients_error is None and row.absent["gradients_error"]
    assert not measure.agrees(row)  # the logits are a thousandth off


def test_devices_that_are_not_here_are_said() -> None:
    with pytest.raises(MmctlError, match="two devices with a comma"):
        measure.pairs("cpu")
    with pytest.raises(MmctlError, match="no device 'nonsense'"):
        measure.pairs("cpu,nonsense")
    found, absent = measure.pairs(None)
    assert found and all(len(pair) == 2 for pair in found)
    assert absent or not any("cpu" in pair for pair in found)


def test_openvino_computes_the_same_text_tower() -> None:
    pytest.importorskip("openvino", reason="needs the extra 'openvino'")
    from mmctl.benchmarks.towers.device import compiled

    tower, ids = model.text_tower().eval(), model.texts(0, 4)
    with torch.no_grad():
        expected = tower(ids)
    got = torch.from_numpy(compiled(tower, ids, "openvino:CPU")(ids.numpy())[0])
    assert (got - expected).abs().max() <= 1e-5
