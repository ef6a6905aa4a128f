"""Failure chains from logs: who failed first, what followed, with the line that says so.

The knowledge is a table (``failures.toml``): what a line means and what is known to bring it
about. A chain is a hypothesis: its links are facts, their order in time is a fact where the log
has a clock, that one brought the other about is inferred. No log of the field held the whole of
a published chain, so each link carries its own evidence and the chain a confidence.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Literal

import msgspec

from mmctl.engine.records import Device
from mmctl.engine.recovery.leaks import Leak, leak_in_lines, leak_in_readings
from mmctl.engine.recovery.logs import Line, read_lines

Severity = Literal["failure", "warning", "step"]

RELATED_S = 600.0
"""A known consequence, or anything on the same device, belongs to a chain within this time."""

BURST_S = 5.0
"""Failures of different devices within this time are taken to be one incident."""

OPEN_CHAINS = 64
"""How many of the latest chains may still grow."""

BURST_LINES = 40
"""The same for logs without a clock, in lines."""


class Code(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of one numbered error."""

    meaning: str
    cause: str = ""
    action: str = ""
    severity: Severity | None = None
    certainty: float | None = None
    causes: tuple[str, ...] = ()


class Pattern(msgspec.Struct, frozen=True, kw_only=True):
    """One entry of the table; see the head of ``failures.toml``."""

    what: str
    match: str
    severity: Severity
    meaning: str
    cause: str = ""
    action: str = ""
    codes: str | None = None
    certainty: float = 0.6
    consequence_of: tuple[str, ...] = ()
    same_as: tuple[str, ...] = ()
    resolves: tuple[str, ...] = ()


class Knowledge(msgspec.Struct, frozen=True, kw_only=True):
    """The whole table."""

    words: tuple[str, ...]
    pattern: tuple[Pattern, ...]
    codes: dict[str, dict[str, Code]]


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """What one line of the log says."""

    what: str
    line: int
    evidence: str
    ts_s: float | None
    device: str | None
    severity: Severity
    certainty: float
    meaning: str
    cause: str
    action: str
    consequence_of: tuple[str, ...]
    same_as: tuple[str, ...]
    resolves: tuple[str, ...]


class Link(msgspec.Struct, kw_only=True):
    """One link of a chain: its first line, and how often the same was said again."""

    what: str
    line: int
    evidence: str
    ts_s: float | None
    devices: list[str]
    count: int
    severity: Severity
    meaning: str
    cause: str
    confidence_ratio: float


class Chain(msgspec.Struct, frozen=True, kw_only=True):
    """What followed what. ``confidence_ratio`` is a judgement of the links, not a measurement."""

    root: str
    links: tuple[Link, ...]
    confidence_ratio: float
    action: str
    basis: str = "modelled"


class Noted(msgspec.Struct, frozen=True, kw_only=True):
    """Something worth knowing that is no failure, with how often it was said."""

    what: str
    line: int
    evidence: str
    count: int
    meaning: str


class Diagnosis(msgspec.Struct, frozen=True, kw_only=True):
    """What a log says in all, and the leak that its failures left, where one is seen."""

    lines: int
    chains: tuple[Chain, ...]
    noted: tuple[Noted, ...]
    leak: Leak | None = None


@cache
def knowledge() -> Knowledge:
    """The shipped table."""
    import tomli

    text = (Path(__file__).parent / "failures.toml").read_text("utf-8")
    return msgspec.convert(tomli.loads(text), Knowledge)


@cache
def _compiled() -> tuple[tuple[Pattern, re.Pattern[str]], ...]:
    return tuple((entry, re.compile(entry.match)) for entry in knowledge().pattern)


def findings(lines: Iterable[Line]) -> Iterator[Finding]:
    """What the lines say, each by the first entry of the table that fits it."""
    words, patterns = knowledge().words, _compiled()
    for line in lines:
        lowered = line.text.lower()
        if not any(word in lowered for word in words):
            continue
        for entry, pattern in patterns:
            if found := pattern.search(line.text):
                yield _finding(entry, found, line)
                break


