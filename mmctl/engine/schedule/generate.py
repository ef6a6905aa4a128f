"""Requests made: from ServeGen's clients, from published quantiles, or as a Poisson stream.

All draw from one seeded generator: the same seed gives the same requests.
"""

from __future__ import annotations

import ast
import csv
import json
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from mmctl.engine.errors import MmctlError
from mmctl.engine.schedule.workload import Contents, Workload, patches_of

# Production image requests (Azure 2025, read off published plots): cumulative percent → value.
# Between the points the logarithm of the value is linear.
AZURE_2025 = {
    "images_per_image_request": ((0, 1), (50, 1), (75, 1.5), (90, 25), (95, 165), (99, 525)),
    "input_tokens_image": ((0, 200), (50, 1408), (90, 9515), (95, 21074), (99, 35806)),
    "input_tokens_text": ((0, 20), (50, 784), (90, 3085), (95, 4156), (99, 14005)),
    "output_tokens_image": ((0, 5), (50, 80), (90, 401), (95, 508), (99, 798)),
    "output_tokens_text": ((0, 5), (50, 147), (90, 471), (95, 756), (99, 1309)),
}
TEXT_RATIO = 0.52
VISION_SHARE = 0.85  # of an image request's input, where only the sum was published
TOKENS_LEAST_AN_IMAGE = 64


def from_quantiles(
    *, rate_per_s: float, count: int, seed: int, text_ratio: float = TEXT_RATIO,
    burst_factor: float = 4.5, quantiles: Path | None = None,
) -> Workload:  # fmt: skip
    """Requests whose sizes follow published quantiles.

    Image requests come in bursts: an eighth of the time at ``burst_factor`` times the usual
    rate. Images and input tokens of one request rise together (modelled: only the margins were
    published).
    """
    table = _read_quantiles(quantiles) if quantiles else AZURE_2025
    random = np.random.default_rng(seed)
    is_text = random.random(count) < text_ratio
    arrival = _bursty(random, is_text, rate_per_s, burst_factor)
    order = np.argsort(arrival, kind="stable")
    arrival, is_text = arrival[order], is_text[order]
    size, length = random.random(count), random.random(count)

    def draw(image: str, text: str, u: np.ndarray) -> np.ndarray:
        return np.where(is_text, _quantile(table[text], u), _quantile(table[image], u))

    whole = np.maximum(np.rint(draw("input_tokens_image", "input_tokens_text", size)), 2)
    output = np.maximum(np.rint(draw("output_tokens_image", "output_tokens_text", length)), 1)
    images = np.where(
        is_text, 0, np.maximum(np.rint(_quantile(table["images_per_image_request"], size)), 1)
    )
    vision = np.where(is_text, 0, np.maximum(whole * VISION_SHARE, images * TOKENS_LEAST_AN_IMAGE))
    vision = np.rint(vision).astype("i4")
    images = images.astype("i4")
    text = np.maximum(whole - vision, 16).astype("i4")
    return Workload(
        name="azure quantiles", format="generated", basis="modelled", arrival_s=arrival,
        text_tokens=text, vision_tokens=vision, images=images,
        patches=patches_of(vision, images), output_tokens=output.astype("i4"),
    )  # fmt: skip


def _bursty(random: Any, is_text: np.ndarray, rate: float, factor: float) -> np.ndarray:
    """Poisson arrivals; those of images at a rate that jumps for an eighth of each minute."""
    count = len(is_text)
    texts = int(is_text.sum())
    found = np.empty(count)
    shares = (texts / count, 1 - texts / count)
    for share, which in zip(shares, (is_text, ~is_text), strict=True):
        n = int(which.sum())
        if n == 0:
            continue
        at = np.cumsum(random.exponential(1.0, n))  # in expected events
        if which is is_text:
            found[which] = at / (rate * share)
            continue
        mean = 1 + (factor - 1) / 8
        base = rate * share / mean
        minute = rate * share * 60.0
        whole, rest = np.floor(at / minute), at % minute
        busy = base * factor * 7.5
        inside = np.where(rest < busy, rest / (base * factor), 7.5 + (rest - busy) / base)
        found[which] = whole * 60.0 + inside
    return found


