"""Recordings: one record a line, optionally compressed, readable after a kill or a full disk."""

from __future__ import annotations

import errno
import io
import math
import re
import sys
import tempfile
import time
import warnings
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

import msgspec

from mmctl import __version__
from mmctl.engine import atomic
from mmctl.engine.errors import MmctlError, Remark
from mmctl.engine.records import AnyRecord, Event, Recording, decode, encode

_ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"


def header(node: str, profile: str, started_ns: int | None = None) -> Recording:
    """The first line of a recording that starts now."""
    return Recording(
        node=node,
        started_ns=time.time_ns() if started_ns is None else started_ns,
        profile=profile,
        mmctl=__version__,
    )


class Writer:
    """Appends records to a new file; every record is on its way to disk when write returns.

    Standard output (``-``), a pipe or a device is written as it is. A name that ends in
    ``.zst`` is compressed, with a block closed per record, so that what was written can be read
    even when the process is killed.
    """

    def __init__(self, path: Path, head: Recording) -> None:
        self.path = path
        try:
            self._seekable = not atomic.goes_straight(path)
            self._file: IO[bytes] = (
                open(path, "wb", buffering=0) if self._seekable else atomic.straight(path)  # noqa: SIM115
            )
        except OSError as error:
            raise MmctlError(f"cannot record to {path}: {error.strerror}") from None
        self._zst: Any = None
        if path.suffix == ".zst":
            import zstandard

            self._zst = zstandard.ZstdCompressor(level=3).stream_writer(self._file, closefd=False)
        self.write(head)

    def write(self, record: AnyRecord) -> None:
        """Append ``record`` as one line."""
        line = encode(record) + b"\n"
        if self._zst is None:
            self._put(line)
        else:
            self._zst.write(line)
            self._zst.flush()

    def _put(self, line: bytes) -> None:
        """Write a whole line, or none of it when the disk is full."""
        start = self.size_bytes
        left = memoryview(line)
        try:
            while left:
                left = left[self._file.write(left) or 0 :]
        except OSError:
            if self._seekable:
                self._file.truncate(start)
                self._file.seek(start)
            raise

    @property
    def size_bytes(self) -> int:
        """How large the file is by now; 0 for what is no file."""
        return self._file.tell() if self._seekable else 0

    def close(self) -> None:
        """Finish the file; what was written stays readable."""
        try:
            if self._zst is not None:
                self._zst.close()
        finally:
            self._file.close()

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_RETRY_S = 5.0


