"""The tapes against what the same stages really allocate."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="needs the extra 'torch'")

from mmctl.agent.tracker import Label, Tracker, on_host  # noqa: E402
from mmctl.demo.plan import Step, Tapes, encode_batch  # noqa: E402
from mmctl.engine.model import Config, KvCache, build, in_float32  # noqa: E402


class Taped:
    """Writes down allocations and releases as a tape does."""

    def __init__(self) -> None:
        self.steps: list[Step] = []
        self.slots: dict[int, int] = {}

    def alloc(self, key: int, size_bytes: int, label: Label, address: int) -> None:
        self.slots[key] = len([s for s in self.steps if s.size_bytes])
        self.steps.append(Step(self.slots[key], size_bytes))

    def free(self, key: int) -> None:
        self.steps.append(Step(self.slots.pop(key), 0))


@pytest.fixture(scope="module")
def model():
    return build()


@pytest.fixture(scope="module")
def tapes() -> Tapes:
    return Tapes(Config())


@torch.inference_mode()
@pytest.mark.parametrize("light", [False, True])
@pytest.mark.parametrize(("side", "counts"), [(112, (1,)), (112, (2, 1)), (56, (1, 1, 1))])
def test_encoding_allocates_what_its_tape_says(model, tapes, side, counts, light) -> None:
    sink = Taped()
    with Tracker(sink) as tracker:
        with on_host():
            for parameter in model.parameters():
                tracker.see(parameter)
            images = [torch.rand(3, side, side) for _ in range(sum(counts))]
        kept = encode_batch(model, images, counts, ["r"] * len(counts), light)
        steps = tuple(sink.steps)
    del kept
    assert steps == tapes.encode(side, counts, light)


def peak_bytes(tape) -> int:
    held, now, most = {}, 0, 0
    for slot, size_bytes in tape:
        now += size_bytes if size_bytes else -held.pop(slot)
        if size_bytes:
            held[slot] = size_bytes
        most = max(most, now)
    return most


def test_the_light_branch_needs_a_fraction(tapes) -> None:
    full, light = (peak_bytes(tapes.encode(448, (1, 1), light)) for light in (False, True))
    assert light < full / 4


@torch.inference_mode()
@pytest.mark.parametrize(
    ("new", "past", "vision_tokens"),
    [(256, 0, 0), (256, 256, 64), (37, 512, 0), (1, 500, 64), (1, 512, 0), (1, 1000, 576)],
)
def test_decoding_allocates_what_its_tape_says(model, tapes, new, past, vision_tokens) -> None:
    sink, cache = Taped(), KvCache(model.config, "cpu")
    ids = torch.zeros(new, dtype=torch.int64)
    pair = torch.zeros(2, vision_tokens, model.config.text_dim, dtype=torch.float16)
    cross = in_float32([pair] * model.config.text_layers) if vision_tokens else None
    if past:
        model.decode(torch.zeros(past, dtype=torch.int64), cache)
    capacity = cache.capacity
    with Tracker(sink) as tracker:
        with on_host():
            for tensor in (*model.parameters(), ids, pair):
                tracker.see(tensor)
        for number, kept in enumerate(zip(cache.keys, cache.values, strict=True)):
            for which, tensor in enumerate(kept):
                if capacity:
                    tracker.see(tensor)
                    sink.slots[tensor.untyped_storage()._cdata] = -1 - 2 * number - which
        del kept, tensor
        sink.steps.clear()
        logits = model.decode(ids, cache, cross)
        del logits
        steps = list(sink.steps)
    taped = tapes.decode(new, past, capacity, vision_tokens)

    def blocks(found) -> list[tuple[int, int]]:
        return [(step.slot, -(-step.size_bytes // 512)) for step in found]

    assert blocks(steps) == blocks(taped)


def test_a_server_that_runs_for_days_keeps_the_tapes_of_the_latest_shapes() -> None:
    tapes = Tapes(Config(), most=2)
    first = tapes.decode(1, 40, 64, 0)
    assert tapes.decode(1, 40, 64, 0) is first
    for past in (60, 90):
        tapes.decode(1, past, 96, 0)
    again = tapes.decode(1, 40, 64, 0)
    assert again == first and again is not first and len(tapes._made) == 2
