"""Running bpftrace: finding libraries, a namespace with tracefs, and what a probe costs."""

from __future__ import annotations

import ctypes
import mmap
import os
import re
import resource
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO

from mmctl.engine.access import align
from mmctl.engine.access.align import Line, Probe
from mmctl.engine.errors import MmctlError, NoSourceError, UsageError

_TRACEFS = Path("/sys/kernel/tracing")
_ATTACH_S = 60.0
_CALIBRATION_CALLS = 400


def locate(probe: Probe, pid: int | None) -> Probe:
    """The probe with the full path of its library: as given, as mapped by ``pid``, or installed.

    Raises UsageError for a library that is not there or does not name the symbol.
    """
    path = _path(probe, pid)
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        if content.find(b"\0" + probe.symbol.encode() + b"\0") < 0:
            raise UsageError(f"{path} has no symbol '{probe.symbol}'")
    return Probe(path, probe.symbol)


def _path(probe: Probe, pid: int | None) -> str:
    if "/" in probe.library:
        path = Path(probe.library).resolve()
        if not path.is_file():
            raise UsageError(f"no library at '{probe.library}'")
        return str(path)
    if pid is not None:
        try:
            maps = Path(f"/proc/{pid}/maps").read_text()
        except OSError as error:
            raise UsageError(f"cannot look at process {pid}: {error.strerror}") from None
        for path_text in re.findall(r"(/\S+)$", maps, re.MULTILINE):
            if Path(path_text).name.startswith(probe.library):
                return path_text
    listed = subprocess.run(
        [shutil.which("ldconfig") or "/sbin/ldconfig", "-p"], capture_output=True, text=True
    ).stdout
    found = re.search(rf"^\s*{re.escape(probe.library)}\S* .*=> (\S+)$", listed, re.MULTILINE)
    if found is None:
        raise UsageError(f"no library '{probe.library}': give its path, or --pid of its user")
    return found[1]


def run(
    launch: Probe | None, npu: Probe | None, pid: int | None, command: list[str],
    seconds: float | None, report: Callable[[str], None],
) -> tuple[list[Line], int, float]:  # fmt: skip
    """Events while ``command`` runs, or for ``seconds``; events lost; cost of a probe in ns.

    Raises NoSourceError when bpftrace cannot attach and MmctlError when COMMAND cannot start.
    """
    libc = _libc()
    text = align.program(launch, npu, pid, (libc, "labs", os.getpid()))
    plain_ns = _time_calls()
    with tempfile.TemporaryFile("w+") as errors:
        tracer = _start(text, errors)
        lines: list[str] = []
        attached = threading.Event()
        reader = threading.Thread(target=_collect, args=(tracer, lines, attached), daemon=True)
        reader.start()
        try:
            if not attached.wait(_ATTACH_S) or tracer.poll() is not None:
                errors.seek(0)
                raise NoSourceError(f"bpftrace could not attach: {_reason(errors.read())}")
            probed_ns = _time_calls()
            report("attached; watching" + (f" {command[0]}" if command else ""))
            _watch(command, seconds)
            time.sleep(0.3)  # what is still in the kernel's buffers
        finally:
            _stop(tracer)
            reader.join(10)
        errors.seek(0)
        events, lost = align.parse([*lines, *errors.read().splitlines()])
    return events, lost, max(0.0, probed_ns - plain_ns)


def _start(text: str, errors: IO[str]) -> subprocess.Popen[str]:
    tracer = [shutil.which("bpftrace") or "bpftrace", "-B", "line", "-e", text]
    if not (_TRACEFS / "events").is_dir():
        # In a namespace of its own, so that nothing stays mounted on the host.
        mount = f'mount -t tracefs tracefs {_TRACEFS} && exec "$@"'
        tracer = ["unshare", "--mount", "sh", "-c", mount, "sh", *tracer]
    environment = {**os.environ, "BPFTRACE_PERF_RB_PAGES": "1024",
                   "BPFTRACE_MAP_KEYS_MAX": "65536"}  # fmt: skip
    return subprocess.Popen(
        tracer, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment,
        preexec_fn=_unlimited, start_new_session=True,
    )  # fmt: skip


def _unlimited() -> None:
    """Maps of the kernel are locked memory."""
    unlimited = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
    try:
        resource.setrlimit(resource.RLIMIT_MEMLOCK, unlimited)
    except (OSError, ValueError):
        return


def _collect(tracer: subprocess.Popen[str], lines: list[str], attached: threading.Event) -> None:
    assert tracer.stdout is not None
    for line in tracer.stdout:
        lines.append(line)
        if line.startswith("C "):
            attached.set()
    attached.set()  # it ended: nothing will attach any more


def _watch(command: list[str], seconds: float | None) -> None:
    if not command:
        time.sleep(seconds or 0.0)
        return
    try:
        child = subprocess.Popen(command, stdout=2)  # standard output is ours
    except OSError as error:
        raise MmctlError(f"cannot run {command[0]}: {error.strerror}") from None
    try:
        child.wait(seconds)
    except subprocess.TimeoutExpired:
        pass
    finally:
        if child.poll() is None:
            child.terminate()
            child.wait()


def _stop(tracer: subprocess.Popen[str]) -> None:
    if tracer.poll() is None:
        tracer.send_signal(signal.SIGINT)
        try:
            tracer.wait(10)
        except subprocess.TimeoutExpired:
            tracer.kill()
            tracer.wait()


def _reason(text: str) -> str:
    lines = [line for line in text.splitlines() if line.strip() and "RLIMIT_MEMLOCK" not in line]
    return " ".join(lines[:2]) or "it gave no reason"


def _libc() -> str:
    """The path of the C library that this process has mapped."""
    maps = Path("/proc/self/maps").read_text()
    found = re.search(r"(/\S*libc[.-]\S*)$", maps, re.MULTILINE)
    if found is None:
        raise MmctlError("this process maps no C library to time a probe on")
    return found[1]


def _time_calls() -> float:
    """Nanoseconds a call of labs takes from here: the lowest mean of several batches."""
    labs = ctypes.CDLL(None).labs
    best = float("inf")
    for _ in range(5):
        start = time.perf_counter_ns()
        for _ in range(_CALIBRATION_CALLS):
            labs(1)
        best = min(best, (time.perf_counter_ns() - start) / _CALIBRATION_CALLS)
    return best
