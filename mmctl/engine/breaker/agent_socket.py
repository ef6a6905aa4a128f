"""Commands to the agent inside a serving process, over its unix socket.

The socket's path comes with the stream: any event whose evidence has ``socket``. A command is
one line; the answer is an event of the stream, never a reply on this connection.
"""

from __future__ import annotations

import socket
from contextlib import suppress

import msgspec

from mmctl.engine.breaker.state import Command
from mmctl.engine.errors import MmctlError
from mmctl.engine.profiles import Mode
from mmctl.engine.records import AnyRecord, Device, Event

TIMEOUT_S = 2.0


class AgentSocket:
    """Sends commands to the newest agent that the stream has named for a device."""

    def __init__(self, mode: Mode = "enforce") -> None:
        self.mode = mode
        self._paths: dict[str, str] = {}
        self._member: dict[str, str] = {}  # a device of each group

    def see(self, record: AnyRecord) -> None:
        """Remember where the agent of a device listens."""
        if isinstance(record, Event) and isinstance(path := record.evidence.get("socket"), str):
            target = record.device or ""
            if self._paths.get(target) != path:
                self._paths[target] = path
                if self.mode == "enforce":
                    self._attach(target)
        elif isinstance(record, Device) and record.group and record.device in self._paths:
            self._member[record.group] = record.device

    def follow(self, mode: Mode) -> None:
        """Tell every agent that is known whether this breaker acts from here on."""
        self.mode = mode
        for target in self._paths:
            self._attach(target)

    def _attach(self, target: str) -> None:
        """The agent lets a step that will not fit wait for the word of an enforcing breaker."""
        with suppress(MmctlError):  # an agent that is gone is told of by the command that misses it
            self(Command(id="", device=target, action="attach", args={"mode": self.mode}))

    def path(self, device: str) -> str | None:
        """Where commands for a device or a group go: its own agent, else the only one."""
        device = self._member.get(device, device)
        if device in self._paths:
            return self._paths[device]
        paths = set(self._paths.values())
        return paths.pop() if len(paths) == 1 else None

    def __call__(self, command: Command) -> None:
        """Send ``command``; MmctlError when no agent takes it."""
        path = self.path(command.device)
        if path is None:
            raise MmctlError(f"no agent is known for '{command.device}'")
        line = msgspec.json.encode(
            {"id": command.id, "action": command.action, "args": command.args}
        )
        try:
            with socket.socket(socket.AF_UNIX) as client:
                client.settimeout(TIMEOUT_S)
                client.connect(path)
                client.sendall(line + b"\n")
        except OSError as error:
            raise MmctlError(
                f"the agent of '{command.device}' at {path} takes no commands: {error}"
            ) from None
