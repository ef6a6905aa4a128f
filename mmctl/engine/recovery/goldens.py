"""Goldens: what a healthy server answered to the canaries, and how far good runs differ.

Recorded on the node before anything trips, in at least five runs over every way of asking that
will be used (batch sizes, thread counts); the spread of those runs is the tolerance.
"""

from __future__ import annotations

import platform
import string
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from time import time_ns

import msgspec
import numpy as np
from numpy.typing import NDArray

from mmctl import __version__
from mmctl.engine import atomic
from mmctl.engine.errors import MmctlError
from mmctl.engine.profiles import Recovery
from mmctl.engine.records import SCHEMA
from mmctl.engine.recovery.canaries import CANARIES, CAPTION, Canary, Image, digest, draw

Floats = NDArray[np.float32]


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """What a server answered.

    ``tokens`` are the generated ids where they are known. ``logits`` is [steps, vocabulary],
    or for servers that tell only their best candidates the log-probabilities per step by
    token, in ``candidates``. ``embedding`` is of the image, ``text_embedding`` of the text.
    """

    text: str
    tokens: tuple[int, ...] | None = None
    logits: Floats | None = None
    candidates: tuple[dict[str, float], ...] | None = None
    embedding: Floats | None = None
    text_embedding: Floats | None = None


_IGNORED = frozenset(string.punctuation + "\n\t\r")

Ask = Callable[[Image, str], Answer]
"""Ask a server a question about an image; raises MmctlError when it does not answer."""


class GoldenAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """One answer of the good runs and the greatest difference among them.

    ``margin`` is the least distance between best and second candidate over the answer.
    ``rejected`` says why the canary cannot judge this server; absent where it can.
    """

    name: str
    question: str
    answer: Answer
    right: bool | None = None
    logits_spread: float | None = None
    embedding_spread: float | None = None
    text_embedding_spread: float | None = None
    margin: float | None = None
    rejected: str | None = None


class Goldens(msgspec.Struct, frozen=True, kw_only=True):
    """A file of goldens."""

    schema: int = SCHEMA
    created_ns: int
    node: str
    server: str
    mmctl: str
    canaries: str
    runs: int
    answers: tuple[GoldenAnswer, ...]


def questions(canaries: Sequence[Canary] = CANARIES) -> Iterator[tuple[str, Canary, str]]:
    """(name, canary, question): the closed questions, then the captions asked for."""
    for canary in canaries:
        yield canary.name, canary, canary.question
    for canary in canaries:
        if canary.described:
            yield f"{canary.name}/caption", canary, CAPTION


def observe(
    ask: Ask, canaries: Sequence[Canary] = CANARIES, at_once: int = 1
) -> dict[str, Answer | str]:
    """The answers of one run by name; a question that got none has the reason instead.

    ``at_once`` questions are asked at the same time, so that a server batches them.
    """

    def one(canary: Canary, question: str) -> Answer | str:
        try:
            return ask(draw(canary), question)
        except MmctlError as error:
            return str(error)

    asked = list(questions(canaries))
    with ThreadPoolExecutor(at_once) as pool:
        answers = pool.map(lambda item: one(item[1], item[2]), asked)
        return {name: answer for (name, _, _), answer in zip(asked, answers, strict=True)}


def record(
    ask: Ask,
    server: str,
    settings: Recovery,
    canaries: Sequence[Canary] = CANARIES,
    at_once: Sequence[int] = (1,),
    progress: Callable[[int, int], None] = lambda done, of: None,
) -> Goldens:
    """Goldens from ``settings.golden_runs`` runs, which take the numbers of ``at_once`` in turn.

    Raises MmctlError when a question gets no answer, or when fewer than half of the closed
    questions are answered alike in all runs: such a server cannot be verified.
    """
    runs: list[dict[str, Answer]] = []
    for number in range(settings.golden_runs):
        answers: dict[str, Answer] = {}
        observed = observe(ask, canaries, at_once[number % len(at_once)])
        for name, answer in observed.items():
            if isinstance(answer, str):
                raise MmctlError(f"no golden: the server did not answer '{name}': {answer}")
            answers[name] = answer
        runs.append(answers)
        progress(number + 1, settings.golden_runs)
    return from_runs(runs, server, settings, canaries)


def from_runs(
    runs: Sequence[Mapping[str, Answer]],
    server: str,
    settings: Recovery,
    canaries: Sequence[Canary] = CANARIES,
) -> Goldens:
    """Goldens from runs that were observed before; see ``record``."""
    if len(runs) < settings.golden_runs:
        raise MmctlError(f"goldens need {settings.golden_runs} good runs, not {len(runs)}")
    answers = tuple(
        _golden(name, canary, question, [run[name] for run in runs], settings)
        for name, canary, question in questions(canaries)
    )
    closed = answers[: len(canaries)]
    stable = sum(golden.rejected is None for golden in closed)
    if 2 * stable < len(closed):
        reasons = "; ".join(sorted({g.rejected for g in closed if g.rejected}))
        raise MmctlError(
            f"only {stable} of {len(closed)} canaries can judge this server ({reasons}): "
            "ask it with temperature 0 and a fixed seed"
        )
    return Goldens(
        created_ns=time_ns(), node=platform.node(), server=server, mmctl=__version__,
        canaries=digest(tuple(canaries)), runs=len(runs), answers=answers,
    )  # fmt: skip


