"""What ``mmctl doctor`` says of one thing, and what is on the bus."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, NamedTuple

State = Literal["ok", "problem", "absent"]


class Check(NamedTuple):
    """One answer. ``problem``: something is here and does not work; ``absent``: it is not here."""

    id: str
    state: State
    detail: str
    fix: str | None = None


def pci_devices(vendor: str) -> list[str]:
    """Display and processing devices of a vendor on the PCI bus (classes 0x03 and 0x12)."""
    found = []
    for device in Path("/sys/bus/pci/devices").glob("*"):
        try:
            kind = (device / "class").read_text().strip()
            if (device / "vendor").read_text().strip() == vendor and (
                kind.startswith(("0x12", "0x03"))
            ):
                found.append(device.name)
        except OSError:
            continue
    return found
