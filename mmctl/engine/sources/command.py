"""Devices that are read by a vendor's own command: run it with a time-out, read what it prints."""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence

from mmctl.engine.errors import MmctlError, NoSourceError
from mmctl.engine.profiles import Profile
from mmctl.engine.records import AnyRecord
from mmctl.engine.sources.check import Check, pci_devices
from mmctl.engine.sources.host import node_name
from mmctl.engine.sources.smi import Origin

_MAX_CHARACTERS = 8 << 20


def output(arguments: Sequence[str], timeout_s: float) -> str:
    """What a command prints. Raises NoSourceError when it is absent, fails or hangs."""
    tool = arguments[0]
    if shutil.which(tool) is None:
        raise NoSourceError(f"{tool} is not installed or not on PATH")
    try:
        done = subprocess.run(
            list(arguments), capture_output=True, text=True, errors="replace", timeout=timeout_s,
            stdin=subprocess.DEVNULL,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise NoSourceError(f"{tool} does not return within {timeout_s:g} s") from None
    except OSError as error:
        raise NoSourceError(f"{tool} cannot be run: {error.strerror}") from None
    if done.returncode != 0 and not done.stdout.strip():
        said = " ".join((done.stderr or "").split())[:160]
        raise NoSourceError(f"{tool} failed with exit code {done.returncode}: {said}")
    return done.stdout[:_MAX_CHARACTERS]


def readings_of(
    choices: Sequence[Sequence[str]],
    read: Callable[[str, Origin], list[AnyRecord]],
    profile: Profile,
) -> Iterator[list[AnyRecord]]:
    """Readings by the first of several commands that is installed and gives one."""
    chosen: Sequence[str] | None = None
    while True:
        problems = []
        for arguments in [chosen] if chosen else choices:
            try:
                origin = Origin(arguments[0], node_name(), time.time_ns())
                # The tools of the vendors take seconds on a busy machine.
                records = read(output(arguments, 5 * profile.sources.timeout_s), origin)
            except MmctlError as error:
                problems.append(str(error))
                continue
            chosen = arguments
            break
        else:
            raise NoSourceError("; ".join(problems))
        yield records


_NAMES = {"ascend": "Ascend NPU", "amd": "AMD GPU"}


def check_tool(vendor: str, pci_vendor: str, tools: Sequence[str]) -> Check:
    """Whether a vendor's devices are on the bus, and one of the ``tools`` that read them here."""
    present = pci_devices(pci_vendor)
    tool = next((path for path in map(shutil.which, tools) if path), None)
    if tool:
        return Check(f"{vendor}.tool", "ok", f"{tool}; {len(present)} devices on the bus")
    if present:
        return Check(
            f"{vendor}.tool", "problem",
            f"{len(present)} devices on the bus and no {' or '.join(tools)}",
            f"install {tools[0]} or put it on PATH",
        )  # fmt: skip
    return Check(
        f"{vendor}.tool", "absent", f"no {_NAMES.get(vendor, vendor)} on the bus of this node"
    )