def _golden(
    name: str, canary: Canary, question: str, given: Sequence[Answer], settings: Recovery
) -> GoldenAnswer:
    first = given[0]
    same = all(answer.tokens == first.tokens and answer.text == first.text for answer in given)
    margin = min((m for m in map(least_margin, given) if m is not None), default=None)
    rejected = None
    closed = question != CAPTION
    if closed and not same:
        rejected = "good runs answered differently"
    elif closed and margin is not None and margin < settings.canary_margin:
        rejected = f"best and second answer are within {settings.canary_margin:g}"
    return GoldenAnswer(
        name=name, question=question, answer=first,
        right=normal(first.text) == canary.answer if closed else None,
        logits_spread=_spread(given, logits_difference),
        embedding_spread=_spread(given, lambda a, b: relative(a.embedding, b.embedding)),
        text_embedding_spread=_spread(
            given, lambda a, b: relative(a.text_embedding, b.text_embedding)
        ),
        margin=margin, rejected=rejected,
    )  # fmt: skip


def _spread(
    given: Sequence[Answer], difference: Callable[[Answer, Answer], float | None]
) -> float | None:
    """The greatest difference between any two runs; absent where it cannot be told."""
    found = [
        difference(a, b) for number, a in enumerate(given) for b in given[number + 1 :]
    ]  # fmt: skip
    return None if None in found else max((f for f in found if f is not None), default=None)


def normal(text: str) -> str:
    """``text`` without case, punctuation and surplus space; anything odder stays."""
    kept = "".join(" " if c in _IGNORED else c for c in text.casefold())
    return " ".join(word for word in kept.split(" ") if word)


def least_margin(answer: Answer) -> float | None:
    """The least distance between the best two candidates of any step; absent without logits."""
    if answer.logits is not None and answer.logits.shape[-1] > 1 and len(answer.logits):
        best = np.partition(answer.logits, -2, axis=-1)[:, -2:]
        return float((best[:, 1] - best[:, 0]).min())
    if answer.candidates:
        pairs = [sorted(step.values())[-2:] for step in answer.candidates if len(step) > 1]
        return min((high - low for low, high in pairs), default=None)
    return None


def logits_difference(a: Answer, b: Answer) -> float | None:
    """The greatest difference of any logit, up to the step where the answers part.

    Later steps answer other prefixes. Absent where either has no logits; infinite where
    one holds values that are not finite.
    """
    if a.logits is not None and b.logits is not None:
        steps = min(len(a.logits), len(b.logits), _common(a.tokens, b.tokens) + 1)
        if a.logits.shape[1:] != b.logits.shape[1:]:
            return float("inf")
        return _greatest(a.logits[:steps], b.logits[:steps])
    if a.candidates is not None and b.candidates is not None:
        worst = 0.0
        for x, y in zip(a.candidates, b.candidates, strict=False):
            shared = x.keys() & y.keys()
            worst = max([worst, *(abs(x[token] - y[token]) for token in shared)])
            if _best(x) != _best(y):
                break
        return worst
    return None


def _best(candidates: Mapping[str, float]) -> str | None:
    return max(candidates, key=candidates.__getitem__, default=None)


def _common(a: Sequence[int] | None, b: Sequence[int] | None) -> int:
    """How many leading tokens are alike; unbounded where all are, or where they are not known."""
    pairs = enumerate(zip(a or (), b or (), strict=False))
    return next((place for place, (x, y) in pairs if x != y), 2**31)


def _greatest(a: Floats, b: Floats) -> float:
    if not a.size:
        return 0.0
    with np.errstate(invalid="ignore"):
        worst = float(np.abs(a.astype(np.float64) - b).max())
    return worst if np.isfinite(worst) else float("inf")


def relative(a: Floats | None, b: Floats | None) -> float | None:
    """Relative L2 difference of two vectors; absent where either is, infinite if not finite."""
    if a is None or b is None:
        return None
    if a.shape != b.shape:
        return float("inf")
    x, y = a.astype(np.float64).ravel(), b.astype(np.float64).ravel()
    size = float(np.linalg.norm(x))
    with np.errstate(invalid="ignore", over="ignore"):
        value = float(np.linalg.norm(x - y)) / (size or 1.0)
    return value if np.isfinite(value) else float("inf")


def cosine(a: Floats, b: Floats) -> float:
    """Cosine of two vectors; 0 where one is zero, not finite or of another length."""
    if a.shape != b.shape:
        return 0.0
    x, y = a.astype(np.float64).ravel(), b.astype(np.float64).ravel()
    size = float(np.linalg.norm(x) * np.linalg.norm(y))
    value = float(x @ y) / size if size and np.isfinite(size) else 0.0
    return value if np.isfinite(value) else 0.0


class _Array(msgspec.Struct, frozen=True):
    shape: tuple[int, ...]
    float32: bytes


def save(goldens: Goldens, path: Path) -> None:
    """Write ``goldens`` as JSON in one step; arrays as float32, little-endian, base64."""

    def encode(value: object) -> object:
        if isinstance(value, np.ndarray):
            return _Array(value.shape, value.astype("<f4").tobytes())
        raise NotImplementedError(f"{type(value)} in goldens")

    atomic.write(path, msgspec.json.encode(goldens, enc_hook=encode))


def load(path: Path, canaries: Sequence[Canary] = CANARIES) -> Goldens:
    """The goldens in ``path``; MmctlError for a broken file or one of other canaries."""

    def decode(kind: type, value: object) -> object:
        array = msgspec.convert(value, _Array)
        flat = np.frombuffer(array.float32, "<f4")
        return flat.reshape(array.shape)

    try:
        goldens = msgspec.json.decode(path.read_bytes(), type=Goldens, dec_hook=decode)
    except (msgspec.DecodeError, ValueError) as error:
        raise MmctlError(f"{path} holds no goldens: {error}") from None
    if goldens.canaries != digest(tuple(canaries)):
        raise MmctlError(
            f"{path} was recorded with other canaries (mmctl {goldens.mmctl}): "
            "record goldens again while the server is healthy"
        )
    return goldens
