"""Sizes, times and rates as people write them: ``16MiB``, ``100ms``, ``5/min``, ``85%``."""

from __future__ import annotations

import re

BYTES: dict[str, float] = {
    "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
    "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40,
}  # fmt: skip
SECONDS: dict[str, float] = {
    "ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3,
    "s": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0,
}  # fmt: skip
KINDS: dict[str, dict[str, float]] = {"bytes": BYTES, "seconds": SECONDS}

_QUANTITY = re.compile(r"\s*([-+]?\d+(?:\.\d*)?(?:[eE][-+]?\d+)?)\s*([A-Za-zµ%]*)\s*\Z")
_RATE = re.compile(r"\s*(.+?)\s*/\s*([A-Za-zµ]+)\s*\Z")


def parse(text: str, kind: str) -> float:
    """``text`` as a plain number in the base unit of ``kind`` (bytes, seconds, ratio, per_second).

    Raises ValueError, in words for the user, when the text is no such quantity.
    """
    if kind == "per_second":
        rate = _RATE.match(text)
        if not rate or rate[2] not in SECONDS:
            raise ValueError(f"'{text}' is not a rate such as '5/min'")
        count = rate[1]
        per = SECONDS[rate[2]]
        bytes_rate = _QUANTITY.match(count)
        if bytes_rate and bytes_rate[2] in BYTES:
            return float(bytes_rate[1]) * BYTES[bytes_rate[2]] / per
        try:
            return float(count) / per
        except ValueError:
            raise ValueError(f"'{text}' is not a rate such as '5/min'") from None
    found = _QUANTITY.match(text)
    if not found:
        raise ValueError(f"'{text}' is not a number with a unit")
    number, unit = float(found[1]), found[2]
    if kind == "ratio":
        if unit in ("", "%"):
            return number / 100 if unit else number
        raise ValueError(f"'{text}' is not a ratio such as '0.85' or '85%'")
    units = KINDS[kind]
    if unit not in units:
        raise ValueError(f"'{text}' has no unit of {kind}: one of {', '.join(units)}")
    return number * units[unit]


def show_bytes(count: float | None) -> str:
    """``3.7 GiB``; an absent count is ``–``."""
    if count is None:
        return "–"
    size = abs(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            digits = 0 if unit == "B" or size >= 100 else 1
            return f"{'-' if count < 0 else ''}{size:.{digits}f} {unit}"
        size /= 1024
    return f"{'-' if count < 0 else ''}{size:.1f} TiB"


def show_seconds(seconds: float | None) -> str:
    """``3.2 ms``, ``41 s``, ``00:04:10``; an absent time is ``–``."""
    if seconds is None:
        return "–"
    if seconds == 0:
        return "0 s"
    size = abs(seconds)
    sign = "-" if seconds < 0 else ""
    if size >= 120:
        whole = int(size)
        return f"{sign}{whole // 3600:02}:{whole // 60 % 60:02}:{whole % 60:02}"
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if size >= scale or unit == "µs":
            number = size / scale
            return f"{sign}{number:.{0 if number >= 100 else 1 if number >= 10 else 2}f} {unit}"
    raise AssertionError("unreachable: the last unit always applies")
