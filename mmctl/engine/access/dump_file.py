"""Opening a flight-recorder dump: JSON, or a pickle read by a limited child process.

This module is also what the child imports, so it needs nothing heavy.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import IO, Any

import msgspec

from mmctl.engine import untrusted
from mmctl.engine.errors import MmctlError

_LIMITS = untrusted.Limits(max_bytes=1 << 30, max_entries=2_000_000)


def rank_of(path: Path, fallback: int) -> int:
    """The rank that a dump's name ends in: ``_dump_12``, ``fr_rank3.json``, ``trace_rank_0``."""
    stem = path.name
    while stem.endswith((".json", ".pickle", ".pkl", ".gz", ".zst")):
        stem = stem.rsplit(".", 1)[0]
    found = re.search(r"(\d+)$", stem) or re.search(r"rank[-_]?(\d+)", stem)
    return int(found[1]) if found else fallback


def is_dump(content: Any) -> bool:
    """Whether plain values look like a flight-recorder dump."""
    return (
        isinstance(content, dict)
        and "traceEvents" not in content
        and any(key in content for key in ("entries", "pg_config", "pg_status"))
    )


def read_pickle(path: Path) -> Any:
    """The dump in a pickle; RefusedError for one that asks for more than plain objects."""
    raw = untrusted.read_pickle(path, "mmctl.engine.access.dump_file:encode", _LIMITS)
    return msgspec.msgpack.decode(raw)


def encode(objects: Any, limits: untrusted.Limits, _: bytes, out: IO[bytes]) -> None:
    """In the child: the dump's objects as msgpack."""
    if not is_dump(objects):
        raise untrusted.RefusedError("it is no flight-recorder dump: it has no entries")
    entries = objects.get("entries") or []
    if len(entries) > limits.max_entries:
        raise untrusted.RefusedError(f"it has more than {limits.max_entries} entries")
    out.write(msgspec.msgpack.encode(objects))


def read_json(raw: bytes, path: Path) -> Any:
    """The dump in JSON; MmctlError for anything else."""
    try:
        content = msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise MmctlError(f"{path} is not JSON: {error}") from None
    if not is_dump(content):
        raise MmctlError(f"{path} is neither a profiler trace nor a flight-recorder dump")
    return content