def _quantile(points: Any, u: np.ndarray) -> np.ndarray:
    percent, value = np.array(points, float).T
    return np.exp(np.interp(u * 100.0, percent, np.log(np.maximum(value, 1.0))))


def holds_quantiles(path: Path) -> bool:
    """Whether the file is a table of quantiles."""
    try:
        with open(path, "rb") as file:
            return file.readline(200).strip().lower().startswith(b"series,cdf_percent,value")
    except OSError as error:
        raise MmctlError(f"cannot read {path}: {error.strerror}") from None


def _read_quantiles(path: Path) -> dict[str, Any]:
    """``series,cdf_percent,value`` rows."""
    table: dict[str, list[tuple[float, float]]] = {}
    try:
        with open(path, newline="", encoding="utf-8") as file:
            for row in csv.DictReader(file):
                point = (float(row["cdf_percent"]), float(row["value"]))
                table.setdefault(row["series"], []).append(point)
    except OSError as error:
        raise MmctlError(f"cannot read {path}: {error.strerror}") from None
    except (KeyError, ValueError, TypeError) as error:
        raise MmctlError(f"{path} is no table of quantiles: {error}") from None
    missing = set(AZURE_2025) - set(table)
    if missing:
        raise MmctlError(f"{path} lacks the series {', '.join(sorted(missing))}")
    return {name: sorted(points) for name, points in table.items()}


def from_servegen(
    folder: Path, *, count: int, seed: int, rate_per_s: float | None = None,
    clients: tuple[int, ...] | None = None,
) -> Workload:  # fmt: skip
    """Requests of ServeGen's multimodal clients, each by its own rate, law and sizes.

    Without ``rate_per_s`` the clients' own rates hold; with it all are scaled alike. Starts at
    the busiest window, so that short runs are not spent in an idle night.
    """
    found = sorted(folder.glob("chunk-*-trace.csv"), key=lambda path: _number(path))
    if clients is not None:
        found = [path for path in found if _number(path) in clients]
    if not found:
        raise MmctlError(f"{folder} holds no client of ServeGen (chunk-N-trace.csv)")
    traces = [_windows(path) for path in found]
    totals: dict[float, float] = {}
    for windows in traces:
        for start, rate, _, _ in windows:
            totals[start] = totals.get(start, 0.0) + rate
    busiest = max(totals, key=lambda start: totals[start])
    scale = rate_per_s / totals[busiest] if rate_per_s else 1.0
    random = np.random.default_rng(seed)
    parts = [
        _client(random, path, windows, busiest, scale, count, totals)
        for path, windows in zip(found, traces, strict=True)
    ]
    columns = [np.concatenate(column) for column in zip(*parts, strict=True)]
    order = np.argsort(columns[0], kind="stable")[:count]
    arrival, text, vision, images, output = (column[order] for column in columns)
    return Workload(
        name=f"servegen {folder.name}", format="servegen", basis="modelled",
        arrival_s=arrival - arrival[0], text_tokens=text.astype("i4"),
        vision_tokens=vision.astype("i4"), images=images.astype("i4"),
        patches=patches_of(vision, images), output_tokens=output.astype("i4"),
    )  # fmt: skip


def _number(path: Path) -> int:
    part = path.name.split("-")[1]
    return int(part) if part.isdigit() else -1


def _windows(path: Path) -> list[tuple[float, float, str, float]]:
    """(start, rate a second, law, shape) of each window; idle ones have no law."""
    found = []
    try:
        with open(path, newline="", encoding="utf-8") as file:
            for start, rate, _, law, shape, _ in csv.reader(file):
                if law and float(rate) > 0:
                    found.append((float(start), float(rate), law, float(shape)))
    except OSError as error:
        raise MmctlError(f"cannot read {path}: {error.strerror}") from None
    except ValueError as error:
        raise MmctlError(f"{path} is no rate table of ServeGen: {error}") from None
    return found


