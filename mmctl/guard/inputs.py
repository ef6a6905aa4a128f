"""Sources beside the traffic: devices for the perception weight, engines' own metrics pages."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence

import msgspec

from mmctl.engine.errors import MmctlError
from mmctl.engine.profiles import Profile
from mmctl.engine.records import AnyRecord, Device, Serving
from mmctl.engine.sources import open_sources
from mmctl.guard.backends import Backend


class Inputs:
    """Reads ``sources`` in a thread and hands each record to ``take`` there.

    A metrics page's record bears the name of the backend whose page it is.
    """

    def __init__(
        self, sources: Sequence[str], profile: Profile, backends: Iterable[Backend],
        take: Callable[[AnyRecord], None], say: Callable[[str], None],
    ) -> None:  # fmt: skip
        self._names = {backend.name for backend in backends}
        self._take, self._say = take, say
        self._stop = threading.Event()
        self._records = open_sources(sources, profile, self._stop)
        self._thread = threading.Thread(target=self._read, name="mmctl-sources", daemon=True)

    def start(self) -> None:
        """Begin to read."""
        self._thread.start()

    def close(self) -> None:
        """End the thread; a source that hangs is left after five seconds."""
        self._stop.set()
        self._thread.join(5)

    def _read(self) -> None:
        try:
            for record in self._records:
                if isinstance(record, Serving):
                    name = record.instance.partition("/")[0]
                    if name in self._names:
                        record = msgspec.structs.replace(record, node=name, instance=name)
                self._take(record)
        except MmctlError as error:
            self._say(f"sources: {error}")


def of_devices(backend: Backend, record: Device) -> Device | None:
    """A backend's devices as one, by the busiest of them, with ``record`` taken in.

    None for a device that is not the backend's. Several devices are in work on every request
    of one instance, so that the busiest decides how long it takes.
    """
    if record.device not in backend.devices and record.group != backend.name:
        return None
    backend.readings[record.device] = record
    readings = backend.readings.values()

    def most(name: str) -> float | None:
        known = [value for one in readings if (value := getattr(one, name)) is not None]
        return max(known, default=None)

    return msgspec.structs.replace(
        record, device=backend.name, sm_ratio=most("sm_ratio"),
        bandwidth_ratio=most("bandwidth_ratio"), kind="gpu" if record.kind == "cpu"
        else record.kind,
    )  # fmt: skip
