"""``mmctl benchmark overlap``: how much of an all-gather hides behind the vision encoder."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Annotated, Any

import msgspec
import typer

from mmctl.cli.app import note, output, quantity
from mmctl.cli.benchmark.progress import Progress
from mmctl.cli.main import Exit
from mmctl.cli.render import emit, to_table
from mmctl.engine.errors import MissingExtraError, UsageError
from mmctl.engine.records import SCHEMA
from mmctl.engine.units import show_bytes


def overlap(
    ranks: Annotated[
        list[int] | None,
        typer.Option(metavar="N", min=2, max=16, help="Ranks (repeatable); by default 2 and 4."),
    ] = None,
    link: Annotated[
        str, typer.Option(metavar="RATE", help="What the slow link carries, such as 20MB/s.")
    ] = "",
    quick: Annotated[
        bool, typer.Option("--quick", help="Smaller images, fewer rounds, within half a minute.")
    ] = False,
) -> int:
    """All-gather started asynchronously, vision encoder running, waited on at fusion.

    Ranks are processes of one thread each on a core each (two share one where there are more
    ranks than cores). Each encodes images, gathers the vision tokens of all ranks by gloo in the
    group of their modality, and fuses them with text. Overlapped, a gather runs while the next
    micro-batch is encoded; blocking, it is waited for where it starts. Hidden is the time saved
    over what gathering costs; the last gather has no encoder to hide behind. Answers of both are
    compared bit by bit.

    Over loopback gloo's own copying takes the cores from the encoder, and the share says so. The
    slow link is the same sockets paced by the kernel (Linux), by default such that a gather
    takes 0.7 of encoding a micro-batch. Everything is measured; variants take turns in rounds,
    and intervals are bootstrapped over rounds.

    \b
    Examples:
      mmctl benchmark overlap --quick
      mmctl benchmark overlap --ranks 2 --link 50MB/s -o json
    """
    wanted = output()
    rate = None
    if link:
        rate = quantity("--link", link, "per_second")
        if rate < 1024:
            raise UsageError(f"--link must be 1KB/s at least: {link}")
    if find_spec("torch") is None:
        raise MissingExtraError("benchmark overlap", "torch")
    import torch
    import torch.distributed as distributed

    from mmctl.benchmarks import overlap as benchmark
    from mmctl.benchmarks.environment import environment
    from mmctl.engine.errors import MmctlError

    if not (distributed.is_available() and distributed.is_gloo_available()):
        raise MmctlError("this torch was built without gloo; the wheels from PyPI have it")
    torch.set_num_threads(1)  # as each rank's
    where = environment()
    with Progress("overlap") as progress:
        rows, absent = benchmark.measure(tuple(ranks or (2, 4)), quick, rate, progress.tell)
    found = [msgspec.to_builtins(row) for row in rows]
    remarks = [*where.remarks, *(f"no {name} run: {why}" for name, why in absent.items())]
    if over := [row.ranks for row in rows if row.ranks > where.cores]:
        remarks.append(f"{max(over)} ranks share {where.cores} cores: encoders slow each other")
    document: dict[str, Any] = {
        "schema": SCHEMA, "benchmark": "overlap", "environment": msgspec.to_builtins(where),
        "notes": remarks, "quick": quick, "overlap": found, "figures": benchmark.figures(rows),
        "absent": absent,
    }  # fmt: skip
    for remark in remarks:
        note(f"mmctl: {remark}")
    emit(document, found, wanted, _table(found) if wanted == "table" else None)
    return Exit.DONE if all(row.equal for row in rows) else Exit.FAILED


def _table(rows: list[dict[str, Any]]) -> str:
    shown = [
        {
            "ranks": row["ranks"], "transport": row["transport"], "limit": row["bottleneck"],
            "MB/s": row["bandwidth_bytes_per_s"] / 1e6, "gather ms": row["gather_ms"],
            "cores": f"{row['gather_cpu_ratio']:.0%}", "compute ms": row["compute_ms"],
            "blocking ms": row["blocking_ms"], "overlapped ms": row["overlapped_ms"],
            "saved": f"{row['saved_ratio']:.1%}",
            "hidden": None if row["hidden_ratio"] is None else f"{row['hidden_ratio']:.0%}",
            "95 %": None if row["hidden_ci"] is None
            else "{:.0%} to {:.0%}".format(*row["hidden_ci"]),
            "unwaited": f"{row['unwaited_ratio']:.0%}",
            "at most": f"{row['largest_hidden_ratio']:.0%}",
            "answers": "equal" if row["equal"] else "DIFFERENT",
        }
        for row in rows
    ]  # fmt: skip
    first = rows[0]
    return (
        f"{first['micro_batches']} micro-batches a round, "
        f"{show_bytes(first['payload_bytes'])} of vision tokens a rank and gather (measured)\n"
        f"{to_table(shown)}\n"
        "cores: how busy a gather alone keeps them; hidden: time saved over what gathering costs; "
        "unwaited: waiting on handles that is gone; at most: all but the last gather"
    )
