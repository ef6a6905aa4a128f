"""How often a verification is right, by command:
``python -m mmctl.benchmarks.verification [SEEDS [KIND...]]``, a kind being a fault or ``healthy``.

Goldens of a healthy demo model are written and read back; then fresh models, damaged in one
place each, answer the canaries, and fresh healthy ones under other batch sizes and threads. The
verdict sees the answers alone.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import msgspec
import torch

from mmctl.engine import profiles
from mmctl.engine.errors import quiet_interrupt
from mmctl.engine.model import KvCache, VisionLanguageModel, build, in_float32, tokenize
from mmctl.engine.profiles import Recovery
from mmctl.engine.recovery.canaries import CANARIES, Image, draw
from mmctl.engine.recovery.faults import FAULTS, inject
from mmctl.engine.recovery.goldens import Answer, Goldens, from_runs, load, save
from mmctl.engine.recovery.verify import Verdict, compare

CLOSED = tuple(msgspec.structs.replace(canary, described=False) for canary in CANARIES)
"""A model with random weights describes nothing: its captions are not asked for."""

KINDS = (*FAULTS, "healthy")

BATCHES = (1, 2, 3, 4, 8)


def recorded(settings: Recovery) -> Goldens:
    """Goldens of the healthy model, by way of a file."""
    model = build()
    runs = [
        {canary.name: _ask(model, draw(canary), canary.question) for canary in CLOSED}
        for _ in range(settings.golden_runs)
    ]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "golden.json"
        save(from_runs(runs, "demo model", settings, CLOSED), path)
        return load(path, CLOSED)


def damaged(goldens: Goldens, settings: Recovery, fault: str, seed: int) -> Verdict:
    """The verdict on a fresh model with one fault."""
    model = build()
    inject(model, fault, seed)
    answers = {canary.name: _ask(model, draw(canary), canary.question) for canary in CLOSED}
    return compare(goldens, answers, settings)


def healthy(goldens: Goldens, settings: Recovery, number: int) -> Verdict:
    """The verdict on a fresh model that encodes its images in batches, on one or two threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1 + number % 2)
    model = build()
    batch = BATCHES[number % len(BATCHES)]
    answers = {canary.name: _ask(model, draw(canary), canary.question, batch) for canary in CLOSED}
    torch.set_num_threads(threads)
    return compare(goldens, answers, settings)


@torch.inference_mode()
def _ask(model: VisionLanguageModel, image: Image, question: str, batch: int = 1) -> Answer:
    """Ask about ``image`` with ``batch`` - 1 other images in the same batch."""
    shown = [image, *(draw(canary) for canary in CANARIES[: batch - 1])]
    pixels = torch.stack([torch.tensor(i[::2, ::2]).permute(2, 0, 1).float() / 255 for i in shown])
    vision = model.encode(pixels)[0]
    cross, cache = in_float32(model.cross_cache(vision)), KvCache(model.config, "cpu")
    logits = model.decode(torch.tensor(tokenize(question)), cache, cross)
    ids: list[int] = []
    rows = []
    for _ in range(4):
        rows.append(logits)
        ids.append(int(logits.argmax()))
        logits = model.decode(torch.tensor(ids[-1:]), cache, cross)
    return Answer(
        text=" ".join(map(str, ids)), tokens=tuple(ids), logits=torch.stack(rows).numpy(),
        embedding=vision.mean(0).numpy(),
    )  # fmt: skip


def main(seeds: int, kinds: Sequence[str] = KINDS) -> None:
    """Print, for each fault, how many of ``seeds`` were caught, and how many changed an answer;
    of healthy models, how many failed."""
    torch.set_num_threads(1)
    settings = profiles.load("default").profile.recovery
    goldens = recorded(settings)
    names = {canary.name for canary in CLOSED}
    for fault in kinds:
        if fault == "healthy":
            verdicts = [healthy(goldens, settings, number) for number in range(seeds)]
            failed = sum(verdict.verdict == "inconsistent" for verdict in verdicts)
            print(f"healthy: {failed} of {seeds} failed", flush=True)
            continue
        verdicts = [damaged(goldens, settings, fault, seed) for seed in range(seeds)]
        caught = sum(verdict.verdict == "inconsistent" for verdict in verdicts)
        changed = sum(
            any(check.name in names and not check.passed for check in verdict.checks)
            for verdict in verdicts
        )
        print(f"{fault}: caught {caught} of {seeds}, {changed} changed an answer", flush=True)


if __name__ == "__main__":
    with quiet_interrupt():
        main(int(sys.argv[1]) if len(sys.argv) > 1 else 200, sys.argv[2:] or KINDS)