class Rotating:
    """An always-on recording: files of ``rotate_bytes``, the newest ``keep`` of them.

    ``path`` is written; ``path.1`` is the one before, ``path.2`` before that. Each begins with
    a header, and with the rules and the mode of a breaker whose decisions are recorded: it opens
    and decides by itself. What an earlier run has left counts among them; without
    ``rotate_bytes`` there is one file, begun anew. On a full disk the oldest file goes; when
    none is left the recording pauses, and ``say`` is told. The stream that is recorded never
    stops for it.
    """

    def __init__(
        self, path: Path, head: Recording, rotate_bytes: int | None, keep: int,
        say: Callable[[str], None],
    ) -> None:  # fmt: skip
        self.path, self.head, self.keep, self.say = path, head, max(keep, 1), say
        self.rotate_bytes = math.inf if rotate_bytes is None else max(rotate_bytes, 4096)
        self._writer: Writer | None = None
        self._decided_by: Event | None = None
        self._carried_bytes = 0
        if rotate_bytes is not None and path.is_file() and path.stat().st_size:
            self._rotate()
        else:
            self._writer = Writer(path, head)
        self._paused_at = 0.0
        self.dropped = 0

    def write(self, record: AnyRecord) -> None:
        """Append ``record``; while the disk is full it is dropped, and counted."""
        if self._writer is None and time.monotonic() - self._paused_at < _RETRY_S:
            self.dropped += 1
            return
        for _ in range(self.keep + 1):
            try:
                if self._writer is None:
                    self._resume()
                    self._carry_over(record)
                elif self._writer.size_bytes - self._carried_bytes >= self.rotate_bytes:
                    self._rotate()
                    self._carry_over(record)
                if self._writer is not None:
                    self._writer.write(record)
                    self._note(record)
                    return
            except BrokenPipeError:
                raise  # whoever read it has gone: no failure of ours
            except OSError as error:
                if error.errno not in _FULL:
                    raise MmctlError(f"cannot record to {self.path}: {error.strerror}") from None
                if not self._make_room():
                    self._pause()
                    return
        self._pause()

    def _note(self, record: AnyRecord) -> None:
        """Keep what a breaker decides by from ``record`` on."""
        if not isinstance(record, Event) or record.state == "refused":
            return
        if record.what in ("breaker", "reload"):
            self._decided_by = record
        elif record.what == "mode" and self._decided_by is not None:
            self._decided_by = msgspec.structs.replace(self._decided_by, mode=record.mode)

    def _carry_over(self, record: AnyRecord) -> None:
        """Begin a further file with what the breaker decides by, at the time of ``record``."""
        if self._decided_by is not None and self._writer is not None:
            ts_ns = getattr(record, "ts_ns", self._decided_by.ts_ns)
            begin = msgspec.structs.replace(
                self._decided_by, ts_ns=ts_ns, what="breaker", message=None
            )
            self._writer.write(begin)
            self._carried_bytes = self._writer.size_bytes

    def _older(self, number: int) -> Path:
        return self.path.with_name(f"{self.path.name}.{number}")

    def _rotate(self) -> None:
        if self._writer is not None:
            writer, self._writer = self._writer, None
            writer.close()
        if self.keep > 1:
            self._older(self.keep - 1).unlink(missing_ok=True)
        for number in range(self.keep - 2, 0, -1):
            if self._older(number).exists():
                self._older(number).replace(self._older(number + 1))
        if self.keep > 1:
            self.path.replace(self._older(1))
        self._writer = Writer(self.path, self.head)

    def _make_room(self) -> bool:
        """Remove the oldest file that is not being written; False when there is none."""
        for number in range(self.keep - 1, 0, -1):
            oldest = self._older(number)
            if oldest.exists():
                oldest.unlink()
                self.say(f"the disk is full: removed {oldest}, the oldest part of the recording")
                return True
        return False

    def _pause(self) -> None:
        if self._writer is not None:
            with suppress(OSError):
                self._writer.close()
            self._writer = None
        if self.dropped == 0:
            self.say(f"the disk is full: {self.path} pauses until there is room again")
        self.dropped += 1
        self._paused_at = time.monotonic()

    def _resume(self) -> None:
        try:
            if self.keep > 1 and self.path.exists():
                self.path.replace(self._older(1))
            self._writer = Writer(self.path, self.head)
        except MmctlError:
            self._writer = None
            raise OSError(errno.ENOSPC, "no space") from None
        self.say(f"recording to {self.path} again; {self.dropped} records were lost meanwhile")
        self.dropped = 0

    def close(self) -> None:
        """Close the file; what was written stays."""
        if self._writer is not None:
            with suppress(OSError):
                self._writer.close()

    def __enter__(self) -> Rotating:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read(path: Path | str, *, strict: bool = False) -> Iterator[AnyRecord]:
    """The records of a recording, the header first; ``-`` reads standard input.

    A last line that was cut is dropped with a Remark: that is all a killed writer can lose. Any
    other broken line raises MmctlError with its number.
    """
    stream = sys.stdin.buffer if str(path) == "-" else _open(Path(path))
    with stream:
        yield from decode_lines(_lines(stream), str(path), strict=strict)
    if str(path) != "-" and _cut_inside(Path(path)):
        _remark_cut(str(path))


def _remark_cut(name: str) -> None:
    said = f"{name} ends in the middle of a record: it was cut, and its end is missing"
    warnings.warn(said, Remark, stacklevel=1)


