"""Lines of kernel, driver and firmware logs: when, and what, whatever wrote the file.

Known forms: dmesg (seconds since boot, wall clock, deltas), /dev/kmsg records, syslog, journalctl
(short, ISO and JSON), and the bracketed dates of vendors' daemons. A line without a time is a
line all the same.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from datetime import datetime, timezone

import msgspec

LINE_LIMIT = 1_024
"""Characters of a line that are looked at: the kernel's own limit."""


class Line(msgspec.Struct, frozen=True):
    """One line: its number in the file (from 1), seconds on the log's own clock, its text.

    ``text`` has no time stamp, host or tag; ``raw`` is the line as it stands in the file.
    """

    number: int
    ts_s: float | None
    text: str
    raw: str


_KMSG = re.compile(r"(\d+),(\d+),(\d+),[^;]*;(.*)\Z", re.S)
_BOOT = re.compile(r"(?:<\d+>)?\[\s*(\d+\.\d+)\](?:\[[ TC]\d+\])?\s?")
_DELTA = re.compile(r"\[\s*\+(\d+\.\d+)\]\s?")
_WALL = re.compile(r"\[([A-Z][a-z]{2} [A-Z][a-z]{2} +\d+ \d\d:\d\d:\d\d \d{4})\]\s?")
_DAEMON = re.compile(r"\[([A-Z][a-z]{2} \d\d \d{4} \d\d:\d\d:\d\d)\]\s?")
_ISO = re.compile(
    r"(?:\S+: \w+: \w+: )?\[?(\d{4}-\d\d-\d\d)[T ](\d\d:\d\d:\d\d)(?:[.,](\d+))?"
    r"(Z|[+-]\d\d:?\d\d)?\]?:?\s+"
)
_SYSLOG = re.compile(
    r"([A-Za-zé]{3,4})\.? +(\d+) (\d\d):(\d\d):(\d\d)(?:\.(\d+))? "
    r"(?:\S+ )??([\w.@\-]+)(?:\[\d+\])?: "
)
_TAG = re.compile(r"(?:\S+ )?(?:kernel|[\w.@\-]+\[\d+\]): ")
_MONTHS = {
    name: number
    for number, names in enumerate(
        ["jan janv ene gen", "feb fév fev févr", "mar mär mrz", "apr avr abr", "may mai mag maj",
         "jun juin giu", "jul juil lug", "aug aoû ago aoút", "sep sept set", "oct okt ott out",
         "nov", "dec dez dic déc"], 1,
    )
    for name in names.split()
}  # fmt: skip


def read_lines(source: Iterable[str]) -> Iterator[Line]:
    """The lines of a log; empty ones and comments are left out, but counted."""
    clock = 0.0
    for number, raw in enumerate(source, 1):
        raw = raw.rstrip("\r\n")[:LINE_LIMIT]
        if not raw.strip() or raw.startswith("#"):
            continue
        delta = _DELTA.match(raw)
        if delta:
            clock += float(delta[1])
            yield Line(number, clock, raw[delta.end() :], raw)
        else:
            ts_s, text = _parse(raw)
            yield Line(number, ts_s, text, raw)


def _parse(raw: str) -> tuple[float | None, str]:
    """(seconds, text) of one line."""
    if raw.startswith("{") and (entry := _journal(raw)):
        return entry
    if found := _KMSG.match(raw):
        return int(found[3]) / 1e6, found[4]
    if found := _BOOT.match(raw):
        return float(found[1]), raw[found.end() :]
    for pattern, form in ((_WALL, "%a %b %d %H:%M:%S %Y"), (_DAEMON, "%b %d %Y %H:%M:%S")):
        if found := pattern.match(raw):
            return _seconds(" ".join(found[1].split()), form), raw[found.end() :]
    if found := _ISO.match(raw):
        moment = _seconds(f"{found[1]} {found[2]}", "%Y-%m-%d %H:%M:%S")
        fraction = float(f"0.{found[3]}") if found[3] else 0.0
        rest = raw[found.end() :]
        tag = _TAG.match(rest)
        return (None if moment is None else moment + fraction), rest[tag.end() if tag else 0 :]
    if found := _SYSLOG.match(raw):
        return _syslog(found, raw)
    return None, raw


def _syslog(found: re.Match[str], raw: str) -> tuple[float | None, str]:
    """A syslog line has no year; where the kernel put its own clock in, that one is finer."""
    rest = raw[found.end() :]
    if boot := _BOOT.match(rest):
        return float(boot[1]), rest[boot.end() :]
    month = _MONTHS.get(found[1].casefold())
    if month is None:
        return None, rest
    # Months of 31 days keep the order within a year, which is all that a chain needs.
    day = (month - 1) * 31 + int(found[2])
    clock = int(found[3]) * 3600 + int(found[4]) * 60 + int(found[5])
    return day * 86400.0 + clock + (float(f"0.{found[6]}") if found[6] else 0.0), rest


def _seconds(text: str, form: str) -> float | None:
    try:
        return datetime.strptime(text, form).replace(tzinfo=timezone.utc).timestamp()
    except ValueError:
        return None


def _journal(raw: str) -> tuple[float | None, str] | None:
    """A line of ``journalctl -o json``; absent when it is other JSON."""
    try:
        entry = json.loads(raw)
    except ValueError:
        return None
    message = entry.get("MESSAGE") if isinstance(entry, dict) else None
    if not isinstance(message, str):
        return None
    stamp = str(entry.get("__REALTIME_TIMESTAMP", ""))
    return (int(stamp) / 1e6 if stamp.isdigit() else None), message
