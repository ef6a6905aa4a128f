"""Other people's files as records: a table, and three forms that are known by their content.

These are earlyoom's memory-pressure traces, texts of out-of-memory errors, and logs of kernels and
drivers, whose findings become events.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from mmctl.engine import records
from mmctl.engine.breaker.tables import is_csv, lines_of, parse_map, read_table
from mmctl.engine.errors import MmctlError
from mmctl.engine.records import AnyRecord, Event, Pool


def open_foreign(path: str, mapping: str = "") -> Iterator[AnyRecord] | None:
    """The records in a table, a trace, error texts or a log; None for a recording.

    Raises MmctlError for a file that is none of these, naming the line.
    """
    if path == "-":
        return None
    try:
        with open(path, "rb") as file:
            start = file.read(4096)
    except OSError as error:
        raise MmctlError(f"cannot read {path}: {error.strerror}") from None
    text = start.decode("utf-8", "replace")
    if mapping or is_csv(text):
        return read_table(path, parse_map(mapping))
    if "/proc/pressure/memory" in text or "full avg10" in text:
        return _pressure_trace(path)
    if start[:4] == b"\x28\xb5\x2f\xfd" or text.lstrip().startswith('{"type"'):
        return None
    if (text.lstrip().startswith("{") and '"tried"' in text) or "Tried to allocate" in text:
        return _error_texts(path)
    if "\0" in text or text.lstrip().startswith(("{", "[{")):
        return None
    return _log(path)


def _pressure_trace(path: str) -> Iterator[AnyRecord]:
    """earlyoom's traces: seconds, MemAvailable and SwapFree in MiB, some, avg10, full, avg10."""
    for line in lines_of(path):
        try:
            numbers = [float(word) for word in line.replace("|", " ").split()]
        except ValueError:
            continue
        if len(numbers) != 7:
            continue
        at, available, _, _, some, _, full = numbers
        yield records.Host(
            ts_ns=round(at * 1e9), available_bytes=round(available * 2**20),
            memory_pressure_ratio=some / 100, memory_full_pressure_ratio=full / 100,
            absent={"swap_used_bytes": "the trace has free swap alone"},
        )  # fmt: skip


def _error_texts(path: str) -> Iterator[AnyRecord]:
    """Figures of out-of-memory messages as pool states, one second apart.

    An allocation is served by the device or by one free block: the room for it is the larger of
    the two. A message does not tell the largest block, so what is reserved and unallocated
    bounds it from above, or, where an old message does not say that, all that is neither free
    nor allocated: where even that does not suffice, the shortfall is certain.
    """
    from mmctl.engine.memory.messages import find

    try:
        text = Path(path).read_text("utf-8", errors="replace")
    except OSError as error:
        raise MmctlError(f"cannot read {path}: {error.strerror}") from None
    found = find(text)
    if not found:
        raise MmctlError(f"{path} holds no out-of-memory message that can be read")
    for number, message in enumerate(found, 1):
        free, capacity = message.device_free_bytes, message.capacity_bytes
        if message.allowed_bytes is not None and free is not None:
            left = message.allowed_bytes - (message.reserved_bytes or message.allocated_bytes or 0)
            free = min(free, max(left, 0))
        allocated = message.allocated_bytes or 0
        unallocated = message.unallocated_bytes
        if unallocated is None and capacity is not None and free is not None:
            unallocated = max(capacity - free - allocated, 0)
        bound = unallocated or 0
        yield Pool(
            ts_ns=number * 10**9, device=f"message{number}",
            reserved_bytes=allocated + bound, allocated_bytes=allocated,
            free_bytes=bound, largest_free_bytes=bound, releasable_bytes=0,
            capacity_bytes=capacity, device_free_bytes=free, fragmentation_ratio=0.0,
            headroom_bytes=None
            if free is None or unallocated is None
            else max(free, unallocated) - message.need_bytes,
        )  # fmt: skip


def _log(path: str) -> Iterator[AnyRecord]:
    """What a kernel's or driver's log says, as events on the log's own clock."""
    from mmctl.engine.recovery.diagnose import findings
    from mmctl.engine.recovery.logs import Line, read_lines

    last, known = 0, False

    def dated(lines: Iterable[Line]) -> Iterator[Line]:
        nonlocal known
        for each in lines:
            known = known or each.ts_s is not None
            yield each

    with Path(path).open(encoding="utf-8", errors="replace") as file:
        for found in findings(dated(read_lines(file))):
            known = True
            last = last if found.ts_s is None else max(last, round(found.ts_s * 1e9))
            yield Event(
                ts_ns=last, what=found.what, device=found.device, state=found.severity,
                message=found.evidence,
                evidence={"meaning": found.meaning, "action": found.action, "line": found.line},
            )  # fmt: skip
    if not known:  # a clean log has nothing to report; what is no log must not pass for one
        empty = Path(path).is_file() and not Path(path).stat().st_size
        unknown = "is no recording, table or log of a known kind: no line of it has a time"
        raise MmctlError(f"{path} {'is empty' if empty else unknown}")
