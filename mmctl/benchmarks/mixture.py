"""Text beside images over two backends: the first token's P99 by round robin and by the guard.

One load in three forms, taken in turns: its text alone through the guard, all of it dealt out
in turn to the backends, all of it through the guard. Arrivals are Poisson from a seed. Backends
are the servers that are named, or two of our own that work on one request at a time and sleep
for as long as work would take (their times are modelled, the waits are measured).
"""

from __future__ import annotations

import asyncio
import base64
import random
import statistics
import time
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import msgspec

from mmctl.benchmarks.relay import guard_process, python_process
from mmctl.engine.errors import MmctlError, quiet_interrupt

IMAGE_SHARE = 0.2
BUDGET_FACTOR = 1.2
PREFILL_S, TOKEN_S, ENCODE_S = 0.008, 0.002, 0.12  # of the backends of our own
OUTPUT_TOKENS = 4
IMAGE_SIDE = 512
FORMS = ("text_alone", "round_robin", "guard")


def noise_png(side: int, seed: int) -> str:
    """A data URL of a grey image that no cache has seen."""
    import numpy as np

    from mmctl.engine.recovery.canaries import png

    pixels = np.random.default_rng(seed).integers(0, 256, (side // 32, side // 32, 1), np.uint8)
    image = np.repeat(np.repeat(np.repeat(pixels, 32, 0), 32, 1), 3, 2)
    return "data:image/png;base64," + base64.b64encode(png(image)).decode()


def _body(model: str, number: int, image: bool) -> bytes:
    content: list[Any] = [{"type": "text", "text": f"a red square and {number} blue circles"}]
    if image:
        url = noise_png(IMAGE_SIDE, number)
        content.insert(0, {"type": "image_url", "image_url": {"url": url}})
    return msgspec.json.encode(
        {
            "model": model, "stream": True, "max_tokens": OUTPUT_TOKENS, "temperature": 0,
            "messages": [{"role": "user", "content": content}],
        }
    )  # fmt: skip


async def serial_backend() -> None:
    """Serve one request at a time until killed, in the times above; says its address."""
    from aiohttp import web

    turn = asyncio.Lock()

    async def models(request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": "serial"}]})

    async def answer(request: web.Request) -> web.StreamResponse:
        body = await request.read()
        image = b'"image_url"' in body
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        if b'"stream":true' not in body:
            message = {"role": "assistant", "content": "yes"}
            return web.json_response({"choices": [{"message": message}]})
        async with turn:
            await asyncio.sleep(PREFILL_S + ENCODE_S * image)
            await response.prepare(request)
            for _ in range(OUTPUT_TOKENS):
                await response.write(b'data: {"choices":[{"delta":{"content":"word"}}]}\n\n')
                await asyncio.sleep(TOKEN_S)
        usage = b'{"prompt_tokens":%d,"completion_tokens":4}' % (2928 * image + 12)
        await response.write(b'data: {"choices":[],"usage":' + usage + b"}\n\ndata: [DONE]\n\n")
        return response

    app = web.Application(client_max_size=64 << 20)
    app.router.add_get("/v1/models", models)
    app.router.add_post("/v1/chat/completions", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    print(f"http://127.0.0.1:{runner.addresses[0][1]}", flush=True)
    await asyncio.Event().wait()


async def _first_token_s(session: Any, url: str, body: bytes) -> float:
    """Seconds to the first token; the answer is read to its end."""
    begun, first = time.perf_counter(), None
    async with session.post(
        f"{url}/v1/chat/completions", data=body, headers={"Content-Type": "application/json"}
    ) as answer:
        if answer.status != 200:
            raise MmctlError(f"{url} answered {answer.status}: {(await answer.text())[:200]}")
        answered = b""
        async for chunk in answer.content.iter_any():
            answered += chunk
            if first is None and b'"content":"' in chunk.replace(b'"content":""', b""):
                first = time.perf_counter() - begun
    if first is None and b"[DONE]" not in answered and b'"finish_reason":"' not in answered:
        raise MmctlError(f"{url} gave no token: {answered[-300:].decode(errors='replace')}")
    if first is None:  # an answer without a word: its end is what a client sees first
        first = time.perf_counter() - begun
    return first


async def _round(
    urls: Sequence[str], model: str, rate_per_s: float, seconds: float, seed: int, images: bool
) -> list[float]:
    """First tokens of the text of one load, dealt out to ``urls`` in turn.

    MmctlError for the first request that fails; the others are given up.
    """
    import aiohttp

    draw = random.Random(seed)
    arrivals, at = [], draw.expovariate(rate_per_s)
    while at < seconds:
        arrivals.append((at, draw.random() < IMAGE_SHARE))
        at += draw.expovariate(rate_per_s)
    if not images:
        arrivals = [arrival for arrival in arrivals if not arrival[1]]
    bodies = [_body(model, seed * 10_000 + n, image) for n, (_, image) in enumerate(arrivals)]
    found: list[float] = []
    failed: list[MmctlError] = []
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        begun = time.perf_counter()

        async def one(number: int, image: bool) -> None:
            url = urls[number % len(urls)]
            try:
                first_s = await _first_token_s(session, url, bodies[number])
            except MmctlError as error:
                failed.append(error)
            except aiohttp.ClientError as error:
                failed.append(MmctlError(f"{url} does not answer: {error}"))
            else:
                if not image:
                    found.append(first_s)

        tasks = []
        for number, (at, image) in enumerate(arrivals):
            await asyncio.sleep(max(0.0, begun + at - time.perf_counter()))
            if failed:
                break
            tasks.append(asyncio.create_task(one(number, image)))
        while not failed and not all(task.done() for task in tasks):
            await asyncio.wait(tasks, timeout=0.05)
        for task in tasks:
            task.cancel()
        ended = await asyncio.gather(*tasks, return_exceptions=True)
    for error in (*failed, *ended):
        if isinstance(error, BaseException):
            raise error
    return found


def check(urls: Sequence[str]) -> None:
    """MmctlError for a backend that does not list its models: said before anything is measured."""
    import httpx

    for url in urls:
        try:
            httpx.get(f"{url}/v1/models", timeout=5.0).raise_for_status()
        except httpx.HTTPError as error:
            raise MmctlError(f"--backend {url} does not list its models: {error}") from None


def measure(
    *,
    rate_per_s: float = 12.0,
    seconds: float = 10.0,
    rounds: int = 3,
    backends: Sequence[str] = (),
    model: str = "serial",
    requests: int = 64,
) -> dict[str, Any]:
    """First tokens of text in the three forms at ``rate_per_s`` requests, a fifth with images."""
    with ExitStack() as stack:
        urls = list(backends)
        if not urls:
            started = [
                stack.enter_context(python_process("mmctl.benchmarks.mixture")) for _ in range(2)
            ]
            urls = [f"http://127.0.0.1:{port}" for _, port in started]
        _, port = stack.enter_context(
            guard_process(urls, "--mode", "enforce", "--requests", str(requests))
        )
        guard = f"http://127.0.0.1:{port}"
        times: dict[str, list[float]] = {form: [] for form in FORMS}
        for turn in range(rounds):
            for form in FORMS:
                through = urls if form == "round_robin" else [guard]
                images = form != "text_alone"
                times[form] += asyncio.run(
                    _round(through, model, rate_per_s, seconds, turn, images)
                )
    alone = _quantile(times["text_alone"], 99)
    return {
        "basis": "measured" if backends else "modelled", "rate_per_s": rate_per_s,
        "image_share_ratio": IMAGE_SHARE, "text_requests": len(times["guard"]),
        **{f"{form}_ttft_p50_s": _quantile(times[form], 50) for form in FORMS},
        **{f"{form}_ttft_p99_s": _quantile(times[form], 99) for form in FORMS},
        "round_robin_factor": _quantile(times["round_robin"], 99) / alone,
        "guard_factor": _quantile(times["guard"], 99) / alone,
        "budget_factor": BUDGET_FACTOR,
    }  # fmt: skip


def _quantile(values: list[float], rank: int) -> float:
    return statistics.quantiles(values, n=100)[rank - 1]


if __name__ == "__main__":
    with quiet_interrupt():
        asyncio.run(serial_backend())
