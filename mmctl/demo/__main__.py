"""Run the demo's worker: ``python -m mmctl.demo --scenario burst --socket PATH``.

Started by the source ``demo:``; it ends when its standard input is closed. With ``--openai PORT``
it is a practice server instead, which answers on loopback until it is ended.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import platform
import sys
import threading
import time
from pathlib import Path

from mmctl.demo.fault import KINDS
from mmctl.demo.scenarios import SCENARIOS
from mmctl.engine.errors import MissingExtraError, MmctlError, quiet_interrupt


def main() -> None:
    """Listen on the socket, wait for a first subscriber, run the scenario."""
    parser = argparse.ArgumentParser(prog="python -m mmctl.demo", description=__doc__)
    parser.add_argument("--scenario", choices=SCENARIOS, default="burst")
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--socket", type=Path, help="where to listen")
    where.add_argument("--openai", type=int, metavar="PORT", help="speak the OpenAI API there")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--pool", type=int, default=256 * 2**20, help="capacity in bytes")
    parser.add_argument("--image-every", type=int, help="steps between images of the stress")
    parser.add_argument("--fault", choices=KINDS, help="what goes wrong in the scenario 'fault'")
    parser.add_argument("--fault-at", type=int, help="the step at which it does")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--every-allocation", type=int, default=0, help="1: small ones as well")
    options = parser.parse_args()
    if options.openai is not None:
        _practise(options.openai, options.seed)
        return
    threading.Thread(target=_end_with_stdin, daemon=True).start()
    run(options)


def _practise(port: int, seed: int) -> None:
    try:
        from mmctl.demo import practice
    except ImportError as error:
        name = "torch" if error.name == "torch" else "guard"
        sys.exit(f"mmctl: error: {MissingExtraError('mmctl.demo --openai', name)}")
    try:
        asyncio.run(practice.serve(port, seed))
    except MmctlError as error:
        sys.exit(f"mmctl: error: {error}")


def _end_with_stdin() -> None:
    # Unbuffered: a buffered read would hold a lock that the interpreter needs to end.
    while os.read(0, 1024):
        pass
    os._exit(0)


def run(options: argparse.Namespace) -> None:
    """Import torch only now, so that ``--help`` needs none of it."""
    import torch

    from mmctl.agent.channel import Channel
    from mmctl.agent.device_pool import AgentPool, DevicePool
    from mmctl.agent.pool import EmulatedPool
    from mmctl.agent.publisher import Publisher
    from mmctl.demo.worker import Worker
    from mmctl.engine.records import Event

    # The tensors are small: more threads would only wait for each other on a busy machine.
    torch.set_num_threads(1)
    on_gpu = torch.cuda.is_available() if options.device == "auto" else options.device == "cuda"
    node, device = platform.node() or "localhost", "gpu0" if on_gpu else "cpu0"
    setup = SCENARIOS[options.scenario]
    if options.image_every is not None:
        setup = setup._replace(image_every=max(1, options.image_every))
    if options.fault is not None:
        setup = setup._replace(fault=options.fault)
    if options.fault_at is not None:
        setup = setup._replace(fault_at=options.fault_at)
    with Channel(options.socket) as channel:
        pool: AgentPool
        every = bool(options.every_allocation)
        if on_gpu:
            total = torch.cuda.get_device_properties(0).total_memory
            torch.cuda.set_per_process_memory_fraction(min(options.pool / total, 1.0))
            pool = DevicePool(options.pool, device, node, channel.publish, every_allocation=every)
        else:
            pool = EmulatedPool(options.pool, device, node, channel.publish, every_allocation=every)
        publisher = Publisher(pool, channel.publish, "mmctl-demo", f"demo:{options.scenario}")
        worker = Worker(setup, options.seed, pool, publisher, channel)
        channel.subscribed.wait()
        channel.greet(
            Event(
                ts_ns=time.time_ns(), node=node, device=device, what="agent",
                message=f"demo:{options.scenario}, seed {options.seed}",
                evidence={
                    "socket": str(options.socket), "instance": publisher.instance,
                    "seed": options.seed, "scenario": options.scenario,
                    "capacity_bytes": options.pool, "basis": pool.basis,
                },
            )
        )  # fmt: skip
        worker.run()


if __name__ == "__main__":
    with quiet_interrupt():
        main()
