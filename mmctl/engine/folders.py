"""Where mmctl keeps what it keeps, by the XDG base directory specification; none is made here."""

from __future__ import annotations

import os
from pathlib import Path


def config() -> Path:
    """``$XDG_CONFIG_HOME/mmctl``: the user's profiles and the name of the active one."""
    return _base("XDG_CONFIG_HOME", ".config")


def state() -> Path:
    """``$XDG_STATE_HOME/mmctl``: the breaker's memory and audit log, recordings."""
    return _base("XDG_STATE_HOME", ".local/state")


def cache() -> Path:
    """``$XDG_CACHE_HOME/mmctl``: what can be made again, such as compiled code."""
    return _base("XDG_CACHE_HOME", ".cache")


def runtime() -> Path:
    """``$XDG_RUNTIME_DIR/mmctl``: sockets and shared files of running processes."""
    base = os.environ.get("XDG_RUNTIME_DIR")
    return Path(base) / "mmctl" if base else Path(f"/tmp/mmctl-{os.getuid()}")


def _base(variable: str, home: str) -> Path:
    return Path(os.environ.get(variable) or Path.home() / home) / "mmctl"
