"""``mmctl breaker watch``: the loop over live sources, its decisions as they fall."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mmctl.cli import completion
from mmctl.cli.app import common, note, output, seconds, to_read
from mmctl.cli.breaker.lines import LineWriter
from mmctl.cli.breaker.outlet import Outlet, unbuffered
from mmctl.cli.listen import Wait, opened
from mmctl.cli.main import Exit
from mmctl.cli.profile import checks
from mmctl.cli.recorded import KEEP, Keep, Record, Rotate, rotate_bytes
from mmctl.engine import profiles, recording
from mmctl.engine.errors import UsageError, suggestion
from mmctl.engine.records import AnyRecord, Event

if TYPE_CHECKING:
    from mmctl.engine.breaker.reload import Changes
    from mmctl.engine.breaker.store import Store

Sources = Annotated[list[str] | None, to_read()]
ModeOption = Annotated[
    str,
    typer.Option(
        metavar="off|observe|enforce",
        autocompletion=completion.words("off", "observe", "enforce"),
        help="What a trip does.",
    ),
]
Duration = Annotated[
    str, typer.Option(metavar="TIME", help="Stop after so long, such as 30s or 5min.")
]


def mode_of(text: str) -> profiles.Mode | None:
    """The mode named on the command line; None leaves it to the profile."""
    known = profiles.MODES
    if text and text not in known:
        raise UsageError(
            f"unknown mode '{text}': one of {', '.join(known)}{suggestion(text, known)}"
        )
    return text or None


def watch(
    sources: Sources = None,
    mode: ModeOption = "",
    duration: Duration = "",
    wait: Wait = "",
    record: Record = None,
    rotate: Rotate = "",
    keep: Keep = KEEP,
    every: Annotated[
        bool, typer.Option("--all", help="Print every record, not events alone (ndjson).")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what each response would do; do nothing.")
    ] = False,
) -> int:
    """Watch sources and trip by the profile's rules; exit 3 on a trip or an oom.

    In observe mode a trip is only said; in enforce mode the worker is asked to respond, is
    verified, and gets its traffic back in two steps. Values are measured by the sources unless
    an input says modelled. The profile is read again when its file changes and on SIGHUP: rules
    that are the same keep their windows, states and holds stay, and a profile that is not valid
    is refused while the old one goes on. With --rotate a recording that is there already is kept
    beside the new one, so that a service may start again; each file opens by itself.

    \b
    Examples:
      mmctl breaker watch demo:burst
      mmctl breaker watch demo:fragmentation --mode enforce --record run.ndjson
      mmctl breaker watch demo:burst --mode enforce --dry-run
      mmctl breaker watch nvml: --record node.ndjson --rotate 64MiB --keep 8
      mmctl breaker watch agent:/run/engine.sock --wait 30s
      mmctl breaker watch nvml: http://127.0.0.1:8000/metrics --duration 1h -o ndjson
    """
    from mmctl.engine.breaker.breaker import CHANGES
    from mmctl.engine.breaker.loop import attend
    from mmctl.engine.breaker.reload import Changes
    from mmctl.engine.sources import demo, is_file, known

    loaded = checks.loaded(common().profile)
    size = rotate_bytes(rotate, record)
    chosen = mode_of(mode) or loaded.profile.breaker.mode
    known(sources or ())
    demo.check_live(sources or [], chosen)
    # Files and pipes can wait for whoever reads us; nobody waits once the breaker acts.
    reads_only = bool(sources) and all(map(is_file, sources or []))
    if sys.stderr.isatty() and not (duration or reads_only):
        note(f"watching in mode {chosen}: goes on until the source ends or Ctrl-C")
    writer = LineWriter(output(), every, unbuffered)
    stop = threading.Event()
    tripped = False
    with ExitStack() as stack:
        if duration:
            timer = threading.Timer(seconds("--duration", duration), stop.set)
            timer.daemon = True
            timer.start()
            stack.callback(timer.cancel)
        stack.callback(stop.set)
        changes = Changes(loaded, common().profile, mode_of(mode))
        with suppress(ValueError):  # only the main thread takes signals
            signal.signal(signal.SIGHUP, _hangup(changes))
        records = opened(sources or [], loaded.profile, stop, wait)
        decided = attend(
            records, loaded.profile, chosen, store=_store(sources or []), changes=changes,
            dry_run=dry_run,
        )  # fmt: skip
        stack.callback(decided.close)
        kept: Iterator[AnyRecord] = decided
        if record is not None:
            kept = _recorded(decided, record, loaded.name, size, keep, stack)
        outlet = stack.enter_context(
            Outlet(writer.write, waits=reads_only and chosen != "enforce", failed=stop.set)
        )
        for item in kept:
            tripped = tripped or (isinstance(item, Event) and item.what in ("trip", "oom"))
            if isinstance(item, Event) and item.what in CHANGES:
                outlet.waits = reads_only and item.mode != "enforce"
            outlet.put(item)
    writer.end()
    return Exit.FINDING if tripped else Exit.DONE


watch.formats = ("table", "ndjson", "csv")  # type: ignore[attr-defined]


def _hangup(changes: Changes) -> Callable[[int, object], None]:
    """Reads the profile again; a terminal that is gone ends the watch as it always did."""
    begun_at_terminal = _terminal()

    def hangup(_number: int, _frame: object) -> None:
        if begun_at_terminal and not _terminal():
            os.kill(os.getpid(), signal.SIGTERM)
        else:
            changes.read_again()

    return hangup


def _terminal() -> bool:
    try:
        os.close(os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY))
    except OSError:
        return False
    return True


def _store(sources: list[str]) -> Store | None:
    """The audit log and the state; without them where another breaker keeps them."""
    from mmctl.engine.breaker.store import Store
    from mmctl.engine.errors import MmctlError

    lasting = not any(uri.partition(":")[0] in ("demo", "-") for uri in sources)
    try:
        return Store(restore=lasting)
    except MmctlError as error:
        note(f"{error}: this one keeps no audit log and takes no orders")
        return None


def _recorded(
    records: Iterator[AnyRecord], path: Path, profile: str, size: int | None, keep: int,
    stack: ExitStack,
) -> Iterator[AnyRecord]:  # fmt: skip
    first = next(records, None)
    if first is None:
        return
    started = getattr(first, "ts_ns", None) or getattr(first, "started_ns", None)
    head = recording.header(first.node, profile, started)
    writer = stack.enter_context(recording.Rotating(path, head, size, keep, note))
    for item in chain([first], records):
        writer.write(item)
        yield item
