"""A frozen decode as a file, and its sampler: what comes back, and what a stranger's cannot do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mmctl.engine.errors import MmctlError
from mmctl.engine.schedule.migration import onnx_form, state
from mmctl.engine.schedule.migration.graph import Graph, Node, rebuild
from mmctl.engine.schedule.migration.state import Frozen, Position, Sampler
from mmctl.engine.untrusted import RefusedError


def frozen(past: int = 5, vision: int = 3, seed: int = 0) -> Frozen:
    """A decode of two layers whose graph does nothing."""
    random = np.random.default_rng(seed)
    rows = random.standard_normal((4, past, 6)).astype(np.float32)
    cross = [random.standard_normal((2, vision, 6)).astype(np.float16) for _ in range(2)]
    graph = Graph(
        layers=2, width=6, vocabulary=9, cross=bool(vision), inputs=["token"],
        weights={"p_head": "head.weight"}, nodes=[], outputs=["a", "b"],
    )  # fmt: skip
    return Frozen(
        graph=graph, weights={"head.weight": random.standard_normal((9, 6)).astype(np.float32)},
        cache=rows, cross=cross if vision else [],
        logits=random.standard_normal(9).astype(np.float32),
        position=Position(
            past=past, token=4, index=3, sampler=Sampler(temperature=0.7, seed=11, drawn=3),
            last=(past - 1, 8),
        ),
    )  # fmt: skip


@settings(max_examples=25, deadline=None)
@given(past=st.integers(2, 40), vision=st.integers(0, 9), seed=st.integers(0, 1000))
def test_round_trip(
    tmp_path_factory: pytest.TempPathFactory, past: int, vision: int, seed: int
) -> None:
    path = tmp_path_factory.mktemp("state") / "s.safetensors"
    one = frozen(past, vision, seed)
    assert state.save(one, path) == path.stat().st_size
    back = state.load(path)
    assert back.graph == one.graph and back.position == one.position
    for name in ("cache", "logits"):
        assert getattr(back, name).tobytes() == getattr(one, name).tobytes()
    assert [a.tobytes() for a in back.cross] == [a.tobytes() for a in one.cross]
    assert back.weights["head.weight"].tobytes() == one.weights["head.weight"].tobytes()


def test_the_file_is_safetensors_and_its_owners(tmp_path: Path) -> None:
    path = tmp_path / "s.safetensors"
    state.save(frozen(), path)
    assert path.stat().st_mode & 0o777 == 0o600
    numpy_side = pytest.importorskip("safetensors.numpy")
    assert numpy_side.load_file(path)["cache"].tobytes() == frozen().cache.tobytes()


@settings(max_examples=150, deadline=None)
@given(cut=st.integers(0, 3000), at=st.integers(0, 3000), value=st.integers(0, 255))
def test_a_damaged_file_is_refused_or_sound(
    tmp_path_factory: pytest.TempPathFactory, cut: int, at: int, value: int
) -> None:
    path = tmp_path_factory.mktemp("state") / "s.safetensors"
    state.save(frozen(), path)
    data = bytearray(path.read_bytes())
    data[at % len(data)] = value
    path.write_bytes(data[: len(data) - cut] if cut % 2 else data)
    try:
        back = state.load(path)
    except RefusedError as error:
        assert str(path) in str(error)
    else:
        assert back.cache.shape == (4, back.position.past, 6)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"position": {"past": 9, "last": (8, 8)}}, "not of one shape"),
        ({"position": {"token": 9}}, "outside the vocabulary"),
        ({"position": {"last": None}}, "the step before"),
        ({"position": {"past": -1}}, "not above nothing"),
        ({"graph": {"vocabulary": 0}}, "not above nothing"),
    ],
)
def test_parts_that_do_not_fit(tmp_path: Path, change: dict[str, Any], said: str) -> None:
    one = frozen()
    for part, values in change.items():
        changed = msgspec.structs.replace(getattr(one, part), **values)
        one = msgspec.structs.replace(one, **{part: changed})
    path = tmp_path / "s.safetensors"
    state.save(one, path)
    with pytest.raises(RefusedError, match=said):
        state.load(path)


def test_a_header_larger_than_the_file(tmp_path: Path) -> None:
    path = tmp_path / "s.safetensors"
    path.write_bytes((1 << 62).to_bytes(8, "little") + b"{}")
    with pytest.raises(RefusedError, match="does not fit"):
        state.load(path)


@pytest.mark.parametrize("op", ["os.system", "aten.randn.default", "__import__", "rand.default"])
def test_a_graph_names_no_other_operator(op: str) -> None:
    pytest.importorskip("torch")
    graph = msgspec.structs.replace(
        frozen().graph, nodes=[Node(name="a", op=op, args=[1])], outputs=["a", "a"]
    )
    weights = frozen().weights
    with pytest.raises(MmctlError, match="which a step does not need"):
        rebuild(graph, weights, "cpu")
    pytest.importorskip("onnx")
    with pytest.raises(MmctlError, match="no form in ONNX"):
        onnx_form.encode(graph, weights)


def test_greedy_takes_the_most_likely() -> None:
    logits = np.array([0.1, 3.0, -1.0], np.float32)
    token, after = Sampler().draw(logits)
    assert (token, after.drawn) == (1, 1)


def test_draws_follow_the_distribution() -> None:
    logits = np.log(np.array([0.5, 0.3, 0.2])).astype(np.float32)
    sampler, counts = Sampler(temperature=1.0, seed=3), np.zeros(3)
    for _ in range(4000):
        token, sampler = sampler.draw(logits)
        counts[token] += 1
    # Five standard deviations of a binomial share of 4,000.
    assert np.abs(counts / 4000 - [0.5, 0.3, 0.2]).max() < 5 * np.sqrt(0.25 / 4000)


@settings(deadline=None)
@given(seed=st.integers(0, 2**31), moved_at=st.integers(0, 20))
def test_a_sampler_goes_on_where_it_was(seed: int, moved_at: int) -> None:
    logits = np.random.default_rng(seed).standard_normal((20, 50)).astype(np.float32)

    def run(moved_at: int) -> list[int]:
        sampler, made = Sampler(temperature=0.9, seed=seed), []
        for number, row in enumerate(logits):
            if number == moved_at:
                sampler = msgspec.json.decode(msgspec.json.encode(sampler), type=Sampler)
            token, sampler = sampler.draw(row)
            made.append(token)
        return made

    assert run(moved_at) == run(-1)
