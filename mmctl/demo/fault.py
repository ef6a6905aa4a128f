"""Faults that a verification, a rule or a diagnosis must find, injected into a running worker."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING

from mmctl.engine.errors import UsageError, suggestion
from mmctl.engine.recovery.faults import FAULTS, inject

if TYPE_CHECKING:
    from mmctl.demo.worker import Worker

KINDS = (*FAULTS, "killed", "stuck", "leak")
"""Damaged weights, a worker killed in mid-batch, a device that hangs, a free that fails."""


def begin(worker: Worker, kind: str, seed: int) -> str:
    """Do it; what was done, in words. Nothing but the answers of the worker tells of it.

    Raises UsageError for a kind not in ``KINDS``.
    """
    if kind == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    server = worker.server
    if kind == "stuck":
        server.setup = worker.setup = worker.setup._replace(stalls_at=server.step_number)
        return "the scheduler has stopped"
    if kind == "leak":
        server.setup = worker.setup = worker.setup._replace(leaks=True)
        return "features of images are kept from now on"
    if kind in FAULTS:
        return inject(worker.model, kind, seed)
    raise UsageError(f"no fault '{kind}': one of {', '.join(KINDS)}{suggestion(kind, KINDS)}")
