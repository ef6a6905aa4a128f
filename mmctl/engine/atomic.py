"""Files that appear whole: a reader sees the old file or the new one, never half of one."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from mmctl.engine.errors import MmctlError


def goes_straight(path: Path) -> bool:
    """Whether ``path`` is written as it goes, with nothing to replace: ``-`` and ``/dev/stdout``
    (standard output), a pipe, a device."""
    return str(path) in ("-", "/dev/stdout") or (path.exists() and not path.is_file())


def straight(path: Path) -> IO[bytes]:
    """A path that ``goes_straight``, open for unbuffered writing; OSError when it cannot be."""
    if str(path) in ("-", "/dev/stdout"):
        # Not by its name: a file behind it would be cut, and written from its beginning again.
        sys.stdout.flush()
        return os.fdopen(os.dup(1), "wb", buffering=0)
    return open(path, "wb", buffering=0)


@contextmanager
def replacing(path: Path, *, private: bool = False) -> Iterator[IO[bytes]]:
    """A file open for writing that takes the place of ``path`` when the block ends well.

    After an exception ``path`` is as it was. The new file may be read by whom the umask allows,
    or with ``private`` by its owner alone. A link stays and its target is replaced; standard
    output, a pipe or a device is written straight, as it cannot be replaced. MmctlError when
    the file cannot be written.
    """
    try:
        if goes_straight(path):
            with io.BufferedWriter(straight(path)) as file:
                yield file
            return
        target = path.resolve()
        temporary = target.with_name(f".mmctl-{os.urandom(6).hex()}")
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        descriptor = os.open(temporary, flags, 0o600 if private else 0o666)
        try:
            with os.fdopen(descriptor, "wb") as file:
                yield file
            os.replace(temporary, target)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
    except BrokenPipeError:
        raise  # whoever read it has gone: no failure of ours
    except OSError as error:
        raise MmctlError(f"cannot write {path}: {error.strerror or error}") from None


def write(path: Path, content: bytes | str, *, private: bool = False) -> None:
    """Replace ``path`` by ``content`` (text as UTF-8) in one step; see ``replacing``."""
    with replacing(path, private=private) as file:
        file.write(content.encode() if isinstance(content, str) else content)
