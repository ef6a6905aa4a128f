"""What only all devices together tell of each: torch's ordinal, and the instance it serves."""

from __future__ import annotations

import os
from typing import Any

import msgspec

from mmctl.engine.records import AnyRecord, Device
from mmctl.engine.sources.processes import groups


def identified(devices: list[Device]) -> list[AnyRecord]:
    """The devices with what only all of them together tell: torch's ordinal, and the groups."""
    ordinals = torch_ordinals(devices, os.environ)
    grouped = groups(devices)
    records: list[AnyRecord] = []
    for device in devices:
        absent = dict(device.absent)
        ordinal, why = ordinals.get(device.device, (None, "hidden by CUDA_VISIBLE_DEVICES"))
        if ordinal is None and why:
            absent["torch_index"] = why
        records.append(
            msgspec.structs.replace(
                device, torch_index=ordinal, group=grouped.get(device.device), absent=absent
            )
        )
    return records


def torch_ordinals(devices: list[Device], environ: Any) -> dict[str, tuple[int | None, str | None]]:
    """Device → what torch calls it in a process with this environment, or why that is unknown.

    By the CUDA programming guide: ``CUDA_VISIBLE_DEVICES`` lists indices or prefixes of UUIDs
    and ends at the first that names nothing; indices follow ``CUDA_DEVICE_ORDER``, which is the
    fastest first unless PCI_BUS_ID is set. With one model of GPU both orders are the same.
    """
    names = [device.device for device in devices]
    whole = [device for device in devices if device.parent is None and device.uuid is not None]
    models = {device.model for device in whole}
    known = environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID" or len(models) <= 1
    order = "CUDA orders unlike GPUs by speed; set CUDA_DEVICE_ORDER=PCI_BUS_ID"
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    found: dict[str, tuple[int | None, str | None]] = {}
    for device in devices:
        if device.parent is not None:
            found[device.device] = (None, "torch sees a MIG instance by its UUID only")
        elif device.uuid is None:
            found[device.device] = (None, "its UUID is not known")
    if visible is None:
        for ordinal, device in enumerate(whole):
            found[device.device] = (ordinal, None) if known else (None, order)
        return found
    taken: set[str] = set()
    for ordinal, word in enumerate(part.strip() for part in visible.split(",")):
        if word.isdigit():
            target = whole[int(word)] if int(word) < len(whole) else None
        else:
            near = [d for d in devices if word and d.uuid and d.uuid.startswith(word)]
            target = near[0] if len(near) == 1 else None
        if target is None:
            break
        if target.device in taken:
            return dict.fromkeys(names, (None, "CUDA_VISIBLE_DEVICES names a device twice"))
        taken.add(target.device)
        found[target.device] = (ordinal, None) if known or not word.isdigit() else (None, order)
    return found