def _client(
    random: Any, path: Path, windows: list[tuple[float, float, str, float]], start_s: float,
    scale: float, count: int, totals: dict[float, float],
) -> tuple[np.ndarray, ...]:  # fmt: skip
    width = 600.0
    try:
        text = path.with_name(path.name.replace("-trace.csv", "-dataset.json")).read_text("utf-8")
        sizes = {float(key): value for key, value in json.loads(text).items() if value}
    except (OSError, ValueError, AttributeError) as error:
        raise MmctlError(f"{path}: its dataset cannot be read: {error}") from None
    arrivals: list[np.ndarray] = []
    columns: list[tuple[np.ndarray, ...]] = []
    day = max([*totals, 0.0]) + width
    expected = 0.0
    by_start = {window[0]: window for window in windows}
    starts = sorted(totals, key=lambda s: (s - start_s) % day)
    for start in starts:
        if expected > 1.2 * count + 100:
            break
        expected += totals[start] * scale * width
        if start not in by_start or not sizes:
            continue
        _, rate, law, shape = by_start[start]
        mean = 1.0 / (rate * scale)
        n = int(width / mean * 1.3 + 20)
        gaps = random.gamma(shape, 1.0, n) if law == "Gamma" else random.weibull(shape, n)
        expectation = shape if law == "Gamma" else _weibull_mean(shape)
        at = np.cumsum(gaps * (mean / expectation))
        at = at[at < width]
        arrivals.append(at + (start - start_s) % day)
        key = max((k for k in sizes if k <= start), default=min(sizes))
        columns.append(_sizes(random, sizes[key], len(at)))
    if not arrivals:
        empty = np.empty(0)
        return empty, empty, empty, empty, empty
    parts = [np.concatenate(column) for column in zip(*columns, strict=True)]
    return (np.concatenate(arrivals), *parts)


def _weibull_mean(shape: float) -> float:
    from math import gamma

    return gamma(1.0 + 1.0 / shape)


def _sizes(random: Any, window: dict[str, str], count: int) -> tuple[np.ndarray, ...]:
    def draw(name: str) -> np.ndarray:
        table = ast.literal_eval(window[name])
        values = np.array(list(table), float)
        weights = np.array(list(table.values()), float)
        drawn: np.ndarray = random.choice(values, count, p=weights / weights.sum())
        return drawn

    try:
        text, each, images = draw("text_tokens"), draw("image_tokens"), draw("image_count")
        output = draw("output_tokens")
    except (KeyError, ValueError, SyntaxError, AttributeError) as error:
        raise MmctlError(f"a ServeGen dataset lacks a distribution: {error}") from None
    images = np.where(each > 0, images, 0)
    return np.maximum(text, 1), images * each, images, np.maximum(output, 1)


def with_repeated_images(work: Workload, ratio: float, seed: int) -> Workload:
    """The requests with names for their images, so that a share ``ratio`` of the images is one
    that an earlier request sent (modelled: of public traces none tells)."""
    random = np.random.default_rng([seed, 1])
    starts = np.concatenate([[0], np.cumsum(work.images, dtype="i8")])
    total = int(starts[-1])
    again = random.random(total) < ratio
    pick = random.random(total)
    request = np.repeat(np.arange(work.requests), work.images)
    earlier = starts[request]  # images sent before this request
    ids = np.arange(total)
    for i in np.flatnonzero(again & (earlier > 0)):
        ids[i] = ids[int(pick[i] * earlier[i])]
    return msgspec.structs.replace(
        work, named_images=Contents(starts=starts, ids=ids.astype("i4"), different=total)
    )


def poisson(
    *, rate_per_s: float, count: int, seed: int, text_tokens: int = 512, output_tokens: int = 128
) -> Workload:
    """A plain stream of text requests of one size: for measuring the simulation itself."""
    random = np.random.default_rng(seed)
    zeros = np.zeros(count, "i4")
    return Workload(
        name="poisson", format="generated", basis="modelled",
        arrival_s=np.cumsum(random.exponential(1.0 / rate_per_s, count)),
        text_tokens=np.full(count, text_tokens, "i4"), vision_tokens=zeros, images=zeros,
        patches=zeros, output_tokens=np.full(count, output_tokens, "i4"),
    )  # fmt: skip
