"""Loops that numba compiles where the extra 'fast' is there, and Python runs where it is not."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from typing import Any, TypeVar

_F = TypeVar("_F", bound=Callable[..., Any])


def compiled(function: _F) -> _F:
    """``function`` compiled at its first call; MMCTL_PLAIN=1 keeps it plain."""
    if os.environ.get("MMCTL_PLAIN"):
        return function
    state: dict[str, Any] = {}

    def call(*args: Any) -> Any:
        if "run" not in state:
            try:
                import numba

                state["run"] = _njit(numba, function)
            except ImportError:
                state["run"] = function
        return state["run"](*args)

    call.plain = function  # type: ignore[attr-defined]
    return call  # type: ignore[return-value]


def is_fast() -> bool:
    """Whether loops are compiled here: numba is installed and not switched off."""
    return not os.environ.get("MMCTL_PLAIN") and importlib.util.find_spec("numba") is not None


def _njit(numba: Any, function: Callable[..., Any]) -> Any:
    try:
        return numba.njit(cache=True)(function)
    except RuntimeError:  # nowhere to keep the compiled code
        return numba.njit(function)
