"""Files given to the wrong command: what a file is, by its content, and which command takes it."""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from mmctl.cli.app import load
from mmctl.cli.commands import TREE, Branch, Leaf

_HEAD_BYTES = 1 << 16


class Kind(NamedTuple):
    """A kind of file: what it is called, how its head is told, and the commands that take it.

    The first of them is the one to name; a group stands for all its commands.
    """

    about: str
    test: Callable[[bytes], bool]
    taken_by: tuple[str, ...]
    line: str


def _has(pattern: bytes) -> Callable[[bytes], bool]:
    compiled = re.compile(pattern, re.MULTILINE)
    return lambda head: compiled.search(head) is not None


def _pickled(*words: bytes) -> Callable[[bytes], bool]:
    return lambda head: head[:1] == b"\x80" and any(word in head for word in words)


KINDS: tuple[Kind, ...] = (
    Kind(
        "a memory snapshot", _pickled(b"segments", b"device_traces"),
        ("probe snapshot", "benchmark pool", "fingerprint paths"), "mmctl probe snapshot {}",
    ),
    Kind(
        "a dump of the flight recorder", _pickled(b"pg_config", b"nccl_version", b"pg_status"),
        ("probe kernels",), "mmctl probe kernels {}",
    ),
    Kind(
        "an Nsight Systems export", lambda head: head.startswith(b"SQLite format 3\0"),
        ("probe kernels",), "mmctl probe kernels {}",
    ),
    Kind(
        "a profiler's trace", _has(rb'"traceEvents"|"deviceProperties"'),
        ("probe kernels", "fingerprint"), "mmctl probe kernels {}",
    ),
    Kind(
        "a recording", lambda head: head.startswith((b"\x28\xb5\x2f\xfd", b'{"type":"recording"')),
        ("breaker replay", "probe node", "probe kernels", "probe links", "breaker", "doctor",
         "fingerprint", "schedule", "benchmark detector", "top"), "mmctl breaker replay {}",
    ),
    Kind("PTX", _has(rb"^\s*\.target\s+sm_"), ("fingerprint instrument",),
         "mmctl fingerprint instrument {} --out traced.ptx"),
    Kind(
        "a model's configuration", _has(rb'"(?:architectures|model_type)"\s*:'), ("probe model",),
        "mmctl probe model {}",
    ),
    Kind(
        "a plan", _has(rb'\A\{\s*"schema"\s*:\s*\d+,\s*"model"\s*:(?s:.*)"policy"\s*:'), (),
        "mmctl schedule simulate TRACE --plan {}",
    ),
    Kind(
        "a profile", _has(rb"^extends\s*=\s*\"|^\[\[?(?:breaker|sampling|schedule|memory)[\].]"),
        ("profile",), "--profile {} with any command, or mmctl profile validate {}",
    ),
    Kind(
        "a log with an out-of-memory message", _has(rb"Tried to allocate [\d.]+ [KMGT]?i?B"),
        ("probe snapshot", "breaker"), "mmctl probe snapshot {}",
    ),
)  # fmt: skip
"""The more particular before the more general."""


def hint(arguments: Sequence[str], message: str) -> str | None:
    """What to run instead, where a file that ``message`` names is for another command.

    None where it is of no kind known here, or of one that the command takes.
    """
    command, leaf = _command(arguments)
    if leaf is None:
        return None
    for file in _files(arguments, message, leaf):
        head = _head(Path(file))
        found = next((kind for kind in KINDS if kind.test(head)), None)
        if found is not None and not _takes(found, command):
            return f"{file} is {found.about}: {found.line.replace('{}', file)}"
    return None


def _files(arguments: Sequence[str], message: str, leaf: Leaf) -> Iterator[str]:
    """Files among the arguments that a message speaks of; values of options are none."""
    valued = {
        name
        for parameter in load("", leaf).params
        if parameter.param_type_name == "option" and not parameter.is_flag
        for name in parameter.opts
    }
    before = ""
    for word in arguments:
        if before not in valued and not word.startswith("-") and Path(word).name in message:
            with suppress(OSError):
                if Path(word).is_file():
                    yield word
        before = word


def _command(arguments: Sequence[str]) -> tuple[str, Leaf | None]:
    """The path of the command and the command, with the default of its group filled in."""
    words = [word for word in arguments if not word.startswith("-")]
    entry = TREE.get(words[0]) if words else None
    if not isinstance(entry, Branch):
        return words[0] if words else "", entry
    name = words[1] if words[1:] and words[1] in entry.commands else entry.default or ""
    return f"{words[0]} {name}", entry.commands.get(name)


def _takes(kind: Kind, command: str) -> bool:
    return any(command == taker or command.startswith(f"{taker} ") for taker in kind.taken_by)


def _head(path: Path) -> bytes:
    """The beginning of a file, unpacked if it is gzipped; nothing of what cannot be read."""
    try:
        with path.open("rb") as file:
            head = file.read(_HEAD_BYTES)
        return (
            zlib.decompressobj(31).decompress(head, _HEAD_BYTES)
            if head[:2] == b"\x1f\x8b"
            else head
        )
    except (OSError, zlib.error):
        return b""
