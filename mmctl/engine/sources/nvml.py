"""``nvml:`` — NVIDIA devices through nvidia-ml-py, every call through one choke point.

A driver can answer late or never, lose one device of eight, lack a function or give a number
that cannot be. Each device is read by a thread of its own, so that a call that does not return
costs that device the one value and the others nothing.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from mmctl.engine.errors import NoSourceError
from mmctl.engine.profiles import Profile
from mmctl.engine.records import AnyRecord, Device, Event
from mmctl.engine.sources.host import node_name
from mmctl.engine.sources.identity import identified
from mmctl.engine.sources.nvml_device import DeviceReader
from mmctl.engine.sources.nvml_values import REASONS, Lost, Missing

_GONE = (1, 9, 12, 17, 18)
"""Codes after which the whole driver has to be opened again."""

_MAX_HUNG = 3
"""After so many calls of one device that do not return it is left alone until one does."""

_REOPEN_S, _REOPEN_MAX_S = 10.0, 300.0
"""How long a lost device is left before the driver is opened anew to look for it; the time
doubles while it stays lost, since every device loses a reading's rates by it."""


class Asker:
    """One thread's way to the driver: the call in progress, and the calls that never returned."""

    def __init__(self, pynvml: Any, hung: frozenset[str] = frozenset()) -> None:
        self.pynvml, self.hung = pynvml, hung
        self.doing: str | None = None

    def __call__(self, name: str, *arguments: Any) -> Any:
        """The choke point: the call's value, or Missing with the reason in words."""
        if name in self.hung:
            raise Missing(f"{name} does not return; the driver hangs", 10)
        function = getattr(self.pynvml, name, None)
        if function is None:
            raise Missing(f"this pynvml has no {name}; pip install -U nvidia-ml-py", 13)
        self.doing = name
        try:
            return function(*arguments)
        except self.pynvml.NVMLError as error:
            code = int(getattr(error, "value", 999))
            raise Missing(REASONS.get(code, f"NVML error {code}: {error}"), code) from None
        except UnicodeDecodeError:
            raise Missing("the driver gave text that is none", 999) from None
        finally:
            self.doing = None


class Line:
    """A thread that does one job at a time and may be given up when a job does not return."""

    def __init__(self, pynvml: Any, name: str) -> None:
        self.name = name
        self.pynvml = pynvml
        self.given_up = 0
        self._begin(frozenset())

    def _begin(self, hung: frozenset[str]) -> None:
        self.asker = Asker(self.pynvml, hung)
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._done = threading.Event()
        self._done.set()
        self.result: Any = None
        threading.Thread(
            target=_work, args=(self._jobs,), daemon=True, name=f"nvml {self.name}"
        ).start()

    def start(self, job: Callable[[Asker], Any]) -> bool:
        """Hand over a job; False when the one before has not returned."""
        if not self._done.is_set():
            return False
        done = self._done = threading.Event()
        asker = self.asker

        def run() -> None:
            try:
                self._finish(asker, job(asker))
            except (Missing, Lost) as problem:
                self._finish(asker, problem)
            finally:
                done.set()

        self._jobs.put(run)
        return True

    def _finish(self, asker: Asker, result: Any) -> None:
        if asker is self.asker:
            self.result = result

    def wait(self, deadline: float) -> bool:
        """Whether the job is done by ``deadline`` on the monotonic clock."""
        return self._done.wait(max(deadline - time.monotonic(), 0.0))

    def give_up(self) -> str:
        """Leave the thread to its fate, avoid the call that hangs; its name."""
        call = self.asker.doing or "a call"
        if self.given_up < _MAX_HUNG:
            self.given_up += 1
            self._jobs.put(None)
            self._begin(self.asker.hung | {call})
        return call

    def close(self) -> None:
        """Let the thread end once its last call returns; a call that hangs is left behind."""
        self._jobs.put(None)


def _work(jobs: queue.SimpleQueue[Callable[[], None] | None]) -> None:
    while (job := jobs.get()) is not None:
        job()


def load_pynvml() -> Any:
    """The module nvidia-ml-py; NoSourceError where it is absent or shadowed."""
    try:
        import pynvml
    except ImportError:
        raise NoSourceError("nvidia-ml-py is not installed: pip install nvidia-ml-py") from None
    if not hasattr(pynvml, "nvmlInitWithFlags"):
        raise NoSourceError(
            "another 'pynvml' hides nvidia-ml-py: pip uninstall pynvml; pip install nvidia-ml-py"
        )
    return pynvml


