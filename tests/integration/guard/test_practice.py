"""The practice server, and the lines of the README that put a guard in front of two of them."""

from __future__ import annotations

import base64
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from mmctl.engine.recording import read
from mmctl.engine.records import Serving
from tests.integration.guard.parts import ROOT
from tests.integration.guard.test_safety import png

pytest.importorskip("torch", reason="the practice server needs the extra 'torch'")
pytest.importorskip("PIL", reason="the practice server needs the extra 'guard'")
Run = Callable[..., subprocess.CompletedProcess[str]]


@contextmanager
def practice() -> Iterator[str]:
    """The address of a server in a process of its own."""
    command = [sys.executable, "-m", "mmctl.demo", "--openai", "0"]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    try:
        assert child.stdout is not None
        yield "http" + child.stdout.readline().strip().partition("http")[2]
    finally:
        child.kill()
        child.wait()


def post(url: str, **asked: Any) -> bytes:
    body = json.dumps(asked).encode()
    request = urllib.request.Request(url + "/v1/chat/completions", data=body)
    with urllib.request.urlopen(request, timeout=60) as answer:
        found: bytes = answer.read()
    return found


def user(*parts: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"role": "user", "content": list(parts)}]


TEXT = {"type": "text", "text": "hello"}


def image(width: int, height: int) -> dict[str, Any]:
    shown = base64.b64encode(png(width, height)).decode()
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{shown}"}}


def test_it_answers_as_an_engine_does(mmctl: Run, tmp_path: Path) -> None:
    with practice() as url:
        asked: dict[str, Any] = {"messages": user(TEXT), "max_tokens": 3, "logprobs": True}
        whole = json.loads(post(url, **asked, top_logprobs=4))
        assert whole["usage"] == {"prompt_tokens": 5, "completion_tokens": 3, "total_tokens": 8}
        choice = whole["choices"][0]
        for step in choice["logprobs"]["content"]:  # greedy: what it said is the likeliest
            assert step["logprob"] == max(top["logprob"] for top in step["top_logprobs"])

        options = {"stream": True, "stream_options": {"include_usage": True}}
        events = post(url, **asked, **options).decode().split("\n\n")
        assert events[-2:] == ["data: [DONE]", ""]
        told = [json.loads(event.removeprefix("data: ")) for event in events[:-2]]
        said = "".join(c["delta"].get("content", "") for e in told for c in e["choices"])
        assert said.strip() == choice["message"]["content"]
        assert told[-1]["usage"] == whole["usage"]

        with_image = json.loads(post(url, messages=user(image(140, 70), TEXT), max_tokens=3))
        assert with_image["usage"]["prompt_tokens"] == 10 * 5 + 5  # patches of 14 × 14 pixels
        for broken in (
            {"messages": user({"type": "image_url", "image_url": {"url": "http://a/b.png"}})},
            {"messages": user({"type": "image_url", "image_url": {"url": "data:image/png,@@"}})},
            {"messages": user(TEXT), "max_tokens": 10**6},
            {"messages": 5},
            {},
        ):
            with pytest.raises(urllib.error.HTTPError) as refused:
                post(url, **broken)
            assert refused.value.code == 400
            assert json.load(refused.value)["error"]["message"]

        record = tmp_path / "page.ndjson"
        watched = ["breaker", "watch", f"{url}/metrics", "--duration", "1s"]
        assert mmctl(*watched, "--record", str(record)).returncode == 0
        page = [r for r in read(record) if isinstance(r, Serving)][-1]
        assert (page.engine, page.running, page.kv_ratio) == ("vllm", 0, 0)


def test_a_port_in_use() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        command = [sys.executable, "-m", "mmctl.demo", "--openai", str(taken.getsockname()[1])]
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert done.returncode == 1
    assert done.stderr.startswith("mmctl: error: cannot listen on port")
    assert done.stderr.count("\n") == 1


@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
def test_the_lines_of_the_readme(tmp_path: Path) -> None:
    text = (ROOT / "README.md").read_text("utf-8")
    section = text.partition("### In front of an unmodified engine")[2].partition("\n### ")[0]
    block = section.partition("```sh\n")[2].partition("```")[0]
    free = [socket.create_server(("127.0.0.1", 0)) for _ in range(3)]
    for port, one in zip(("8000", "8001", "8088"), free, strict=True):
        assert port in block or port == "8088"
        block = block.replace(f":{port}", f":{one.getsockname()[1]}")
        block = block.replace(f"--openai {port}", f"--openai {one.getsockname()[1]}")
    block = block.replace("guard ", f"guard --listen 127.0.0.1:{free[2].getsockname()[1]} ", 1)
    for one in free:
        one.close()
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    with open(tmp_path / "said", "w") as out:  # of the shell, and of what it left running
        shell = subprocess.Popen(
            ["bash", "-c", block], stdout=out, stderr=subprocess.DEVNULL, cwd=ROOT,
            env={**os.environ, "PATH": path}, start_new_session=True,
        )  # fmt: skip
    try:
        assert shell.wait(120) == 0
        answer = json.loads((tmp_path / "said").read_text().rpartition("\n")[2])
        assert answer["usage"]["prompt_tokens"] == 5
        assert re.fullmatch(r"\d+( \d+)*", answer["choices"][0]["message"]["content"])
    finally:
        os.killpg(shell.pid, signal.SIGKILL)
