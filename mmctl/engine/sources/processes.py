"""Who holds a device: names and containers of processes, and which devices serve together."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from mmctl.engine.records import Device, Process

_CONTAINER = re.compile(r"(?:^|[/:-])([0-9a-f]{64})(?:\.scope)?(?:$|/)", re.MULTILINE)
_SUPERVISORS = frozenset({
    "systemd", "init", "tini", "dumb-init", "docker-init", "supervisord", "containerd-shim",
    "conmon", "bash", "sh", "dash", "zsh", "fish", "tmux", "screen", "sshd", "login", "su",
    "sudo", "slurmstepd", "s6-supervise", "runsvdir", "pause", "catatonit",
})  # fmt: skip
"""Parents of many unrelated things: what they start does not belong together."""


def describe(pid: int, used_bytes: int | None) -> Process:
    """A process by its pid; its name is absent when the pid is not of this namespace."""
    return Process(pid=pid, name=name_of(pid), used_bytes=used_bytes, container=container_of(pid))


def name_of(pid: int) -> str | None:
    """The name as the process set it, without its arguments: they may hold secrets."""
    try:
        first = (
            Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0", 1)[0].decode("utf-8", "replace")
        )
        short = Path(f"/proc/{pid}/comm").read_text("utf-8", "replace").strip()
    except OSError:
        return None
    title = first.split(" ", 1)[0]
    return title[:80] if title.startswith(short) and len(title) > len(short) else short


def container_of(pid: int) -> str | None:
    """The first 12 digits of the container's id, as its runtime shows it."""
    try:
        found = _CONTAINER.search(Path(f"/proc/{pid}/cgroup").read_text())
    except OSError:
        return None
    return found[1][:12] if found else None


def groups(devices: Iterable[Device]) -> dict[str, str]:
    """Device → the instance it serves together with others, ``name:pid`` of what started it.

    Two devices serve one instance when one process holds both, or when their processes have
    the same parent, as the ranks of a tensor-parallel engine have, that is no mere supervisor.
    """
    holders: dict[int, list[str]] = {}
    for device in devices:
        for process in device.processes or ():
            holders.setdefault(_head(process.pid), []).append(device.device)
    found: dict[str, str] = {}
    for head, names in sorted(holders.items()):
        if len(set(names)) > 1:
            label = f"{name_of(head) or 'process'}:{head}"
            for name in names:
                found.setdefault(name, label)
    return found


def _head(pid: int) -> int:
    """The process that stands for ``pid``: its parent when that started it as a rank."""
    if "EngineCore" in (name_of(pid) or ""):
        return pid  # a data-parallel replica of vLLM is an instance of its own
    parent = _parent(pid)
    if parent is None or parent <= 1 or (name_of(parent) or "init").split(":")[0] in _SUPERVISORS:
        return pid
    return parent


def _parent(pid: int) -> int | None:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text("utf-8", "replace")
        return int(stat.rpartition(")")[2].split()[1])
    except (OSError, ValueError, IndexError):
        return None
