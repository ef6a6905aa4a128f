"""``mmctl breaker diagnose``: kernel and driver logs → who failed first, and what followed."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import msgspec
import typer

from mmctl.cli.app import common, note, output
from mmctl.cli.main import Exit
from mmctl.cli.render import emit
from mmctl.engine.errors import MmctlError, NoSourceError
from mmctl.engine.records import SCHEMA, Device, Event
from mmctl.engine.units import show_bytes

Log = Annotated[str, typer.Argument(metavar="FILE|-|kmsg:", help="A kernel or driver log.")]
DevicesOption = Annotated[
    str,
    typer.Option("--devices", metavar="SOURCE", help="Device readings to find a leak in."),
]


def diagnose(log: Log = "kmsg:", devices: DevicesOption = "") -> int:
    """Failure chains in a log: who failed first, what followed, and the line that says so.

    Reads dmesg, journalctl, syslog and Fabric Manager logs, this kernel's own messages (kmsg:)
    or a recording of mmctl. Lines and their order are facts; that one failure brought the next
    about is a hypothesis with a confidence. Corrected errors and other warnings are noted and
    are no failure. Exit 3 when there is a failure or a leak.

    \b
    Examples:
      mmctl breaker diagnose /var/log/kern.log
      journalctl -k -b -1 | mmctl breaker diagnose - -o json
      mmctl breaker diagnose kmsg: --devices nvml:
    """
    from mmctl.engine.recovery.diagnose import diagnose as find

    with _open(log) as lines:
        found = find(lines.text(), lines.readings(devices))
    if not found.lines and not lines.devices:
        raise MmctlError(f"{log} is empty: nothing can be said of it")
    rows = [
        {
            "chain": number, "link": place, "what": link.what, "line": link.line,
            "count": link.count, "devices": link.devices, "meaning": link.meaning,
            "confidence_ratio": link.confidence_ratio, "evidence": link.evidence,
        }
        for number, chain in enumerate(found.chains, 1)
        for place, link in enumerate(chain.links, 1)
    ]  # fmt: skip
    document = {
        "schema": SCHEMA, "source": log, "lines": found.lines,
        "chains": msgspec.to_builtins(found.chains), "noted": msgspec.to_builtins(found.noted),
        "leak": msgspec.to_builtins(found.leak) if found.leak else {},
    }  # fmt: skip
    emit(document, rows, output(), table=_drawn(found))
    return Exit.FINDING if found.chains or found.leak else Exit.DONE


def _drawn(found: Any) -> str:
    blocks = []
    for number, chain in enumerate(found.chains, 1):
        arrow = " → ".join(link.what for link in chain.links)
        lines = [f"chain {number} (confidence {chain.confidence_ratio:.2f}): {arrow}"]
        for link in chain.links:
            again = f" ×{link.count}" if link.count > 1 else ""
            where = f" [{', '.join(link.devices)}]" if link.devices else ""
            lines += [
                f"  {link.what}{again}{where}: {link.meaning}",
                f"    line {link.line}: {_plain(link.evidence)}",
            ]
        blocks.append("\n".join([*lines, f"  do: {chain.action}"]))
    blocks += [
        f"noted: {quiet.what} ×{quiet.count}: {quiet.meaning}\n"
        f"    line {quiet.line}: {_plain(quiet.evidence)}"
        for quiet in found.noted
    ]
    if found.leak:
        grows = found.leak.growth_bytes_per_minute
        rate = f", growing by {show_bytes(grows)} a minute" if grows else ""
        blocks.append(
            f"leak: {show_bytes(found.leak.held_bytes)} of {found.leak.device} are in use"
            f"{rate}: {found.leak.holder}"
        )
    if not found.chains and not found.leak:
        blocks.append(f"no failure in {found.lines} lines")
    return "\n".join(blocks)


def _plain(text: str) -> str:
    """Evidence is a stranger's text: no control character reaches the terminal."""
    return "".join(c if c.isprintable() else " " for c in text)


class _Log:
    """The lines of a log, and the device readings found in it when it is a recording."""

    def __init__(self, lines: Iterable[str], name: str) -> None:
        self.lines, self.name = lines, name
        self.devices: list[Device] = []

    def text(self) -> Iterator[str]:
        for number, line in enumerate(self.lines):
            if line.startswith('{"type":'):
                yield self._record(line)
            elif number == 0 and line.lstrip().startswith(("<?", "<!", "{", "[]", "[{")):
                raise self._none("log, but a document")
            elif "\0" in line:
                raise self._none("text")
            else:
                yield line

    def _none(self, what: str) -> MmctlError:
        return MmctlError(f"{self.name} is no {what}: give a kernel log or a recording")

    def readings(self, source: str) -> Iterator[Device]:
        """The readings found among the lines, complete once these are read, then ``source``'s."""
        yield from self.devices
        yield from _readings(source)

    def _record(self, line: str) -> str:
        """What a record says as a log line would; readings of devices are kept."""
        from mmctl.engine.records import decode

        try:
            record = decode(line)
        except MmctlError:
            return line
        if isinstance(record, Device):
            self.devices.append(record)
        if isinstance(record, Event) and record.message:
            return f"[{record.ts_ns / 1e9:.6f}] {record.message}"
        return ""


@contextmanager
def _open(log: str) -> Iterator[_Log]:
    if log == "-":
        yield _Log(sys.stdin, "standard input")
    elif log == "kmsg:":
        yield _Log(_kernel(), log)
    else:
        try:
            file = open(log, encoding="utf-8", errors="replace")  # noqa: SIM115
        except OSError as error:
            raise MmctlError(f"cannot read {log}: {error.strerror}") from None
        with file:
            yield _Log(file, log)


def _kernel() -> Iterator[str]:
    """The kernel's messages up to now."""
    path = "/dev/kmsg"
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except OSError as error:
        raise NoSourceError(
            f"cannot read {path} ({error.strerror}): run as root, or dmesg | mmctl breaker "
            "diagnose -"
        ) from None
    try:
        while True:
            try:
                record = os.read(handle, 8192)
            except BlockingIOError:
                return
            except BrokenPipeError:
                continue  # messages were overwritten while reading: go on with the oldest left
            if not record:
                return
            yield from record.decode("utf-8", "replace").splitlines()
    finally:
        os.close(handle)


def _readings(source: str) -> list[Device]:
    """Readings of ``source``: a recording whole, live devices for two looks."""
    if not source:
        return []
    import threading

    from mmctl.engine import profiles
    from mmctl.engine.sources import open_sources

    profile = profiles.load(common().profile).profile
    records = open_sources([source], profile, threading.Event(), count=2)
    found = [record for record in records if isinstance(record, Device)]
    if not found:
        note(f"{source} gave no reading of a device: no leak can be seen")
    return found
