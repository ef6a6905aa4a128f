"""Asking an OpenAI-compatible server: images, options it refuses, what it gives and what not."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from mmctl.engine import profiles
from mmctl.engine.errors import MmctlError
from mmctl.engine.recovery import asks
from mmctl.engine.recovery.canaries import CANARIES, CAPTION, draw, png
from mmctl.engine.recovery.goldens import observe, record
from mmctl.engine.recovery.verify import compare

SETTINGS = profiles.load("default").profile.recovery
BY_IMAGE = {base64.b64encode(png(draw(canary))).decode(): canary for canary in CANARIES}


class Server(ThreadingHTTPServer):
    """Knows the canaries; ``strict`` refuses fields as some servers do, ``wrong`` errs on one."""

    daemon_threads = True
    strict = True
    logprobs = True
    embeds = True
    wrong = False
    shift = 0.0

    def answer(self, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        if self.strict and "seed" in body:
            return 422, {"error": "unexpected field: seed"}
        if not self.logprobs and "logprobs" in body:
            return 400, {"error": "logprobs are not supported"}
        shown, asked = body["messages"][0]["content"]
        canary = BY_IMAGE[shown["image_url"]["url"].removeprefix("data:image/png;base64,")]
        text = canary.caption if asked["text"] == CAPTION else canary.answer
        if self.wrong and canary.name == "five_dots":
            text = "4"
        choice: dict[str, Any] = {"message": {"role": "assistant", "content": text}}
        if body.get("logprobs"):
            top = [{"token": text, "logprob": -0.1 + self.shift}, {"token": "?", "logprob": -3.0}]
            step = {"token": text, "logprob": -0.1 + self.shift, "top_logprobs": top}
            choice["logprobs"] = {"content": [step]}
        return 200, {"choices": [choice]}


class Handler(BaseHTTPRequestHandler):
    server: Server

    def _send(self, code: int, document: object) -> None:
        content = json.dumps(document).encode()
        self.send_response(code)
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def do_GET(self) -> None:
        self._send(200, {"data": [{"id": "served"}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        if self.path == "/v1/chat/completions":
            self._send(*self.server.answer(body))
        elif self.server.embeds:
            vector = [float(len(word)) for word in ([*body["input"].split(), "", "", ""])[:3]]
            self._send(200, {"data": [{"embedding": vector}]})
        else:
            self._send(404, {"error": "no embeddings here"})

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[Server]:
    with Server(("127.0.0.1", 0), Handler) as listening:
        threading.Thread(target=listening.serve_forever, daemon=True).start()
        yield listening
        listening.shutdown()


def url(server: Server) -> str:
    return f"http://127.0.0.1:{server.server_address[1]}"


def test_everything_a_server_gives_is_checked(server: Server) -> None:
    ask = asks.endpoint(url(server))
    goldens = record(ask, "test", SETTINGS, at_once=(1, 2, 4))
    assert all(golden.right for golden in goldens.answers if golden.right is not None)
    verdict = compare(goldens, observe(asks.endpoint(url(server) + "/v1/")), SETTINGS)
    assert verdict.verdict == "consistent"
    assert {"logits", "caption_embedding_distance"} <= {check.name for check in verdict.checks}

    server.wrong = True
    failed = [c.name for c in compare(goldens, observe(ask), SETTINGS).checks if not c.passed]
    assert failed == ["five_dots"]
    server.wrong, server.shift = False, 0.01
    failed = [c.name for c in compare(goldens, observe(ask), SETTINGS).checks if not c.passed]
    assert failed == ["logits"]


def test_what_a_server_refuses_is_left_out_and_named(server: Server) -> None:
    server.logprobs = server.embeds = False
    goldens = record(asks.endpoint(url(server)), "test", SETTINGS)
    verdict = compare(goldens, observe(asks.endpoint(url(server))), SETTINGS)
    assert verdict.verdict == "consistent"
    assert {"logits", "caption_embedding_distance"} <= verdict.absent.keys()


def test_nobody_there_and_no_chat_are_one_line(server: Server) -> None:
    with pytest.raises(MmctlError, match="is the server up"):
        asks.endpoint("http://127.0.0.1:9", timeout_s=2)
    ask = asks.endpoint("http://127.0.0.1:9", model="named", timeout_s=2)
    with pytest.raises(MmctlError, match="no answer from"):
        ask(draw(CANARIES[0]), "?")
    server.answer = lambda body: (200, {"choices": []})  # type: ignore[method-assign]
    with pytest.raises(MmctlError, match="no chat completion"):
        asks.endpoint(url(server))(draw(CANARIES[0]), "?")
    server.answer = lambda body: (500, {"error": "out of memory"})  # type: ignore[method-assign]
    with pytest.raises(MmctlError, match="answered 500"):
        asks.endpoint(url(server))(draw(CANARIES[0]), "?")
