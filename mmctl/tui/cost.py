"""What the dashboard itself costs: its share of a core and its memory."""

from __future__ import annotations

import time
from pathlib import Path

_STATM = Path("/proc/self/statm")
LEAST_S = 0.5  # a share over less says nothing


class Cost:
    """Share of a core since the last reading, and resident bytes of this process."""

    def __init__(self) -> None:
        self._wall, self._cpu = time.monotonic(), time.process_time()
        self._share = 0.0

    def read(self) -> tuple[float, int]:
        wall, cpu = time.monotonic(), time.process_time()
        if wall - self._wall > LEAST_S:  # a timer that is late fires twice at once
            self._share = (cpu - self._cpu) / (wall - self._wall)
            self._wall, self._cpu = wall, cpu
        return self._share, resident_bytes()


def resident_bytes() -> int:
    """Memory of this process that is in RAM."""
    if _STATM.exists():
        import resource

        return int(_STATM.read_text().split()[1]) * resource.getpagesize()
    import psutil

    return int(psutil.Process().memory_info().rss)
