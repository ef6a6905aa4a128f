"""How well fingerprints tell tasks apart, hold still, and how well collisions are predicted.

``python -m mmctl.benchmarks.fingerprints fit`` makes ``engine/access/locality.npz`` anew.
"""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mmctl.benchmarks import zoo
from mmctl.engine.access import cache, fingerprint, reuse, tracing
from mmctl.engine.access.accesses import Accesses
from mmctl.engine.errors import MissingExtraError, MmctlError, quiet_interrupt
from mmctl.engine.records import SCHEMA

DROPPED_RATIO = 0.05
COMPONENTS, RIDGE, LARGEST_COSINE, CANDIDATES = 16, 1e-4, 0.5, 8000
SIMULATED_BLOCK_BYTES = 1 << 17
Report = Callable[[str], None]


def trace(name: str, scale: float = 1.0, batch: int = 1) -> Accesses:
    """The accesses of one forward pass of a model of the zoo."""
    try:
        return tracing.trace(zoo.workload(name, scale, batch), name)
    except ImportError as error:
        if error.name == "torch":
            raise MissingExtraError("the evaluation", "torch") from None
        raise MmctlError(f"the evaluation needs {error.name}: pip install {error.name}") from None


def evaluate(cache_bytes: int, report: Report = lambda _: None, drops: int = 4) -> dict[str, Any]:
    """Every figure of the evaluation as a JSON document; nothing is fitted here.

    ``report`` is told what is going on. Simulated misses are those of a 16-way cache of
    ``cache_bytes`` under both tasks in turn, at blocks of 128 KiB.
    """
    names = list(zoo.MODELS)
    traces = {}
    for name in names:
        report(f"tracing {name}")
        traces[name] = trace(name)
    signatures = {name: reuse.signature(traces[name]) for name in names}
    codes = {name: fingerprint.locality(traces[name], signatures[name]) for name in names}
    classics = {name: fingerprint.classic(traces[name]) for name in names}
    report("the same in another process")
    again = _in_another_process()
    report(f"with {DROPPED_RATIO:.0%} of the accesses dropped")
    rng = np.random.default_rng(0)
    thinned = {
        name: [_thinned(traces[name], rng) for _ in range(drops)] for name in names
    }  # fmt: skip
    held = [name for name in names if zoo.MODELS[name][0] not in zoo.FIT_FAMILIES]
    report("simulating pairs")
    return {
        "schema": SCHEMA,
        "models": len(names),
        "held_out_families": sorted({zoo.MODELS[name][0] for name in held}),
        "locality": {
            **_uniqueness(codes),
            "held_out": _uniqueness({name: codes[name] for name in held}),
            "other_process": _changes(codes, {n: [again[n]["locality"]] for n in names}),
            "dropped": _changes(
                codes, {n: [fingerprint.locality(t) for t in thinned[n]] for n in names}
            ),
        },
        "classic": {
            **_uniqueness(classics),
            "other_process": _changes(classics, {n: [again[n]["classic"]] for n in names}),
            "dropped": _changes(
                classics, {n: [fingerprint.classic(t) for t in thinned[n]] for n in names}
            ),
            "bits_used": max(classics.values()).bit_length(),
        },
        "collision": _collisions(traces, signatures, codes, held, cache_bytes),
        "codes": {name: f"{codes[name]:016x}" for name in names},
    }


def _thinned(accesses: Accesses, rng: np.random.Generator) -> Accesses:
    return accesses.where(rng.random(len(accesses)) > DROPPED_RATIO)


def _uniqueness(codes: dict[str, int]) -> dict[str, Any]:
    distances = [
        fingerprint.distance(a, b) for a, b in itertools.combinations(codes.values(), 2)
    ]  # fmt: skip
    return {
        "distinct_ratio": len(set(codes.values())) / len(codes),
        "pairs": len(distances),
        "pairs_above_8_ratio": float(np.mean([d > 8 for d in distances])),
        "distance_min": min(distances),
        "distance_p50": float(np.median(distances)),
    }


def _changes(codes: dict[str, int], others: dict[str, list[int]]) -> dict[str, Any]:
    bits = [fingerprint.distance(codes[name], code) for name in codes for code in others[name]]
    return {
        "bits_p50": float(np.median(bits)),
        "bits_max": max(bits),
        "within_2_bits_ratio": float(np.mean([b <= 2 for b in bits])),
        "n": len(bits),
    }


