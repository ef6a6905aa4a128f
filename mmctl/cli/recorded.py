"""``--record FILE --rotate SIZE --keep N``: a recording of what a command sees."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mmctl.cli.app import quantity, to_write
from mmctl.engine.errors import UsageError

Record = Annotated[Path | None, to_write("Record everything to a file.")]
Rotate = Annotated[
    str, typer.Option(metavar="SIZE", help="Begin a new file of the recording at SIZE.")
]
Keep = Annotated[int, typer.Option(metavar="N", min=1, help="Files of the recording to keep.")]
KEEP = 4


def rotate_bytes(rotate: str, record: Path | None) -> int | None:
    """The size of ``--rotate``; None for one file without an end."""
    if rotate and record is None:
        raise UsageError("--rotate belongs to --record FILE")
    return int(quantity("--rotate", rotate, "bytes")) if rotate else None
