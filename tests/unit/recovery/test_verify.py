"""Goldens and verdicts, on a server that is a function of its weights."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest

from mmctl.engine import profiles
from mmctl.engine.errors import MmctlError
from mmctl.engine.recovery.canaries import CANARIES, Image
from mmctl.engine.recovery.goldens import Answer, load, observe, record, save
from mmctl.engine.recovery.verify import compare

SETTINGS = profiles.load("default").profile.recovery
WORDS = ("red", "blue", "yes", "no", "3", "7", "a red circle", "two blue squares")


class Server:
    """Features of the image times weights, words by the greatest logit; ``noise`` as of threads."""

    def __init__(self, noise: float = 0.0) -> None:
        generator = np.random.default_rng(7)
        self.vision = generator.normal(size=(49 * 3, 16)).astype(np.float32)
        self.head = generator.normal(size=(16, len(WORDS))).astype(np.float32)
        self.noise, self.generator = noise, generator

    def __call__(self, image: Image, question: str) -> Answer:
        pooled = image.reshape(7, 32, 7, 32, 3).mean((1, 3)).ravel() / 255 + len(question) % 7
        features = (pooled @ self.vision).astype(np.float32)
        logits = features @ self.head
        logits = logits + self.noise * self.generator.normal(size=logits.shape)
        token = int(logits.argmax())
        return Answer(
            text=WORDS[token], tokens=(token,), logits=logits[None].astype(np.float32),
            embedding=features, text_embedding=features,
        )  # fmt: skip


def test_a_healthy_server_is_consistent_and_a_changed_one_is_not() -> None:
    server = Server(noise=1e-5)
    goldens = record(server, "test", SETTINGS)
    verdict = compare(goldens, observe(server), SETTINGS)
    assert verdict.verdict == "consistent", [c for c in verdict.checks if not c.passed]
    assert {check.name for check in verdict.checks} >= {
        "red_circle", "red_circle/caption", "logits", "image_embedding_error",
        "image_embedding_cosine", "caption_bleu", "caption_embedding_distance",
    }  # fmt: skip
    server.head[3, 0] += 0.01
    changed = compare(goldens, observe(server), SETTINGS)
    assert changed.verdict == "inconsistent"
    assert {c.name for c in changed.checks if not c.passed} >= {"logits"}


def test_tolerance_is_the_spread_of_the_good_runs() -> None:
    quiet = record(Server(), "test", SETTINGS)
    loud = record(Server(noise=0.1), "test", SETTINGS)

    def bound(goldens):
        checks = compare(goldens, observe(Server()), SETTINGS).checks
        return next(c.tolerance for c in checks if c.name == "logits")

    assert bound(loud) > 100 * bound(quiet) > 0


def test_values_that_are_not_finite_are_inconsistent() -> None:
    server = Server()
    goldens = record(server, "test", SETTINGS)
    server.vision[0, 0] = np.nan
    assert compare(goldens, observe(server), SETTINGS).verdict == "inconsistent"


def test_no_answer_is_inconsistent_with_its_reason() -> None:
    server = Server()
    goldens = record(server, "test", SETTINGS)

    def dead(image: Image, question: str) -> Answer:
        raise MmctlError("the connection was refused")

    verdict = compare(goldens, observe(dead), SETTINGS)
    assert verdict.verdict == "inconsistent"
    assert "refused" in str(verdict.checks[0].detail)


def test_text_alone_is_enough_and_says_what_is_absent() -> None:
    def ask(image: Image, question: str) -> Answer:
        return Answer(text=Server()(image, question).text)

    goldens = record(ask, "test", SETTINGS)
    verdict = compare(goldens, observe(ask), SETTINGS)
    assert verdict.verdict == "consistent"
    assert {"logits", "image_embedding_cosine"} <= verdict.absent.keys()


def test_closed_answers_may_be_worded_otherwise_but_not_changed() -> None:
    def says(answer):
        def ask(image: Image, question: str) -> Answer:
            return Answer(text=answer if "colour is the circle" in question else "no")

        return ask

    goldens = record(says("red"), "test", SETTINGS)
    assert compare(goldens, observe(says("It is Red.")), SETTINGS).verdict == "consistent"
    assert compare(goldens, observe(says("It is blue.")), SETTINGS).verdict == "inconsistent"


def test_candidates_are_compared_up_to_where_answers_part() -> None:
    def says(second):
        def ask(image: Image, question: str) -> Answer:
            return Answer(text="no", candidates=({"no": -0.1, "yes": -2.0}, second))

        return ask

    goldens = record(says({"x": -1.0, "y": -3.0}), "test", SETTINGS)

    def logits(second):
        checks = compare(goldens, observe(says(second)), SETTINGS).checks
        return next(c for c in checks if c.name == "logits")

    assert logits({"x": -1.0, "z": -3.5}).passed
    assert not logits({"x": -1.2, "y": -3.0}).passed


def test_saved_goldens_load_again_and_broken_ones_say_so(tmp_path: Path) -> None:
    goldens = record(Server(), "test", SETTINGS)
    path = tmp_path / "golden.json"
    save(goldens, path)
    again = load(path)
    assert again.server == "test" and len(again.answers) == len(goldens.answers)
    assert np.array_equal(again.answers[0].answer.logits, goldens.answers[0].answer.logits)
    assert compare(again, observe(Server()), SETTINGS).verdict == "consistent"
    for content in (b"", b"{}", path.read_bytes()[:500], b'{"schema": 1, "answers": 3}'):
        path.write_bytes(content)
        with pytest.raises(MmctlError, match="holds no goldens"):
            load(path)
    save(msgspec.structs.replace(goldens, canaries="other"), path)
    with pytest.raises(MmctlError, match="other canaries"):
        load(path)


def test_servers_that_cannot_be_verified_are_refused() -> None:
    answers = iter(range(10**6))
    with pytest.raises(MmctlError, match="temperature 0"):
        record(lambda image, question: Answer(text=str(next(answers))), "test", SETTINGS)
    near = np.array([[1.0, 1.0001]], np.float32)
    with pytest.raises(MmctlError, match="within"):
        record(lambda image, question: Answer(text="no", logits=near), "test", SETTINGS)
    assert len(CANARIES) == 12
