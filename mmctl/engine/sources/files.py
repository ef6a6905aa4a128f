"""``FILE`` and ``-`` — files recognised by their content, never by their name."""

from __future__ import annotations

import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from importlib import import_module
from itertools import chain
from pathlib import Path
from typing import IO, NamedTuple

from mmctl.engine import recording
from mmctl.engine.errors import MmctlError, NoSourceError
from mmctl.engine.profiles import Profile
from mmctl.engine.records import AnyRecord
from mmctl.engine.sources.exposition import looks_like_page
from mmctl.engine.sources.host import node_name
from mmctl.engine.sources.smi import Origin, is_csv_header
from mmctl.engine.sources.smi_text import FAILURES

_HEAD = 1 << 16
_MAX_BYTES = 256 << 20
_ZSTD = b"\x28\xb5\x2f\xfd"
_ANSI = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]")


class Form(NamedTuple):
    """A kind of file: how its head is recognised, and the function that reads the whole."""

    about: str
    test: Callable[[str], bool]
    target: str


def _has(pattern: str) -> Callable[[str], bool]:
    compiled = re.compile(pattern, re.MULTILINE)
    return lambda head: compiled.search(head) is not None


_TABLE = (
    r"NVIDIA-SMI \d|"
    r"^\|\s*\d+\s+\S.*\|\s*[0-9A-Fa-f]{4,8}:[0-9A-Fa-f]{2}:[0-9A-Fa-f]{2}\.\d (?:On|Off|N/A)"
)
_MATRIX = r"^\s*(?:GPU|NPU)\d+\s.*\n\s*(?:GPU|NPU)\d+\s+X\b"
_MEASURED = r"(?:[Bb]andwidth|[Ll]atency).*\((?:GB/s|us|ns)\)|P2P Connectivity Matrix"
_LOG = (
    r"^(?:<\d+>)?\[\s*\d+\.\d{3,}\]|^\d+,\d+,\d+,[^;]*;|NVRM:|kernel: |"
    r"^\[[A-Z][a-z]{2} [A-Z][a-z]{2} +\d+ \d\d:\d\d:\d\d \d{4}\]"
)

FORMS: tuple[Form, ...] = (
    Form("a capture", _has(r"^# \$ nvidia-smi"), "smi_text:capture"),
    Form("nvidia-smi -q -x", _has(r"<nvidia_smi_log"), "smi:xml"),
    Form("a Prometheus page", looks_like_page, "files:_page"),
    Form("nvidia-smi -q", _has(r"^=+NVSMI LOG=+"), "smi:query"),
    Form("nvidia-smi's table", _has(_TABLE), "smi_text:table"),
    Form("dmon and pmon", _has(r"^#\s*(?:Date\s+Time\s+)?gpu\s+"), "smi_text:monitor"),
    Form(
        "nvidia-smi's CSV", lambda head: any(map(is_csv_header, head.splitlines()[:3])),
        "smi:table_csv",
    ),
    Form("npu-smi info", _has(r"npu-smi \d|^\|\s*NPU\s+Name\b"), "npu:info"),
    Form("npu-smi info -t", _has(r"^\s*NPU ID\s*:\s*\d"), "npu:page"),
    Form("a topology of NCCL", _has(r"<system\b"), "links:nccl_xml"),
    Form("a matrix of links", _has(_MATRIX), "links:matrix"),
    Form("nvbandwidth JSON", _has(r'"nvbandwidth"\s*:'), "links:nvbandwidth_json"),
    Form("a bandwidth or latency matrix", _has(_MEASURED), "links:matrices"),
    Form(
        "rocm-smi or amd-smi JSON",
        _has(r'"card\d+"\s*:|"gpu"\s*:\s*\d|"gpu_data"\s*:|"\(Topology\)'), "rocm:json_page",
    ),
    Form("request spans in OTLP JSON", _has(r'"resourceSpans"|"resource_spans"'), "otlp:spans"),
    Form("a kernel log", _has(_LOG), "kmsg:log"),
    Form("an nvidia-smi failure", lambda head: bool(FAILURES.search(head)), "smi_text:failure"),
)  # fmt: skip
"""Every kind of file beside recordings, the more particular before the more general. A target
is ``function(text, origin)`` and gives a list of records."""


