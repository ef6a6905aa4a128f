"""Ways to ask a server about an image: an HTTP endpoint, a worker's socket, a Python callable.

Each gives an ``Ask``: image and question in, ``Answer`` out, MmctlError when there is none.
"""

from __future__ import annotations

import base64
import os
import socket
import sys
import time
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from mmctl.engine.errors import MmctlError, UsageError
from mmctl.engine.recovery.canaries import CAPTION, Image, png
from mmctl.engine.recovery.goldens import Answer, Ask

CLOSED_TOKENS, CAPTION_TOKENS = 16, 48
TIMEOUT_S = 120.0

# What servers refuse is left out from then on, most dispensable last: log-probabilities are
# worth most, a seed says nothing at temperature 0.
_OPTIONS: tuple[dict[str, Any], ...] = (
    {"temperature": 0, "seed": 0, "logprobs": True, "top_logprobs": 5},
    {"temperature": 0, "logprobs": True, "top_logprobs": 5},
    {"temperature": 0, "seed": 0},
    {"temperature": 0},
)


def endpoint(url: str, model: str | None = None, timeout_s: float = TIMEOUT_S) -> Ask:
    """Ask an OpenAI-compatible server at ``url`` (with or without ``/v1``).

    ``model`` is the first one that the server lists unless named. Captions are embedded where
    the server has ``/v1/embeddings``. A key is taken from ``OPENAI_API_KEY``. Raises
    MmctlError when the server does not list its models.
    """
    import httpx

    base = url.rstrip("/").removesuffix("/v1") + "/v1"
    key = os.environ.get("OPENAI_API_KEY")
    headers = {"authorization": f"Bearer {key}"} if key else {}
    client = httpx.Client(timeout=timeout_s, headers=headers)
    name = model or _first_model(client, base)
    state = {"options": 0, "embeds": True}

    def ask(image: Image, question: str) -> Answer:
        shown = "data:image/png;base64," + base64.b64encode(png(image)).decode()
        body = {
            "model": name,
            "max_tokens": CAPTION_TOKENS if question == CAPTION else CLOSED_TOKENS,
            "messages": [
                {
                    "role": "user",
                    "content": [
                        {"type": "image_url", "image_url": {"url": shown}},
                        {"type": "text", "text": question},
                    ],
                }
            ],
        }
        while True:
            reply = _post(
                client, f"{base}/chat/completions", {**body, **_OPTIONS[state["options"]]}
            )
            refused = reply.status_code in (400, 422) and state["options"] + 1 < len(_OPTIONS)
            if not refused:
                break
            state["options"] += 1
        if reply.status_code != 200:
            raise MmctlError(f"{base} answered {reply.status_code}: {reply.text[:200]}")
        text, candidates = _completion(reply.content)
        vector = None
        if question == CAPTION and state["embeds"]:
            vector = _embedding(client, base, name, text)
            state["embeds"] = vector is not None
        return Answer(text=text, candidates=candidates, text_embedding=vector)

    return ask


def _first_model(client: Any, base: str) -> str:
    import httpx

    try:
        reply = client.get(f"{base}/models")
        return str(reply.raise_for_status().json()["data"][0]["id"])
    except (httpx.HTTPError, ValueError, LookupError, TypeError) as error:
        raise MmctlError(
            f"{base}/models lists no model ({error or type(error).__name__}): is the server up? "
            "name the model with --model where it has no list"
        ) from None


def _post(client: Any, url: str, body: Mapping[str, Any]) -> Any:
    import httpx

    try:
        return client.post(url, json=body)
    except httpx.HTTPError as error:
        raise MmctlError(f"no answer from {url}: {error or type(error).__name__}") from None


class _Candidate(msgspec.Struct):
    token: str
    logprob: float


class _Step(_Candidate):
    top_logprobs: list[_Candidate] = []


class _Logprobs(msgspec.Struct):
    content: list[_Step] | None = None


class _Message(msgspec.Struct):
    content: str | None = None


class _Choice(msgspec.Struct):
    message: _Message
    logprobs: _Logprobs | None = None


class _Completion(msgspec.Struct):
    choices: list[_Choice]