def _cut_inside(path: Path) -> bool:
    """Whether a compressed recording ends inside a block.

    A writer that was killed leaves its last frame open after a whole block, and has lost nothing.
    """
    import zstandard

    size = path.stat().st_size if path.is_file() else 0
    with open(path, "rb") as file:
        while (start := file.tell()) < size:
            head = file.read(18)
            if not head.startswith(_ZSTD_MAGIC):
                return False  # plain, or a frame of another kind
            try:
                known = zstandard.get_frame_parameters(head)
            except zstandard.ZstdError:
                return True
            file.seek(start + zstandard.frame_header_size(head))
            last = False
            while not last and file.tell() < size:
                block = file.read(3)
                if len(block) < 3:
                    return True
                word = int.from_bytes(block, "little")
                last = bool(word & 1)
                # A repeated byte is held once, whatever its length.
                file.seek(1 if word >> 1 & 3 == 1 else word >> 3, io.SEEK_CUR)
            if last and known.has_checksum:
                file.seek(4, io.SEEK_CUR)
        return file.tell() > size


def _open(path: Path) -> IO[bytes]:
    try:
        file = open(path, "rb")  # noqa: SIM115
    except OSError as error:
        raise MmctlError(f"cannot read {path}: {error.strerror}") from None
    magic = file.read(4)
    file.seek(0)
    if magic == _ZSTD_MAGIC:
        import zstandard

        return zstandard.ZstdDecompressor().stream_reader(file, read_across_frames=True)
    return file


def _lines(stream: IO[bytes]) -> Iterator[bytes]:
    """Lines with their ends; a compressed stream that was cut simply ends."""
    if isinstance(stream, (io.BufferedReader, io.FileIO)):
        yield from stream
        return
    rest = b""
    while True:
        try:
            chunk = stream.read(1 << 16)
        except Exception as error:
            if type(error).__name__ != "ZstdError":
                raise
            raise MmctlError(f"the compressed recording is damaged: {error}") from None
        if not chunk:
            break
        lines = (rest + chunk).split(b"\n")
        rest = lines.pop()
        yield from (line + b"\n" for line in lines)
    if rest:
        yield rest


def decode_lines(lines: Iterable[bytes], name: str, *, strict: bool = False) -> Iterator[AnyRecord]:
    """Records of lines; a last line without its end may be broken, unless ``strict``."""
    known = False
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            yield decode(line)
            known = True
        except MmctlError as error:
            if not strict and not line.endswith(b"\n"):
                if known:  # what holds no record at all is no recording that was cut
                    _remark_cut(name)
                return
            raise MmctlError(f"{name}, line {number}: {error}") from None


class Index(msgspec.Struct, frozen=True):
    """Where the moments of a recording lie, so that it can be entered anywhere.

    ``marks`` are ``(time, offset)`` pairs some hundred kilobytes apart, ``events`` every event
    in order of the file. ``file`` holds the plain lines: the recording itself, or an unpacked
    copy that goes with this object.
    """

    head: Recording | None
    started_ns: int
    ended_ns: int
    marks: tuple[tuple[int, int], ...]
    events: tuple[Event, ...]
    file: Any

    def read_from(self, ts_ns: int) -> Iterator[AnyRecord]:
        """Records from the last mark before ``ts_ns`` on; each caller reads for itself.

        A line that is no record ends the reading with MmctlError, except a cut last one.
        """
        at = bisect_right(self.marks, ts_ns, key=lambda mark: mark[0]) - 1
        with open(self.file.fileno(), "rb", closefd=False) as stream:
            offset = self.marks[max(0, at)][1]
            for line in _lines_at(stream, offset):
                if line.strip():
                    try:
                        yield decode(line)
                    except MmctlError:
                        if line.endswith(b"\n"):
                            raise
                        return


