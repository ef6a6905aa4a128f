"""Pickles and sizes from strangers: nothing executed, nothing bigger than allowed.

A pickle is read in a child process whose memory and CPU time are limited, by an unpickler that
refuses every global. The child turns the objects into bytes; only those reach the caller.
"""

from __future__ import annotations

import io
import os
import pickle
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

import msgspec

from mmctl.engine.errors import MmctlError

MIB = 1 << 20
GIB = 1 << 30

# Plain objects take up to about nine times the bytes of their pickle; a small file, little.
_MEMORY_BASE = 256 * MIB
_MEMORY_PER_BYTE = 16
# An honest file of 20 MiB takes half a second; this leaves room for slow machines.
_CPU_BASE_S = 5
_BYTES_PER_CPU_S = 2 * MIB
_REFUSED = 65
_MAGIC = {
    b"\x1f\x8b": "is compressed with gzip: gunzip it first",
    b"\x28\xb5\x2f\xfd": "is compressed with zstd: unzstd it first",
    b"PK\x03\x04": "is a zip archive (torch.save?), not a plain pickle",
    b"\x7fELF": "is a program, not a pickle",
}


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """Caps on what a stranger's file may ask for."""

    max_bytes: int = 4 * GIB
    max_memory_bytes: int = 16 * GIB
    max_entries: int = 20_000_000
    max_depth: int = 1000
    max_cpu_s: int = 120


class RefusedError(MmctlError):
    """The file was not read: hostile, broken, too large or not what it claims to be."""


class _Unpickler(pickle.Unpickler):
    """Builds plain containers, strings and numbers, and nothing else."""

    def find_class(self, module: str, name: str) -> NoReturn:
        raise RefusedError(f"it asks for the Python object {module[:80]}.{name[:80]}")

    def persistent_load(self, pid: Any) -> NoReturn:
        raise RefusedError("it asks for an object from outside the file")


def load_plain(file: BinaryIO) -> Any:
    """The plain objects in an open pickle; RefusedError for anything else.

    Runs in the calling process: bounded only where that is (see ``read_pickle``).
    """
    import gc

    collecting = gc.isenabled()
    gc.disable()  # millions of new containers and no garbage: three times as fast
    try:
        return _Unpickler(file).load()
    except RefusedError:
        raise
    except MemoryError:
        raise RefusedError("it asks for more memory than such a file can need") from None
    except RecursionError:
        raise RefusedError("it is nested too deeply") from None
    except Exception as error:
        raise RefusedError(f"no readable pickle ({error or type(error).__name__})") from None
    finally:
        if collecting:
            gc.enable()


def read_pickle(path: Path, target: str, limits: Limits, options: bytes = b"") -> bytes:
    """What ``target`` ("module:function") makes of a pickle, computed in a limited child.

    The function is called in the child with (objects, limits, options, output file) and writes
    bytes; those are returned. Raises RefusedError with one line that says why.
    """
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            _check(path, size, os.pread(file.fileno(), 8, 0), limits)
            return _in_child(path, file, size, target, limits, options)
    except IsADirectoryError:
        raise RefusedError(f"{path} is a folder, not a file") from None
    except OSError as error:
        raise RefusedError(f"cannot read {path}: {error.strerror}") from None


def _check(path: Path, size: int, start: bytes, limits: Limits) -> None:
    if size > limits.max_bytes:
        raise RefusedError(
            f"{path} has {size} bytes, more than the {limits.max_bytes} allowed: raise --max-size"
        )
    if size == 0:
        raise RefusedError(f"{path} is empty")
    for magic, what in _MAGIC.items():
        if start.startswith(magic):
            raise RefusedError(f"{path} {what}")


def _in_child(
    path: Path, file: io.BufferedReader, size: int, target: str, limits: Limits, options: bytes
) -> bytes:
    memory = min(_MEMORY_BASE + _MEMORY_PER_BYTE * size, limits.max_memory_bytes)
    seconds = min(_CPU_BASE_S + size // _BYTES_PER_CPU_S, limits.max_cpu_s)
    request = msgspec.json.encode([sys.path, target, memory, seconds, limits])
    # No site, no environment, no user's start-up files: only this package and its imports.
    start = "import sys,json;sys.path[:]=json.loads(sys.argv[1])[0];" \
        "from mmctl.engine.untrusted import _child;_child()"  # fmt: skip
    result = subprocess.run(
        [sys.executable, "-I", "-S", "-c", start, request.decode(), options.hex()],
        stdin=file,
        capture_output=True,
        check=False,
    )
    if result.returncode == 0:
        return result.stdout
    # The interpreter may have grumbled before; the reason is the last line.
    said = result.stderr.decode("utf-8", "replace").strip().splitlines()
    reason = said[-1] if said else "no reason given"
    if result.returncode == _REFUSED:
        raise RefusedError(f"{path} was refused: {reason}")
    if result.returncode < 0:
        raise RefusedError(
            f"{path} was refused: the process that read it was ended by signal "
            f"{-result.returncode} (too deep, too long or too much memory)"
        )
    raise RefusedError(f"{path} could not be read: {reason}")


def _child() -> None:
    """The limited process: standard input is the file, standard output the result."""
    import gc
    import resource

    gc.disable()  # what is built lives until the process ends
    _, target, memory, seconds, fields = msgspec.json.decode(sys.argv[1].encode())
    limits = msgspec.convert(fields, Limits)
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    module, name = target.split(":")
    function = getattr(import_module(module), name)
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    try:
        with open(0, "rb", buffering=MIB) as file:
            objects = load_plain(file)
        with open(1, "wb", buffering=MIB) as out:
            function(objects, limits, bytes.fromhex(sys.argv[2]), out)
            out.flush()
            # Millions of objects need no tidying up.
            os._exit(0)
    except (RefusedError, MemoryError, RecursionError, OverflowError) as error:
        reason = str(error) if isinstance(error, RefusedError) else _REASONS[type(error)]
        sys.stderr.write(reason)
        sys.stderr.flush()
        os._exit(_REFUSED)


_REASONS: dict[type[BaseException], str] = {
    MemoryError: "it asks for more memory than such a file can need",
    RecursionError: "it is nested too deeply",
    OverflowError: "a number in it is larger than 64 bits",
}
