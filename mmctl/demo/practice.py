"""A practice server that speaks the OpenAI API: ``python -m mmctl.demo --openai PORT``.

Answers are those of the package's own small model, on this machine's CPU: greedy, whatever
temperature is asked for, and of token ids instead of words, because its weights are random. What
is real is what a gateway needs to see: prompt tokens that count an image by its size, a KV cache
that fills and lets requests wait, streams, log-probabilities, the metrics page of an engine.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import time
from collections.abc import AsyncGenerator, AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from typing import Any

import msgspec
import torch
from aiohttp import web
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

from mmctl.demo.prompt import Prompt, Token, answer, read
from mmctl.engine import model as models
from mmctl.engine.errors import MmctlError

MODEL = "mmctl-tiny"
KV_TOKENS = 8192
"""Tokens that fit: a request that needs more than is left waits."""
_BODY_BYTES = 64 << 20
_OUTPUT_TOKENS = 16


class _Ask(msgspec.Struct):
    """What is read of a request; the API's other fields change nothing here."""

    messages: list[dict[str, Any]]
    model: str = MODEL
    stream: bool = False
    stream_options: dict[str, Any] | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    logprobs: bool = False
    top_logprobs: int = 0


class Server:
    """The model, what is in work, and the metrics page, under the names that vLLM gives them."""

    def __init__(self, seed: int) -> None:
        self.model = models.build(seed=seed)
        self.created = int(time.time())
        self.held = 0  # tokens of the requests in work
        self.room = asyncio.Condition()
        self.turns = ThreadPoolExecutor(1)  # requests in work advance in turn, by a token each
        self.numbers = itertools.count(1)
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        label = {"labelnames": ("model_name",), "registry": self.registry}

        def of(kind: Any, name: str, told: str) -> Any:
            return kind(f"vllm:{name}", told, **label).labels(MODEL)

        self.running = of(Gauge, "num_requests_running", "Requests in work.")
        self.waiting = of(Gauge, "num_requests_waiting", "Requests that wait for room.")
        self.kv = of(Gauge, "kv_cache_usage_perc", "Share of the KV tokens that is taken.")
        self.prompts = of(Counter, "prompt_tokens", "Prompt tokens read.")
        self.generated = of(Counter, "generation_tokens", "Tokens generated.")
        self.ttft = of(Histogram, "time_to_first_token_seconds", "Arrival to first token.")
        self.itl = of(Histogram, "inter_token_latency_seconds", "From a token to the next.")
        self.e2e = of(Histogram, "e2e_request_latency_seconds", "Arrival to the last token.")

    async def tokens(self, prompt: Prompt, count: int, top: int) -> AsyncGenerator[Token, None]:
        """The tokens of an answer, once there is room for it."""
        loop, arrived, need = asyncio.get_running_loop(), time.monotonic(), prompt.tokens + count
        with self.waiting.track_inprogress():
            async with self.room:
                await self.room.wait_for(lambda: self.held + need <= KV_TOKENS)
                self.held += need
        self.kv.set(self.held / KV_TOKENS)
        try:
            with self.running.track_inprogress():
                steps, before = answer(self.model, prompt, count, top), arrived
                while token := await loop.run_in_executor(self.turns, next, steps, None):
                    now = time.monotonic()
                    (self.ttft if before == arrived else self.itl).observe(now - before)
                    self.generated.inc()
                    before = now
                    yield token
            self.prompts.inc(prompt.tokens)
            self.e2e.observe(time.monotonic() - arrived)
        finally:
            self.held -= need
            self.kv.set(self.held / KV_TOKENS)
            async with self.room:
                self.room.notify_all()

    async def chat(self, request: web.Request) -> web.StreamResponse:
        """POST /v1/chat/completions."""
        try:
            ask = msgspec.json.decode(await request.read(), type=_Ask)
            if ask.model != MODEL:
                return _error(404, f"there is no model {ask.model!r}: {MODEL}")
            prompt = await asyncio.to_thread(read, ask.messages)
        except (
            ValueError,
            TypeError,
            LookupError,
            AttributeError,
            RecursionError,
            msgspec.MsgspecError,
        ) as error:
            return _error(400, str(error) or type(error).__name__)
        count = max(1, ask.max_completion_tokens or ask.max_tokens or _OUTPUT_TOKENS)
        if prompt.tokens + count > KV_TOKENS:
            said = f"the request needs {prompt.tokens + count} tokens of {KV_TOKENS}"
            return _error(400, said)
        usage = {
            "prompt_tokens": prompt.tokens, "completion_tokens": count,
            "total_tokens": prompt.tokens + count,
        }  # fmt: skip
        whole = {
            "id": f"chatcmpl-{next(self.numbers)}", "created": int(time.time()), "model": MODEL,
            "object": "chat.completion.chunk" if ask.stream else "chat.completion",
        }  # fmt: skip
        top = min(max(ask.top_logprobs, 0), 20)
        async with aclosing(self.tokens(prompt, count, top)) as tokens:
            if ask.stream:
                return await _streamed(request, ask, tokens, whole, usage)
            answered = [token async for token in tokens]
        message = {"role": "assistant", "content": "".join(t.text for t in answered).strip()}
        choice = {
            "index": 0,
            "message": message,
            "finish_reason": "length",
            **_logprobs(ask, answered),
        }
        return web.json_response({**whole, "choices": [choice], "usage": usage})

    async def page(self, request: web.Request) -> web.Response:
        """GET /metrics."""
        body = generate_latest(self.registry)
        return web.Response(body=body, headers={"Content-Type": CONTENT_TYPE_LATEST})

    async def listed(self, request: web.Request) -> web.Response:
        """GET /v1/models; ``created`` is when this process began."""
        card = {"id": MODEL, "object": "model", "created": self.created, "owned_by": "mmctl"}
        return web.json_response({"object": "list", "data": [card]})


