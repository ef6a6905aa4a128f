"""What a colleague needs to look into an incident, in one archive, without secrets or prompts."""

from __future__ import annotations

import io
import os
import re
import tarfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from mmctl.engine import atomic, folders, profiles, recording
from mmctl.engine.errors import MmctlError
from mmctl.engine.records import SCHEMA, encode
from mmctl.engine.sources import open_sources
from mmctl.engine.sources.check import Check
from mmctl.engine.sources.doctor import versions

_MAX_BYTES = 16 << 20
_MAX_FILES = 8
HIDDEN = "[redacted]"
_LOGS = re.compile(r"\.(?:ndjson|jsonl|log)(?:\.zst)?(?:\.\d+)?$")

_TEXT_KEYS = re.compile(
    r"^(?:prompts?|text|content|contents|messages?_body|messages|inputs?|outputs?|completions?|"
    r"captions?|questions?|answers?|response_text|document|image_url)$",
    re.IGNORECASE,
)
_SECRET_KEYS = re.compile(
    r"secret|passw|passphrase|api_?key|apikey|auth|cookie|credential|private|session|"
    r"(?:^|_)token$|access_key",
    re.IGNORECASE,
)
_SECRETS = re.compile(
    r"(?i:bearer|basic)\s+[A-Za-z0-9._~+/=-]{8,}|\b(?:sk|pk|rk)-[A-Za-z0-9_-]{8,}|"
    r"\bhf_[A-Za-z0-9]{8,}|\bgh[pousr]_[A-Za-z0-9]{8,}|\bAKIA[A-Z0-9]{12,}|\bxox[abpr]-[\w-]{8,}|"
    r"\bAIza[A-Za-z0-9_-]{20,}|\bey[A-Za-z0-9_-]{10,}\.[A-Za-z0-9_-]{10,}\.[A-Za-z0-9_-]{5,}|"
    r"(?<=://)[^\s/@:]+:[^\s/@]+(?=@)|"
    r"(?i:(?<=password=)|(?<=passwd=)|(?<=token=)|(?<=api_key=)|(?<=secret=))[^\s&\"']+|"
    r"-----BEGIN [A-Z ]*PRIVATE KEY-----"
)


def redacted(value: Any, key: str = "") -> Any:
    """``value`` without secrets anywhere in it and without texts under the keys of prompts."""
    if isinstance(value, dict):
        return {name: redacted(item, str(name)) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [redacted(item, key) for item in value]
    if isinstance(value, str):
        if value and (_TEXT_KEYS.match(key) or _SECRET_KEYS.search(key)):
            return HIDDEN
        return _SECRETS.sub(HIDDEN, value)
    return value


def write(
    path: Path, checks: Sequence[Check], sources: Sequence[str], recordings: Sequence[Path],
    profile_name: str | None,
) -> list[str]:  # fmt: skip
    """Write the archive in one step, for the user alone; the names of what is in it.

    It holds the checks, versions, one reading, the links, the profile, and the end of the
    newest recordings and logs of the state folder and of those named.
    """
    loaded = profiles.load(profile_name)
    parts: dict[str, bytes] = {
        "doctor.json": _json({"schema": SCHEMA, "checks": [check._asdict() for check in checks]}),
        "versions.json": _json(versions()),
        "profile.json": _json({"name": loaded.name, "profile": redacted(loaded.written)}),
        "environment.json": _json(_environment()),
        "reading.ndjson": _reading(sources, loaded.profile),
        "links.ndjson": _links(loaded.profile),
    }
    for number, file in enumerate(_files(recordings)):
        parts[f"recordings/{number}-{file.name.removesuffix('.zst')}"] = _tail(file)
    with (
        atomic.replacing(path, private=True) as raw,
        tarfile.open(fileobj=raw, mode="w:gz") as archive,
    ):
        for name, content in parts.items():
            entry = tarfile.TarInfo(f"mmctl-bundle/{name}")
            entry.size, entry.mtime, entry.mode = len(content), int(time.time()), 0o600
            archive.addfile(entry, io.BytesIO(content))
    return list(parts)


def _json(value: Any) -> bytes:
    return msgspec.json.format(msgspec.json.encode(value), indent=2)


def _environment() -> dict[str, str]:
    """Variables that change what is read; their values redacted."""
    names = ("MMCTL_", "CUDA_", "NVIDIA_", "NCCL_", "PYTORCH_", "ASCEND_", "ROCR_", "HIP_", "VLLM_")
    return {
        name: redacted(value, name) for name, value in sorted(os.environ.items())
        if name.startswith(names)
    }  # fmt: skip


def _reading(sources: Sequence[str], profile: profiles.Profile) -> bytes:
    lines = []
    try:
        stop = threading.Event()
        for record in open_sources(list(sources), profile, stop, 2):
            lines.append(msgspec.json.encode(redacted(msgspec.to_builtins(record))))
            if len(lines) >= 1000:
                stop.set()
                break
    except MmctlError as error:
        lines.append(msgspec.json.encode({"error": str(error)}))
    return b"\n".join(lines) + b"\n"


def _links(profile: profiles.Profile) -> bytes:
    from mmctl.engine.sources.host import node_name
    from mmctl.engine.sources.links import live
    from mmctl.engine.sources.smi import Origin

    try:
        found = live(profile, Origin("nvml:", node_name(), time.time_ns()))
        return b"".join(encode(link) + b"\n" for link in found)
    except MmctlError as error:
        return msgspec.json.encode({"error": str(error)}) + b"\n"


def _files(named: Sequence[Path]) -> Iterator[Path]:
    """The files that were named, then the newest of the state folder."""
    yield from named
    folder = folders.state()
    found = [path for path in folder.rglob("*") if path.is_file() and not path.is_symlink()]
    known = [path for path in found if _LOGS.search(path.name)]
    yield from sorted(known, key=lambda path: path.stat().st_mtime, reverse=True)[:_MAX_FILES]


def _tail(path: Path) -> bytes:
    """The end of a file, redacted line by line; a recording is read as one, so that a compressed
    or cut one is fine too."""
    lines: list[bytes] = []
    size = 0
    try:
        source: Iterator[bytes] = (encode(record) for record in recording.read(path))
        for line in source:
            size += len(line)
            lines.append(line)
            while size > _MAX_BYTES:
                size -= len(lines.pop(0))
    except MmctlError:
        with path.open("rb") as file:
            file.seek(max(path.stat().st_size - _MAX_BYTES, 0))
            lines = file.read(_MAX_BYTES).split(b"\n")
    return b"".join(_clean(line) + b"\n" for line in lines if line)


def _clean(line: bytes) -> bytes:
    try:
        return msgspec.json.encode(redacted(msgspec.json.decode(line)))
    except (msgspec.DecodeError, RecursionError):
        return _SECRETS.sub(HIDDEN, line.decode("utf-8", "replace")).encode()
