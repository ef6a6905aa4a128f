"""What becomes of a request under pressure: smaller images, a shorter answer, or a refusal."""

from __future__ import annotations

import asyncio
import math
import time
from collections import OrderedDict
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec

from mmctl.engine import profiles
from mmctl.engine.errors import suggestion
from mmctl.guard.images import data_url, shrink
from mmctl.guard.refusal import Refusal
from mmctl.guard.seeing import Image, Seen
from mmctl.guard.tokens import Predictor, Tokens, smaller

RESPONSES = frozenset({"shrink_images", "cap_output", "defer_images", "limit_admission"})
"""What the guard can do to requests."""


def unknown(names: Iterable[str]) -> list[str]:
    """What is wrong with each of ``names`` that is no response of the guard's."""
    known = ", ".join(sorted(RESPONSES))
    return [
        f"no response '{name}' of the guard{suggestion(name, RESPONSES) or f': one of {known}'}"
        for name in names
        if name not in RESPONSES
    ]


AS_ASKED = {
    "quantize_vision": "shrink_images", "distill": "shrink_images", "light_vision": "shrink_images",
    "choose": "shrink_images", "offload_kv": "cap_output", "cap_batch": "defer_images",
}  # fmt: skip
"""What the guard does instead of responses that only a worker could carry out."""

_LIMITS = ("max_completion_tokens", "max_tokens", "max_output_tokens")
_SUSPECTS = 4096


class Plan(msgspec.Struct, frozen=True):
    """How a request's images could be made smaller: a scale for each, and the tokens then.

    ``over`` counts the images that stay above the budget, because a smaller one would be worse
    than the floors allow, or is not known to have fewer tokens.
    """

    scales: tuple[float, ...]
    tokens: Tokens
    over: int = 0

    @property
    def changes(self) -> bool:
        """Whether any image would become smaller."""
        return any(scale < 1 for scale in self.scales)


def plan(seen: Seen, tokens: Tokens, predictor: Predictor, settings: profiles.Guard) -> Plan:
    """The scales at which every image has at most ``image_tokens``, within the floors."""
    most, floor, side = settings.image_tokens, settings.quality_floor, settings.least_side
    scales, over, saved = [], 0, 0.0
    for image in seen.images:
        before = after = predictor.image(image.size)
        scale = 1.0
        if image.size is not None and not image.remote:
            scale = smaller(predictor, image.size, most, floor, side)
            after = predictor.image(image.size.scaled(scale)) if scale < 1 else before
        over += after > most
        saved += before - after
        scales.append(scale)
    return Plan(tuple(scales), Tokens(max(0, round(tokens.vision - saved)), tokens.text), over)


async def shrink_images(
    seen: Seen, scales: tuple[float, ...], pool: ThreadPoolExecutor, most_pixels: int
) -> None:
    """Put smaller images into the request's document, and their sizes with them.

    Raises Refusal for an image that cannot be read.
    """
    loop = asyncio.get_running_loop()
    for image, scale in zip(seen.images, scales, strict=True):
        inline = data_url(image.url) if scale < 1 else None
        if inline is not None:
            media, content = await loop.run_in_executor(pool, shrink, *inline, scale, most_pixels)
            image.replace(f"data:{media};base64,{content}")
            image.size = image.size.scaled(scale) if image.size is not None else None


def cap_output(document: dict[str, Any], path: str, most: int) -> int | None:
    """Lower the limit of the output in the document; the limit it had, absent where it is kept.

    A request without a limit gets one, under the name that its API has for it.
    """
    named = [name for name in _LIMITS if document.get(name) is not None]
    before = next((document[name] for name in named), None)
    if isinstance(before, (int, float)) and before <= most:
        return None
    for name in named or ["max_output_tokens" if path.endswith("/responses") else "max_tokens"]:
        document[name] = most
    return int(before) if isinstance(before, (int, float)) else 0


class Quarantine:
    """Images that were in work when a backend died.

    The image of a request that was alone there is kept out at once; of several, those that are
    there again when a backend dies another time, with no answer in between. After
    ``quarantine_s`` an image may try again.
    """

    def __init__(self, settings: profiles.Guard) -> None:
        self.settings = settings
        self._deaths: OrderedDict[str, int] = OrderedDict()
        self._until_s: OrderedDict[str, float] = OrderedDict()

    def __len__(self) -> int:
        return len(self._until_s)

    def death(self, digests: set[str], requests: int) -> list[str]:
        """A backend died with so many requests and these images in work; those that are kept
        out from now on."""
        found = []
        for digest in digests:
            deaths = self._deaths.pop(digest, 0) + 1
            self._deaths[digest] = deaths
            if requests <= 1 or deaths >= self.settings.deaths:
                self._until_s[digest] = time.monotonic() + self.settings.quarantine_s
                found.append(digest)
        for known in (self._deaths, self._until_s):
            while len(known) > _SUSPECTS:
                known.popitem(last=False)
        return found

    def answered(self, images: list[Image]) -> None:
        """A whole answer came to these images: what happened before was not their doing."""
        for image in images if self._deaths else ():
            self._deaths.pop(image.digest, None)

    def refusal(self, images: list[Image]) -> Refusal | None:
        """Why a request with these images is not passed on."""
        for image in images if self._until_s else ():
            until = self._until_s.get(image.digest, -math.inf)
            if until > time.monotonic():
                said = f"a backend died with image {image.digest} in work"
                return Refusal(422, "image_quarantined", said, until - time.monotonic())
            self._until_s.pop(image.digest, None)
        return None
