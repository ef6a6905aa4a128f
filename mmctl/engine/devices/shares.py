"""Whose a device's memory is: what a process holds beside its allocator's pool."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from mmctl.engine.records import Device, Pool

_SEVERAL = "several processes hold the device and the pools do not say whose they are"


def with_non_torch(device: Device, pools: Iterable[Pool]) -> Device:
    """``device`` with the non-torch bytes (context, NCCL, graphs) of its process: what the driver
    counts for it less what its allocator has reserved. Known when one process holds the device."""
    own = [pool for pool in pools if (pool.node, pool.device) == (device.node, device.device)]
    held = device.processes or ()
    if not own or not held:
        return device
    if len(held) > 1:
        absent = {**device.absent, "processes.non_torch_bytes": _SEVERAL}
        return msgspec.structs.replace(device, absent=absent)
    process = held[0]
    reserved = sum(pool.reserved_bytes for pool in own)
    if process.used_bytes is None or process.used_bytes < reserved:
        return device
    rest = msgspec.structs.replace(process, non_torch_bytes=process.used_bytes - reserved)
    return msgspec.structs.replace(device, processes=(rest,))
