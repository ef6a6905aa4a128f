"""Result files of ``mmctl benchmark``: what a device or a link was measured to do.

``mmctl benchmark … -o json > FILE`` writes them; schedulers take one where they want a device
or a link.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from mmctl.engine.devices import table
from mmctl.engine.errors import MmctlError, UsageError
from mmctl.engine.records import SCHEMA

_MAX_BYTES = 256 * 2**20
_PREFERRED = ("bf16", "fp16", "fp32")


class DeviceResult(NamedTuple):
    """What one device was measured to do. ``overhead_s`` is the least time of one kernel; power
    is the published one where the device is in the table, else None."""

    name: str
    kind: str
    precision: str
    flops_per_s: float
    bandwidth_bytes_per_s: float
    memory_bytes: int | None
    overhead_s: float | None
    power_w: float | None
    idle_w: float | None
    link_bytes_per_s: float | None


class LinkResult(NamedTuple):
    """What a message costs: a start, and bytes per second for large ones."""

    link_class: str
    operation: str
    ranks: int
    latency_s: float
    bytes_per_s: float


def is_result(path: Path) -> bool:
    """Whether a file looks like a result of ``mmctl benchmark``."""
    try:
        with open(path, "rb") as file:
            head = file.read(4096)
    except OSError:
        return False
    return head.lstrip().startswith(b"{") and b'"benchmark"' in head


def read(path: Path) -> dict[str, Any]:
    """The document in a result file; MmctlError for one that is none or of a newer schema."""
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise MmctlError(f"{path} is too large for a result of mmctl benchmark")
        document = json.loads(path.read_bytes())
    except OSError as error:
        raise MmctlError(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, RecursionError):
        raise MmctlError(
            f"{path} is no result of mmctl benchmark (write it with -o json)"
        ) from None
    if not isinstance(document, dict) or "benchmark" not in document:
        raise MmctlError(f"{path} is no result of mmctl benchmark (write it with -o json)")
    if document.get("schema") != SCHEMA:
        raise MmctlError(f"{path} has schema {document.get('schema')}, this mmctl reads {SCHEMA}")
    return document


def device(path: Path, name: str | None = None) -> DeviceResult:
    """The device in a result of ``benchmark device``: ``name``, or the first with a matrix rate
    at the best of half precision, else fp32.

    UsageError for a device that is not in it, MmctlError for another kind of result.
    """
    rows = [row for row in _list(path, read(path), "devices") if row.get("flops_per_s")]
    if not rows:
        raise MmctlError(f"{path} holds no measured rate of a device")
    known = list(dict.fromkeys(str(row.get("device")) for row in rows))
    chosen = name or known[0]
    if chosen not in known:
        raise UsageError(f"{path} holds no device '{chosen}': {', '.join(known)}")
    own = {row.get("precision"): row for row in rows if row.get("device") == chosen}
    precision = max(
        (p for p in _PREFERRED if p in own), key=lambda p: own[p]["flops_per_s"], default=None
    )
    if precision is None:
        raise MmctlError(f"{path} has no rate of {chosen} at {', '.join(_PREFERRED)}")
    row = own[precision]
    known_device = table.find(str(row.get("name")))
    try:
        return DeviceResult(
            name=str(row.get("name") or chosen),
            kind="npu" if chosen.startswith("npu") else "cpu" if "cpu" in chosen else "gpu",
            precision=precision, flops_per_s=float(row["flops_per_s"]),
            bandwidth_bytes_per_s=float(row["bandwidth_bytes_per_s"]),
            memory_bytes=int(row["memory_bytes"]) if row.get("memory_bytes") else None,
            overhead_s=float(row["launch_s"]) if row.get("launch_s") else None,
            power_w=known_device.power.value if known_device else None,
            idle_w=known_device.idle.value if known_device else None,
            link_bytes_per_s=known_device.link.value if known_device else None,
        )  # fmt: skip
    except (KeyError, TypeError, ValueError):
        raise MmctlError(f"{path} lacks the bandwidth of {chosen}") from None


def link(path: Path, operations: Sequence[str] = ("alltoall",)) -> LinkResult:
    """The link in a result of ``benchmark links``: the fit with the most ranks of the first of
    ``operations`` that it holds, else of pairs.

    MmctlError for a result without one.
    """
    usable = [
        fit
        for fit in _list(path, read(path), "fits")
        if fit.get("intercept_us") is not None and (fit.get("us_per_kib") or 0) > 0
    ]
    for operation in (*operations, "pair"):
        those = [fit for fit in usable if fit.get("operation") == operation]
        if not those:
            continue
        try:
            best = max(those, key=lambda fit: int(fit["ranks"]))
            return LinkResult(
                link_class=str(best["link_class"]), operation=operation,
                ranks=int(best["ranks"]), latency_s=float(best["intercept_us"]) * 1e-6,
                bytes_per_s=1024 / (float(best["us_per_kib"]) * 1e-6),
            )  # fmt: skip
        except (KeyError, TypeError, ValueError):
            raise MmctlError(f"{path} is damaged: a fit without its fields") from None
    raise MmctlError(f"{path} holds no fit of {' or '.join(operations)} with a start and a rate")


def _list(path: Path, document: dict[str, Any], key: str) -> list[dict[str, Any]]:
    rows = document.get(key)
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise MmctlError(
            f"{path} is a result of benchmark {document['benchmark']} and holds no {key}"
        )
    return rows