def _completion(content: bytes) -> tuple[str, tuple[dict[str, float], ...] | None]:
    """(text, candidates per step) of a chat completion."""
    try:
        choice = msgspec.json.decode(content, type=_Completion).choices[0]
    except (msgspec.DecodeError, IndexError) as error:
        raise MmctlError(f"the server's answer is no chat completion: {error}") from None
    steps = (choice.logprobs.content if choice.logprobs else None) or []
    candidates = tuple(
        {step.token: step.logprob} | {other.token: other.logprob for other in step.top_logprobs}
        for step in steps
    )
    return choice.message.content or "", candidates or None


def _embedding(client: Any, base: str, model: str, text: str) -> Any:
    """The server's embedding of ``text``; absent where it has none to give."""
    reply = _post(client, f"{base}/embeddings", {"model": model, "input": text or " "})
    try:
        values = reply.json()["data"][0]["embedding"] if reply.status_code == 200 else None
    except (ValueError, LookupError, TypeError):
        return None
    return None if values is None else np.asarray(values, np.float32)


def worker(path: str, timeout_s: float = TIMEOUT_S) -> Ask:
    """Ask a worker that holds mmctl's agent, by its socket at ``path``.

    It takes ``{"action": "ask", "args": {"pixels", "shape", "question"}}`` and answers with an
    event ``ask``. Raises MmctlError when nothing listens there.
    """
    number = 0

    def ask(image: Image, question: str) -> Answer:
        nonlocal number
        number += 1
        name = f"ask-{os.getpid()}-{number}"
        pixels = base64.b64encode(image.tobytes()).decode()
        args = {"pixels": pixels, "shape": list(image.shape), "question": question}
        command = msgspec.json.encode({"id": name, "action": "ask", "args": args})
        evidence = _answered(path, name, command, timeout_s)
        if "refused" in evidence:
            raise MmctlError(f"the worker refused: {evidence['refused']}")
        return _converted(evidence, f"the worker at {path}")

    return ask


def _answered(path: str, name: str, command: bytes, timeout_s: float) -> dict[str, Any]:
    """Send one command and wait for the event that answers it."""
    connection = socket.socket(socket.AF_UNIX)
    deadline = time.monotonic() + timeout_s
    try:
        with connection:
            connection.settimeout(timeout_s)
            connection.connect(path)
            connection.sendall(b'{"action": "subscribe"}\n' + command + b"\n")
            with connection.makefile("rb") as stream:
                for line in stream:
                    if name.encode() in line:
                        found: dict[str, Any] = msgspec.json.decode(line)["evidence"]
                        return found
                    if time.monotonic() > deadline:
                        break
    except (OSError, msgspec.DecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise MmctlError(f"no answer from the worker at {path}: {reason}") from None
    raise MmctlError(f"the worker at {path} ended or did not answer in {timeout_s:g} s")


def callable_(target: str) -> Ask:
    """Ask the Python function ``module:function`` of (image, question); the module is looked for
    in the current folder too.

    The image is an array [224, 224, 3] of uint8. It returns the text, or a mapping or object
    with the fields of ``Answer``. Raises UsageError where there is no such function.
    """
    module, _, name = target.partition(":")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        function: Callable[[Image, str], Any] = getattr(import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise UsageError(f"no function '{target}' (module:function): {error}") from None

    def ask(image: Image, question: str) -> Answer:
        try:
            answer = function(image, question)
        except Exception as error:
            raise MmctlError(f"{target} raised {type(error).__name__}: {error}") from None
        return _converted(answer, target)

    return ask


def _converted(answer: Any, who: str) -> Answer:
    if isinstance(answer, Answer):
        return answer
    if isinstance(answer, str):
        return Answer(text=answer)
    try:
        fields = answer if isinstance(answer, Mapping) else vars(answer)

        def array(name: str) -> Any:
            value = fields.get(name)
            return None if value is None else np.asarray(value, np.float32)

        tokens, candidates = fields.get("tokens"), fields.get("candidates")
        return Answer(
            text=str(fields["text"]),
            tokens=None if tokens is None else tuple(int(token) for token in tokens),
            logits=array("logits"), embedding=array("embedding"),
            text_embedding=array("text_embedding"),
            candidates=None if candidates is None else tuple(dict(step) for step in candidates),
        )  # fmt: skip
    except (KeyError, TypeError, ValueError) as error:
        raise MmctlError(f"{who} gave no answer: {type(error).__name__} {error}") from None