def source(rest: str, profile: Profile, stop: threading.Event) -> Iterator[AnyRecord]:
    """The records in a file, or in standard input for ``-``.

    Raises NoSourceError for a file that cannot be opened or says of itself that nothing could
    be read, MmctlError for one that is broken or of no known kind.
    """
    stream, head = _open(rest)
    with stream:
        if head.startswith(_ZSTD) or _is_recording(head):
            for record in _recording(rest, stream, head):
                if stop.is_set():
                    return
                yield record
            return
        yield from read(_rest(rest, stream, head), rest, _written_ns(rest))


def read(text: str, name: str, ts_ns: int) -> list[AnyRecord]:
    """The records of a whole text of any kind but a recording."""
    text = _ANSI.sub("", text)
    form = form_of(text[:_HEAD])
    if form is None:
        kinds = ", ".join(dict.fromkeys(form.about for form in FORMS))
        raise MmctlError(f"{name} is of no known kind: a recording, {kinds}")
    try:
        records = read_as(form, text, Origin(name, node_name(), ts_ns))
    except MmctlError as error:
        raise type(error)(f"{name}: {error}") from None
    if not records:
        raise MmctlError(f"{name} looks like {form.about} and holds no reading")
    return records


def read_as(form: Form, text: str, origin: Origin) -> list[AnyRecord]:
    """The records of a text that is known to be of this kind."""
    module, function = form.target.split(":")
    reader = getattr(import_module(f"mmctl.engine.sources.{module}"), function)
    records: list[AnyRecord] = reader(text, origin)
    return records


def form_of(head: str) -> Form | None:
    """What kind of file begins like this; None when no kind is known to."""
    return next((form for form in FORMS if form.test(head)), None)


def _open(name: str) -> tuple[IO[bytes], bytes]:
    if name == "-":
        stream: IO[bytes] = sys.stdin.buffer
        return stream, stream.readline(_HEAD)
    path = Path(name)
    try:
        if path.is_dir():
            raise NoSourceError(f"{name} is a folder; give a file")
        stream = open(path, "rb")  # noqa: SIM115
    except FileNotFoundError:
        raise NoSourceError(f"no such file: {name}") from None
    except OSError as error:
        raise NoSourceError(f"cannot read {name}: {error.strerror}") from None
    return stream, stream.readline(_HEAD)


def _is_recording(head: bytes) -> bool:
    """Whether a first line is a record: an object whose first words hold its type."""
    line = head.strip()
    return line.startswith(b"{") and re.match(rb'\{.{0,400}?"type"\s*:\s*"', line) is not None


def _recording(name: str, stream: IO[bytes], head: bytes) -> Iterator[AnyRecord]:
    if name == "-" and not head.startswith(_ZSTD):
        # Line by line as they come: a pipe may bring one record an hour.
        return recording.decode_lines(chain([head], iter(stream.readline, b"")), "standard input")
    return recording.read(name)


def _rest(name: str, stream: IO[bytes], head: bytes) -> str:
    content = head + stream.read(_MAX_BYTES - len(head) + 1)
    if len(content) > _MAX_BYTES:
        raise MmctlError(f"{name} is larger than {_MAX_BYTES >> 20} MiB and no recording")
    if not content.strip():
        raise MmctlError(f"{name} is empty")
    if content.startswith((b"\xff\xfe", b"\xfe\xff")):
        return content.decode("utf-16", "replace")  # PowerShell redirects so
    if b"\0" in content[:_HEAD]:
        raise MmctlError(f"{name} is binary and no compressed recording")
    return content.decode("utf-8-sig", "replace").replace("\r\n", "\n")


def _written_ns(name: str) -> int:
    """When a file was written: the time of a reading that does not carry its own."""
    try:
        return time.time_ns() if name == "-" else Path(name).stat().st_mtime_ns
    except OSError:
        return time.time_ns()


def _page(text: str, origin: Origin) -> list[AnyRecord]:
    from mmctl.engine.sources.page import Page

    return Page(Path(origin.name).name, origin.node).records(text, origin.ts_ns)
