"""Which modality a name speaks of: of a module, a stack frame, a range or a user's label."""

from __future__ import annotations

import re
from collections.abc import Sequence

from mmctl.engine.errors import UsageError
from mmctl.engine.profiles import ModalityPatterns
from mmctl.engine.records import Modality

_CAMEL = re.compile(r"(?<=[a-z0-9])(?=[A-Z][a-z])|(?<=[A-Z])(?=[A-Z][a-z])")


class Matcher:
    """A profile's patterns, which stand for whole words of an identifier, a path or a text.

    ``vit`` is found in ``modeling_vit.py``, ``ViTLayer`` and ``vit_b_16``, not in ``activity``;
    digits and a plural s may follow. UsageError for a pattern that is no regular expression.
    """

    def __init__(self, patterns: ModalityPatterns) -> None:
        self._vision = expression(patterns.vision)
        self._text = expression(patterns.text)

    def modality(self, words: str) -> Modality | None:
        """``vision`` before ``text``; None where nothing matches."""
        plain = _CAMEL.sub("_", words).lower()
        if self._vision.search(plain):
            return "vision"
        return "text" if self._text.search(plain) else None


def expression(words: Sequence[str]) -> re.Pattern[str]:
    """What finds any of ``words``; UsageError where one is no regular expression."""
    try:
        for word in words:
            re.compile(word)
        return re.compile(rf"(?<![a-z])(?:{'|'.join(words) or '(?!)'})s?(?![a-z])")
    except re.error as error:
        raise UsageError(f"[modality] of the profile holds no valid pattern: {error}") from None
