"""``hwmon:DEVICE=FILE``: a temperature in thousandths of a degree, as Linux writes it."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

from mmctl.engine.errors import NoSourceError, UsageError
from mmctl.engine.profiles import Profile
from mmctl.engine.records import Device


def source(rest: str, profile: Profile, stop: threading.Event) -> Iterator[Device]:
    """A reading every ``[sampling] interval`` until ``stop`` is set.

    UsageError for what is no DEVICE=FILE, NoSourceError when the file cannot be read.
    """
    name, _, file = rest.partition("=")
    if not name or not file:
        raise UsageError(f"'hwmon:{rest}' is not hwmon:DEVICE=FILE")
    while True:
        try:
            temperature_c = int(Path(file).read_text()) / 1000
        except (OSError, ValueError) as error:
            raise NoSourceError(f"hwmon: cannot read {file}: {error}") from None
        yield Device(
            ts_ns=time.time_ns(), device=name, kind="npu", temperature_c=temperature_c,
            absent={"sm_ratio": "hwmon tells the temperature alone"},
        )  # fmt: skip
        if stop.wait(profile.sampling.interval_s):
            return
