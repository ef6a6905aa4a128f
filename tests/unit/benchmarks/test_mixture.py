"""The load of text beside images, where a backend fails."""

from __future__ import annotations

import asyncio
import socket
from contextlib import closing

import pytest

from mmctl.engine.errors import MmctlError

pytest.importorskip("aiohttp", reason="needs the extra 'guard'")
from mmctl.benchmarks import mixture


def _nobody() -> str:
    with closing(socket.create_server(("127.0.0.1", 0))) as server:
        return f"http://127.0.0.1:{server.getsockname()[1]}"


def test_a_backend_that_is_gone_ends_the_round_with_one_error(caplog) -> None:
    url = _nobody()
    with pytest.raises(MmctlError, match=f"{url} does not answer"):
        asyncio.run(mixture._round([url], "m", 200.0, 30.0, 1, images=True))
    assert "never retrieved" not in caplog.text


def test_a_backend_that_is_gone_is_said_before_anything_is_measured() -> None:
    url = _nobody()
    with pytest.raises(MmctlError, match=f"--backend {url} does not list its models"):
        mixture.check([url])
