"""What processors the code in a binary or wheel is for: CUDA fat binaries, cubins, ELF machines.

A fat binary begins with its magic, version and sizes; each entry says PTX or cubin and for which
compute capability. Nothing of it is run, sizes are bounded, and a damaged one ends the search in
it, not the program.
"""

from __future__ import annotations

import mmap
import struct
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import msgspec

from mmctl.engine.errors import MmctlError

_FATBIN = struct.pack("<I", 0xBA55ED50)
_PTX, _CUBIN = 1, 2
_ELF = b"\x7fELF"
_MACHINES = {62: "x86_64", 183: "aarch64", 243: "riscv64", 21: "ppc64le", 3: "i386"}
_EM_CUDA, _EM_AMDGPU = 190, 224
_MEMBER_MOST_BYTES = 4 << 30
_ENTRIES_MOST = 100_000


class CodeObject(msgspec.Struct, frozen=True, kw_only=True, order=True):
    """Code of one kind for one target: ``sm`` is 90 for compute capability 9.0."""

    kind: Literal["cubin", "ptx", "host"]
    target: str
    sm: int = 0


def read(path: Path) -> dict[CodeObject, int]:
    """How many code objects of each sort a binary, or the binaries in a wheel, hold.

    Raises MmctlError for a file that cannot be read or holds none.
    """
    found: dict[CodeObject, int] = {}
    try:
        if zipfile.is_zipfile(path):
            with zipfile.ZipFile(path) as wheel:
                for member in wheel.infolist():
                    name = member.filename
                    if not (name.endswith((".so", ".cubin", ".fatbin", ".a")) or ".so." in name):
                        continue
                    if member.file_size > _MEMBER_MOST_BYTES:
                        raise MmctlError(f"{path}: {name} claims {member.file_size} bytes")
                    with wheel.open(member) as file:
                        _count(found, file.read(_MEMBER_MOST_BYTES))
        else:
            with open(path, "rb") as file:
                if not file.read(1):
                    raise MmctlError(f"{path} is empty")
                with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                    _count(found, data)
    except OSError as error:
        raise MmctlError(f"cannot read {path}: {error.strerror or error}") from None
    except (zipfile.BadZipFile, NotImplementedError, RuntimeError, EOFError) as error:
        raise MmctlError(f"{path} is a damaged wheel: {error}") from None
    if not found:
        raise MmctlError(f"{path} holds no code that is known: no ELF and no CUDA fat binary")
    return dict(sorted(found.items()))


def _count(found: dict[CodeObject, int], data: Any) -> None:
    for code in _objects(data):
        found[code] = found.get(code, 0) + 1


def _objects(data: Any) -> Iterator[CodeObject]:
    head = bytes(data[:64])
    if head[:4] == _ELF and len(head) >= 52:
        machine = struct.unpack_from("<H", head, 18)[0]
        if machine == _EM_CUDA:
            yield _cubin(head)
        elif machine in _MACHINES:
            yield CodeObject(kind="host", target=_MACHINES[machine])
    at = data.find(_FATBIN)
    while at >= 0:
        yield from _fatbin(data, at)
        at = data.find(_FATBIN, at + 4)


def _cubin(head: bytes) -> CodeObject:
    """A bare cubin: the capability stands in the flags of its ELF header."""
    flags = struct.unpack_from("<I", head, 48)[0]
    sm = flags & 0xFF if head[8] != 8 else (flags >> 8) & 0xFF
    return CodeObject(kind="cubin", target=f"sm_{sm}", sm=sm)


def _fatbin(data: Any, at: int) -> Iterator[CodeObject]:
    if at + 16 > len(data):
        return
    _, version, head_size, size = struct.unpack_from("<IHHQ", data, at)
    if version != 1 or head_size < 16 or size > len(data) - at:
        return
    place, end = at + head_size, at + head_size + size
    for _ in range(_ENTRIES_MOST):
        if place + 32 > min(end, len(data)):
            return
        kind, _, entry_head, payload = struct.unpack_from("<HHIQ", data, place)
        sm = struct.unpack_from("<I", data, place + 28)[0]
        if entry_head < 32 or not 10 <= sm <= 999:
            return
        if kind == _PTX:
            yield CodeObject(kind="ptx", target=f"compute_{sm}", sm=sm)
        elif kind == _CUBIN:
            yield CodeObject(kind="cubin", target=f"sm_{sm}", sm=sm)
        place += entry_head + payload
