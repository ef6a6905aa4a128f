"""The events of a Chrome trace, decoded in pieces: memory stays small whatever the size.

A piece ends between two events. A cut is right exactly when what lies before it decodes as a
list, so no scanning of strings is needed; where it does not, an earlier cut is tried.
"""

from __future__ import annotations

import gc
import gzip
import json
import re
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any, ClassVar, Union, cast

import msgspec

from mmctl.engine.errors import MmctlError

PIECE_BYTES = 1 << 17  # small enough for a processor's own cache
LARGEST_PIECE_BYTES = 256 << 20
LARGEST_HEADER_BYTES = 64 << 20
Number = int | float | str | None


class Args(msgspec.Struct, gc=False):
    """What the analysis needs of an event's arguments, over all vendors' spellings."""

    stream: Number = None
    stream_id: Number = msgspec.field(name="Stream Id", default=None)
    device: Number = None
    device_id: Number = msgspec.field(name="Device Id", default=None)
    correlation: Number = None
    correlation_id: Number = msgspec.field(name="correlation_id", default=None)
    collective: str | None = msgspec.field(name="Collective name", default=None)
    group: Number = msgspec.field(name="Process Group Name", default=None)
    group_what: Number = msgspec.field(name="Process Group Description", default=None)
    group_ranks: Any = msgspec.field(name="Process Group Ranks", default=None)
    sequence: Number = msgspec.field(name="Seq", default=None)
    name: Any = None
    labels: Any = None


class Complete(msgspec.Struct, gc=False, tag="X", tag_field="ph"):
    """An event with a duration; ``ts`` and ``dur`` in microseconds."""

    cat: str = ""
    name: str = ""
    ts: float = 0.0
    dur: float = 0.0
    pid: Number = None
    tid: Number = None
    args: Args | None = None


class Metadata(msgspec.Struct, gc=False, tag="M", tag_field="ph"):
    """Names of processes and threads."""

    cat: ClassVar[str] = "\0metadata"
    name: str = ""
    pid: Number = None
    tid: Number = None
    args: Args | None = None


def _ignored(tag: str) -> type[msgspec.Struct]:
    return msgspec.defstruct(
        f"Ignored_{ord(tag[0])}", [], gc=False, tag=tag, tag_field="ph",
        namespace={"cat": "\0ignored", "__annotations__": {"cat": ClassVar[str]}},
    )  # fmt: skip


_KNOWN: tuple[type, ...] = (Complete, Metadata, *(_ignored(tag) for tag in "sftinbeCPNODRBEvV"))
_decoder: msgspec.json.Decoder[list[Any]] = msgspec.json.Decoder(list[Union[_KNOWN]])  # type: ignore[valid-type]  # noqa: UP007
_args_fields = {field.encode_name: field.name for field in msgspec.structs.fields(Args)}


def open_binary(path: Path) -> IO[bytes]:
    """The file, decompressed by what its first bytes say."""
    try:
        file = open(path, "rb")  # noqa: SIM115
    except OSError as error:
        raise MmctlError(f"cannot read {path}: {error.strerror}") from None
    magic = file.read(4)
    file.seek(0)
    if magic[:2] == b"\x1f\x8b":
        file.close()
        return cast(IO[bytes], gzip.open(path, "rb"))
    if magic == b"\x28\xb5\x2f\xfd":
        import zstandard

        return zstandard.ZstdDecompressor().stream_reader(file, read_across_frames=True)
    return file


