"""The trace argument that simulate, sweep and plan share."""

from __future__ import annotations

import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mmctl.cli import completion
from mmctl.cli.app import common, note
from mmctl.engine import profiles
from mmctl.engine.errors import MmctlError, UsageError, suggestion

if TYPE_CHECKING:
    from mmctl.engine.profiles import Schedule
    from mmctl.engine.schedule.fleet import Engine
    from mmctl.engine.schedule.plan import Slo
    from mmctl.engine.schedule.sweep import Task
    from mmctl.engine.schedule.workload import Workload

GENERATED = ("azure", "poisson")
traces = completion.words_or_files(*GENERATED)

Trace = Annotated[
    str,
    typer.Argument(
        metavar="TRACE",
        autocompletion=traces,
        help="A trace file or -, a folder of ServeGen clients, a table of quantiles, or azure.",
    ),
]
Rate = Annotated[
    float | None, typer.Option(metavar="RATE", help="Requests a second, where they are generated.")
]
Clients = Annotated[str, typer.Option(metavar="N,…", help="ServeGen clients by number: 0,3.")]


def clients_of(text: str) -> tuple[int, ...] | None:
    """The numbers in ``--clients``; None for all."""
    try:
        return tuple(int(part) for part in text.split(",") if part.strip()) or None
    except ValueError:
        raise UsageError(f"--clients '{text}' is no list of numbers such as 0,3") from None


@contextmanager
def spooled(trace: str) -> Iterator[str]:
    """``trace``, or for ``-`` a file with all of standard input: workers read it again."""
    if trace != "-":
        if not trace:
            raise UsageError("no trace: name a file, a folder of ServeGen clients, or 'azure'")
        if trace not in GENERATED and not Path(trace).exists():
            hint = suggestion(trace, GENERATED)
            raise MmctlError(f"cannot read {trace}: No such file or directory{hint}")
        yield trace
        return
    with tempfile.TemporaryDirectory(prefix="mmctl-") as folder:
        path = Path(folder) / "stdin"
        with path.open("wb") as file:
            shutil.copyfileobj(sys.stdin.buffer, file)
        try:
            yield str(path)
        except MmctlError as error:
            if str(path) not in str(error):
                raise
            raise MmctlError(str(error).replace(str(path), "standard input")) from None


def task(
    path: str, devices: str, model: str, rate: float | None, count: int, seed: int,
    clients: str = "", output_tokens: int | None = None, slo: Slo | None = None,
) -> Task:  # fmt: skip
    """What workers simulate: the workload, the devices, the profile's engine and objective."""
    from mmctl.engine.schedule import fleet
    from mmctl.engine.schedule.source import Source
    from mmctl.engine.schedule.sweep import Task

    settings = profiles.load(common().profile).profile.schedule
    made = Task(
        source=Source(
            trace=path, rate_per_s=rate, count=count, limit=count, seed=seed,
            clients=clients_of(clients), output_tokens=output_tokens,
        ),
        devices=devices, model=model or fleet.model_for(devices), engine=engine_of(settings),
        ttft_slo_s=slo.ttft_s if slo else settings.ttft_slo_s,
        itl_slo_s=slo.itl_s if slo else settings.itl_slo_s,
    )  # fmt: skip
    fleet.parse(devices, fleet.model(made.model), made.engine)  # what is wrong is told here
    tell_skipped(made.source.read())
    return made


def engine_of(settings: Schedule) -> Engine:
    """The engine with the constants of the profile, or of the measured link that it names."""
    from mmctl.engine.schedule.fleet import Engine

    if settings.links:
        from mmctl.engine.devices import results

        reduce = results.link(Path(settings.links), ("all_reduce", "alltoall"))
        copy = results.link(Path(settings.links), ("sendrecv", "alltoall", "all_reduce"))
        return Engine(
            host_s=settings.host_overhead_s, collective_s=reduce.latency_s,
            collective_bytes_per_s=reduce.bytes_per_s, link_s=copy.latency_s,
            link_bytes_per_s=copy.bytes_per_s,
        )  # fmt: skip
    return Engine(
        host_s=settings.host_overhead_s, collective_s=settings.collective_s,
        collective_bytes_per_s=settings.collective_bytes_per_s,
    )  # fmt: skip


def tell_skipped(work: Workload) -> None:
    """What could not be used of a trace, to the person."""
    if work.skipped:
        told = ", ".join(f"{count} × {reason}" for reason, count in work.skipped.items())
        note(f"{work.name}: {work.requests} requests used, skipped {told}")
    if work.reordered:
        note(f"{work.name}: {work.reordered} requests came out of order and were sorted in")


_TELL_S = 10.0
_told_s = time.monotonic()


def progress(done: int, of: int) -> None:
    """How many simulations of a batch are done; a log or a pipe is told now and then."""
    global _told_s
    if sys.stderr.isatty() and not common().quiet:
        print(f"\r{done} of {of} simulations", end="\n" if done == of else "", file=sys.stderr)
    elif time.monotonic() - _told_s > _TELL_S:
        _told_s = time.monotonic()
        note(f"{done} of {of} simulations")


def step(told: str) -> None:
    """What long work does next, where a person looks on."""
    if sys.stderr.isatty():
        note(told)
