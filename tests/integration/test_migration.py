"""Decodes that move between real processes: the same tokens, and back when something breaks."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

torch = pytest.importorskip("torch")

from mmctl.engine import model as demo  # noqa: E402
from mmctl.engine.errors import MmctlError  # noqa: E402
from mmctl.engine.schedule.migration import live  # noqa: E402
from mmctl.engine.schedule.migration.decode import Begin  # noqa: E402
from mmctl.engine.schedule.migration.state import Sampler  # noqa: E402

BEGIN = Begin(cache_tokens=48, image_pixels=56, temperature=0.8, seed=5)
LIMITS = live.Limits(deadline_s=20, patience_s=60, l2_same_kind=1e-6, l2_across_kinds=2.3e-5)
A_MOVE = 24  # tokens that each test may use, and more than a copy takes at this pace
PACE_S = 0.05
MOVES = 15


def known_answer(count: int) -> list[int]:
    """The tokens of the model's own decode, without any of what is tested."""
    model = demo.build(seed=BEGIN.seed)
    random = torch.Generator().manual_seed(BEGIN.seed)
    torch.set_num_threads(1)
    with torch.inference_mode():
        image = torch.rand(1, 3, BEGIN.image_pixels, BEGIN.image_pixels, generator=random)
        cross = demo.in_float32(model.cross_cache(model.encode(image)[0]))
        prompt = torch.randint(0, 256, (BEGIN.cache_tokens,), generator=random)
        cache = demo.KvCache(model.config, "cpu")
        logits = model.decode(prompt, cache, cross)
        sampler, made = Sampler(temperature=BEGIN.temperature, seed=BEGIN.seed), []
        for _ in range(count):
            token, sampler = sampler.draw(logits.numpy())
            made.append(token)
            logits = model.decode(torch.tensor([token]), cache, cross)
    return made


class Scene(NamedTuple):
    """A source that has been through every test before, and every token that has come so far."""

    source: live.Process
    made: list[live.Made]
    wanted: list[int]

    def check(self) -> None:
        """Each token once, in order, and that of the decode that never moved."""
        assert [one.index for one in self.made] == list(range(len(self.made)))
        assert [one.token for one in self.made] == self.wanted[: len(self.made)]

    def move(self, target: str, fault: str = "", **limits: float) -> live.Move:
        """One attempt to move the decode to a new process; where it fails it goes on here."""
        allowed = live.Limits(**{**live.msgspec.structs.asdict(LIMITS), **limits})
        taker = live.Process("target", target, fault=fault)
        try:
            live.prepare(self.source, taker, allowed)
            until = len(self.made) + A_MOVE
            return live.hand_over(
                self.source, taker, self.made, allowed, after=2, until=until, pace_s=PACE_S
            )
        finally:
            taker.close()


@pytest.fixture(scope="module")
def scene() -> Iterator[Scene]:
    source = live.Process("source", "torch:cpu")
    made: list[live.Made] = []
    plan = live.Plan(source="torch:cpu", target="", tokens=MOVES * A_MOVE, begin=BEGIN)
    try:
        _, reference, _ = live.start(source, plan, LIMITS, made)
        wanted = known_answer(MOVES * A_MOVE)
        assert reference == wanted
        yield Scene(source, made, wanted)
    finally:
        source.close()


@pytest.mark.parametrize(
    ("fault", "phase", "said"),
    [
        ("weights", "check", "computes something else"),
        ("memory", "copy", "failed"),
        ("kill:copy", "copy check", "gone"),  # what was sent before is only missed later
        ("kill:check", "check", "gone"),
        ("kill:pause", "pause", "gone"),
        ("kill:take", "take", "signal 9"),
        ("kill:token", "take", "signal 9"),
    ],
)
def test_what_breaks_leaves_the_decode_where_it_was(
    scene: Scene, fault: str, phase: str, said: str
) -> None:
    pytest.importorskip("onnxruntime")
    move = scene.move("onnxruntime:cpu", fault)
    assert move.status == "rolled_back" and move.phase is not None
    assert move.phase in phase.split()
    assert move.why is not None and said in move.why
    assert (move.pause_s is None) == (move.phase not in ("pause", "take"))
    scene.check()
    # Two tokens came from the other side before it was killed: they stay, and are not repeated.
    assert sum(one.by == "target" for one in scene.made[-A_MOVE:]) == 2 * (fault == "kill:token")


@pytest.mark.parametrize(("fault", "phase"), [("hang:pause", "pause"), ("hang:take", "take")])
def test_a_target_that_stands_still(scene: Scene, fault: str, phase: str) -> None:
    pytest.importorskip("onnxruntime")
    move = scene.move("onnxruntime:cpu", fault, deadline_s=2)
    assert (move.status, move.phase) == ("rolled_back", phase)
    assert move.why is not None and "does not answer" in move.why
    scene.check()


