"""``mmctl probe links``: how the devices of a node are joined."""

from __future__ import annotations

import threading
import time
from typing import Annotated

import msgspec
import typer

from mmctl.cli.app import common, output
from mmctl.cli.main import Exit
from mmctl.cli.render import emit, to_table
from mmctl.engine import profiles
from mmctl.engine.errors import NoSourceError
from mmctl.engine.records import SCHEMA, Link
from mmctl.engine.sources import links as reader
from mmctl.engine.sources.files import source
from mmctl.engine.sources.host import node_name
from mmctl.engine.sources.smi import Origin


def links(
    sources: Annotated[
        list[str] | None,
        typer.Argument(metavar="[nvml:|FILE]...", help="Files, or nvml:, which is the default."),
    ] = None,
) -> int:
    """Read how devices are joined: class, hops, NUMA crossing, measured latency and bandwidth.

    Files are recognised by content: nvidia-smi topo -m, npu-smi info -t topo, NCCL topology
    XML, p2pBandwidthLatencyTest, nvbandwidth (text and JSON), rocm-smi JSON. Several are
    joined into one table: a topology gives the class, a measurement the figures.

    \b
    Examples:
      mmctl probe links
      mmctl probe links topo.txt p2p.txt
      mmctl probe links nvbandwidth.json -o csv
    """
    profile = profiles.load(common().profile).profile
    found: list[Link] = []
    names = sources or ["nvml:"]
    for name in names:
        if name == "nvml:":
            try:
                found += reader.live(profile, Origin(name, node_name(), time.time_ns()))
            except NoSourceError as error:
                hint = "" if sources else "; or give a file, such as of nvidia-smi topo -m"
                raise NoSourceError(f"{error}{hint}") from None
        else:
            records = source(name, profile, threading.Event())
            found += [record for record in records if isinstance(record, Link)]
    if not found:
        raise NoSourceError(f"no link in {', '.join(names)}")
    merged = list(reader.joined(found))
    rows = [msgspec.to_builtins(link) for link in merged]
    table = to_table(
        {
            "a": link.a, "b": link.b, "class": link.link_class, "hops": link.hops,
            "crosses numa": link.crosses_numa, "latency (µs)": link.latency_us,
            "bandwidth (GB/s)": None if link.bandwidth_bytes_per_s is None
            else link.bandwidth_bytes_per_s / 1e9,
        }
        for link in merged
    )  # fmt: skip
    emit({"schema": SCHEMA, "node": merged[0].node, "links": rows}, rows, output(), table=table)
    return Exit.DONE
