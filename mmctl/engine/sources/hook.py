"""``hook:PID`` — what the allocation hook sees inside a process started by ``breaker run``.

Segments as ``memory`` records, a ``device`` record a tick with what the process has reserved,
and an event ``refuse`` for every allocation that a rule refused (or, observing, would have). A
hook sees segments, not tensors: which of their bytes are free is unknown here.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from mmctl.engine.errors import NoSourceError
from mmctl.engine.profiles import Profile
from mmctl.engine.records import AnyRecord, Device, Event, Memory
from mmctl.engine.sources.check import Check
from mmctl.engine.sources.host import node_name
from mmctl.native import layout

_LOOK_S = 0.02
_PROGRAM = '#include <dlfcn.h>\nvoid *f(void) { return dlsym(0, "x"); }\n'
_HIDDEN = "an allocation hook sees segments, not what is free inside them"


def source(rest: str, profile: Profile, stop: threading.Event) -> Iterator[AnyRecord]:
    """Records until the process ends or ``stop`` is set.

    Raises NoSourceError when no hook reports from the process.
    """
    if not rest.isdecimal():
        raise NoSourceError(f"hook:PID needs the number of a process, not '{rest}'{_known()}")
    pid = int(rest)
    path = layout.folder() / f"hook-{pid}"
    try:
        state = layout.StateFile(path)
    except FileNotFoundError:
        raise NoSourceError(_why_not(pid)) from None
    node, seen, tick = node_name(), 0, 0.0
    live = list(state.segments())
    now = time.time_ns()
    seen = state.counters().head
    for address, size, device in live:
        yield Memory(
            ts_ns=now, node=node, device=f"gpu{device}", action="segment_alloc", address=address,
            size_bytes=size,
        )  # fmt: skip
    try:
        while not stop.is_set():
            events, seen, lost = state.events(seen)
            if lost:
                yield Event(
                    ts_ns=time.time_ns(), node=node, what="notice",
                    message=f"{lost} events of the hook were overwritten before they were read",
                )  # fmt: skip
            for event in events:
                yield _record(event, node, pid)
            if time.monotonic() >= tick:
                tick = time.monotonic() + profile.sampling.interval_s
                yield from _devices(state, node, pid)
            if not path.exists() or not _alive(pid):
                return
            stop.wait(_LOOK_S)
    finally:
        state.close()


def compiler() -> Iterator[Check]:
    """Whether the allocation hook can be built."""
    found = shutil.which("cc")
    fix = "apt-get install gcc libc6-dev"
    if found is None:
        yield Check(
            "hook.compiler", "problem", "no C compiler: the allocation hook cannot be built", fix
        )
        return
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [found, "-x", "c", "-shared", "-fPIC", "-o", f"{folder}/x.so", "-"],
            input=_PROGRAM,
            capture_output=True,
            text=True,
            timeout=30,
        )
    if done.returncode == 0:
        yield Check("hook.compiler", "ok", found)
    else:
        said = " ".join(done.stderr.split())[:120]
        yield Check("hook.compiler", "problem", f"{found} cannot build a library: {said}", fix)


def _record(event: layout.HookEvent, node: str, pid: int) -> AnyRecord:
    device = f"gpu{event.device}"
    if event.action in ("refused", "would_refuse"):
        return Event(
            ts_ns=event.ts_ns, node=node, what="refuse_allocation", device=device,
            mode="enforce" if event.action == "refused" else "observe",
            message=f"an allocation of {event.size_bytes} bytes "
            + ("was refused" if event.action == "refused" else "would have been refused"),
            evidence={"size_bytes": event.size_bytes, "rule_number": event.rule, "pid": pid},
        )  # fmt: skip
    return Memory(
        ts_ns=event.ts_ns, node=node, device=device, action=event.action,  # type: ignore[arg-type]
        address=event.address, size_bytes=event.size_bytes, stream=event.stream,
    )  # fmt: skip


def _devices(state: layout.StateFile, node: str, pid: int) -> Iterator[Device]:
    counters = state.counters()
    reserved: dict[int, int] = {}
    for _, size, device in state.segments():
        reserved[device] = reserved.get(device, 0) + size
    for device, size in sorted(reserved.items() or [(0, 0)]):
        known = counters.total_bytes > 0 and len(reserved) <= 1
        reason = "the process has not asked for it (cudaMemGetInfo)"
        if len(reserved) > 1:
            reason = "the process uses several devices: the hook does not know which it asked"
        if known:  # what the driver's pool keeps of memory that was given back to it
            size += max(counters.pool_reserved_bytes - counters.pool_used_bytes, 0)
        yield Device(
            ts_ns=time.time_ns(), node=node, device=f"gpu{device}", kind="gpu",
            reserved_bytes=size, total_bytes=counters.total_bytes if known else None,
            free_bytes=counters.free_bytes if known else None,
            absent={
                "sm_ratio": _HIDDEN, "used_bytes": _HIDDEN,
                **({} if known else {"total_bytes": reason, "free_bytes": reason}),
            },
        )  # fmt: skip


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _why_not(pid: int) -> str:
    """Why there is no report: the hook makes its file at the first call to a device."""
    if not _alive(pid):
        return f"there is no process {pid}{_known()}"
    try:
        hooked = b"MMCTL_HOOK_" in Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        hooked = False
    if hooked:
        return f"process {pid} is under the hook and has allocated nothing on a device yet"
    return f"no hook is in process {pid}; start it by mmctl breaker run{_known()}"


def _known() -> str:
    folder = layout.folder()
    pids = sorted(path.name[5:] for path in folder.glob("hook-*")) if folder.is_dir() else []
    return f"; hooks report from: {', '.join(pids)}" if pids else ""
