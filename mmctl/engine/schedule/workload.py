"""Requests in: traces of any of the known formats become columns in order of arrival.

Formats are recognised by content: Azure's CSV, Mooncake's and vLLM-bench's JSON lines (the
sent workload or the measured run), mmctl's own ``request`` records. What cannot be used is
skipped, counted and told by reason.
"""

from __future__ import annotations

import csv
import json
import math
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from mmctl.engine.errors import MmctlError
from mmctl.engine.records import Basis

PATCHES_PER_TOKEN = 4
TOKENS_PER_IMAGE = 1196  # the usual image of Qwen-VL clients, where a trace names no image size
TOKENS_MOST = 1 << 24


class Contents(msgspec.Struct, frozen=True, kw_only=True):
    """What requests say they hold: those of request ``i`` are ``ids[starts[i] : starts[i + 1]]``,
    numbered from 0 to ``different`` - 1 in order of their first use."""

    starts: Any
    ids: Any
    different: int


class Workload(msgspec.Struct, frozen=True, kw_only=True):
    """Requests as columns, sorted by arrival; ``patches`` are of one image before merging.

    ``skipped`` counts rows by the reason they were left out; ``reordered`` rows came late and
    were sorted in. ``prefixes`` are the 512-token pieces of prompts, ``named_images`` the images
    that a trace names, so that what repeats can be known. ``measured`` holds a run's own times,
    by request, where the file has them.
    """

    name: str
    format: str
    basis: Basis
    arrival_s: Any
    text_tokens: Any
    vision_tokens: Any
    images: Any
    patches: Any
    output_tokens: Any
    skipped: dict[str, int] = {}
    reordered: int = 0
    measured: dict[str, Any] | None = None
    prefixes: Contents | None = None
    named_images: Contents | None = None

    @property
    def requests(self) -> int:
        """How many there are."""
        return len(self.arrival_s)

    @property
    def span_s(self) -> float:
        """From the first arrival to the last."""
        return float(self.arrival_s[-1] - self.arrival_s[0]) if self.requests else 0.0


class _Skip(Exception):
    """Why a row cannot be used."""


class Row(msgspec.Struct):
    """One request as read; ``times`` are first token and last token of a measured run."""

    arrival_s: float
    text_tokens: int
    output_tokens: int
    images: int = 0
    vision_tokens: int = 0
    key: str | None = None
    times: tuple[float, float] | None = None
    prefixes: tuple[Any, ...] = ()
    named_images: tuple[Any, ...] = ()


def read(path: Path, *, output_tokens: int | None = None, limit: int | None = None) -> Workload:
    """The requests of a trace file.

    ``output_tokens`` stands in where a trace has none. Raises MmctlError when no row is left,
    with every reason and its count.
    """
    try:
        with open(path, encoding="utf-8", errors="replace", newline="") as file:
            first = file.readline()
            file.seek(0)
            if first.lstrip().startswith("{"):
                kind, rows = "jsonl", _json_rows(file)
            else:
                kind, rows = "csv", _csv_rows(file, path)
            return _columns(path.name, kind, rows, output_tokens, limit)
    except OSError as error:
        raise MmctlError(f"cannot read {path}: {error.strerror}") from None