def read(path: Path, take: Callable[[list[Any]], None]) -> dict[str, Any]:
    """Give every piece of events to ``take``; what stands beside the events is returned.

    Raises MmctlError for a file that is no trace, is damaged or ends too early.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        with open_binary(path) as file:
            return _read(file, path, take)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise MmctlError(f"{path} is damaged or was cut: {error}") from None
    finally:
        if enabled:
            gc.enable()


def _read(file: IO[bytes], path: Path, take: Callable[[list[Any]], None]) -> dict[str, Any]:
    header, data = _find_events(file, path)
    pieces, tail = _Pieces(file, path, data), b""
    for events, ended in pieces:
        take(events)
        tail = ended
    text = header + b"null" + tail + file.read(LARGEST_HEADER_BYTES)
    if not header.strip():
        return {}
    try:
        found = json.loads(text)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _find_events(file: IO[bytes], path: Path) -> tuple[bytes, bytes]:
    """The bytes before the list of events, and those already read behind its bracket."""
    data = b""
    while len(data) < LARGEST_HEADER_BYTES:
        more = file.read(max(PIECE_BYTES, len(data)))
        data += more
        start = data.lstrip()[:1]
        if start == b"[":
            return b"", data[data.index(b"[") + 1 :]
        found = re.search(rb'"traceEvents"\s*:\s*\[', data)
        if found:
            return data[: found.end() - 1], data[found.end() :]
        if not more or start != b"{":
            break
    raise MmctlError(f"{path} is no trace: it has no list of traceEvents")


class _Pieces:
    """Iterates over (events, tail); the tail is empty until the list has ended."""

    def __init__(self, file: IO[bytes], path: Path, data: bytes) -> None:
        self.file, self.path, self.data = file, path, data

    def __iter__(self) -> Iterator[tuple[list[Any], bytes]]:
        while True:
            more = self.file.read(max(PIECE_BYTES, len(self.data)))
            self.data += more
            step = self._step(final=not more)
            if step is None:
                if len(self.data) > LARGEST_PIECE_BYTES or not more:
                    raise MmctlError(f"{self.path} ends or breaks in the middle of an event")
                continue
            events, tail, ended = step
            yield events, tail
            if ended:
                return

    def _step(self, final: bool) -> tuple[list[Any], bytes, bool] | None:
        cut = len(self.data)
        for _ in range(4):
            cut = _last_cut(self.data, cut)
            if cut < 0:
                break
            events = decode(b"[" + self.data[: cut + 1] + b"]")
            if events is not None:
                self.data = self.data[self.data.index(b",", cut) + 1 :]
                return events, b"", False
        return self._end(final)

    def _end(self, final: bool) -> tuple[list[Any], bytes, bool] | None:
        """The list ends inside what was read: split it there."""
        text = ("[" + self.data.decode("utf-8", "replace")).rstrip()
        try:
            raw, end = json.JSONDecoder(strict=False).raw_decode(text)
        except (ValueError, RecursionError):
            repaired = _repair(text)
            try:
                raw, end = json.JSONDecoder(strict=False).raw_decode(repaired)
            except (ValueError, RecursionError):
                if not final:
                    return None
                # Chrome's own format may leave out the closing bracket.
                try:
                    raw = json.loads(repaired.rstrip().rstrip(",") + "]", strict=False)
                except (ValueError, RecursionError):
                    return None
                end = len(repaired)
            text = repaired
        return _lenient(raw), text[end:].encode(), True


def _last_cut(data: bytes, before: int) -> int:
    """Position of the last ``}`` followed by ``,`` and ``{``, or −1."""
    while True:
        comma = data.rfind(b",", 0, before)
        if comma < 0:
            return -1
        if data[comma + 1 : comma + 64].lstrip()[:1] == b"{":
            close = len(data[:comma].rstrip()) - 1 if data[comma - 1] <= 32 else comma - 1
            if data[close] == 125:
                return close
        before = comma


def decode(piece: bytes) -> list[Any] | None:
    """Events of a JSON list, or None when it is none; odd types and numbers are put right."""
    try:
        return _decoder.decode(piece)
    except msgspec.ValidationError:
        pass  # a type of its own, such as times as text
    except (msgspec.DecodeError, UnicodeDecodeError):
        return _decode_text(piece)
    try:
        return _lenient(msgspec.json.decode(piece))
    except (msgspec.DecodeError, UnicodeDecodeError):
        return _decode_text(piece)


def _decode_text(piece: bytes) -> list[Any] | None:
    """What Python's own, more forgiving reader makes of a piece, as it is or repaired."""
    text = piece.decode("utf-8", "replace")
    for attempt in (text, _repair(text)):
        try:
            return _lenient(json.loads(attempt, strict=False))
        except (ValueError, RecursionError):
            continue
    return None


_BAD_ESCAPE = re.compile(r'\\(?!["\\/bfnrt]|u[0-9a-fA-F]{4})')


def _repair(text: str) -> str:
    r"""Windows paths written without escaping: ``C:\Users`` becomes ``C:\\Users``."""
    return re.sub(r"(?<=[:,\[\s])(nan|-nan|inf|-inf)(?=[\s,\]}])", "null",
                  _BAD_ESCAPE.sub(r"\\\\", text))  # fmt: skip


def _lenient(raw: list[Any]) -> list[Any]:
    """Complete and metadata events of plain values; whatever is no event is left out."""
    events: list[Any] = []
    for item in raw:
        if not isinstance(item, dict) or item.get("ph") not in ("X", "M"):
            continue
        args = _lenient_args(item.get("args"))
        pid, tid = _scalar(item.get("pid")), _scalar(item.get("tid"))
        name = str(item.get("name", ""))
        if item["ph"] == "M":
            events.append(Metadata(name=name, pid=pid, tid=tid, args=args))
            continue
        start, duration = _float(item.get("ts")), _float(item.get("dur"))
        if start is None or duration is None:
            continue
        events.append(
            Complete(
                cat=str(item.get("cat") or ""), name=name, ts=start, dur=duration,
                pid=pid, tid=tid, args=args,
            )
        )  # fmt: skip
    return events


def _lenient_args(value: Any) -> Args | None:
    if not isinstance(value, dict):
        return None
    args = Args()
    for key, field in _args_fields.items():
        if key in value:
            item = value[key]
            plain = field in ("group_ranks", "name", "labels")
            setattr(args, field, item if plain else _scalar(item))
    if not isinstance(args.collective, (str, type(None))):
        args.collective = str(args.collective)
    return args


def _scalar(value: Any) -> Number:
    return value if isinstance(value, (int, float, str)) or value is None else str(value)


def _float(value: Any) -> float | None:
    try:
        return float(value)
    except (TypeError, ValueError):
        return None
