"""Engines over HTTP and those who are told, against servers that stand for them."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import msgspec
import pytest

from mmctl.engine import profiles
from mmctl.engine.breaker.actuators import Actuators
from mmctl.engine.breaker.loop import attend
from mmctl.engine.breaker.state import Command
from mmctl.engine.errors import MmctlError
from mmctl.engine.records import Device, Event, Pool, Serving
from tests.unit.breaker.test_breaker import pool


class Server:
    """Remembers what was posted; offers the paths of vLLM's developer mode, without /sleep."""

    def __init__(self) -> None:
        self.posts: list[tuple[str, bytes]] = []
        self.paths = ["/pause", "/resume", "/reset_prefix_cache", "/api/v2/alerts"]
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                body = json.dumps({"paths": {path: {} for path in outer.paths}}).encode()
                self.answer(200, body)

            def do_POST(self) -> None:
                length = int(self.headers.get("Content-Length", 0))
                outer.posts.append((self.path, self.rfile.read(length)))
                self.answer(500 if self.path == "/broken" else 200, b"{}")

            def answer(self, code: int, body: bytes) -> None:
                self.send_response(code)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}"
        threading.Thread(target=self.http.serve_forever, daemon=True).start()


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server()
    yield made
    made.http.shutdown()
    made.http.server_close()


def actuators(dry_run: bool = False, **settings: object) -> Actuators:
    profile = profiles.load("default").profile
    settings = {"timeout_s": 1.0, **settings}
    changed = msgspec.structs.replace(
        profile, actuators=msgspec.structs.replace(profile.actuators, **settings)
    )
    return Actuators(changed, "enforce", dry_run=dry_run)


def answer(made: Actuators, command: Command) -> Event:
    made(command)
    for _ in range(500):
        for event in made.answers():
            return event
        time.sleep(0.01)
    raise AssertionError("no answer")


def respond(*order: str) -> Command:
    return Command(id="c1", device="gpu0", action="respond", args={"order": list(order)})


def test_vllm_is_paused_and_what_it_cannot_do_is_advice(server: Server) -> None:
    made = actuators(engine="vllm", url=server.url)
    event = answer(made, respond("hold_admission", "cap_batch", "offload_kv"))
    assert event.what == "respond" and event.evidence["id"] == "c1"
    paused, advice, refused = event.evidence["steps"]
    assert paused["path"] == "/pause" and paused["took_ns"] > 0
    assert "--limit-mm-per-prompt" in advice["advice"]
    assert "does not offer /sleep" in refused["refused"]
    assert [path for path, _ in server.posts] == ["/pause"]
    resumed = answer(made, Command(id="c2", device="gpu0", action="admit", args={"share": 1.0}))
    assert resumed.evidence["steps"][0]["path"] == "/resume"


def test_sleep_waits_for_an_empty_engine_and_room_on_the_host(server: Server) -> None:
    server.paths.append("/sleep")
    made = actuators(engine="vllm", url=server.url, timeout_s=0.1)

    def refused() -> str:
        step: dict[str, str] = answer(made, respond("offload_kv")).evidence["steps"][0]
        return step.get("refused", "")

    assert "whether requests run is unknown" in refused()
    made.see(Serving(ts_ns=1, engine="vllm", instance="i", running=3))
    assert "3 requests run: drain before sleep" in refused()
    made.see(Serving(ts_ns=2, engine="vllm", instance="i", running=0))
    assert "how much a sleep moves is unknown" in refused()
    made.see(Device(ts_ns=3, device="gpu0", kind="gpu", used_bytes=1 << 60))
    assert "host memory" in refused()
    made.see(Device(ts_ns=4, device="gpu0", kind="gpu", used_bytes=1))
    assert refused() == "" and server.posts[-1][0] == "/sleep?level=1"


def test_sglang_flushes_its_cache_once_nothing_runs(server: Server) -> None:
    server.paths = ["/flush_cache"]
    made = actuators(engine="sglang", url=server.url, timeout_s=0.1)
    made.see(Serving(ts_ns=1, engine="sglang", instance="i", running=0))
    advice, flushed = answer(made, respond("hold_admission", "offload_kv")).evidence["steps"]
    assert "mmctl guard" in advice["advice"] and flushed["path"] == "/flush_cache"
    assert [path for path, _ in server.posts] == ["/flush_cache"]


def test_a_sleeping_engine_is_woken_before_it_resumes(server: Server) -> None:
    server.paths += ["/sleep", "/wake_up", "/reset_mm_cache"]
    made = actuators(engine="vllm", url=server.url)
    made.see(Serving(ts_ns=1, engine="vllm", instance="i", running=0))
    made.see(Device(ts_ns=2, device="gpu0", kind="gpu", used_bytes=1))
    answer(made, respond("reset_prefix_cache", "reset_mm_cache", "offload_kv"))
    answer(made, Command(id="c2", device="gpu0", action="admit", args={"share": 1.0}))
    assert [path for path, _ in server.posts] == [
        "/reset_prefix_cache", "/reset_mm_cache", "/sleep?level=1", "/wake_up", "/resume",
    ]  # fmt: skip