def _collisions(
    traces: dict[str, Accesses], signatures: dict[str, reuse.Signature], codes: dict[str, int],
    held: list[str], cache_bytes: int,
) -> dict[str, Any]:  # fmt: skip
    """Rank correlation of predicted with simulated extra misses over all held-out pairs."""
    sequences = {name: _coarse(traces[name]) for name in held}
    predicted, at_risk, simulated, distances = [], [], [], []
    for a, b in itertools.combinations_with_replacement(held, 2):
        found = reuse.collision(signatures[a], signatures[b], cache_bytes)
        predicted.append(found.predicted_extra_misses_ratio)
        at_risk.append(found.baseline_ratio)
        extra, _, _ = cache.extra_misses(
            sequences[a], sequences[b], cache_bytes // SIMULATED_BLOCK_BYTES
        )
        simulated.append(extra)
        distances.append(-fingerprint.distance(codes[a], codes[b]))
    return {
        "basis": "modelled",
        "cache_bytes": cache_bytes,
        "pairs": len(simulated),
        "predicted_rank_correlation": rank_correlation(predicted, simulated),
        "baseline_rank_correlation": rank_correlation(at_risk, simulated),
        "similarity_rank_correlation": rank_correlation(distances, simulated),
        "predicted_extra_misses_mean_ratio": float(np.mean(predicted)),
        "simulated_extra_misses_mean_ratio": float(np.mean(simulated)),
    }


def _coarse(accesses: Accesses) -> Any:
    size = SIMULATED_BLOCK_BYTES
    first = accesses.address // size
    count = (accesses.address + accesses.size_bytes - 1) // size - first + 1
    start = np.cumsum(count) - count
    blocks = np.repeat(first - start, count) + np.arange(int(count.sum()))
    return blocks - blocks.min()


def rank_correlation(a: Sequence[float], b: Sequence[float]) -> float:
    """Spearman's: Pearson's of the ranks, ties sharing their mean rank."""
    return float(np.corrcoef(_ranks(a), _ranks(b))[0, 1])


def _ranks(values: Sequence[float]) -> Any:
    array = np.asarray(values)
    _, inverse, counts = np.unique(array, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    return ((last - counts + last - 1) / 2)[inverse]


def _in_another_process() -> dict[str, dict[str, int]]:
    command = [sys.executable, "-m", "mmctl.benchmarks.fingerprints", "codes"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found: dict[str, dict[str, int]] = json.loads(done.stdout.splitlines()[-1])
    return found


def codes_of_all() -> dict[str, dict[str, int]]:
    """Both codes of every model, traced here."""
    found = {}
    for name in zoo.MODELS:
        accesses = trace(name)
        found[name] = {
            "locality": fingerprint.locality(accesses), "classic": fingerprint.classic(accesses),
        }  # fmt: skip
    return found


def fit(path: Path, report: Report = print) -> None:
    """Fit the directions of the locality code on the fit families and write them to ``path``.

    Discriminant analysis first: the components in which tasks differ most against the change
    that dropping 5 % of the accesses makes. Then, of many random directions in that space, the
    64 whose sign changes least under dropping, no two too much alike, each cut at its median.
    """
    rng = np.random.default_rng(3)
    rows, noise = [], []

    def add(accesses: Accesses) -> None:
        values = fingerprint.features(accesses)
        rows.append(values)
        noise.append([fingerprint.features(_thinned(accesses, rng)) - values for _ in range(8)])

    for name, model in zoo.MODELS.items():
        if model[0] in zoo.FIT_FAMILIES:
            report(name)
            for scale, batch in zoo.VARIANTS:
                add(trace(name, scale, batch))
    for scale in (1, 4, 16, 64):
        for accesses in zoo.kernels(scale):
            add(accesses)
    directions, offset = _directions(np.array(rows), np.array(noise))
    np.savez_compressed(
        path, directions=directions.astype(np.float32), offset=offset.astype(np.float32)
    )


def _directions(rows: Any, noise: Any) -> tuple[Any, Any]:
    centre = rows.mean(0)
    between = np.cov((rows - centre).T)
    flat = noise.reshape(-1, rows.shape[1])
    within = flat.T @ flat / len(flat)
    within += RIDGE * np.trace(between) / len(between) * np.eye(len(between))
    inverse = np.linalg.inv(np.linalg.cholesky(within))
    strength, vectors = np.linalg.eigh(inverse @ between @ inverse.T)
    best = np.argsort(strength)[::-1][:COMPONENTS]
    space = inverse.T @ vectors[:, best] / np.sqrt(strength[best])
    candidates = np.random.default_rng(1).standard_normal((CANDIDATES, COMPONENTS))
    candidates /= np.linalg.norm(candidates, axis=1, keepdims=True)
    at = (rows - centre) @ space @ candidates.T
    cut = np.median(at, 0)
    moved = at[:, None, :] + noise @ space @ candidates.T
    flips = ((moved > cut) != (at > cut)[:, None, :]).mean((0, 1))
    chosen: list[int] = []
    for index in np.argsort(flips, kind="stable").tolist():
        if all(abs(candidates[index] @ candidates[c]) < LARGEST_COSINE for c in chosen):
            chosen.append(index)
            if len(chosen) == fingerprint.BITS:
                break
    directions = candidates[chosen] @ space.T
    return directions, directions @ centre + cut[chosen]


if __name__ == "__main__":
    with quiet_interrupt():
        if sys.argv[1:] == ["codes"]:
            print(json.dumps(codes_of_all()))
        elif sys.argv[1:] == ["fit"]:
            fit(Path(fingerprint.__file__).with_name("locality.npz"))
