"""Records of sources for as long as they are worth listening to."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated

import typer

from mmctl.cli.app import common, note, seconds
from mmctl.engine import profiles
from mmctl.engine.errors import NoSourceError
from mmctl.engine.records import AnyRecord, Event
from mmctl.engine.sources import open_sources

START_S = 60.0  # the longest wait for the first record: a worker may load a model first


Wait = Annotated[
    str, typer.Option(metavar="TIME", help="Wait so long for a source that is not there yet.")
]


def opened(
    sources: Sequence[str], profile: profiles.Profile, stop: threading.Event, wait: str,
    count: int | None = None,
) -> Iterator[AnyRecord]:  # fmt: skip
    """The records of ``sources`` as ``open_sources`` gives them, each waited for as --wait says.

    Where none is named and there is no NVIDIA driver, the person is told what else there is.
    """
    wait_s = seconds("--wait", wait, zero=True) if wait else 0.0
    try:
        for record in open_sources(sources, profile, stop, count, wait_s):
            if not sources and isinstance(record, Event) and _no_driver(record):
                note("no NVIDIA device here: name what to watch, such as "
                     "http://127.0.0.1:8000/metrics, agent:PATH or demo:burst")  # fmt: skip
            yield record
    except NoSourceError as error:
        comes = any(uri.partition(":")[0] in ("agent", "hook", "http", "https") for uri in sources)
        hint = "; --wait 30s waits for it" if comes and not wait else ""
        raise NoSourceError(f"{error}{hint}") from None


def _no_driver(event: Event) -> bool:
    down = event.what == "source" and event.state == "down"
    return down and str(event.evidence.get("uri")).startswith("nvml")


def listen(
    sources: Sequence[str],
    length_s: float,
    begins: Callable[[AnyRecord], bool],
    start_s: float = START_S,
) -> Iterator[AnyRecord]:
    """The records of ``sources`` (those of the profile where none is named): of a recording or a
    pipe all, of a live source those of ``length_s`` from the first record that ``begins`` it,
    which is waited for ``start_s``."""
    profile = profiles.load(common().profile).profile
    sources = sources or profile.sources.default
    stop = threading.Event()
    live = any(source != "-" and not Path(source).is_file() for source in sources)
    timer = threading.Timer(start_s + length_s, stop.set)
    timer.daemon = True
    if live:
        timer.start()
    until: float | None = None
    try:
        for record in open_sources(sources, profile, stop):
            if until is None and begins(record):
                until = time.monotonic() + length_s
            yield record
            if live and until is not None and time.monotonic() > until:
                break
    finally:
        stop.set()
        timer.cancel()