def test_a_trip_of_the_loop_reaches_the_engine_and_those_who_are_told(server: Server) -> None:
    settings = profiles.load("default").profile
    mine = msgspec.structs.replace(
        settings.actuators, engine="vllm", url=server.url, webhook=f"{server.url}/hook",
        alertmanager=server.url, timeout_s=1.0,
    )  # fmt: skip
    settings = msgspec.structs.replace(settings, actuators=mine)

    def records() -> Iterator[Pool]:
        yield pool(1, True)
        yield pool(2, False)
        for at in range(3, 300):
            if len(server.posts) >= 3 and at > 6:
                return
            time.sleep(0.01)
            yield pool(2 + at / 100, True)

    seen = [item for item in attend(records(), settings, "enforce") if isinstance(item, Event)]
    assert {path for path, _ in server.posts} == {"/pause", "/hook", "/api/v2/alerts"}
    told = json.loads(next(body for path, body in server.posts if path == "/hook"))
    assert told["what"] == "trip" and told["rule"] == "fits"
    (respond_,) = [event for event in seen if event.what == "respond"]
    assert respond_.evidence["steps"][0]["path"] == "/pause"
    server.posts.clear()
    list(attend([pool(1, True), pool(2, False)], settings, "enforce", dry_run=True))
    assert server.posts == []


def test_a_verification_without_goldens_and_a_rebuild_are_refused(server: Server) -> None:
    made = actuators(engine="vllm", url=server.url)
    verify = answer(made, Command(id="v", device="gpu0", action="verify"))
    assert "mmctl breaker verify --golden" in verify.evidence["refused"]
    rebuild = answer(made, Command(id="r", device="gpu0", action="rebuild"))
    assert "cannot be rebuilt" in rebuild.evidence["refused"]


def test_nobody_to_ask_is_said() -> None:
    with pytest.raises(MmctlError, match="nobody takes commands"):
        actuators()(respond("hold_admission"))


def test_a_dry_run_says_what_it_would_do(server: Server) -> None:
    made = actuators(dry_run=True, engine="sglang", url=server.url)
    made.see(Serving(ts_ns=1, engine="sglang", instance="i", running=2))
    held, flushed = made.plan(respond("hold_admission", "offload_kv"))
    assert "mmctl guard" in held
    assert "/flush_cache (refused: 2 requests run" in flushed
    made(respond("offload_kv"))
    assert server.posts == []


def test_webhook_alertmanager_and_command_are_told(server: Server, tmp_path: Path) -> None:
    out = tmp_path / "out"
    made = actuators(
        webhook=f"{server.url}/hook", alertmanager=server.url,
        command=("sh", "-c", f"cat > {out}"),
    )  # fmt: skip
    trip = Event(
        ts_ns=10**18, node="n", what="trip", device="gpu0", rule="fits", mode="enforce",
        state="open", evidence={"reason": "no room"},
    )  # fmt: skip
    made.tell(trip)
    made.tell(msgspec.structs.replace(trip, what="respond"))
    made.tell(msgspec.structs.replace(trip, what="close", mode="observe"))
    made.close()
    paths = [path for path, _ in server.posts]
    assert paths == ["/hook", "/api/v2/alerts", "/hook", "/api/v2/alerts"]
    (alert,) = json.loads(server.posts[1][1])
    assert alert["labels"]["rule"] == "fits" and alert["startsAt"].startswith("2001-09-09T")
    assert "endsAt" in json.loads(server.posts[3][1])[0]
    assert json.loads(out.read_text())["what"] == "trip", "a command runs in enforce mode alone"


def test_whoever_cannot_be_told_is_an_event(server: Server) -> None:
    made = actuators(
        webhook=f"{server.url}/broken", command=("sh", "-c", "echo no >&2; exit 3"),
        alertmanager="http://127.0.0.1:9",
    )  # fmt: skip
    made.tell(Event(ts_ns=1, what="trip", mode="enforce"))
    made.close()
    said = sorted(event.message or "" for event in made.answers())
    assert len(said) == 3 and "cannot be reached" in said[0]
    assert said[1] == "command: sh ended with 3: no" and "answers 500" in said[2]


@pytest.mark.parametrize(
    "page", [b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n[]", b"garbage\r\n\r\n"]
)
def test_a_server_that_answers_nonsense_is_refused_and_the_next_command_answered(
    page: bytes,
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            with contextlib.suppress(OSError):
                while True:
                    client, _ = listener.accept()
                    with client:
                        client.recv(1 << 16)
                        client.sendall(page)

        threading.Thread(target=serve, daemon=True).start()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        made = actuators(engine="vllm", url=url)
        for number in range(2):
            command = Command(
                id=str(number), device="gpu0", action="respond", args={"order": ["hold_admission"]}
            )
            assert answer(made, command).evidence["id"] == str(number)
        made.close()
