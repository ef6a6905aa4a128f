"""The demo's canaries: closed questions before the trip and after, one a step."""

from __future__ import annotations

import base64
from collections.abc import Generator
from functools import partial
from typing import Any

import msgspec
import numpy as np
import torch

from mmctl.agent.tracker import labelled
from mmctl.engine.errors import MmctlError
from mmctl.engine.model import VisionLanguageModel
from mmctl.engine.profiles import Recovery
from mmctl.engine.recovery.canaries import CANARIES, Image, draw
from mmctl.engine.recovery.goldens import Answer, Goldens, from_runs
from mmctl.engine.recovery.verify import compare

CLOSED = tuple(msgspec.structs.replace(canary, described=False) for canary in CANARIES)
"""A model with random weights describes nothing: its captions are not asked for."""


def ask(model: VisionLanguageModel, image: Image, question: str) -> Answer:
    """Ask the model itself, with nothing of the server's state and no lossy response."""
    with labelled("other", "canary"):
        # Every second pixel: the shapes stay, and a canary takes a quarter of the memory.
        pixels = torch.tensor(image[::2, ::2]).permute(2, 0, 1).float() / 255
        ids, logits, embedding = model.answer(pixels, question)
        return Answer(
            text=" ".join(map(str, ids)), tokens=tuple(ids), logits=logits.cpu().numpy().copy(),
            embedding=None if embedding is None else embedding.cpu().numpy().copy(),
        )  # fmt: skip


def asked(model: VisionLanguageModel, args: dict[str, Any]) -> dict[str, Any]:
    """The answer to a question as it comes over the socket: ``pixels`` in base64, ``shape``,
    ``question``. Raises MmctlError for anything else."""
    try:
        pixels = np.frombuffer(base64.b64decode(args["pixels"], validate=True), np.uint8)
        height, width, colours = (int(side) for side in args["shape"])
        image = pixels.reshape(height, width, colours)
        question = str(args["question"])
        if colours != 3 or not question:
            raise ValueError("an image is [height, width, 3], a question is not empty")
    except (KeyError, TypeError, ValueError) as error:
        raise MmctlError(f"no question about an image: {type(error).__name__} {error}") from None
    answer = ask(model, image, question)
    return {
        "text": answer.text,
        "tokens": answer.tokens,
        "logits": None if answer.logits is None else answer.logits.tolist(),
        "embedding": None if answer.embedding is None else answer.embedding.tolist(),
    }


def record_goldens(model: VisionLanguageModel, settings: Recovery) -> Goldens:
    """What the healthy model answers, over as many runs as the profile asks for."""
    runs = [
        {canary.name: ask(model, draw(canary), canary.question) for canary in CLOSED}
        for _ in range(settings.golden_runs)
    ]
    return from_runs(runs, "mmctl-demo", settings, CLOSED)


def verify(
    model: VisionLanguageModel, goldens: Goldens | None, settings: Recovery
) -> Generator[dict[str, Any] | None, None, None]:
    """Ask one canary each time it is advanced; the last item is the verdict with its checks."""
    if goldens is None:
        raise MmctlError("no goldens were recorded before the trip")
    answers: dict[str, Answer | str] = {}
    question = partial(ask, model)
    for canary in CLOSED:
        try:
            answers[canary.name] = question(draw(canary), canary.question)
        except torch.OutOfMemoryError as error:
            answers[canary.name] = str(error)
        yield None
    yield msgspec.to_builtins(compare(goldens, answers, settings))
