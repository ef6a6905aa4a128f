"""C sources, compiled by ``cc`` on first use into the cache folder."""

from __future__ import annotations

import hashlib
import os
import subprocess
import tempfile
from pathlib import Path

from mmctl.engine import folders
from mmctl.engine.errors import MmctlError

FLAGS = ("-O2", "-fPIC", "-shared", "-fvisibility=hidden", "-Wall", "-Wextra")


def library(name: str) -> Path:
    """The shared library of ``NAME.c`` beside this file, compiled unless the cache has it.

    The cache is keyed by the source and the flags. Raises MmctlError without a C compiler, or
    with the compiler's first complaint.
    """
    source = Path(__file__).parent / f"{name}.c"
    text = source.read_bytes()
    key = hashlib.sha256(text + " ".join(FLAGS).encode()).hexdigest()[:16]
    folder = folders.cache() / "native"
    path = folder / f"{name}-{key}.so"
    if path.exists():
        return path
    folder.mkdir(parents=True, exist_ok=True)
    descriptor, temporary = tempfile.mkstemp(dir=folder, suffix=".so")
    os.close(descriptor)
    compiler = os.environ.get("CC", "cc").split()
    command = [*compiler, *FLAGS, "-o", temporary, str(source), "-ldl", "-lpthread"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    except FileNotFoundError:
        os.unlink(temporary)
        raise MmctlError(
            f"'{compiler[0]}' is not installed: the hook needs a C compiler (or set CC)"
        ) from None
    if done.returncode:
        os.unlink(temporary)
        first = next(iter(done.stderr.splitlines()), "no message")
        raise MmctlError(f"{compiler[0]} could not compile {source.name}: {first}")
    os.replace(temporary, path)  # two at once make the same file: either is right
    return path