def _columns(
    name: str, kind: str, rows: Iterable[tuple[Row | str, Any]], output: int | None,
    limit: int | None,
) -> Workload:  # fmt: skip
    arrival, first, last = array("d"), array("d"), array("d")
    text, vision, images, out = array("i"), array("i"), array("i"), array("i")
    prefixes, named_images = _Named(), _Named()
    skipped: Counter[str] = Counter()
    seen: set[int] = set()
    for row, raw in rows:
        if limit is not None and len(arrival) >= limit:
            break
        if isinstance(row, str):
            skipped[row] += 1
            continue
        if row.output_tokens < 0 and output is not None:
            row.output_tokens = output
        if (reason := _refused(row)) is not None:
            skipped[reason] += 1
            continue
        key = hash(row.key if row.key is not None else raw)
        if key in seen:
            skipped["duplicate"] += 1
            continue
        seen.add(key)
        arrival.append(row.arrival_s)
        text.append(row.text_tokens)
        vision.append(row.vision_tokens)
        images.append(row.images)
        out.append(row.output_tokens)
        prefixes.add(row.prefixes)
        named_images.add(row.named_images)
        if row.times:
            first.append(row.times[0])
            last.append(row.times[1])
    if not arrival:
        told = ", ".join(f"{count} × {reason}" for reason, count in skipped.items())
        raise MmctlError(f"{name} holds no usable request ({told or 'it is empty'})")
    at = np.frombuffer(arrival)
    order = np.argsort(at, kind="stable")
    reordered = int(np.sum(at[1:] < np.maximum.accumulate(at)[:-1]))
    at = at[order] - at.min()
    measured = None
    if len(first) == len(arrival):
        begun = np.frombuffer(arrival)[order]
        measured = {
            "first_s": np.frombuffer(first)[order] - begun,
            "last_s": np.frombuffer(last)[order] - begun,
        }
    seen_images = np.frombuffer(images, "i4")[order]
    seen_vision = np.frombuffer(vision, "i4")[order]
    return Workload(
        name=name, format=kind, basis="measured", arrival_s=at,
        text_tokens=np.frombuffer(text, "i4")[order], vision_tokens=seen_vision,
        images=seen_images, patches=patches_of(seen_vision, seen_images),
        output_tokens=np.frombuffer(out, "i4")[order], skipped=dict(skipped),
        reordered=reordered, measured=measured, prefixes=prefixes.contents(order),
        named_images=named_images.contents(order),
    )  # fmt: skip


class _Named:
    """Gathers what rows name, by number; a row's names end at the first that it repeats."""

    def __init__(self) -> None:
        self._number: dict[Any, int] = {}
        self._ids = array("i")
        self._counts = array("i")

    def add(self, names: tuple[Any, ...]) -> None:
        unique = 0
        mine: set[Any] = set()
        for name in names:
            if name in mine:
                break
            mine.add(name)
            self._ids.append(self._number.setdefault(name, len(self._number)))
            unique += 1
        self._counts.append(unique)

    def contents(self, order: np.ndarray) -> Contents | None:
        """What the rows name, the rows in ``order``; None when none of them names anything."""
        if not self._number:
            return None
        counts = np.frombuffer(self._counts, "i4").astype("i8")
        begins = np.cumsum(counts) - counts
        sorted_counts = counts[order]
        starts = np.concatenate([[0], np.cumsum(sorted_counts)])
        source = np.repeat(begins[order] - starts[:-1], sorted_counts) + np.arange(starts[-1])
        ids = np.frombuffer(self._ids, "i4")[source]
        return Contents(starts=starts, ids=ids, different=len(self._number))


def patches_of(vision_tokens: np.ndarray, images: np.ndarray) -> np.ndarray:
    """Patches of one image before merging, from a request's vision tokens."""
    each = vision_tokens / np.maximum(images, 1)
    return np.where(images > 0, np.maximum(np.rint(each * PATCHES_PER_TOKEN), 1), 0).astype("i4")


def _refused(row: Row) -> str | None:
    if not math.isfinite(row.arrival_s):
        return "time is not a number"
    if row.arrival_s < 0:
        return "negative time"
    if row.output_tokens < 0:
        return "no output tokens"
    if row.output_tokens == 0:
        return "output of no token"
    if row.text_tokens < 0 or row.vision_tokens < 0 or row.images < 0:
        return "negative count"
    if max(row.text_tokens, row.vision_tokens, row.output_tokens, row.images) > TOKENS_MOST:
        return "count beyond all reason"
    if row.text_tokens + row.vision_tokens == 0:
        return "no input token"
    if row.times and not (row.arrival_s <= row.times[0] <= row.times[1]):
        return "times out of order"
    return None


_TIME = ("arrival_s", "timestamp", "arrival_time_ns", "arrival_time", "arrived_at", "time")
_INPUT = ("input_length", "input_toks", "contexttokens", "input_tokens", "num_prefill_tokens")
_OUTPUT = ("output_length", "output_toks", "generatedtokens", "output_tokens", "num_decode_tokens")
_IMAGES = ("numimages", "num_images", "images", "image_count")


def _pick(row: dict[str, Any], names: tuple[str, ...]) -> Any:
    for name in names:
        value = row.get(name)
        if value is not None and value != "":
            return value
    return None


def _count(value: Any, what: str) -> int:
    try:
        return int(float(value))
    except (TypeError, ValueError, OverflowError):
        raise _Skip(f"{what} is no number") from None


