"""What examples find already running: serving engines, workers, a hooked program, a breaker.

Each starts the real thing (a small HTTP server stands for a serving engine) and gives the text
that takes the place of what the example says.
"""

from __future__ import annotations

import base64
import json
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from mmctl.engine.records import Memory
from mmctl.engine.recovery.canaries import CANARIES, CAPTION, draw, png
from mmctl.engine.sources.agent import connect, records
from tests.cli.examples.files import FIXTURES, prepare

RUNTIME = Path(__file__).parents[2] / "unit" / "native" / "fake_cudart.c"
START_S = 60.0
STUB = """
int cudaLaunchKernel(const void *f) { return f != 0; }
int aclrtLaunchKernel(long id) { return (int)id; }
"""
SERVER = """
#include <unistd.h>
int cudaLaunchKernel(const void *f);
int aclrtLaunchKernel(long id);
int main(int argc, char **argv) {
  for (long i = 0; i < 40 || argc > 1; i++) {
    cudaLaunchKernel((void *)i);
    aclrtLaunchKernel(i);
    usleep(50000);
  }
  return 0;
}
"""
ALLOCATOR = """
#include <unistd.h>
int cudaMalloc(void **a, unsigned long size);
int cudaFree(void *a);
int main(void) {
  for (void *a;; cudaFree(a)) { cudaMalloc(&a, 1 << 20); usleep(50000); }
}
"""
Environment = dict[str, str]
Service = Callable[[Path, Environment], AbstractContextManager[str]]


def begin(line: str, folder: Path, environment: Environment, stack: ExitStack) -> str:
    """Start what ``line`` needs, end it with ``stack``; the line as it is to be run here."""
    for text, service in SERVICES.items():
        if text in line:
            line = line.replace(text, stack.enter_context(service(folder, environment)))
    return line


class _Engine(BaseHTTPRequestHandler):
    """vLLM's metrics page, and an OpenAI-compatible server that knows the canaries."""

    PAGE = (FIXTURES / "readers" / "engine.prom").read_bytes()
    ANSWERS = {base64.b64encode(png(draw(canary))).decode(): canary for canary in CANARIES}  # noqa: RUF012

    def do_GET(self) -> None:
        known: dict[str, bytes] = {
            "/metrics": self.PAGE, "/health": b"{}",
            "/v1/models": b'{"object": "list", "data": [{"id": "small-vl"}]}',
        }  # fmt: skip
        self._send(200 if self.path in known else 404, known.get(self.path, b"{}"))

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        if self.path == "/v1/metrics":  # an OpenTelemetry collector takes everything
            return self._send(200, b"")
        if self.path != "/v1/chat/completions":
            return self._send(404, b"{}")
        asked = json.loads(body)
        text = self._answer(asked["messages"][-1]["content"])
        if asked.get("stream"):
            told = {"choices": [{"delta": {"content": text}}]}
            return self._send(
                200, f"data: {json.dumps(told, separators=(',', ':'))}\n\ndata: [DONE]\n\n".encode()
            )
        told = {"choices": [{"message": {"role": "assistant", "content": text}}]}
        self._send(200, json.dumps(told).encode())

    def _answer(self, content: Any) -> str:
        """The right one about a canary; the same about everything else."""
        parts = content if isinstance(content, list) else []
        images = [part["image_url"]["url"] for part in parts if part["type"] == "image_url"]
        canary = self.ANSWERS.get(images[0].partition("base64,")[2]) if images else None
        if canary is None:
            return "yes"
        asked = next(part["text"] for part in parts if part["type"] == "text")
        return canary.caption if asked == CAPTION else canary.answer

    def _send(self, code: int, content: bytes) -> None:
        self.send_response(code)
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:
        pass


@contextmanager
def _serving(folder: Path, environment: Environment) -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), _Engine) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


@contextmanager
def _free(folder: Path, environment: Environment) -> Iterator[str]:
    """A port that nobody has."""
    yield "127.0.0.1:0"


@contextmanager
def _worker(folder: Path, environment: Environment) -> Iterator[str]:
    """The demo's worker at a socket of its own."""
    pytest.importorskip("torch", reason="the demo's worker needs the extra 'torch'")
    socket = folder / "w.sock"
    command = [sys.executable, "-m", "mmctl.demo", "--scenario", "calm", "--socket", str(socket)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, env=environment) as worker:
        try:
            _until(socket.exists, worker)
            yield str(socket)
        finally:
            worker.kill()


@contextmanager
def _agent(folder: Path, environment: Environment) -> Iterator[str]:
    """A worker that has begun to serve: its model is loaded and it allocates."""
    with _worker(folder, environment) as socket:
        stop = threading.Event()
        next(r for r in records(connect(socket), stop) if isinstance(r, Memory))
        stop.set()
        yield f"agent:{socket}"


