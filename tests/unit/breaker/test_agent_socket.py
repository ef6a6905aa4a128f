"""Commands to an agent, over the socket that its greeting names."""

from __future__ import annotations

from pathlib import Path

import pytest

from mmctl.agent.channel import Channel
from mmctl.engine.breaker.agent_socket import AgentSocket
from mmctl.engine.breaker.state import Command
from mmctl.engine.errors import MmctlError
from mmctl.engine.records import Device, Event


def greeting(path: Path, device: str) -> Event:
    return Event(ts_ns=1, node="n", device=device, what="agent", evidence={"socket": str(path)})


def command(device: str) -> Command:
    return Command(id="7", device=device, action="admit", args={"share": 0.5})


def test_a_group_is_reached_by_a_device_of_it_and_a_new_socket_is_followed(tmp_path: Path) -> None:
    sent = AgentSocket()
    with Channel(tmp_path / "a") as old, Channel(tmp_path / "b") as other:
        sent.see(greeting(old.path, "gpu0"))
        sent.see(greeting(other.path, "gpu1"))
        sent.see(Device(ts_ns=2, node="n", device="gpu1", kind="gpu", group="i1"))
        for channel in (old, other):
            attached = channel.commands.get(timeout=5)
            assert (attached.action, attached.args) == ("attach", {"mode": "enforce"})
        sent(command("i1"))
        assert other.commands.get(timeout=5).args == {"share": 0.5}
        with pytest.raises(MmctlError, match="no agent is known for 'gpu9'"):
            sent(command("gpu9"))
        with Channel(tmp_path / "c") as new:
            sent.see(greeting(new.path, "gpu0"))
            assert new.commands.get(timeout=5).action == "attach"
            sent.follow("observe")
            assert new.commands.get(timeout=5).args == {"mode": "observe"}
    with pytest.raises(MmctlError, match="takes no commands"):
        sent(command("gpu0"))


def test_the_only_agent_takes_commands_for_every_device_and_is_not_told_of_a_watcher(
    tmp_path: Path,
) -> None:
    sent = AgentSocket("observe")
    with Channel(tmp_path / "a") as only:
        sent.see(greeting(only.path, ""))
        sent(command("gpu3"))
        assert only.commands.get(timeout=5).id == "7", "no attach before it"