def call(line: Line, timeout_s: float, name: str, *arguments: Any) -> Any:
    """One call on ``line``; Missing when it fails or does not return in time."""
    if not line.start(lambda ask: ask(name, *arguments)) or not line.wait(
        time.monotonic() + timeout_s
    ):
        raise Missing(f"{line.give_up()} does not return; the driver hangs", 10)
    if isinstance(line.result, Exception):
        raise line.result
    return line.result


class Session:
    """The driver while it is open: its devices, each with a line, and the Xid events."""

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self.pynvml = load_pynvml()
        self.line = Line(self.pynvml, "driver")
        try:
            self.ask("nvmlInitWithFlags", 0)
            count = self.ask("nvmlDeviceGetCount_v2" if hasattr(
                self.pynvml, "nvmlDeviceGetCount_v2") else "nvmlDeviceGetCount")  # fmt: skip
        except Missing as problem:
            raise NoSourceError(f"NVML: {problem}") from None
        self.driver = self.or_none("nvmlSystemGetDriverVersion")
        self.handles: list[Any] = []
        self.problems: list[str | None] = []
        for index in range(min(int(count), 1024)):
            try:
                self.handles.append(self.ask("nvmlDeviceGetHandleByIndex", index))
                self.problems.append(None)
            except Missing as problem:
                self.handles.append(None)
                self.problems.append(str(problem))
        if not self.handles:
            self.close()
            raise NoSourceError("NVML works and finds no GPU on this node")
        self.lines = [Line(self.pynvml, f"gpu{index}") for index in range(len(self.handles))]
        self.events = self._register()

    def ask(self, name: str, *arguments: Any) -> Any:
        """A call about the whole driver, within the time-out."""
        return call(self.line, self.timeout_s, name, *arguments)

    def or_none(self, name: str, *arguments: Any) -> Any:
        """``ask``, or None where the driver does not have it."""
        try:
            return self.ask(name, *arguments)
        except Missing:
            return None

    def _register(self) -> Any:
        """An event set that hears the Xids of every device that has them."""
        events = self.or_none("nvmlEventSetCreate")
        heard = False
        for handle in self.handles if events is not None else ():
            if handle is not None:
                try:
                    self.ask("nvmlDeviceRegisterEvents", handle, 8, events)
                    heard = True
                except Missing:
                    continue
        return events if heard else None

    def xids(self) -> list[tuple[int, int]]:
        """(device index, Xid) of every event that has come since the last call."""
        found: list[tuple[int, int]] = []
        while self.events is not None and len(found) < 256:
            try:
                data = self.ask("nvmlEventSetWait_v2", self.events, 0)
                address = _address(data.device)
                index = next(
                    (i for i, handle in enumerate(self.handles)
                     if handle is not None and _address(handle) == address),
                    None,
                )  # fmt: skip
                if data.eventType == 8 and index is not None:
                    found.append((index, int(data.eventData)))
            except Missing as problem:
                if problem.code in _GONE:
                    self.events = None
                break
        return found

    def close(self) -> None:
        """Shut NVML down, unless a call hangs in it: then only the threads are left behind."""
        lines = [self.line, *getattr(self, "lines", [])]
        if not any(line.given_up for line in lines):
            if getattr(self, "events", None) is not None:
                self.or_none("nvmlEventSetFree", self.events)
            self.or_none("nvmlShutdown")
        for line in lines:
            line.close()


def _address(handle: Any) -> int | None:
    import ctypes

    return ctypes.cast(handle, ctypes.c_void_p).value