@contextmanager
def _hooked(folder: Path, environment: Environment) -> Iterator[str]:
    """A program under the allocation hook, with a runtime library that only counts."""
    (folder / "allocator.c").write_text(ALLOCATOR)
    library, program = folder / "libcudart.so.13", folder / "allocator"
    _compile(folder, "-shared", "-fPIC", f"-Wl,-soname,{library.name}", RUNTIME, "-o", library)
    _compile(folder, "allocator.c", library, f"-Wl,-rpath,{folder}", "-o", program)
    with subprocess.Popen(
        [sys.executable, "-m", "mmctl", "breaker", "run", "--", program], env=environment,
        stderr=subprocess.PIPE, text=True,
    ) as running:  # fmt: skip
        assert running.stderr is not None
        try:
            uri = running.stderr.readline().split()[0]
            state = Path(environment["XDG_RUNTIME_DIR"], "mmctl", "hook", uri.replace(":", "-"))
            _until(state.exists, running)
            yield uri
        finally:
            running.terminate()


@contextmanager
def _library(folder: Path, environment: Environment) -> Iterator[str]:
    """A library that launches kernels, and ``./server`` that calls it for two seconds."""
    (folder / "stub.c").write_text(STUB)
    (folder / "server.c").write_text(SERVER)
    _compile(folder, "-shared", "-fPIC", "stub.c", "-o", "libstub.so")
    _compile(folder, "server.c", folder / "libstub.so", f"-Wl,-rpath,{folder}", "-o", "server")
    yield "./libstub.so"


@contextmanager
def _launching(folder: Path, environment: Environment) -> Iterator[str]:
    with subprocess.Popen([folder / "server", "for ever"]) as program:
        yield str(program.pid)
        program.kill()


@contextmanager
def _watched(name: str, folder: Path, environment: Environment) -> Iterator[str]:
    """A breaker that has run on this node, and a device that it has tripped by hand."""
    watch = "watch nvml: --mode enforce --duration 1s"
    for arguments in (watch, "trip gpu1 --reason drill", *([watch] if name == "log" else [])):
        subprocess.run(
            [sys.executable, "-m", "mmctl", "breaker", *arguments.split()], env=environment,
            check=False, capture_output=True, timeout=START_S,
        )  # fmt: skip
    yield f"mmctl breaker {name}"


@contextmanager
def _log(folder: Path, environment: Environment) -> Iterator[str]:
    prepare("kern.log", folder)
    yield "kern.log"


def _compile(folder: Path, *arguments: str | Path) -> None:
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler")
    subprocess.run([compiler, "-O1", *arguments], cwd=folder, check=True)


def _until(ready: Callable[[], bool], process: subprocess.Popen[Any]) -> None:
    end = time.monotonic() + START_S
    while not ready():
        assert process.poll() is None and time.monotonic() < end, "it did not start"
        time.sleep(0.05)


# In this order: a library is there before the program that calls it.
SERVICES: dict[str, Service] = {
    "http://127.0.0.1:8000": _serving,
    "http://127.0.0.1:8001": _serving,
    "http://127.0.0.1:8002": _serving,
    "http://127.0.0.1:4318": _serving,
    "127.0.0.1:9000": _free,
    "agent:/run/engine.sock": _agent,
    "/run/user/0/mmctl/demo.sock": _worker,
    "hook:PID": _hooked,
    "/usr/lib/libcudart.so.13": _library,
    "./libstub.so": _library,
    "4242": _launching,
    "/var/log/kern.log": _log,
    **{f"mmctl breaker {name}": partial(_watched, name)
       for name in ("status", "log", "trip", "hold", "reset", "forget")},
}  # fmt: skip

# Programs of other people that examples pipe from or run, with what they would say.
PROGRAMS = {
    "mmctl": f'exec {sys.executable} -m mmctl "$@"',
    "python": f'exec {sys.executable} "$@"',
    "journalctl": f"exec cat {FIXTURES}/readers/kernel.log",
    "gateway": """printf '{"id": 1, "images": 1, "vision_tokens": 900}\\n{"id": 2}\\n'""",
    "vllm": "sleep 600 & trap 'kill $!; exit 143' TERM; wait",
}


def programs(folder: Path) -> Path:
    """A folder for PATH that holds ``PROGRAMS``."""
    folder.mkdir(exist_ok=True)
    for name, body in PROGRAMS.items():
        path = folder / name
        path.write_text(f"#!/bin/sh\n{body}\n")
        path.chmod(0o755)
    return folder
