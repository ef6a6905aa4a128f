"""Prometheus text → samples of the metrics that are wanted; everything else is not even split.

Written for pages read ten times a second: the labels of a series are parsed when it is first
seen. The tests hold it against prometheus_client's parser, which is too slow here (2.5 MB/s,
and 0.06 to 0.2 s to import). Format: prometheus.io/docs/instrumenting/exposition_formats.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import NamedTuple

from mmctl.engine.errors import MmctlError

_LABEL = re.compile(r'\s*([a-zA-Z_][a-zA-Z0-9_]*)\s*=\s*"((?:[^"\\]|\\.)*)"\s*(?:,|$)')
_ESCAPE = re.compile(r"\\(.)")
_NAME = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*\Z")
_MAX_SERIES = 200_000


class Sample(NamedTuple):
    """One line of a page: the name, its labels, the value; ``time_ms`` where the page has it."""

    name: str
    labels: dict[str, str]
    value: float
    time_ms: int | None = None


class Reader:
    """Reads pages of one source; ``wanted`` gives a name's canonical form, or None to skip it.

    ``lower`` gives labels' names in lower case: exporters change theirs from ``Hostname`` to
    ``hostname`` between versions.
    """

    def __init__(self, wanted: Callable[[str], str | None], lower: bool = False) -> None:
        self._wanted, self._lower = wanted, lower
        self._names: dict[str, str | None] = {}
        self._series: dict[str, tuple[str, dict[str, str]]] = {}

    def read(self, text: str) -> list[Sample]:
        """The samples of the wanted metrics, in the order of the page.

        Raises MmctlError for a wanted line that is no sample.
        """
        names, series = self._names, self._series
        samples: list[Sample] = []
        for line in text.split("\n"):
            if not line or line[0] == "#":
                continue
            brace = line.find("{")
            end = brace if brace > 0 else line.find(" ")
            name = line[:end].strip() if end > 0 else line.strip()
            try:
                canonical = names[name]
            except KeyError:
                canonical = names[name] = self._wanted(name) if _NAME.match(name) else None
            if canonical is None:
                continue
            close = line.rfind("}") if brace > 0 else end - 1
            if " # " in line:  # an exemplar of OpenMetrics has labels of its own
                close = line.rfind("}", 0, line.rfind(" # ")) if brace > 0 else close
            key, rest = line[: close + 1], line[close + 1 :]
            known = series.get(key)
            if known is None:
                if len(series) >= _MAX_SERIES:
                    series.clear()
                labels = _labels(key, brace)
                if self._lower:
                    labels = {label.lower(): value for label, value in labels.items()}
                known = series[key] = (canonical, labels)
            samples.append(_sample(known, rest, line))
        return samples


def _sample(known: tuple[str, dict[str, str]], rest: str, line: str) -> Sample:
    words = rest.split(" # ", 1)[0].split()
    try:
        if len(words) == 1:
            return Sample(known[0], known[1], float(words[0]))
        if len(words) == 2:
            time = float(words[1])
            # Milliseconds in Prometheus' own format, seconds in OpenMetrics.
            return Sample(
                known[0], known[1], float(words[0]), int(time if time > 1e11 else time * 1e3)
            )
    except (ValueError, OverflowError):
        pass
    raise MmctlError(f"not a metrics page: {line[:80]!r} is no sample")


def _labels(key: str, brace: int) -> dict[str, str]:
    labels: dict[str, str] = {}
    if brace <= 0:
        return labels
    inner = key[brace + 1 : -1]
    place = 0
    while place < len(inner):
        found = _LABEL.match(inner, place)
        if found is None:
            if not inner[place:].strip(" ,"):
                break
            raise MmctlError(f"not a metrics page: {key[:80]!r} has broken labels")
        value = found[2]
        labels[found[1]] = _ESCAPE.sub(_unescape, value) if "\\" in value else value
        place = found.end()
    return labels


def _unescape(found: re.Match[str]) -> str:
    return {"n": "\n", '"': '"', "\\": "\\"}.get(found[1], "\\" + found[1])


def looks_like_page(head: str) -> bool:
    """Whether the beginning of a text is a Prometheus page."""
    good = 0
    for line in head.split("\n")[:40]:
        if line.startswith(("# HELP ", "# TYPE ", "# UNIT ")):
            return True
        if not line.strip() or line.startswith("#"):
            continue
        if not re.match(
            r'[a-zA-Z_:][a-zA-Z0-9_:]*(\{([a-zA-Z_]\w*\s*=\s*".*")?,?\s*\})?\s+\S+(\s+\S+)?\s*$',
            line,
        ):
            return False
        good += 1
    return good > 0