def _finding(entry: Pattern, found: re.Match[str], line: Line) -> Finding:
    groups = {name.rstrip("2"): text for name, text in found.groupdict().items() if text}
    code = groups.get("code")
    known = knowledge().codes.get(entry.codes or "", {}).get(code or "")
    severity = (known.severity if known else None) or entry.severity
    word = groups.get("word", "").replace("-", "").lower()
    if word:
        severity = "failure" if word == "fatal" else "warning"
    elif code == "154" and "(None)" in line.text.rpartition(" to ")[2]:
        severity = "warning"  # the driver asks for nothing any more
    causes = known.causes if known else ()
    return Finding(
        what=f"{entry.what}{code}" if code else entry.what,
        line=line.number,
        evidence=line.raw.strip(),
        ts_s=line.ts_s,
        device=_device(groups.get("device"), line.text),
        severity=severity,
        certainty=(known.certainty if known and known.certainty else entry.certainty),
        meaning=known.meaning if known else entry.meaning,
        cause=known.cause if known else entry.cause,
        action=known.action if known else entry.action,
        consequence_of=(*entry.consequence_of, *causes),
        same_as=entry.same_as,
        resolves=entry.resolves,
    )


_ADDRESS = re.compile(r"\b[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\b", re.I)


def _device(named: str | None, text: str) -> str | None:
    """The device of a line: a PCI address as domain:bus:device, so that all functions of a card
    are one, else what the pattern named."""
    address = _ADDRESS.search(named or text)
    return address[0].lower()[-10:] if address else named


class _Open:
    """A chain while it grows, with what it says kept ready: logs repeat themselves a lot."""

    def __init__(self, first: Finding) -> None:
        self.findings: list[Finding] = []
        self.says: set[str] = set()
        self.causes: set[str] = set()
        self.devices: set[str] = set()
        self.serious = False
        self.add(first)

    def add(self, new: Finding) -> None:
        """Take ``new`` in as the latest."""
        self.findings.append(new)
        self.says.add(new.what)
        self.causes.update(new.consequence_of)
        self.serious = self.serious or new.severity != "warning"
        if new.device:
            self.devices.add(new.device)

    def takes(self, new: Finding) -> bool:
        """Does ``new`` belong to this chain?"""
        last = self.findings[-1]
        apart_s = None if new.ts_s is None or last.ts_s is None else abs(new.ts_s - last.ts_s)
        near = new.line - last.line <= BURST_LINES if apart_s is None else apart_s <= BURST_S
        if apart_s is not None and apart_s > RELATED_S:
            return False
        if new.device and new.device in self.devices:
            return True
        if not self.says.isdisjoint((*new.consequence_of, *new.same_as)):
            # A corrected error elsewhere explains nothing here.
            return near or self.serious
        if new.what in self.causes and near:
            return True
        # Without a known relation only failures, and only at the same moment, are one incident;
        # a warning that names a device speaks for that device alone.
        unbound = new.device is None or last.device is None
        both = new.severity != "warning" and last.severity != "warning"
        return near and (both or (unbound and new.severity != "warning"))


def diagnose(source: Iterable[str], devices: Iterable[Device] = ()) -> Diagnosis:
    """Chains of failures in the lines of a log, and what else is worth noting.

    A clean log gives neither; a storm of corrected errors is noted and is no failure.
    ``devices`` are readings of the time around it: memory in use that no process holds is the
    last link of the last chain.
    """
    count = 0
    figures: list[Line] = []

    def counted() -> Iterator[Line]:
        nonlocal count
        for line in read_lines(source):
            count += 1
            if "mem" in line.text.lower():
                figures.append(line)
            yield line

    chains: list[_Open] = []
    for finding in findings(counted()):
        # The latest chain that it fits: an incident goes on, it does not resume an old one.
        recent = islice(reversed(chains), OPEN_CHAINS)
        home = next((chain for chain in recent if chain.takes(finding)), None)
        if home:
            home.add(finding)
        else:
            chains.append(_Open(finding))
    done = [_close(chain.findings) for chain in chains if _failed(chain)]
    quiet = [finding for chain in chains if not _failed(chain) for finding in chain.findings]
    leak = leak_in_readings(devices) or leak_in_lines(figures)
    if leak and done:
        done[-1] = _holding(done[-1], leak)
    return Diagnosis(lines=count, chains=tuple(done), noted=_noted(quiet), leak=leak)


