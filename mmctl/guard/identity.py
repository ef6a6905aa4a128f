"""Whether the process behind an address is still the same one, by what it tells of itself."""

from __future__ import annotations

import re

from mmctl.guard.backends import Listing

_STEADY_S = 3.0  # a time of creation that has stayed so long is not the time of the answer
_APART_S = 5.0  # the workers of one server start within this
_STARTED = re.compile(rb"^process_start_time_seconds(?:\{[^}\n]*\})? ([0-9.eE+]+)", re.MULTILINE)


class Identity:
    """What one backend has told; times are of ``time.monotonic``.

    Two things tell a restart. ``created`` of a listed model, where it has stayed the same: vLLM
    and others put the time of the answer there, which changes and says nothing. And
    ``process_start_time_seconds`` of the metrics page: a server of several workers has several,
    close together, so only a start after the last reading is another process. That is compared
    on the server's own clock, which need not be ours.
    """

    def __init__(self) -> None:
        self._model = ""
        self._created: tuple[float, float, float] | None = None  # value, first and last seen
        self._started: tuple[float, float, float] | None = None

    def listed(self, found: Listing, now_s: float) -> bool:
        """Take an answer of /v1/models; whether another process gave it. Another model in the
        first place tells nothing."""
        created, model = found.created, found.models[0] if found.models else ""
        if model != self._model:
            self._model, self._created = model, None
        before, first_s, last_s = self._created or (created, now_s, now_s)
        if created is None or created == before:
            self._created = None if created is None else (created, first_s, now_s)
            return False
        self._created = (created, now_s, now_s)
        return last_s - first_s >= _STEADY_S

    def page(self, body: bytes, now_s: float) -> bool:
        """Take a metrics page; whether another process gave it than those before."""
        found = _STARTED.search(body)
        if found is None:
            return False
        started = float(found[1])
        before, first_s, last_s = self._started or (started, now_s, now_s)
        if started - before > max(last_s - first_s, _APART_S):
            self._started = (started, now_s, now_s)
            return True
        self._started = (max(started, before), first_s, now_s)
        return False