def _row(row: dict[str, Any]) -> Row:
    """A request from the fields of any known format; _Skip with the reason when it is none."""
    at = _pick(row, ("queued_ts", *_TIME))
    if at is None and row.get("type") == "request" and isinstance(row.get("ts_ns"), int):
        at = row["ts_ns"] / 1e9
    if at is None:
        raise _Skip("no time")
    if row.get("type") == "request":
        text = _count(row.get("text_tokens", 0), "text tokens")
        vision = _count(row.get("vision_tokens", 0), "vision tokens")
        images = _count(row.get("images", 0), "images")
        output = _count(row.get("output_tokens") or -1, "output tokens")
        return Row(float(at), text, output, images, vision, key=row.get("id"))
    if "arrival_time_ns" in row and row.get("queued_ts") is None:
        at = _seconds(at) / 1e9
    elif "hash_ids" in row or ("input_length" in row and "timestamp" in row):
        at = _seconds(at) / 1e3
    else:
        at = _seconds(at)
    given = _pick(row, _INPUT)
    if given is None:
        raise _Skip("no input tokens")
    whole = _count(given, "input tokens")
    found = _pick(row, _OUTPUT)
    output = -1 if found is None else _count(found, "output tokens")
    images = _count(_pick(row, _IMAGES) or 0, "images")
    known = row.get("vision_tokens")
    if known is None:
        known = min(images * TOKENS_PER_IMAGE, max(whole - 1, 0)) if images > 0 else 0
    vision = _count(known, "vision tokens")
    times = None
    if row.get("first_token_ts") is not None and row.get("last_token_ts") is not None:
        times = (_seconds(row["first_token_ts"]), _seconds(row["last_token_ts"]))
    key = row.get("request_id", row.get("id"))
    return Row(
        at, max(whole - vision, 0) if whole >= 0 else whole, output, images, vision,
        key=None if key is None else str(key), times=times, prefixes=_names(row, "hash_ids"),
        named_images=_names(row, "image_ids"),
    )  # fmt: skip


def _names(row: dict[str, Any], field: str) -> tuple[Any, ...]:
    """A list of names or numbers; what is no such list names nothing."""
    value = row.get(field)
    if not isinstance(value, list) or not all(isinstance(name, (str, int)) for name in value):
        return ()
    return tuple(value)


def _seconds(value: Any) -> float:
    """A number, or a date and time as Azure writes it."""
    if isinstance(value, (int, float)):
        return float(value)
    try:
        return float(value)
    except ValueError:
        pass
    text = str(value).strip().removesuffix("Z")
    head, dot, fraction = text.partition(".")
    try:
        whole = datetime.fromisoformat(head.split("+")[0])
        return (whole - datetime(1970, 1, 1)).total_seconds() + (
            float("0." + fraction.split("+")[0]) if dot else 0.0
        )
    except ValueError:
        raise _Skip("time is not a number") from None


def _json_rows(lines: Iterable[str]) -> Iterator[tuple[Row | str, Any]]:
    last: str | None = None
    for line in lines:
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError:
            yield "not JSON", None
            continue
        if not isinstance(row, dict):
            yield "not JSON", None
            continue
        if row.get("type", "request") != "request":
            continue  # other records of a recording
        if row.get("type") == "request" and row.get("state") not in (None, "completed"):
            continue
        last = line
        try:
            yield _row(row), last
        except _Skip as reason:
            yield str(reason), None


def _csv_rows(lines: Any, path: Path) -> Iterator[tuple[Row | str, Any]]:
    reader = csv.DictReader(lines)
    try:
        names = {name: name.strip().lower() for name in reader.fieldnames or ()}
    except csv.Error as error:
        raise MmctlError(f"{path} is no trace that is known: {error}") from None
    known = {*_TIME, *_INPUT, *_OUTPUT}
    if not known & set(names.values()):
        raise MmctlError(
            f"{path} is no trace that is known: its first line names none of "
            "a time, input tokens or output tokens"
        )
    try:
        for row in reader:
            fields = {names[k]: v for k, v in row.items() if k in names}
            try:
                yield _row(fields), tuple(fields.values())
            except _Skip as reason:
                yield str(reason), None
    except csv.Error as error:
        raise MmctlError(f"{path}, line {reader.line_num}: {error}") from None
