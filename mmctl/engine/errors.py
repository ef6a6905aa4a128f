"""What can go wrong, in the words an operator reads: what happened, to what, what to do next."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from difflib import get_close_matches


class MmctlError(Exception):
    """The work could not be done: broken input, a failed step (exit code 1)."""


class UsageError(MmctlError):
    """The request itself is wrong: an unknown name, key or format (exit code 2)."""


class NoSourceError(MmctlError):
    """None of the sources asked for could be read (exit code 4)."""


class MissingExtraError(MmctlError):
    """An optional dependency is not installed; the message names the extra (exit code 1)."""

    def __init__(self, what: str, extra: str) -> None:
        super().__init__(f"{what} needs the extra '{extra}': {install(extra)}")


class Remark(UserWarning):
    """Worth a word to the person, though the work goes on: said once, by ``warnings``."""


@contextmanager
def quiet_interrupt() -> Iterator[None]:
    """Ctrl-C ends the process with 130 and not a word: around the ``main`` of every module."""
    try:
        yield
    except KeyboardInterrupt:
        sys.exit(130)


def install(extra: str) -> str:
    """The command that adds an extra, quoted so that every shell passes it on as it is."""
    return f"pip install 'mmctl[{extra}]'"


def nearest(word: str, known: Iterable[str], *more: str) -> str:
    """What follows an unknown name: the known one nearest to it, else all of them (and what
    ``more`` there could be)."""
    names = list(known)
    return suggestion(word, names) or f": one of {', '.join((*names, *more))}"


def suggestion(word: str, known: Iterable[str]) -> str:
    """``; did you mean 'x'?`` for the known word nearest to ``word``, or an empty string."""
    near = get_close_matches(word, list(known), n=1)
    return f"; did you mean '{near[0]}'?" if near else ""
