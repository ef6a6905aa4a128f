"""The demo's own look at its attention, from an eager run beside the serving."""

from __future__ import annotations

from mmctl.agent.tracker import on_host
from mmctl.demo.server import Server
from mmctl.engine.responses import entropy

EVERY_STEPS = 10
"""Steps between two looks, where an image was encoded meanwhile."""

SIDE_PX = 112
"""Side of the corner of an image that is looked at: 64 patches, a few milliseconds."""


def look(server: Server) -> entropy.Sample | None:
    """How diffuse the full vision branch's attention to the newest image is; None when no look
    is due.

    The run is outside the pool's books: looking changes nothing that is looked at.
    """
    if server.newest is None or server.step_number % EVERY_STEPS:
        return None
    with on_host(), entropy.captured(server.model) as layers:
        corner = server.newest.images()[0][None, :, :SIDE_PX, :SIDE_PX]
        server.newest = None
        server.model.encode(corner.to(server.model.head.weight.device))
        return entropy.look(layers)
