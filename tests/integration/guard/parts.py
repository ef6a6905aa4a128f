"""A backend that answers over real sockets, and a raw client."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec
from aiohttp import web

ROOT = Path(__file__).parents[3]
Answer = Callable[[web.Request, bytes], Awaitable[web.StreamResponse]]


class Engine:
    """A server that speaks enough of the OpenAI API, and remembers what reached it."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, dict[str, str], bytes]] = []
        self.canaries = 0
        self.words = "the same words"  # what it answers to canaries
        self.gone: list[str] = []
        self.started_s: float | None = None  # as its metrics page has it; None: it has no page
        self.answer: Answer = completion
        self.port = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def start(self, port: int = 0) -> None:
        app = web.Application(client_max_size=1 << 30)
        app.router.add_route("*", "/{path:.*}", self._handle)
        self.runner = web.AppRunner(app, handler_cancellation=True, auto_decompress=False)
        await self.runner.setup()
        await web.TCPSite(self.runner, "127.0.0.1", port or self.port).start()
        self.port = self.runner.addresses[0][1]

    async def stop(self) -> None:
        await self.runner.cleanup()

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        if request.path == "/v1/models":
            return web.json_response({"object": "list", "data": [{"id": "tiny"}]})
        if request.path == "/metrics":
            if self.started_s is None:
                return web.Response(status=404)
            return web.Response(text=f"process_start_time_seconds {self.started_s}\n")
        if "httpx" in request.headers.get("User-Agent", ""):  # the guard's canaries
            self.canaries += 1
            message = {"role": "assistant", "content": self.words}
            return web.json_response({"choices": [{"message": message}], "usage": {}})
        self.seen.append((request.path_qs, dict(request.headers), body))
        try:
            return await self.answer(request, body)
        except asyncio.CancelledError:
            self.gone.append(request.path)
            raise


async def completion(request: web.Request, body: bytes) -> web.StreamResponse:
    """Ten words, at once or as a stream, with the number of bytes as the prompt's tokens."""
    asked = msgspec.json.decode(body) if body else {}
    words = [f"w{number} " for number in range(10)]
    usage = {"prompt_tokens": len(body), "completion_tokens": 10, "total_tokens": len(body) + 10}
    if not asked.get("stream"):
        message = {"role": "assistant", "content": "".join(words)}
        return web.json_response({"choices": [{"message": message}], "usage": usage})
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "X-Engine": "yes"})
    await response.prepare(request)
    for word in words:
        piece = msgspec.json.encode({"choices": [{"delta": {"content": word}}]})
        await response.write(b"data: " + piece + b"\n\n")
        await asyncio.sleep(0)
    end = msgspec.json.encode({"choices": [], "usage": usage})
    await response.write(b"data: " + end + b"\n\ndata: [DONE]\n\n")
    return response


async def raw(url: str, request: bytes) -> bytes:
    """Send bytes as they are and read until the other side closes."""
    host, _, port = url.removeprefix("http://").partition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(request)
    await writer.drain()
    answer = await asyncio.wait_for(reader.read(), 20)
    writer.close()
    return answer


class Killable:
    """An engine in a process of its own, slow enough to be caught at work; ``kill`` is -9.

    It appends the body of every request to a file before it answers.
    """

    def __init__(self, log: Path) -> None:
        self.log, self.port = log, 0
        self.process: subprocess.Popen[str] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        command = [sys.executable, "-m", "tests.integration.guard.parts", str(self.log)]
        self.process = subprocess.Popen(
            [*command, str(self.port)], cwd=ROOT, stdout=subprocess.PIPE, text=True
        )
        assert self.process.stdout is not None
        self.port = int(self.process.stdout.readline())

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()

    def received(self) -> list[bytes]:
        return self.log.read_bytes().splitlines() if self.log.exists() else []


async def _serve(log: Path, port: int) -> None:
    engine = Engine()

    async def answer(request: web.Request, body: bytes) -> web.StreamResponse:
        with open(log, "ab", buffering=0) as file:
            file.write(body.replace(b"\n", b" ") + b"\n")
        await asyncio.sleep(5 if b"linger" in body else 0.1)
        return await completion(request, body)

    engine.answer = answer
    await engine.start(port)
    print(engine.port, flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(_serve(Path(sys.argv[1]), int(sys.argv[2])))
