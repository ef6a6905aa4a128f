"""The progress bar of long benchmarks: on standard error, when that is a terminal."""

from __future__ import annotations

import sys
import time
from types import TracebackType

from mmctl.cli.app import common

WIDTH = 24


class Progress:
    """A bar that ``tell(name, share)`` moves; ends its line, or the run that was interrupted,
    when the block does."""

    def __init__(self, title: str) -> None:
        self.title = title
        self.shown = sys.stderr.isatty() and not common().quiet
        self.started = time.monotonic()

    def tell(self, name: str, share: float) -> None:
        """What is being done, and which share of all is done by now."""
        if not self.shown:
            return
        full = round(min(max(share, 0.0), 1.0) * WIDTH)
        bar = "━" * full + "╌" * (WIDTH - full)
        elapsed = time.monotonic() - self.started
        print(
            f"\r\x1b[K{self.title} {bar} {share:4.0%} {elapsed:3.0f} s  {name}",
            end="", file=sys.stderr, flush=True,
        )  # fmt: skip

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:  # fmt: skip
        if self.shown:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)
