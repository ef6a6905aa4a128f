"""Loops that numba compiles where the extra 'fast' is there, and Python runs where it is not."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from mmctl.engine import compiling

_F = TypeVar("_F", bound=Callable[..., Any])


def compiled(function: _F) -> _F:
    """``function`` compiled at its first call; MMCTL_PLAIN=1 keeps it plain."""

    @cache
    def ready() -> Callable[..., Any]:
        return _njit(function) if compiling.available() else function

    def call(*args: Any) -> Any:
        return ready()(*args)

    call.plain = function  # type: ignore[attr-defined]
    return call  # type: ignore[return-value]


def _njit(function: Callable[..., Any]) -> Callable[..., Any]:
    with compiling.into(compiling.folder(Path(__file__).parent.glob("*.py"))) as numba:
        try:
            made: Callable[..., Any] = numba.njit(cache=True)(function)
        except RuntimeError:  # nowhere to keep the compiled code
            made = numba.njit(function)
    return made