def readings(rest: str, profile: Profile) -> Iterator[list[AnyRecord]]:
    """One record a device (and one a MIG instance) each reading; faults and Xids as events."""
    session = Session(profile.sources.timeout_s)
    node = node_name()
    try:
        readers = [DeviceReader(index, node, session.driver) for index in range(len(session.lines))]
        lost_since: dict[int, float] = {}
        last_xid: dict[int, int] = {}
        gone: list[AnyRecord] = []
        reopen_at, reopen_s = time.monotonic() + _REOPEN_S, _REOPEN_S
        while True:
            records, gone = gone, []
            xids = session.xids()
            for index, xid in xids:
                last_xid[index] = xid
                records.append(_xid_event(node, readers[index], xid))
            devices, codes = _read_all(session, readers, dict(xids))
            for index in range(len(readers)):
                reason = devices[index][1]
                if reason is not None and index not in lost_since:
                    lost_since[index] = time.monotonic()
                    records.append(_fault_event(node, readers[index], reason, last_xid.get(index)))
                elif reason is None and lost_since.pop(index, None) is not None:
                    records.append(_back_event(node, readers[index]))
            found = [device for pair in devices for device in pair[0]]
            records += identified(found)
            yield records
            if len(lost_since) == len(readers) and all(code in _GONE for code in codes):
                raise NoSourceError(f"NVML: {REASONS.get(codes[0], 'the driver is gone')}")
            now = time.monotonic()
            if not lost_since:
                reopen_at, reopen_s = now + _REOPEN_S, _REOPEN_S
            elif now >= reopen_at:
                before = readers
                session, readers = _reopened(session, node, profile)
                reopen_s = min(2 * reopen_s, _REOPEN_MAX_S)
                reopen_at = now + reopen_s
                lost_since = {i: t for i, t in lost_since.items() if i < len(readers)}
                gone = _gone_events(node, before[len(readers) :])
    finally:
        session.close()


def _reopened(session: Session, node: str, profile: Profile) -> tuple[Session, list[DeviceReader]]:
    """The driver opened anew, to find a lost device that has come back or to forget one."""
    session.close()
    fresh = Session(profile.sources.timeout_s)
    return fresh, [DeviceReader(index, node, fresh.driver) for index in range(len(fresh.lines))]


def _gone_events(node: str, readers: list[DeviceReader]) -> list[AnyRecord]:
    """A device that the driver no longer lists does not vanish in silence. The driver counts
    the rest anew, so that only the UUIDs of the readings tell which one it was."""
    return [
        Event(
            ts_ns=time.time_ns(), node=node, what="fault", state="gone", device=reader.device,
            message=f"the driver lists one GPU less: there is no {reader.device} any more",
        )
        for reader in readers
    ]  # fmt: skip


Reading = tuple[list[Device], str | None]
"""The records of one device, and why it cannot be read where it cannot."""


def _read_all(
    session: Session, readers: list[DeviceReader], xids: dict[int, int]
) -> tuple[list[Reading], list[int]]:
    deadline = time.monotonic() + session.timeout_s
    started = []
    for index, (line, reader) in enumerate(zip(session.lines, readers, strict=True)):
        handle = session.handles[index]
        reader.begin(time.time_ns())
        started.append(
            handle is not None and line.start(lambda ask, r=reader, h=handle: r.read(ask, h))  # type: ignore[misc]
        )
    readings: list[Reading] = []
    codes: list[int] = []
    for index, (line, reader) in enumerate(zip(session.lines, readers, strict=True)):
        reason, code = None, 0
        if session.handles[index] is None:
            reason, code = session.problems[index], 0
        elif not started[index]:
            reason = f"{line.asker.doing or 'a call'} does not return; the driver hangs"
        elif not line.wait(deadline):
            hung = line.give_up()
            reader.sheet.absent_rest(f"{hung} does not return; the driver hangs")
            readings.append((reader.records(xids.get(index)), None))
            readers[index] = reader.fresh()
            codes.append(10)
            continue
        elif isinstance(line.result, Lost):
            reason, code = str(line.result), line.result.code
        if reason is not None:
            reader.sheet.absent_rest(reason)
        readings.append((reader.records(xids.get(index)), reason))
        codes.append(code)
    return readings, codes


def _xid_event(node: str, reader: DeviceReader, xid: int) -> Event:
    return Event(
        ts_ns=time.time_ns(), node=node, what="xid", device=reader.device,
        message=f"Xid {xid} on {reader.device}", evidence={"xid": xid, **reader.identity()},
    )  # fmt: skip


def _fault_event(node: str, reader: DeviceReader, reason: str, xid: int | None) -> Event:
    evidence: dict[str, Any] = {"reason": reason, **reader.identity()}
    if xid is not None:
        evidence["last_xid"] = xid
    return Event(
        ts_ns=time.time_ns(), node=node, what="fault", state="lost", device=reader.device,
        message=f"{reader.device} cannot be read: {reason}", evidence=evidence,
    )  # fmt: skip


def _back_event(node: str, reader: DeviceReader) -> Event:
    return Event(
        ts_ns=time.time_ns(), node=node, what="fault", state="back", device=reader.device,
        message=f"{reader.device} can be read again", evidence=reader.identity(),
    )  # fmt: skip