_MARK_BYTES = 1 << 18
_LINE_MOST_BYTES = 64 << 20
_UNPACKED_MOST_BYTES = 8 << 30
_EVENT = re.compile(rb'\n\s*\{[^\n]{0,40}?"type"\s*:\s*"event"[^\n]*(?=\n)')


class _Time(msgspec.Struct):
    ts_ns: int | None = None
    started_ns: int | None = None


_time = msgspec.json.Decoder(_Time)


def index(path: Path) -> Index:
    """Look over a recording once, without keeping it: its span, its events, where to enter.

    Only events and one line in every 256 KiB are decoded. Raises MmctlError for a file that
    holds no record at all.
    """
    file = _plain(path)
    head: Recording | None = None
    marks: list[tuple[int, int]] = []
    events: list[Event] = []
    latest = offset = 0
    rest = b"\n"
    while chunk := _read_at(file, offset, _MARK_BYTES):
        block, block_offset = rest + chunk, offset - len(rest)
        offset += len(chunk)
        first = block.find(b"\n") + 1
        line = block[first : block.find(b"\n", first)]
        if head is None and not marks:
            head = _head(line)
        if (ts_ns := _ts_ns(line)) is not None:
            latest = max(latest, ts_ns)
            marks.append((latest, block_offset + first))
        events += [event for event in map(_event, _EVENT.findall(block)) if event is not None]
        rest = block[block.rfind(b"\n") :]
        if len(rest) > _LINE_MOST_BYTES:
            raise MmctlError(f"{path} has no line's end in {_LINE_MOST_BYTES >> 20} MiB")
    for line in _read_at(file, max(0, offset - _MARK_BYTES), _MARK_BYTES).split(b"\n"):
        latest = max(latest, _ts_ns(line) or 0)
    if not marks:
        raise MmctlError(f"{path} holds no record")
    if _cut_inside(path) or (rest.strip() and _ts_ns(rest) is None):
        _remark_cut(str(path))
    events.sort(key=lambda event: event.ts_ns)
    return Index(head, marks[0][0], max(latest, marks[0][0]), tuple(marks), tuple(events), file)


def _plain(path: Path) -> IO[bytes]:
    """The file, or its unpacked content in a nameless one."""
    file = _open(path)
    if isinstance(file, io.BufferedReader):
        return file
    plain: IO[bytes] = tempfile.TemporaryFile(prefix="mmctl-")  # noqa: SIM115
    size = 0
    while True:
        try:
            chunk = file.read(1 << 20)
        except Exception as error:
            if type(error).__name__ != "ZstdError":
                raise
            raise MmctlError(f"the compressed recording is damaged: {error}") from None
        if not chunk:
            break
        size += len(chunk)
        if size > _UNPACKED_MOST_BYTES:
            raise MmctlError(f"{path} unpacks to more than {_UNPACKED_MOST_BYTES >> 30} GiB")
        plain.write(chunk)
    plain.flush()
    return plain


def _read_at(file: IO[bytes], offset: int, size: int) -> bytes:
    import os

    return os.pread(file.fileno(), size, offset)


def _lines_at(stream: IO[bytes], offset: int) -> Iterator[bytes]:
    """Lines from an offset on, by positioned reads: several readers share one descriptor."""
    rest = b""
    while chunk := _read_at(stream, offset, 1 << 16):
        offset += len(chunk)
        lines = (rest + chunk).split(b"\n")
        rest = lines.pop()
        for line in lines:
            yield line + b"\n"
    if rest:
        yield rest


def _ts_ns(line: bytes) -> int | None:
    try:
        found = _time.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
    return found.ts_ns if found.ts_ns is not None else found.started_ns


def _event(line: bytes) -> Event | None:
    try:
        found = decode(line)
    except MmctlError:
        return None
    return found if isinstance(found, Event) else None


def _head(line: bytes) -> Recording | None:
    try:
        found = decode(line)
    except MmctlError:
        return None
    return found if isinstance(found, Recording) else None
