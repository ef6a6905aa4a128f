"""The benchmark itself: which recordings, what was learned, how right it is, how fast it serves."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from mmctl.benchmarks.detector import export, network, serving
from mmctl.benchmarks.detector.windows import FEATURES, SAMPLES, Series
from mmctl.engine.errors import MmctlError, UsageError, suggestion

STEPS = 400
LEARNED_SEEDS, HELD_SEEDS = 8, 3
QUICK_LEARNED_SEEDS, QUICK_HELD_SEEDS = 3, 2
FIRST_HELD_SEED = 100
EPOCHS, QUICK_EPOCHS = 12, 10
CALIBRATION = 1024
MOST = 20_000  # windows that the bias of INT8 is found on
WINDOWS_SERVED = 512
SPELLS, QUICK_SPELLS = (15, 0.4), (3, 0.25)  # rounds, and seconds of each way in each
DRAWS = 1000

FAMILIES: dict[str, tuple[str, int | None]] = {
    "calm": ("calm", None), "burst": ("burst", None), "fragmentation": ("fragmentation", None),
    "leak": ("leak", None), "calm:8": ("calm", 8), "burst:4": ("burst", 4),
    "fragmentation:5": ("fragmentation", 5), "leak:6": ("leak", 6),
}  # fmt: skip
"""The demo's scenarios, also at another pace of images (mean steps between two)."""

HELD = ("calm:8", "burst:4", "fragmentation:5", "leak:6")
"""Families that are held back whole, unless others are asked for."""

PUBLISHED = {
    "queries_per_s": (142, 217), "p99_ms": (28.6, 19.3), "queries_factor": 1.53,
    "p99_factor": 0.67, "device": "A100-40GB, plain ONNX Runtime against a TensorRT-LLM plugin",
}  # fmt: skip


class Take(NamedTuple):
    """A recording to make."""

    family: str
    scenario: str
    image_every: int | None
    seed: int
    held: bool


def takes(held: Sequence[str] = HELD, quick: bool = False) -> list[Take]:
    """The recordings of a run: of learned families some seeds to learn from and others to be
    judged on, of held families only the latter.

    Raises UsageError for a family that there is not, or when none is left to learn from.
    """
    for name in held:
        if name not in FAMILIES:
            raise UsageError(f"no family '{name}'{suggestion(name, FAMILIES)}")
    learned = [name for name in FAMILIES if name not in held and ":" not in name]
    if not set(learned) - {"calm"}:
        raise UsageError("every family with conflicts is held back: none is left to learn from")
    count, judged = (
        (QUICK_LEARNED_SEEDS, QUICK_HELD_SEEDS) if quick else (LEARNED_SEEDS, HELD_SEEDS)
    )
    found = [Take(name, *FAMILIES[name], seed, False) for name in learned for seed in range(count)]
    for name in (*learned, *held):
        most = 1 if quick and name in held else judged
        seeds = range(FIRST_HELD_SEED, FIRST_HELD_SEED + most)
        found += [Take(name, *FAMILIES[name], seed, True) for seed in seeds]
    return found


def divided(found: Sequence[Series]) -> tuple[list[Series], list[Series]]:
    """One's own recordings: every third is held back; of a single one its last third."""
    if not found:
        raise MmctlError("the recordings have no 'pool' record: record with an agent or the demo")
    if len(found) == 1:
        (one,) = found
        cut = 2 * len(one.conflict) // 3
        if len(one.conflict) - cut < SAMPLES:
            raise MmctlError(
                f"the recording has {len(one.conflict)} readings of its pool: too few to learn "
                f"from a part of it and be judged on another (at least {3 * SAMPLES})"
            )
        first = one._replace(
            values=one.values[: cut + SAMPLES - 1], conflict=one.conflict[:cut], oom=one.oom[:cut]
        )
        rest = one._replace(values=one.values[cut:], conflict=one.conflict[cut:], oom=one.oom[cut:])
        return [first], [rest]
    held = [one for number, one in enumerate(found) if number % 3 == 2 or number == len(found) - 1]
    names = {id(one) for one in held}
    return [one for one in found if id(one) not in names], held


