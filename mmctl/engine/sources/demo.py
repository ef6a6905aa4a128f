"""``demo[:SCENARIO[?seed=…&pool=…&image_every=…]]``: a worker that runs a real model, as a source.

The worker is a process of its own that this source starts and ends. Without torch the source
plays the recording of a demo run that ships with the package, which says so in its first event.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import parse_qsl

import msgspec

import mmctl
from mmctl.engine import recording, units
from mmctl.engine.errors import MissingExtraError, MmctlError, UsageError, suggestion
from mmctl.engine.profiles import Profile
from mmctl.engine.records import AnyRecord, Event, Recording
from mmctl.engine.sources.agent import connect, records

SCENARIOS = ("burst", "calm", "fault", "fragmentation", "leak", "stall")
DEVICES = ("auto", "cpu", "cuda")
OPTIONS = ("device", "seed", "pool", "image_every", "every_allocation", "fault", "fault_at")
START_S = 60.0
SHIPPED = Path(mmctl.__file__).parent / "demo" / "recordings"


def live_available() -> bool:
    """True where a live worker can run: torch is installed."""
    return find_spec("torch") is not None


def check_live(uris: Sequence[str], mode: str) -> None:
    """MissingExtraError where ``uris`` name a demo that ``mode`` would act on and torch is not
    installed: a recording cannot be acted on. UsageError for a demo of no such name."""
    for uri in filter(_is_demo, uris):
        parse(uri.partition(":")[2])
    if mode == "enforce" and any(map(_is_demo, uris)) and not live_available():
        raise MissingExtraError("a live demo worker", "torch")


def stand_in(uri: str) -> str:
    """``uri``, or the recording that stands in for a demo where no live worker can run."""
    if not _is_demo(uri) or live_available():
        return uri
    return str(_shipped(parse(uri.partition(":")[2])[0]))


def _is_demo(uri: str) -> bool:
    return uri.partition(":")[0] == "demo"


def _shipped(scenario: str) -> Path:
    path = SHIPPED / f"{scenario}.ndjson.zst"
    if not path.is_file():
        raise MissingExtraError(f"demo:{scenario}", "torch")
    return path


def source(rest: str, profile: Profile, stop: threading.Event) -> Iterator[AnyRecord]:
    """Records of a demo run, until ``stop`` is set or the worker ends.

    A worker that dies by itself gives an event ``fault`` with its last words and MmctlError.
    """
    scenario, options = parse(rest)
    if live_available():
        yield from _live(scenario, options, stop)
    else:
        yield from _played(scenario, stop)


def parse(rest: str) -> tuple[str, dict[str, str]]:
    """Scenario and options of the URI; UsageError with a suggestion for unknown ones."""
    name, _, query = rest.partition("?")
    name = name or "burst"
    if name not in SCENARIOS:
        raise UsageError(
            f"unknown scenario 'demo:{name}': one of {', '.join(SCENARIOS)}"
            f"{suggestion(name, SCENARIOS)}"
        )
    options = dict(parse_qsl(query, keep_blank_values=True))
    for key, value in options.items():
        if key not in OPTIONS:
            raise UsageError(f"unknown option '{key}' of demo:{suggestion(key, OPTIONS)}")
        if key == "pool":
            try:
                options[key] = str(int(units.parse(value, "bytes")))
            except ValueError as error:
                raise UsageError(f"option 'pool' of demo: {error}") from None
        elif key == "device" and value in DEVICES:
            continue
        elif key != "fault" and not value.isdecimal():
            raise UsageError(f"option '{key}' of demo: must be a whole number, not '{value}'")
    return name, options


def _live(scenario: str, options: dict[str, str], stop: threading.Event) -> Iterator[AnyRecord]:
    with tempfile.TemporaryDirectory(prefix="mmctl-demo-") as folder:
        path, words = Path(folder) / "agent", Path(folder) / "words"
        command = [sys.executable, "-m", "mmctl.demo", "--scenario", scenario]
        command += ["--socket", str(path)]
        for key, value in options.items():
            command += [f"--{key.replace('_', '-')}", value]
        with words.open("wb") as errors:
            worker = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=errors,
                start_new_session=True, env={**os.environ, "PYTHONHASHSEED": "0"},
            )  # fmt: skip
        try:
            deadline = time.monotonic() + START_S
            while not path.exists() and worker.poll() is None and time.monotonic() < deadline:
                if stop.wait(0.05):
                    return
            if worker.poll() is None:
                yield from records(connect(str(path), wait_s=2.0), stop)
            if stop.is_set():
                return
            code = worker.wait(timeout=10)
            if code != 0:
                said = words.read_text(errors="replace").strip().splitlines()
                last = said[-1] if said else "nothing"
                yield Event(
                    ts_ns=time.time_ns(), what="fault", message=f"the worker died: {last}",
                    evidence={"exit_code": code, "last_words": said[-20:], "pid": worker.pid},
                )  # fmt: skip
                raise MmctlError(f"the demo worker died with code {code}; its last words: {last}")
        finally:
            _end(worker)


def _end(worker: subprocess.Popen[bytes]) -> None:
    if worker.stdin is not None:
        worker.stdin.close()  # the worker ends when nobody holds the other end
    for ask in (worker.terminate, worker.kill):
        if worker.poll() is not None:
            return
        ask()
        try:
            worker.wait(timeout=3)
        except subprocess.TimeoutExpired:
            continue


def _played(scenario: str, stop: threading.Event) -> Iterator[AnyRecord]:
    offset_ns = 0
    for record in recording.read(_shipped(scenario)):
        if isinstance(record, Recording):
            offset_ns = time.time_ns() - record.started_ns
            continue
        due_ns = record.ts_ns + offset_ns
        while (left := (due_ns - time.time_ns()) / 1e9) > 0:
            if stop.wait(min(left, 0.1)):
                return
        yield msgspec.structs.replace(record, ts_ns=due_ns)
