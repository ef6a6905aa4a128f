"""How many tokens a request will be: by the model's own rules, corrected by what usage states.

Text is tokenised where the model's tokenizer is at hand; else its tokens are a line over bytes
and messages, fitted by recursive least squares with slow forgetting. An image has the tokens
that its family's processor gives a size; each size that has been seen keeps a correction.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from mmctl.engine import profiles
from mmctl.engine.errors import MissingExtraError, MmctlError, UsageError
from mmctl.engine.memory import config as configuration
from mmctl.engine.memory.towers import Vision, count, tower
from mmctl.guard.images import Size
from mmctl.guard.seeing import Seen

_SIZES_KEPT = 4096
_UNKNOWN_PATCH = 28  # pixels a side per token, where nothing of the model is known
_TOKENIZED_BYTES = 32 << 10  # of one request; longer text is taken to go on alike
_FORGETTING = 0.995
_LARGE = Size(1024, 1024)  # the image that an encoder's room is kept for
_USABLE_RATIO = 0.9  # of a device's memory, as engines take it
_LATEST = 0.1  # weight of the latest prediction in the mean error
_PRIOR = (4.0, 4.0, 0.25)  # tokens of a request, of a message, of a byte
_PRIOR_COVARIANCE = (100.0, 100.0, 0.05)


class Tokens(msgspec.Struct, frozen=True):
    """Predicted prompt tokens, by what they come from."""

    vision: int
    text: int

    @property
    def prompt(self) -> int:
        """Tokens of the whole prompt."""
        return self.vision + self.text


class _Size:
    """What images of one size were found to be."""

    __slots__ = ("samples", "tokens")

    def __init__(self, tokens: float) -> None:
        self.tokens, self.samples = tokens, 0


class Predictor:
    """Predicts the prompt tokens of one model; ``learn`` corrects it.

    ``config`` is the model's configuration, or, ``partial``, the fields of its family that
    decide how images become tokens; ``tokenizer`` a ``tokenizer.json``.
    """

    def __init__(
        self,
        config: dict[str, Any] | None = None,
        tokenizer: Path | None = None,
        partial: bool = False,
    ) -> None:
        self.config, self.partial = config, partial
        self._needs: dict[Size | None, configuration.Needs | None] = {}
        self.vision = _tower(config)
        self._tokenizer = _load(tokenizer) if tokenizer else None
        self._sizes: OrderedDict[Size | str, _Size] = OrderedDict()
        self._text = _Line(1.0 if self._tokenizer else _PRIOR[2])
        self._factor = 1.0  # tokens of images as stated, over those by the rule
        self.samples = 0
        self.errors: dict[str, float] = {}
        """Mean relative error of the latest predictions, by modality."""

    def predict(self, seen: Seen) -> Tokens:
        """The prompt tokens of a request."""
        return Tokens(round(self._images(seen)), round(self._text.value(self._features(seen))))

    def image(self, size: Size | None) -> float:
        """The tokens of one image; of an unknown size, those of the latest one."""
        known = self._sizes.get(size if size is not None else "?")
        if known is not None:
            return known.tokens
        if size is None:
            latest = next(reversed(self._sizes.values()), None)
            return latest.tokens if latest else self.by_rule(Size(640, 480))
        return self.by_rule(size) * self._factor

    def by_rule(self, size: Size) -> float:
        """The tokens of an image by its family's rule alone."""
        if self.vision is None:
            return max(1.0, size.width * size.height / _UNKNOWN_PATCH**2)
        try:
            return float(count(self.vision, size, None)[1])
        except (KeyError, TypeError, ValueError, ZeroDivisionError):
            return max(1.0, size.width * size.height / _UNKNOWN_PATCH**2)

    def peak_bytes(self, seen: Seen, tokens: Tokens, output_tokens: int) -> int | None:
        """What a request may come to take: the KV cache of its tokens, and the encoder's peak
        for its largest image. Modelled; absent where the configuration does not tell."""
        sizes = [image.size for image in seen.images if image.size is not None]
        largest = max(sizes, key=lambda size: size.width * size.height, default=None)
        needed = self._needed(largest)
        if needed is None:
            return None
        encoder = max((image.encoder_peak_bytes for image in needed.images), default=0)
        return needed.kv_bytes_per_token * (tokens.prompt + output_tokens) + encoder

    def capacity_tokens(self, memory_bytes: int) -> int | None:
        """Tokens whose KV cache fits beside the weights and one encoder at work. Modelled."""
        needed = self._needed(_LARGE)
        if needed is None or not needed.kv_bytes_per_token:
            return None
        encoder = max((image.encoder_peak_bytes for image in needed.images), default=0)
        left = int(memory_bytes * _USABLE_RATIO) - needed.weight_bytes - encoder
        return max(1, left // needed.kv_bytes_per_token)

    def _needed(self, size: Size | None) -> configuration.Needs | None:
        """What the model needs for an image of ``size``; None for a family without the rest."""
        if size in self._needs:
            return self._needs[size]
        found = None
        if self.config is not None and not self.partial:
            try:
                found = configuration.needs(self.config, [size] if size else [])
            except MmctlError:
                found = None
        if len(self._needs) >= _SIZES_KEPT:
            self._needs.clear()
        self._needs[size] = found
        return found

    def learn(self, seen: Seen, predicted: Tokens, prompt_tokens: int) -> None:
        """Take in what a backend stated; images of a size seen thrice no longer explain text."""
        self.samples += 1
        error = abs(predicted.prompt - prompt_tokens) / max(1, prompt_tokens)
        before = self.errors.get(seen.modality, error)
        self.errors[seen.modality] = before + _LATEST * (error - before)
        features = self._features(seen)
        kinds = [*(image.size or "?" for image in seen.images), *["video"] * seen.videos]
        entries = [self._entry(kind) for kind in kinds]
        if all(entry.samples >= 3 for entry in entries):
            self._text.learn(features, prompt_tokens - self._images(seen))
        if not entries:
            return
        found = prompt_tokens - self._text.value(features)
        known = sum(entry.tokens for entry in entries)
        if found <= 0 or known <= 0:
            return
        for entry in entries:
            entry.samples += 1
            step = max(1 / entry.samples, 0.1)
            entry.tokens += step * (entry.tokens * found / known - entry.tokens)
        sizes = [image.size for image in seen.images if image.size is not None]
        if by_rule := sum(map(self.by_rule, sizes)):
            stated = sum(map(self.image, sizes))
            self._factor += 0.2 * (stated / by_rule - self._factor)

    def _entry(self, kind: Size | str) -> _Size:
        entry = self._sizes.pop(kind, None)
        if entry is None:
            entry = _Size(self.image(kind if isinstance(kind, Size) else None))
            if len(self._sizes) >= _SIZES_KEPT:
                self._sizes.popitem(last=False)
        self._sizes[kind] = entry
        return entry

    def _images(self, seen: Seen) -> float:
        videos = self._sizes.get("video")
        return sum(self.image(image.size) for image in seen.images) + (
            seen.videos * videos.tokens if videos else 0.0
        )

    def _features(self, seen: Seen) -> tuple[float, float, float]:
        length = seen.text_bytes
        if self._tokenizer is not None and length:
            length = self._tokenized(seen.texts)
        return (1.0, float(seen.messages), float(length))

    def _tokenized(self, texts: Sequence[str]) -> int:
        text = "\n".join(texts)
        part = text[:_TOKENIZED_BYTES]
        assert self._tokenizer is not None
        tokens = len(self._tokenizer.encode(part, add_special_tokens=False).ids)
        return round(tokens * len(text) / len(part))


class _Line:
    """y = w · x over three features, by recursive least squares; plain floats are faster here."""

    def __init__(self, slope: float) -> None:
        self.weights = [_PRIOR[0], _PRIOR[1], slope]
        self.covariance = [
            [_PRIOR_COVARIANCE[i] if i == j else 0.0 for j in range(3)] for i in range(3)
        ]

    def value(self, x: Sequence[float]) -> float:
        return max(1.0, sum(w * f for w, f in zip(self.weights, x, strict=True)))

    def learn(self, x: Sequence[float], y: float) -> None:
        p = self.covariance
        px = [sum(p[i][j] * x[j] for j in range(3)) for i in range(3)]
        scale = _FORGETTING + sum(x[i] * px[i] for i in range(3))
        error = y - sum(w * f for w, f in zip(self.weights, x, strict=True))
        for i in range(3):
            self.weights[i] += px[i] / scale * error
            for j in range(3):
                p[i][j] = (p[i][j] - px[i] * px[j] / scale) / _FORGETTING
        # Without news in a direction forgetting would let its variance grow for ever.
        for i in range(3):
            p[i][i] = min(p[i][i], _PRIOR_COVARIANCE[i])


def _tower(config: dict[str, Any] | None) -> Vision | None:
    if config is None:
        return None
    text = config.get("text_config") or config
    hidden = text.get("hidden_size") or 4096
    try:
        return tower(config, int(hidden))
    except (KeyError, TypeError, ValueError, AttributeError, ZeroDivisionError) as error:
        raise MmctlError(f"the model's configuration lacks or misstates {error}") from None


def _load(path: Path) -> Any:
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise MissingExtraError(f"reading {path}", "guard") from None
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:
        raise MmctlError(f"{path} is no tokenizer.json: {error}") from None


def of_model(
    name: str, families: Sequence[profiles.Family], folder: Path | None = None
) -> Predictor:
    """A predictor for a model: by its folder where that is at hand, else by its family."""
    if folder is not None:
        tokenizer = folder / "tokenizer.json"
        config = configuration.read(folder)
        return Predictor(config, tokenizer if tokenizer.is_file() else None)
    for family in families:
        if pattern(family.match).search(name):
            return Predictor(family.config, partial=True)
    return Predictor()


def pattern(match: str) -> re.Pattern[str]:
    """What finds a family in a model's name; UsageError for what is no regular expression."""
    try:
        return re.compile(match, re.IGNORECASE)
    except re.error as error:
        raise UsageError(f"'{match}' is no pattern for names of models: {error}") from None


def smaller(
    predictor: Predictor, size: Size, most_tokens: int, floor: float, least_side: int
) -> float:
    """The largest scale at which an image of ``size`` has at most ``most_tokens``.

    An image keeps ``floor`` of its sides, and ``least_side`` pixels of the shorter one; where
    that is too much for the budget, the scale is the largest with the fewest tokens. Tokens
    need not fall with the size (tiles are chosen by shape), so every scale is looked at, in
    steps of 2 %.
    """
    best, fewest = 1.0, predictor.image(size)
    least = max(floor, min(1.0, least_side / min(size)))
    scale = 1.0
    while fewest > most_tokens and (scale := scale * 0.98) >= least:
        tokens = predictor.image(size.scaled(scale))
        if tokens < fewest:
            best, fewest = scale, tokens
    return best
