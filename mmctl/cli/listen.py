"""Records of sources for as long as they are worth listening to."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from mmctl.cli.app import common
from mmctl.engine import profiles
from mmctl.engine.records import AnyRecord

START_S = 60.0  # the longest wait for the first record: a worker may load a model first


def listen(
    sources: Sequence[str],
    length_s: float,
    begins: Callable[[AnyRecord], bool],
    start_s: float = START_S,
) -> Iterator[AnyRecord]:
    """The records of ``sources`` (those of the profile where none is named): of a recording or a
    pipe all, of a live source those of ``length_s`` from the first record that ``begins`` it,
    which is waited for ``start_s``."""
    from mmctl.engine.sources import open_sources

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
