"""``kmsg:`` — what the kernel says of devices, live or from a log file, as events."""

from __future__ import annotations

import os
import select
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from mmctl.engine.errors import MmctlError, NoSourceError
from mmctl.engine.profiles import Profile
from mmctl.engine.records import AnyRecord, Event
from mmctl.engine.recovery.diagnose import Finding, findings
from mmctl.engine.recovery.logs import read_lines
from mmctl.engine.sources.check import Check
from mmctl.engine.sources.host import node_name
from mmctl.engine.sources.smi import Origin

_DEVICE = "/dev/kmsg"
_LOOK_S = 0.2


def source(rest: str, profile: Profile, stop: threading.Event) -> Iterator[AnyRecord]:
    """Events of the kernel's messages from now on; ``rest`` may name another kmsg device.

    Raises NoSourceError where the messages may not be read.
    """
    path = rest or _DEVICE
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except OSError as error:
        raise NoSourceError(
            f"cannot read {path}: {error.strerror}; run as root or set kernel.dmesg_restrict=0"
        ) from None
    node = node_name()
    # The kernel stamps its messages with the time since boot.
    offset_ns = time.time_ns() - time.clock_gettime_ns(time.CLOCK_MONOTONIC)
    try:
        if Path(path).is_char_device():
            os.lseek(descriptor, 0, os.SEEK_END)
        while not stop.is_set():
            if not select.select([descriptor], [], [], _LOOK_S)[0]:
                continue
            try:
                content = os.read(descriptor, 8192)
            except BlockingIOError:
                continue
            except BrokenPipeError:
                continue  # messages came faster than they were read; the next one follows
            if not content:
                return
            for finding in findings(read_lines(content.decode("utf-8", "replace").splitlines())):
                yield event(finding, node, offset_ns)
    finally:
        os.close(descriptor)


def kernel_messages() -> Iterator[Check]:
    """Whether Xids and PCIe errors can be heard."""
    try:
        descriptor = os.open(_DEVICE, os.O_RDONLY | os.O_NONBLOCK)
        os.close(descriptor)
        yield Check("kernel.messages", "ok", f"{_DEVICE} can be read")
    except OSError as error:
        yield Check(
            "kernel.messages",
            "problem",
            f"{_DEVICE}: {error.strerror}",
            f"run as root, or sysctl kernel.dmesg_restrict=0 and mount {_DEVICE}",
        )


def event(finding: Finding, node: str, offset_ns: int) -> Event:
    """What one line of a log says, as an event."""
    known = finding.ts_s is not None and 0 <= finding.ts_s < 1e10
    ts_ns = offset_ns + int((finding.ts_s or 0.0) * 1e9) if known else time.time_ns()
    return Event(
        ts_ns=ts_ns, node=node, what=finding.what, device=finding.device, state=finding.severity,
        message=finding.evidence,
        evidence={"meaning": finding.meaning, "action": finding.action, "line": finding.line},
    )  # fmt: skip


def log(text: str, origin: Origin) -> list[AnyRecord]:
    """The events in a kernel log. Times since boot are counted back from the file's own time."""
    lines = list(read_lines(text.splitlines()))
    times = [line.ts_s for line in lines if line.ts_s is not None and 0 <= line.ts_s < 1e10]
    last = max(times, default=0.0)
    # A wall clock is seconds since the epoch already; a boot clock is small.
    offset_ns = 0 if last > 1e9 else origin.ts_ns - int(last * 1e9)
    records: list[AnyRecord] = [event(found, origin.node, offset_ns) for found in findings(lines)]
    if not lines:
        raise MmctlError("a log without lines")
    if not records:
        clean = "the log names no device that fails"
        records.append(
            Event(ts_ns=origin.ts_ns, node=origin.node, what="log", state="clean", message=clean)
        )
    return records