def run(
    learned: Sequence[Series], held: Sequence[Series], quick: bool, out: Path | None,
    seed: int = 0, tell: Callable[[str, float], None] = lambda name, share: None,
) -> dict[str, Any]:  # fmt: skip
    """Learn, export, judge and serve; ``out`` takes the model files.

    The document has ``model``, ``agreement`` (all held recordings and each family, per
    precision and target), ``serving`` and ``files``. Raises MmctlError when there is nothing to
    learn from.
    """
    if not any(one.conflict.any() for one in learned):
        raise MmctlError(
            "no exact rule held in the recordings to learn from: there is no conflict to detect"
        )
    trained = network.train(
        learned, QUICK_EPOCHS if quick else EPOCHS, seed,
        lambda share: tell("learning", 0.4 * share),
    )  # fmt: skip
    weights = trained.weights()
    draw = np.random.default_rng(seed)
    calibration = _calibration(learned, draw)
    with tempfile.TemporaryDirectory(prefix="mmctl-detector-") as name:
        folder = Path(name)
        tell("exporting", 0.4)
        models = {
            "fp32": export.graph(weights),
            "fp16": export.graph(weights, half=True),
            "int8": export.quantized(weights, calibration, _drawn(learned, MOST, draw), folder),
        }
        tell("judging", 0.45)
        said = {
            precision: [export.probabilities(model, one.windows()) > 0.5 for one in held]
            for precision, model in models.items()
        }
        files = {}
        for precision, model in models.items():
            files[precision] = folder / f"{precision}.onnx"
            files[precision].write_bytes(model.SerializeToString())
        rows = serving.measure(
            files, _drawn(held, WINDOWS_SERVED, draw), *(QUICK_SPELLS if quick else SPELLS),
            lambda name, share: tell(name, 0.5 + 0.5 * share),
        )  # fmt: skip
        casts = {precision: export.casts(model, folder) for precision, model in models.items()}
        sizes = {precision: path.stat().st_size for precision, path in files.items()}
    written = []
    if out is not None:
        batches = {
            precision: {"batch": model, **{size: export.fixed(model, size) for size in (1, 32)}}
            for precision, model in models.items()
        }
        written = export.write(out, batches)
    return {
        "model": {
            "window": [SAMPLES, len(FEATURES)], "features": FEATURES, "outputs": network.OUTPUTS,
            "parameters": sum(array.size for array in weights.values()),
            "flops": export.flops(), "size_bytes": sizes, "inserted_casts": casts,
            "learned_windows": sum(len(one.conflict) for one in learned),
            "held_windows": sum(len(one.conflict) for one in held),
            "learned": sorted({one.family for one in learned}),
            "held": sorted({one.family for one in held}),
        },
        "agreement": agreement(held, said, seed),
        "serving": [msgspec.to_builtins(row) for row in rows],
        "figures": serving.figures(rows),
        "published": PUBLISHED,
        "files": written,
    }  # fmt: skip


def _drawn(found: Sequence[Series], count: int, draw: np.random.Generator) -> NDArray[np.float32]:
    """``count`` windows by chance, of any of the series."""
    lengths = np.array([len(one.conflict) for one in found])
    chosen = np.sort(draw.choice(lengths.sum(), min(count, int(lengths.sum())), replace=False))
    ends = np.cumsum(lengths)
    places = np.searchsorted(ends, chosen, "right")
    return np.stack(
        [
            found[place].windows()[at - (ends[place] - lengths[place])]
            for place, at in zip(places, chosen, strict=True)
        ]
    )


def _calibration(found: Sequence[Series], draw: np.random.Generator) -> NDArray[np.float32]:
    """Windows to calibrate on: any, and as many with a conflict as a batch of training has."""
    conflicts = np.concatenate([one.windows()[one.conflict] for one in found])
    count = CALIBRATION * network.RARE // network.BATCH
    chosen = draw.choice(len(conflicts), min(count, len(conflicts)), replace=False)
    return np.concatenate([_drawn(found, CALIBRATION - count, draw), conflicts[chosen]])


def agreement(
    held: Sequence[Series], said: dict[str, list[NDArray[np.bool_]]], seed: int = 0
) -> list[dict[str, Any]]:
    """How often each precision says what is so, for all held recordings and per family.

    ``target`` is ``rules`` (an exact rule holds now) or ``oom`` (memory runs out within the
    horizon). ``never_ratio`` is what one would reach that never says so. Intervals are of a
    bootstrap over recordings, for windows of one are no independent samples.
    """
    families = ["all", *sorted({one.family for one in held})]
    rows = []
    for precision, answers in said.items():
        for target, column in (("rules", 0), ("oom", 1)):
            for family in families:
                chosen = [n for n, one in enumerate(held) if family in ("all", one.family)]
                truths = [held[n].conflict if column == 0 else held[n].oom for n in chosen]
                given = [answers[n][:, column] for n in chosen]
                rows.append(
                    {"precision": precision, "target": target, "family": family,
                     **_shares(truths, given, seed), "basis": "measured"}
                )  # fmt: skip
    by_place = {(row["precision"], row["target"], row["family"]): row for row in rows}
    for row in rows:
        plain = by_place["fp32", row["target"], row["family"]]
        row["points_from_fp32"] = 100 * (row["agreement_ratio"] - plain["agreement_ratio"])
    return rows


def _shares(
    truths: Sequence[NDArray[np.bool_]], given: Sequence[NDArray[np.bool_]], seed: int
) -> dict[str, Any]:
    equal = np.array([(t == g).sum() for t, g in zip(truths, given, strict=True)])
    counts = np.array([len(truth) for truth in truths])
    truth, answer = np.concatenate(truths), np.concatenate(given)
    hits = int((truth & answer).sum())
    drawn = np.random.default_rng(seed).integers(0, len(counts), (DRAWS, len(counts)))
    shares = equal[drawn].sum(1) / counts[drawn].sum(1)
    low, high = np.quantile(shares, (0.025, 0.975))
    return {
        "recordings": len(counts), "windows": int(counts.sum()), "positives": int(truth.sum()),
        "agreement_ratio": float(equal.sum() / counts.sum()),
        "agreement_ci_ratio": [float(low), float(high)],
        "never_ratio": float(1 - truth.mean()),
        "recall_ratio": hits / int(truth.sum()) if truth.any() else None,
        "precision_ratio": hits / int(answer.sum()) if answer.any() else None,
        "false_ratio": float((answer & ~truth).sum() / max(1, (~truth).sum())),
    }  # fmt: skip