def _holding(chain: Chain, leak: Leak) -> Chain:
    """The chain with the memory that it left behind as its last link."""
    last = chain.links[-1]
    link = Link(
        what="memory_held", line=leak.line or last.line, evidence=leak.evidence, ts_s=last.ts_s,
        devices=[leak.device], count=leak.readings, severity="failure",
        meaning="device memory is still in use", cause=leak.holder, confidence_ratio=0.6,
    )  # fmt: skip
    action = f"{chain.action}; reset {leak.device}: a new worker does not free what is held"
    return msgspec.structs.replace(chain, links=(*chain.links, link), action=action)


def _failed(chain: _Open) -> bool:
    """Is there a failure that the end of the chain did not resolve?"""
    resolved = chain.findings[-1].resolves
    return any(f.severity == "failure" and f.what not in resolved for f in chain.findings)


def _noted(quiet: list[Finding]) -> tuple[Noted, ...]:
    by_what: dict[str, list[Finding]] = {}
    for finding in quiet:
        by_what.setdefault(finding.what, []).append(finding)
    return tuple(
        Noted(
            what=what, line=found[0].line, evidence=found[0].evidence, count=len(found),
            meaning=found[0].meaning,
        )
        for what, found in by_what.items()
    )  # fmt: skip


def _close(found: list[Finding]) -> Chain:
    # The order of a chain is that of what was said first; the rest only counts.
    first = {finding.what: finding for finding in reversed(found)}
    heads = [finding for finding in found if first[finding.what] is finding]
    ordered = _causes_first(heads)
    repeated = [finding for finding in found if first[finding.what] is not finding]
    links: list[Link] = []
    by_what: dict[str, Link] = {}
    for place, finding in enumerate([*ordered, *repeated]):
        # A device that says the same again, or its driver in other words, adds no link.
        known = next((by_what[w] for w in (finding.what, *finding.same_as) if w in by_what), None)
        if known:
            known.count += 1
            if finding.device and finding.device not in known.devices:
                known.devices.append(finding.device)
            continue
        link = Link(
            what=finding.what, line=finding.line, evidence=finding.evidence, ts_s=finding.ts_s,
            devices=[finding.device] if finding.device else [], count=1,
            severity=finding.severity, meaning=finding.meaning, cause=finding.cause,
            confidence_ratio=_confidence(finding, ordered[:place]),
        )  # fmt: skip
        links.append(link)
        by_what[finding.what] = link
    return Chain(
        root=links[0].what, links=tuple(links), action=_action(ordered),
        confidence_ratio=round(sum(link.confidence_ratio for link in links) / len(links), 2),
    )  # fmt: skip


def _causes_first(found: list[Finding]) -> list[Finding]:
    """The findings in the order of the log, but in one burst no consequence before its cause.

    Drivers print from several contexts: "no error_detected callback" may come before the
    error that was detected.
    """
    ordered = list(found)
    for _ in found:
        for place, finding in enumerate(ordered):
            before = {f.what for f in ordered[:place]}
            if before & set(finding.consequence_of):
                continue
            later = [
                i
                for i, f in enumerate(ordered[place + 1 :], place + 1)
                if f.what in finding.consequence_of
                and f.severity == "failure"
                and finding.what not in f.consequence_of
                and _same_burst(finding, f)
            ]
            if later:
                ordered.insert(place, ordered.pop(later[0]))
                break
        else:
            return ordered
    return ordered


def _same_burst(a: Finding, b: Finding) -> bool:
    if a.ts_s is None or b.ts_s is None:
        return abs(a.line - b.line) <= BURST_LINES
    return abs(a.ts_s - b.ts_s) <= BURST_S


def _confidence(finding: Finding, before: list[Finding]) -> float:
    """How sure it is that this link belongs where it stands."""
    if not before:
        # A root whose own cause would be known is perhaps not where it began.
        return finding.certainty if finding.severity == "failure" else 0.6
    related = any(f.what in finding.consequence_of for f in before)
    same = finding.device is not None and any(f.device == finding.device for f in before)
    return 0.95 if related and same else 0.85 if related else 0.7 if same else 0.4


def _action(ordered: list[Finding]) -> str:
    """What to do about the worst, then about what began it."""
    failures = [finding for finding in ordered if finding.severity == "failure"]
    worst = max(failures, key=lambda f: (bool(f.action), f.certainty))
    first = ordered[0]
    if first.what == worst.what or not first.action:
        return worst.action
    return f"{worst.action}; where it began ({first.what}): {first.action}"
