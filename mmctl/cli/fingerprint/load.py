"""What the fingerprint commands read: traces, recordings, earlier fingerprints, live sources."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mmctl.cli.app import common
from mmctl.engine import profiles, recording
from mmctl.engine.errors import MmctlError, NoSourceError
from mmctl.engine.profiles import Profile
from mmctl.engine.records import AnyRecord

if TYPE_CHECKING:
    from mmctl.engine.access.accesses import Accesses
    from mmctl.engine.access.tasks import Task

_URI = re.compile(r"[a-z][a-z0-9+-]*:")


def tasks(names: Iterable[str], algorithm: str, profile: Profile, *, split: bool) -> list[Task]:
    """The tasks of every file or source; ``split`` makes one of each stream."""
    from mmctl.engine.access import tasks as engine

    found: list[Task] = []
    for name in names:
        made = _made_before(name)
        if made is not None:
            found += engine.decode(made, name)
            continue
        found += [engine.of(part, algorithm) for part in parts(one(name, profile), split=split)]
    return found


def parts(accesses: Accesses, *, split: bool) -> list[Accesses]:
    """The accesses whole, or by stream."""
    from mmctl.engine.access import tasks as engine

    return engine.by_stream(accesses) if split else [accesses]


def one(name: str, profile: Profile) -> Accesses:
    """The accesses of a file, of standard input (``-``) or of a live source."""
    from mmctl.engine.access import accesses

    if name == "-":
        return _from_records(recording.decode_lines(sys.stdin.buffer, "stdin"), "stdin")
    path = Path(name)
    if _URI.match(name) and not path.exists():
        return _from_records(_live(name, profile), name)
    if not path.is_file():
        raise MmctlError(f"cannot read {name}: no such file")
    start = _start(path)
    if b'"type"' in start.split(b"\n", 1)[0] or start[:4] == b"\x28\xb5\x2f\xfd":
        return _from_records(recording.read(path), path.name)
    return accesses.read(path)


def _from_records(records: Iterable[AnyRecord], name: str) -> Accesses:
    from mmctl.engine.access import accesses

    found = accesses.from_records(records, name)
    if len(found) == 0:
        raise NoSourceError(f"{name} gave neither accesses nor allocations")
    return found


def _live(uri: str, profile: Profile) -> Iterator[AnyRecord]:
    """What a source sends for as long as the profile listens."""
    import threading

    from mmctl.engine.sources import open_sources

    stop = threading.Event()
    timer = threading.Timer(profile.fingerprint.live_s, stop.set)
    timer.start()
    try:
        yield from open_sources([uri], profile, stop)
    finally:
        timer.cancel()
        stop.set()


def _start(path: Path) -> bytes:
    with open(path, "rb") as file:
        return file.read(4096)


def _made_before(name: str) -> Any:
    """The content of a file that ``fingerprint trace`` wrote, as json or ndjson, or None."""
    import msgspec

    path = Path(name)
    if not path.is_file() or b'"fingerprint"' not in _start(path):
        return None
    raw = path.read_bytes()
    try:
        return msgspec.json.decode(raw)
    except msgspec.DecodeError:
        pass
    try:
        return [msgspec.json.decode(line) for line in raw.splitlines() if line.strip()]
    except msgspec.DecodeError as error:
        raise MmctlError(f"{name} is no output of fingerprint trace: {error}") from None


def profile() -> Profile:
    """The profile in force for this command."""
    return profiles.load(common().profile).profile
