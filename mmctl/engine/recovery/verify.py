"""Is the node right again? Answers of now against the goldens of before, check by check.

The verdict rests on closed answers and, where the server gives them, on logits and embeddings
within the spread of good runs. The published floors (cosine, BLEU-4, embedding distance) are
checked too; alone they would pass wrong answers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import msgspec
import numpy as np

from mmctl.engine.profiles import Recovery
from mmctl.engine.recovery.captions import closed_answer, contradictions, facts
from mmctl.engine.recovery.goldens import (
    Answer,
    GoldenAnswer,
    Goldens,
    cosine,
    logits_difference,
    normal,
    relative,
)

ROUNDING = 2.0**-22
"""Least spread assumed, relative to the greatest value: good runs may agree to the last bit."""


class Check(msgspec.Struct, frozen=True, kw_only=True):
    """One comparison. ``tolerance`` is a difference for spreads, the bound itself for floors,
    and absent for answers, which must match exactly."""

    name: str
    value: float | str | None
    golden: float | str | None
    tolerance: float | None
    passed: bool
    detail: str | None = None


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """``checks`` decide; what could not be checked is in ``absent`` with its reason."""

    verdict: Literal["consistent", "inconsistent"]
    checks: tuple[Check, ...]
    absent: dict[str, str]


def compare(goldens: Goldens, answers: Mapping[str, Answer | str], settings: Recovery) -> Verdict:
    """The verdict on ``answers`` (as ``goldens.observe`` gives them)."""
    checks: list[Check] = []
    absent: dict[str, str] = {}
    pairs: list[tuple[GoldenAnswer, Answer]] = []
    for golden in goldens.answers:
        answer = answers.get(golden.name, "not asked")
        if isinstance(answer, str):
            checks.append(_unanswered(golden, answer))
            continue
        pairs.append((golden, answer))
        if golden.name.endswith("/caption"):
            continue
        if golden.rejected:
            absent[golden.name] = f"rejected when recorded: {golden.rejected}"
        else:
            checks.append(_closed(golden, answer))
    captions = [pair for pair in pairs if pair[0].name.endswith("/caption")]
    checks += [_caption(golden, answer) for golden, answer in captions]
    for found in (
        _logits(pairs, settings),
        _embeddings(pairs, settings),
        _cosines(pairs, settings),
        _wording(captions, settings),
        _distances(captions, settings),
    ):
        if isinstance(found, Check):
            checks.append(found)
        else:
            absent.update([found])
    right = all(check.passed for check in checks)
    return Verdict(
        verdict="consistent" if right else "inconsistent", checks=tuple(checks), absent=absent
    )


def _unanswered(golden: GoldenAnswer, reason: str) -> Check:
    return Check(
        name=golden.name, value=None, golden=golden.answer.text, tolerance=None, passed=False,
        detail=reason,
    )  # fmt: skip


def _closed(golden: GoldenAnswer, answer: Answer) -> Check:
    """Exact match: of tokens where both are known, else of the answer that the words name."""
    before, now = golden.answer, answer
    if before.tokens is not None and now.tokens is not None:
        passed = before.tokens == now.tokens
    else:
        meant = closed_answer(before.text)
        passed = normal(before.text) == normal(now.text) or (
            meant is not None and meant == closed_answer(now.text)
        )
    return Check(
        name=golden.name, value=now.text, golden=before.text, tolerance=None, passed=passed
    )


def _caption(golden: GoldenAnswer, answer: Answer) -> Check:
    """A caption may be worded otherwise, but must not contradict the golden one."""
    wrong = contradictions(golden.answer.text, answer.text)
    return Check(
        name=golden.name, value=answer.text, golden=golden.answer.text, tolerance=None,
        passed=not wrong, detail="; ".join(wrong) or None,
    )  # fmt: skip


def _worst(name: str, found: list[tuple[float, float, str]]) -> Check:
    """The check of the greatest difference for its tolerance among (difference, tolerance, of)."""
    difference, tolerance, of = max(found, key=lambda item: item[0] / item[1])
    return Check(
        name=name, value=difference, golden=0.0, tolerance=tolerance,
        passed=difference <= tolerance, detail=f"greatest in {of}",
    )  # fmt: skip


def _logits(
    pairs: list[tuple[GoldenAnswer, Answer]], settings: Recovery
) -> Check | tuple[str, str]:
    found = []
    for golden, answer in pairs:
        difference = logits_difference(golden.answer, answer)
        if golden.logits_spread is None:
            continue
        if difference is None:
            return "logits", "the server gives no logits now, it did when goldens were recorded"
        tolerance = settings.spread_factor * max(golden.logits_spread, _rounding(golden.answer))
        found.append((difference, tolerance, golden.name))
    return _worst("logits", found) if found else ("logits", "the server gives none")


def _rounding(answer: Answer) -> float:
    if answer.logits is not None:
        return ROUNDING * float(np.abs(answer.logits).max(initial=1.0))
    values = [abs(v) for step in answer.candidates or () for v in step.values()]
    return ROUNDING * max(values, default=1.0)


def _embeddings(
    pairs: list[tuple[GoldenAnswer, Answer]], settings: Recovery
) -> Check | tuple[str, str]:
    found = [
        (error, settings.spread_factor * max(golden.embedding_spread, ROUNDING), golden.name)
        for golden, answer in pairs
        if golden.embedding_spread is not None
        and (error := relative(golden.answer.embedding, answer.embedding)) is not None
    ]
    if not found:
        return "image_embedding_error", "the server gives no image embeddings"
    return _worst("image_embedding_error", found)


def _cosines(
    pairs: list[tuple[GoldenAnswer, Answer]], settings: Recovery
) -> Check | tuple[str, str]:
    found = [
        (cosine(golden.answer.embedding, answer.embedding), golden.name)
        for golden, answer in pairs
        if golden.answer.embedding is not None and answer.embedding is not None
    ]
    if not found:
        return "image_embedding_cosine", "the server gives no image embeddings"
    value, name = min(found)
    return Check(
        name="image_embedding_cosine", value=value, golden=1.0, tolerance=settings.cosine_floor,
        passed=value > settings.cosine_floor, detail=f"least in {name}",
    )  # fmt: skip


def _wording(
    captions: list[tuple[GoldenAnswer, Answer]], settings: Recovery
) -> Check | tuple[str, str]:
    if not captions:
        return "caption_bleu", "no caption was asked for"
    try:
        from sacrebleu import corpus_bleu
    except ImportError:
        return "caption_bleu", "needs the extra 'torch' (sacrebleu)"
    ours = [golden.answer.text for golden, _ in captions]
    theirs = [answer.text for _, answer in captions]
    # Texts of under four words have no 4-gram and would score 0 against themselves.
    score = 100.0 if ours == theirs else float(corpus_bleu(theirs, [ours]).score)
    reworded = score <= settings.bleu_floor and all(
        facts(a).things() and not contradictions(a, b) for a, b in zip(ours, theirs, strict=True)
    )
    return Check(
        name="caption_bleu", value=score, golden=100.0, tolerance=settings.bleu_floor,
        passed=score > settings.bleu_floor or reworded,
        detail="worded otherwise, but every caption states the same facts" if reworded else None,
    )  # fmt: skip


def _distances(
    captions: list[tuple[GoldenAnswer, Answer]], settings: Recovery
) -> Check | tuple[str, str]:
    found = [
        (1 - cosine(golden.answer.text_embedding, answer.text_embedding), golden.name)
        for golden, answer in captions
        if golden.answer.text_embedding is not None and answer.text_embedding is not None
    ]
    if not found:
        return "caption_embedding_distance", "the server gives no text embeddings"
    value, name = max(found)
    return Check(
        name="caption_embedding_distance", value=value, golden=0.0,
        tolerance=settings.embedding_distance, passed=value < settings.embedding_distance,
        detail=f"greatest in {name}",
    )  # fmt: skip
