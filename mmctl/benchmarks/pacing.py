"""A slow link where there is none: the sockets of a gloo group, paced by the kernel.

The rate is set on the very sockets that gloo opened (SO_MAX_PACING_RATE, which TCP keeps by its
own timer, without a queueing discipline): no relay copies the bytes, so that waiting for the
link takes no processor time.
"""

from __future__ import annotations

import os
import socket
import struct
import sys
from collections.abc import Collection

SO_MAX_PACING_RATE = 47  # asm-generic/socket.h; the module socket has no name for it
UNPACED = 2**32 - 1


def reason_without() -> str | None:
    """Why sockets cannot be paced here; None where they can."""
    if sys.platform != "linux":
        return "only Linux lets a process pace its sockets"
    return None


def sockets() -> set[int]:
    """The file descriptors of this process that are sockets."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            if os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                found.add(int(name))
        except OSError:
            continue  # closed since it was listed
    return found


def pace(numbers: Collection[int], bytes_per_s: float | None) -> int:
    """Let each of these sockets send at most so much (None: as fast as it can); how many are
    connections over TCP."""
    rate = UNPACED if bytes_per_s is None else min(UNPACED - 1, max(1024, round(bytes_per_s)))
    count = 0
    for number in numbers:
        with socket.socket(fileno=os.dup(number)) as one:
            if one.family not in (socket.AF_INET, socket.AF_INET6):
                continue
            try:
                one.getpeername()
            except OSError:
                continue  # it listens
            one.setsockopt(socket.SOL_SOCKET, SO_MAX_PACING_RATE, struct.pack("I", rate))
            count += 1
    return count
