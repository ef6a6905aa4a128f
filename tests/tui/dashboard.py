"""Draw the README's picture from the recording that is shipped: ``python tests/tui/dashboard.py``.

A quarter of a second after the trip: the batch that would not have fitted, what was done about
it, and the worker being verified.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

from mmctl.engine import recording
from mmctl.engine.records import Event
from mmctl.engine.sources.demo import SHIPPED
from mmctl.tui.model import Model
from mmctl.tui.once import draw
from mmctl.tui.ui import Ui

PICTURE = Path(__file__).with_suffix(".svg")
AFTER_TRIP_NS = 250_000_000
SIZE = (120, 30)


def svg() -> str:
    """The overview of the shipped burst, in universal time."""
    os.environ["TZ"] = "UTC"
    time.tzset()
    model, until = Model(), 0
    for record in recording.read(SHIPPED / "burst.ndjson.zst"):
        if isinstance(record, Event):
            if record.what == "notice":  # that a recording is played stands in the README
                continue
            if record.what == "trip" and not until:
                until = record.ts_ns + AFTER_TRIP_NS
        if until and getattr(record, "ts_ns", 0) > until:
            break
        model.add(record)
    ui = Ui(now_ns=until, live=False, sources=("demo:burst",), cost=(0.08, 54 << 20))
    return draw(model.snapshot(), ui, SIZE, "calm")[0]


if __name__ == "__main__":
    PICTURE.write_text(svg())
    print(PICTURE)
