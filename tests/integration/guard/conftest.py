"""Backends over real sockets, and guards in front of them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import msgspec
import pytest

pytest.importorskip("aiohttp", reason="the guard needs the extra 'guard'")

import aiohttp

from mmctl.engine import profiles
from mmctl.guard.app import Guard, Options
from mmctl.guard.backends import parse
from tests.integration.guard.parts import Engine


@pytest.fixture
async def engine() -> AsyncIterator[Engine]:
    running = Engine()
    await running.start()
    yield running
    await running.stop()


@pytest.fixture
async def guarded() -> AsyncIterator[Callable[..., Awaitable[str]]]:
    """Start a guard: ``url = await guarded([engine.url], mode, key=value…)`` of ``[guard]``.

    The function's ``running`` are those that run, the latest last.
    """
    running: list[Guard] = []

    async def start(
        urls: list[str], mode: profiles.Mode = "observe", drill: frozenset[str] = frozenset(),
        **changed: Any,
    ) -> str:  # fmt: skip
        profile = profiles.load("default").profile
        settings = msgspec.structs.replace(profile.guard, drain_s=0.2, **changed)
        profile = msgspec.structs.replace(profile, guard=settings)
        guard = Guard(profile, mode, parse(urls), Options(drill=drill))
        port = await guard.start("127.0.0.1", 0)
        running.append(guard)
        return f"http://127.0.0.1:{port}"

    start.running = running  # type: ignore[attr-defined]
    yield start
    for guard in running:
        await guard.stop()


@pytest.fixture
async def client() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(auto_decompress=False) as session:
        yield session
