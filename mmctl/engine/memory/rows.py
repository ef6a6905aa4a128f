"""Sorted rows as Python lists, and no compiler: what ``core`` runs on when it is imported."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable
from typing import TypeVar

__all__ = ["bisect_left", "bisect_right", "insert", "jit", "remove"]

F = TypeVar("F", bound=Callable[..., object])


def jit(function: F) -> F:
    """The function as it is."""
    return function


def insert(row: list[int], count: int, position: int, value: int) -> None:
    """Put ``value`` into the first ``count`` entries of a row."""
    row.insert(position, value)


def remove(row: list[int], count: int, position: int) -> None:
    """Take an entry out of the first ``count`` entries of a row."""
    del row[position]
