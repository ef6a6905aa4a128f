"""``mmctl breaker run``: a program with the allocation hook in front of its CUDA calls."""

from __future__ import annotations

import os
import signal
import threading
from typing import TYPE_CHECKING, Annotated

import typer

from mmctl.cli.app import common, note
from mmctl.cli.breaker.watch import ModeOption, mode_of
from mmctl.cli.profile import checks
from mmctl.engine import profiles
from mmctl.engine.errors import MmctlError, UsageError

if TYPE_CHECKING:
    from mmctl.engine.breaker.hooked import Hooked

Command = Annotated[
    list[str] | None,
    typer.Argument(metavar="-- COMMAND [ARGUMENT]...", help="The program to start."),
]
Inputs = Annotated[
    list[str] | None,
    typer.Option("--input", metavar="SOURCE", help="Figures for the rules (repeatable)."),
]


def run(command: Command = None, mode: ModeOption = "", inputs: Inputs = None) -> int:
    """Start a program under the allocation hook and end with its exit code.

    The profile's rules about single allocations are evaluated before every cudaMalloc,
    cudaMallocAsync and cuMemCreate: observing, a hit is counted; enforcing, the call is refused
    with error 2, after which a framework releases its cache, tries again, and raises an error
    that can be caught. Rules follow the profile's file without a restart. Token counts and pool
    figures come from --input sources or from an agent. Needs a C compiler at the first use.

    \b
    Examples:
      mmctl breaker run -- python serve.py
      mmctl breaker run --mode enforce --input http://127.0.0.1:8000/metrics -- vllm serve MODEL
      mmctl top hook:PID
    """
    if not command:
        raise UsageError("run what? mmctl breaker run -- COMMAND")
    from mmctl.engine.breaker.hooked import Hooked
    from mmctl.engine.sources import known

    known(inputs or ())
    loaded = checks.loaded(common().profile)
    hooked = Hooked(command, loaded, mode_of(mode) or loaded.profile.breaker.mode)
    pid = hooked.process.pid
    note(
        f"hook:{pid} reports this process; rules: "
        + (", ".join(f"{rule.name} ({rule.mode})" for rule in hooked.rules) or "none")
    )
    stop = threading.Event()

    def pass_on(number: int, _: object) -> None:
        hooked.process.send_signal(number)

    signal.signal(signal.SIGTERM, pass_on)

    def interrupted(number: int, frame: object) -> None:
        if not _at_terminal():
            pass_on(number, frame)

    signal.signal(signal.SIGINT, interrupted)
    if inputs:
        threading.Thread(
            target=_feed, args=(hooked, inputs, loaded.profile, stop), daemon=True
        ).start()
    try:
        return hooked.wait()
    finally:
        stop.set()
        hooked.end()


def _at_terminal() -> bool:
    """True where a Ctrl-C of the terminal has told the child as well."""
    try:
        return os.tcgetpgrp(0) == os.getpgrp()
    except OSError:
        return False


def _feed(
    hooked: Hooked, uris: list[str], profile: profiles.Profile, stop: threading.Event
) -> None:
    from mmctl.engine.sources import open_sources

    try:
        hooked.feed(open_sources(uris, profile, stop))
    except MmctlError as error:
        note(f"--input: {error}: rules that need it are unknown from here on")
