"""``mmctl benchmark responses``: what giving memory back costs on this device."""

from __future__ import annotations

import sys
from typing import Annotated

import msgspec
import typer

from mmctl.cli.app import common, output, quantity
from mmctl.cli.main import Exit
from mmctl.cli.render import emit, to_table
from mmctl.engine import units
from mmctl.engine.errors import MissingExtraError
from mmctl.engine.records import SCHEMA

DeviceOption = Annotated[
    str, typer.Option("--device", metavar="DEVICE", help="auto, cpu, cuda, cuda:1 …")
]
ThreadsOption = Annotated[
    int, typer.Option("--threads", metavar="N", min=1, help="Threads of torch.")
]
RunsOption = Annotated[
    int, typer.Option("--runs", metavar="N", min=3, help="Timed calls of each response.")
]
RequestsOption = Annotated[
    int,
    typer.Option(
        "--requests", metavar="N", min=1, help="Requests of the demo model with and without it."
    ),
]
OffloadOption = Annotated[
    str, typer.Option("--offload", metavar="SIZE", help="Bytes of KV cache to offload.")
]


def responses(
    device: DeviceOption = "auto",
    threads: ThreadsOption = 1,
    runs: RunsOption = 15,
    requests: RequestsOption = 7,
    offload: OffloadOption = "64MiB",
) -> int:
    """Latency, bytes freed, error and throughput of each response, measured here.

    On [1, 576, 1024] (features that resemble their neighbours) and on the demo model's own
    vision tokens. latency_ms is until the call returns for offloads and until the memory is
    free for all others; throughput_ratio is of whole requests of the demo model. The published
    figures stand beside, they are of other devices; an offload of 512 MiB in 12 ms would need
    a link of 45 GB/s.

    \b
    Examples:
      mmctl benchmark responses
      mmctl benchmark responses --device cuda --offload 512MiB -o json
    """
    try:
        import torch
    except ImportError:
        raise MissingExtraError("benchmark responses", "torch") from None
    from mmctl.benchmarks.environment import check_torch_device
    from mmctl.benchmarks.responses import measure

    chosen = device
    if device == "auto":
        chosen = "cuda" if torch.cuda.is_available() else "cpu"
    check_torch_device(chosen)
    size = round(quantity("--offload", offload, "bytes"))
    torch.set_num_threads(threads)
    found = measure(chosen, runs, size, requests, _progress)
    rows = [msgspec.to_builtins(row) for row in found]
    document = {
        "schema": SCHEMA, "device": _named(torch, chosen), "threads": threads, "responses": rows,
    }  # fmt: skip
    emit(document, rows, output(), table=_drawn(rows))
    return Exit.DONE


def _named(torch: object, device: str) -> str:
    if device.startswith("cuda"):
        return str(torch.cuda.get_device_name(device))  # type: ignore[attr-defined]
    return device


def _drawn(rows: list[dict]) -> str:  # type: ignore[type-arg]
    shown = []
    for row in rows:
        said = row["published"]
        shown.append(
            {
                "response": row["name"], "shape": row["shape"],
                "size": units.show_bytes(row["size_bytes"]),
                "ms": row["latency_ms"], "pub.": said.get("latency_ms"),
                "freed": f"{row['freed_ratio']:.1%}",
                "pub. ": f"{said['freed_ratio']:.0%}" if "freed_ratio" in said else None,
                "error": row["error"],
                "cosine": None if row["cosine_mean"] is None else f"{row['cosine_mean']:.5f}",
                "throughput": row["throughput_ratio"], "pub.  ": said.get("throughput_ratio"),
                "link": row["link"],
            }
        )  # fmt: skip
    return to_table(shown) + "\nmeasured here; pub. = published of other devices"


def _progress(name: str) -> None:
    if sys.stderr.isatty() and not common().quiet:
        print(f"\r\x1b[K{name}", end="", file=sys.stderr, flush=True)
