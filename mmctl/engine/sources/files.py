"""``FILE`` and ``-`` — files recognised by their content, never by their name."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

from mmctl.engine import recording
from mmctl.engine.errors import NoSourceError
from mmctl.engine.profiles import Profile
from mmctl.engine.records import AnyRecord


def source(rest: str, profile: Profile, stop: threading.Event) -> Iterator[AnyRecord]:
    """The records in a file, or in standard input for ``-``.

    Raises NoSourceError for a file that cannot be opened, MmctlError for one that is broken.
    """
    if rest != "-" and not Path(rest).exists():
        raise NoSourceError(f"no such file: {rest}")
    for record in recording.read(rest):
        if stop.is_set():
            return
        yield record
