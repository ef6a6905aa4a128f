from __future__ import annotations

import gc

import pytest

torch = pytest.importorskip("torch", reason="needs the extra 'torch'")

from mmctl.agent.tracker import Label, Tracker, labelled, on_host  # noqa: E402
from mmctl.engine.model import KvCache, build  # noqa: E402


class Ledger:
    """Remembers what a tracker reports."""

    def __init__(self) -> None:
        self.live: dict[int, tuple[int, Label]] = {}
        self.allocated: list[int] = []
        self.refuse_above = 1 << 60

    def alloc(self, key: int, size_bytes: int, label: Label, address: int) -> None:
        if size_bytes > self.refuse_above:
            raise torch.OutOfMemoryError("no")
        assert key not in self.live
        self.live[key] = (size_bytes, label)
        self.allocated.append(size_bytes)

    def free(self, key: int) -> None:
        del self.live[key]

    @property
    def bytes(self) -> int:
        return sum(size for size, _ in self.live.values())


@torch.inference_mode()
def test_sees_what_the_profiler_sees() -> None:
    model = build()
    image = torch.rand(1, 3, 112, 112)

    def work() -> None:
        cache = KvCache(model.config, "cpu")
        model.encode(image)
        model.decode(torch.arange(64), cache)

    work()
    ledger = Ledger()
    with Tracker(ledger) as tracker:
        with on_host():  # the weights are known, and not of this work
            for parameter in model.parameters():
                tracker.see(parameter)
        work()
    with torch.profiler.profile(profile_memory=True) as profile:
        work()
    oracle = [event.nbytes() for event in profile.profiler.kineto_results.events()
              if event.name() == "[memory]" and event.nbytes() > 0]  # fmt: skip
    assert sum(ledger.allocated) >= 0.98 * sum(oracle)
    large = [size for size in oracle if size >= 2**18]
    assert large and sorted(s for s in ledger.allocated if s >= 2**18) == sorted(large)


@torch.inference_mode()
def test_every_storage_is_freed_once_and_views_are_not_new() -> None:
    ledger = Ledger()
    with Tracker(ledger):
        a = torch.ones(1000)
        views = [a.view(10, 100), a[5:], a.t()]
        assert ledger.bytes == 4000
        del a
        assert ledger.bytes == 4000
        views.clear()
        gc.collect()
        assert ledger.bytes == 0


@torch.inference_mode()
def test_labels_and_host_storage() -> None:
    ledger = Ledger()
    with Tracker(ledger):
        with labelled("vision", "r7"):
            a = torch.ones(10)
        with on_host():
            b = torch.ones(20)
        c = b[:5]  # a view of host storage, outside
        d = torch.ones(30)
    assert [label for _, label in ledger.live.values()] == [
        Label("vision", "r7"),
        Label("other", ""),
    ]
    assert ledger.bytes == 160
    del a, b, c, d


@torch.inference_mode()
def test_a_refused_storage_is_not_kept() -> None:
    ledger = Ledger()
    ledger.refuse_above = 1000
    with Tracker(ledger), pytest.raises(torch.OutOfMemoryError):
        torch.ones(1000)
    assert ledger.bytes == 0


def test_a_tracker_needs_no_dynamo(mmctl) -> None:
    import subprocess
    import sys

    code = (
        "import sys, torch\n"
        "from mmctl.agent.tracker import Tracker\n"
        "class S:\n  def alloc(self, *a): pass\n  def free(self, *a): pass\n"
        "with Tracker(S()): torch.ones(3) + 1\n"
        "assert 'torch._dynamo' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
