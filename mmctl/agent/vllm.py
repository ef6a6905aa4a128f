"""The agent's way into vLLM: an entry point of its general plugins, loaded in every worker.

vLLM calls ``start`` once in each of its processes. Nothing happens unless ``MMCTL_AGENT`` names
a folder: then the process listens on ``FOLDER/PID.sock`` (a source as ``agent:PATH``), says so in
an event, and publishes what torch's allocator holds on each of its devices. It answers
``release_cache``; what vLLM itself must do goes over its own HTTP endpoints, so everything else is
refused with a reason. A failure here never reaches the engine: it is one line on standard error.
"""

from __future__ import annotations

import os
import platform
import queue
import sys
import threading
import time
from pathlib import Path
from typing import Any

from mmctl.agent.channel import Channel, Command
from mmctl.engine.errors import MmctlError
from mmctl.engine.records import Device, Event

INTERVAL_S = 0.1
_started: set[int] = set()


def start() -> None:
    """Start the agent in this process, once, when MMCTL_AGENT asks for it."""
    folder = os.environ.get("MMCTL_AGENT")
    if not folder or os.getpid() in _started:
        return
    _started.add(os.getpid())
    try:
        home = Path(folder)
        home.mkdir(parents=True, exist_ok=True, mode=0o700)
        channel = Channel(home / f"{os.getpid()}.sock")
    except (OSError, MmctlError) as error:
        print(f"mmctl: the agent does not start: {error}", file=sys.stderr)
        return
    threading.Thread(target=_serve, args=(channel,), name="mmctl-agent", daemon=True).start()


def _serve(channel: Channel) -> None:
    node = platform.node() or "localhost"
    try:
        channel.subscribed.wait()
        channel.greet(
            Event(
                ts_ns=time.time_ns(), node=node, what="agent", message="vLLM worker",
                evidence={"socket": str(channel.path)},
            )
        )  # fmt: skip
        while True:
            for record in devices(node):
                channel.publish(record)
            try:
                command = channel.commands.get(timeout=INTERVAL_S)
            except queue.Empty:
                continue
            channel.publish(_answer(command, node))
    except Exception as error:  # the engine must live on, whatever torch makes of it
        print(f"mmctl: the agent ends: {type(error).__name__}: {error}", file=sys.stderr)
        channel.close()


def devices(node: str) -> list[Device]:
    """What torch's allocator holds on every device that this process has begun to use."""
    torch: Any = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available() or not torch.cuda.is_initialized():
        return []  # looking must not make a context where the engine has none
    found = []
    for index in range(torch.cuda.device_count()):
        stats = torch.cuda.memory_stats(index)
        reserved = stats.get("reserved_bytes.all.current", 0)
        if not reserved:
            continue
        free, total = torch.cuda.mem_get_info(index)
        found.append(
            Device(
                ts_ns=time.time_ns(), node=node, device=f"gpu{index}", kind="gpu",
                torch_index=index, reserved_bytes=reserved, total_bytes=total, free_bytes=free,
                used_bytes=total - free,
                absent={"sm_ratio": "an agent sees its own process; nvml: has the device"},
            )
        )  # fmt: skip
    return found


def _answer(command: Command, node: str) -> Event:
    started = time.monotonic_ns()
    evidence: dict[str, Any] = {"id": command.id}
    torch: Any = sys.modules.get("torch")
    if command.action == "attach":
        evidence["mode"] = command.args.get("mode")
    elif command.action == "release_cache" and torch is not None and torch.cuda.is_initialized():
        before = torch.cuda.memory_reserved()
        torch.cuda.empty_cache()
        evidence["freed_bytes"] = before - torch.cuda.memory_reserved()
    else:
        evidence["refused"] = (
            f"no '{command.action}' in a vLLM worker: set [actuators] engine = 'vllm' and its url"
        )
    return Event(
        ts_ns=time.time_ns(), node=node, what=command.action, evidence=evidence,
        took_ns=time.monotonic_ns() - started,
    )  # fmt: skip
