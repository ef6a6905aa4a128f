"""``mmctl breaker guard``: breaker and scheduler in front of unmodified serving engines."""

from __future__ import annotations

from typing import Annotated

import typer

from mmctl.cli.app import common, host_port, note
from mmctl.cli.breaker.watch import ModeOption, mode_of
from mmctl.cli.main import Exit
from mmctl.engine import profiles
from mmctl.engine.errors import MissingExtraError

Backends = Annotated[
    list[str] | None,
    typer.Option("--backend", metavar="URL[=DEVICE,…]", help="A serving engine, and its devices."),
]
Listen = Annotated[str, typer.Option(metavar="HOST:PORT", help="Where to listen; loopback.")]


def guard(backends: Backends = None, listen: Listen = "", mode: ModeOption = "") -> int:
    """Stand in front of OpenAI-compatible servers and pass on what they can bear.

    \b
    Examples:
      mmctl breaker guard --backend http://127.0.0.1:8000
      mmctl breaker guard --backend http://127.0.0.1:8000 --mode enforce
    """
    try:
        from mmctl.guard import app
        from mmctl.guard.backends import parse
    except ImportError:
        raise MissingExtraError("breaker guard", "guard") from None
    loaded = profiles.load(common().profile)
    host, port = host_port(listen or loaded.profile.guard.listen)
    chosen = mode_of(mode) or loaded.profile.breaker.mode
    served = app.Guard(loaded.profile, chosen, parse(backends or []))
    note(f"guarding on http://{host}:{port}")
    app.run(served, host, port)
    return Exit.DONE