def test_a_target_that_never_gets_ready(scene: Scene) -> None:
    pytest.importorskip("onnxruntime")
    with pytest.raises(MmctlError, match="gone"):
        scene.move("onnxruntime:cpu", "kill:build")
    scene.check()


def test_an_error_beyond_what_is_allowed(scene: Scene) -> None:
    pytest.importorskip("onnxruntime")
    move = scene.move("onnxruntime:cpu", l2_across_kinds=0.0)
    assert (move.status, move.phase) == ("rolled_back", "check")
    assert move.l2_error is not None and 0 < move.l2_error < 2.3e-5
    scene.check()


@pytest.mark.parametrize("target", ["torch:cpu", "openvino:cpu", "onnxruntime:cpu"])
def test_there_and_back(scene: Scene, target: str) -> None:
    pytest.importorskip(target.partition(":")[0])
    taker = live.Process("target", target)
    try:
        live.prepare(scene.source, taker, LIMITS)
        until = len(scene.made) + A_MOVE
        there = live.hand_over(
            scene.source, taker, scene.made, LIMITS, after=2, until=until, pace_s=PACE_S,
            taker_steps=live.HELD_TOKENS,
        )  # fmt: skip
        taker.hear("done", scene.made)
        back = live.hand_over(
            taker, scene.source, scene.made, LIMITS, after=2, until=until, pace_s=PACE_S
        )
        scene.source.hear("done", scene.made)
    finally:
        taker.close()
    allowed = 1e-6 if target == "torch:cpu" else 2.3e-5
    for move in (there, back):
        assert move.status == "migrated", move.why
        assert move.same_kind == (target == "torch:cpu")
        assert move.l2_error is not None and move.l2_error < allowed and move.checked_steps >= 2
        assert move.pause_s is not None and move.gap_s is not None
        assert 0 < move.pause_s < move.gap_s
        # Only a row and the sampler's numbers are left for the pause.
        assert move.paused_bytes is not None and move.paused_bytes < move.copied_bytes / 20
    assert {one.by for one in scene.made[-A_MOVE:]} == {"source", "target"}
    scene.check()


def run_json(done: Any) -> Any:
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_command(mmctl: Callable[..., Any], tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    small = ("--cache", "64", "--image", "0", "--seed", "3", "-q", "-o", "json")
    moved = run_json(
        mmctl("schedule", "migrate", "torch:cpu", "onnxruntime:cpu", "--deadline", "20s",
              "--tokens", "200", *small)
    )  # fmt: skip
    assert moved["verdict"] == "migratable" and moved["basis"] == "measured"
    assert moved["tokens_equal"] is True and (moved["lost"], moved["repeated"]) == (0, 0)
    assert moved["pause_s"]["n"] == 1 and moved["l2_error"] < 2.3e-5
    assert len(moved["tokens"]) == 200 and moved["decode"]["vision_tokens"] == 0

    path = tmp_path / "decode.safetensors"
    kept = run_json(
        mmctl("schedule", "migrate", "torch:cpu", "--tokens", "20", "--out", str(path), *small)
    )
    assert kept["bytes"] == path.stat().st_size
    rest = run_json(
        mmctl("schedule", "migrate", "onnxruntime:cpu", "--tokens", "20", "--from", str(path),
              *small)
    )  # fmt: skip
    assert kept["tokens"] + rest["tokens"] == moved["tokens"][:40]
    assert rest["first_index"] == 20 and rest["l2_error"] < 2.3e-5


def test_not_migratable_and_nothing_done(mmctl: Callable[..., Any]) -> None:
    done = mmctl(
        "schedule", "migrate", "torch:cpu", "torch:cpu", "--memory", "1000TiB", "-o", "json"
    )
    assert done.returncode == 3
    found = json.loads(done.stdout)
    assert found["verdict"] == "not_migratable" and "moves" not in found
    assert [r["check"] for r in found["reasons"] if r["verdict"] == "blocks"] == ["memory"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["torch:cpu"], "name two engines"),
        (["troch:cpu", "torch:cpu"], "did you mean 'torch:cpu'"),
        (["torch:cpu", "here"], "unknown engine 'here'"),
        (["torch:cpu", "torch:cpu", "--fault", "kil"], "did you mean 'kill'"),
        (["torch:cpu", "torch:cpu", "--deadline", "0s"], "more than nothing"),
        (["torch:cpu", "torch:cpu", "--image", "7"], "at least 28"),
        (["torch:cpu", "torch:cpu", "--out", "x"], "--out takes one engine"),
        (["--check", "here"], "--check takes two places"),
    ],
)
def test_slips(mmctl: Callable[..., Any], arguments: list[str], said: str) -> None:
    done = mmctl("schedule", "migrate", *arguments)
    assert done.returncode == 2 and said in done.stderr
