"""Recordings: one record a line, optionally compressed, readable after a kill or a full disk."""

from __future__ import annotations

import io
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Any

from mmctl import __version__
from mmctl.engine.errors import MmctlError
from mmctl.engine.records import AnyRecord, Recording, decode, encode

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

    A name that ends in ``.zst`` is compressed, with a block closed per record, so that what
    was written can be read even when the process is killed.
    """

    def __init__(self, path: Path, head: Recording) -> None:
        self.path = path
        try:
            self._file: IO[bytes] = open(path, "wb", buffering=0)  # noqa: SIM115
        except OSError as error:
            raise MmctlError(f"cannot record to {path}: {error.strerror}") from None
        self._zst: Any = None
        if path.suffix == ".zst":
            import zstandard

            self._zst = zstandard.ZstdCompressor(level=3).stream_writer(self._file, closefd=False)
        self.write(head)

    def write(self, record: AnyRecord) -> None:
        line = encode(record) + b"\n"
        if self._zst is None:
            self._file.write(line)
        else:
            self._zst.write(line)
            self._zst.flush()

    def close(self) -> None:
        """Finish the file; what was written stays readable."""
        if self._zst is not None:
            self._zst.close()
        self._file.close()

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read(path: Path | str, *, strict: bool = False) -> Iterator[AnyRecord]:
    """The records of a recording, the header first; ``-`` reads standard input.

    A last line that was cut is dropped in silence: that is all a killed writer can lose. Any
    other broken line raises MmctlError with its number.
    """
    stream = sys.stdin.buffer if str(path) == "-" else _open(Path(path))
    with stream:
        yield from decode_lines(_lines(stream), str(path), strict=strict)


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
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            yield decode(line)
        except MmctlError as error:
            if not strict and not line.endswith(b"\n"):
                return
            raise MmctlError(f"{name}, line {number}: {error}") from None