async def _streamed(
    request: web.Request, ask: _Ask, tokens: AsyncIterator[Token], whole: dict[str, Any],
    usage: dict[str, int],
) -> web.StreamResponse:  # fmt: skip
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)

    async def event(choices: list[Any], **more: Any) -> None:
        data = msgspec.json.encode({**whole, "choices": choices, **more})
        await response.write(b"data: " + data + b"\n\n")

    async for token in tokens:
        delta = {"role": "assistant", "content": token.text}
        choice = {"index": 0, "delta": delta, "finish_reason": None, **_logprobs(ask, [token])}
        await event([choice])
    await event([{"index": 0, "delta": {}, "finish_reason": "length"}])
    if (ask.stream_options or {}).get("include_usage"):
        await event([], usage=usage)
    await response.write(b"data: [DONE]\n\n")
    return response


def _logprobs(ask: _Ask, said: list[Token]) -> dict[str, Any]:
    if not ask.logprobs:
        return {}
    steps = [{"token": t.text, "logprob": t.logprob, "top_logprobs": t.top} for t in said]
    return {"logprobs": {"content": steps}}


def _error(status: int, message: str) -> web.Response:
    error = {"message": message, "type": "invalid_request_error", "param": None, "code": status}
    return web.json_response({"error": error}, status=status)


async def _healthy(request: web.Request) -> web.Response:
    return web.Response()


async def serve(port: int, seed: int) -> None:
    """Serve on loopback until cancelled; says its address. MmctlError where the port is taken."""
    torch.set_num_threads(1)
    server = Server(seed)
    app = web.Application(client_max_size=_BODY_BYTES)
    app.router.add_get("/health", _healthy)
    app.router.add_get("/metrics", server.page)
    app.router.add_get("/v1/models", server.listed)
    app.router.add_post("/v1/chat/completions", server.chat)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=1)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", port).start()
        print(f"{MODEL} on http://127.0.0.1:{runner.addresses[0][1]}", flush=True)
        await asyncio.Event().wait()
    except OSError as error:
        raise MmctlError(f"cannot listen on port {port}: {os.strerror(error.errno or 0)}") from None
    finally:
        await runner.cleanup()
        server.turns.shutdown(cancel_futures=True)
