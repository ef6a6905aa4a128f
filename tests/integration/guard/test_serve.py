"""A real server and a real client: ``transformers serve`` with a tiny model, and ``openai``."""

from __future__ import annotations

import asyncio
import base64
import io
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integration.guard.parts import ROOT
from tests.integration.guard.test_failures import status

for needed in ("transformers", "torch", "fastapi", "uvicorn"):
    pytest.importorskip(needed, reason="needs transformers[serving]")
pytest.importorskip("httpx")  # before two threads import it at once
openai = pytest.importorskip("openai", reason="needs the openai package")
Image = pytest.importorskip("PIL.Image", reason="needs Pillow")

Guarded = Callable[..., Awaitable[str]]
SIZES = {(256, 256): 1176, (512, 512): 2928, (1024, 768): 2340}  # image tokens
MAKER = Path(os.environ.get("MMCTL_TEST_DATA", ROOT.parent / "shared" / "data")).parent
ENVIRONMENT = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
WAIT_S = 120


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    """(URL, model) of a running server."""
    maker = MAKER / "tools" / "tiny_vlm.py"
    if not maker.is_file():
        pytest.skip("the maker of the tiny model is absent (beside the folder of real inputs)")
    folder = tmp_path_factory.mktemp("tiny")
    subprocess.run([sys.executable, str(maker), str(folder)], check=True, env=ENVIRONMENT)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [str(Path(sys.executable).with_name("transformers")), "serve", str(folder)]
    if not Path(command[0]).is_file():
        command[0] = "transformers"
    with open(folder / "log", "wb") as log:
        server = subprocess.Popen(
            [*command, "--device", "cpu", "--port", str(port)], env=ENVIRONMENT, stdout=log,
            stderr=log,
        )  # fmt: skip
    url, end = f"http://127.0.0.1:{port}", time.monotonic() + WAIT_S
    try:
        while True:
            try:
                urllib.request.urlopen(url + "/health", timeout=5).close()
                break
            except OSError:
                if server.poll() is not None or time.monotonic() > end:
                    pytest.skip(f"the server did not start: {(folder / 'log').read_text()[-300:]}")
                time.sleep(0.2)
        yield url, str(folder)
    finally:
        server.kill()
        server.wait()


def picture(size: tuple[int, int], seed: int) -> str:
    out = io.BytesIO()
    Image.effect_noise(size, 20 + seed).convert("RGB").save(out, "JPEG")
    return "data:image/jpeg;base64," + base64.b64encode(out.getvalue()).decode()


def ask(url: str, model: str, size: tuple[int, int] | None, seed: int = 0, **more: Any) -> Any:
    client = openai.OpenAI(base_url=url + "/v1", api_key="none", max_retries=0)
    content: list[Any] = [{"type": "text", "text": "a red square on the left"}]
    if size is not None:
        content.insert(0, {"type": "image_url", "image_url": {"url": picture(size, seed)}})
    return client.chat.completions.create(
        model=model, messages=[{"role": "user", "content": content}], max_tokens=4,
        temperature=0, **more,
    )  # fmt: skip


async def test_observed_answers_are_direct_ones_and_predictions_hold(
    served: tuple[str, str], guarded: Guarded, client: Any
) -> None:
    direct, model = served
    guard = await guarded([direct])
    for size in (*SIZES, None):
        answers = [await asyncio.to_thread(ask, url, model, size) for url in (direct, guard)]
        said = [(a.choices, a.usage, a.model) for a in answers]
        assert said[0] == said[1]

    def streamed(url: str) -> list[str | None]:
        events = ask(url, model, (256, 256), stream=True)
        return [choice.delta.content for event in events for choice in event.choices]

    assert "".join(text or "" for text in await asyncio.to_thread(streamed, direct)) == "".join(
        text or "" for text in await asyncio.to_thread(streamed, guard)
    )
    for number in range(10):
        for size in SIZES:
            await asyncio.to_thread(ask, guard, model, size, number)
    (found,) = (await status(client, guard))["models"].values()
    assert found["family"] == "llava_next"
    assert found["samples"] >= 35
    assert found["prompt_error"]["vision"] < 0.05


async def test_enforced_the_image_arrives_within_its_budget(
    served: tuple[str, str], guarded: Guarded
) -> None:
    direct, model = served
    guard = await guarded([direct], "enforce", frozenset({"shrink_images"}), image_tokens=1200)
    whole = await asyncio.to_thread(ask, direct, model, (512, 512))
    small = await asyncio.to_thread(ask, guard, model, (512, 512))
    words = whole.usage.prompt_tokens - SIZES[512, 512]
    assert small.usage.prompt_tokens - words <= 1200
    as_it_was = await asyncio.to_thread(ask, guard, model, (256, 256))
    assert as_it_was.usage.prompt_tokens - words == SIZES[256, 256]
