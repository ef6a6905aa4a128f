"""Who carries out a command: the agent in the process, vLLM or SGLang over HTTP; and who is
told of a decision: a webhook, a command, Prometheus Alertmanager.

Each step has a precondition, a time-out and a dry run. What an engine cannot do is given back as
advice, never pretended. HTTP is spoken in a thread of its own: the loop waits for nobody, and
answers come back as events of the stream.
"""

from __future__ import annotations

import json
import queue
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from http.client import HTTPException
from typing import Any, NamedTuple

import msgspec

from mmctl.engine.breaker.agent_socket import AgentSocket
from mmctl.engine.breaker.state import Command
from mmctl.engine.errors import MmctlError
from mmctl.engine.profiles import Mode, Profile
from mmctl.engine.records import AnyRecord, Device, Event, Serving, encode

# What is told to webhooks, commands and Alertmanager.
TOLD = frozenset({"trip", "refuse", "half_open", "close", "isolate", "clear"})


class Step(NamedTuple):
    """One request to an engine: the path, and what must hold before it is sent."""

    response: str
    path: str
    precondition: str = ""


class Engine(NamedTuple):
    """What an engine offers over HTTP for our responses, and advice for the others."""

    steps: dict[str, Step]
    advice: dict[str, str]
    hold: Step | None
    resume: Step | None


ENGINES: dict[str, Engine] = {
    "vllm": Engine(
        steps={
            "hold_admission": Step("hold_admission", "/pause"),
            "reset_prefix_cache": Step("reset_prefix_cache", "/reset_prefix_cache"),
            "reset_mm_cache": Step("reset_mm_cache", "/reset_mm_cache"),
            # Sleep while serving ends in illegal accesses: drained first, with room on the host.
            "offload_kv": Step("offload_kv", "/sleep?level=1", "drained and host memory"),
        },
        advice={
            "cap_batch": "restart vLLM with a smaller --max-num-batched-tokens or "
            "--limit-mm-per-prompt",
            "quantize_vision": "vLLM cannot quantise vision tokens in place",
        },
        hold=Step("hold_admission", "/pause"),
        resume=Step("admit", "/resume"),
    ),
    "sglang": Engine(
        steps={"offload_kv": Step("flush_cache", "/flush_cache", "drained")},
        advice={
            "hold_admission": "SGLang cannot hold requests; stop them in front of it: mmctl guard",
            "cap_batch": "restart SGLang with a smaller --max-running-requests",
            "quantize_vision": "SGLang cannot quantise vision tokens in place",
        },
        hold=None,
        resume=None,
    ),
}  # fmt: skip


class Actuators:
    """Callable with a command; tells of events; gives answers as events.

    With ``dry_run`` nothing is asked of any worker and nobody is told.
    """

    def __init__(self, profile: Profile, mode: Mode, *, dry_run: bool = False) -> None:
        self.settings, self.profile = profile.actuators, profile
        self.dry_run = dry_run
        self.agent = AgentSocket("observe" if dry_run else mode)
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._running: dict[str, int] = {}
        self._used: dict[str, int] = {}
        self._asleep = False

    def see(self, record: AnyRecord) -> None:
        """Where agents listen, how many requests run, and how much a sleep would move."""
        self.agent.see(record)
        if isinstance(record, Serving) and record.running is not None:
            self._running[record.instance] = record.running
        elif isinstance(record, Device) and record.kind != "cpu" and record.used_bytes is not None:
            self._used[record.device] = record.used_bytes

    def __call__(self, command: Command) -> None:
        """Have ``command`` carried out; MmctlError when nobody can."""
        if self.dry_run:
            return
        if self.agent.path(command.device) is not None:
            self.agent(command)
        elif self.settings.engine in ENGINES and self.settings.url:
            self._later(lambda: self._carry_out(command))
        else:
            raise MmctlError(
                f"nobody takes commands for '{command.device}': no agent is known, and "
                "[actuators] engine and url are not set"
            )

    def follow(self, profile: Profile, mode: Mode) -> None:
        """Go on with another profile and mode, as the breaker does."""
        self.settings, self.profile = profile.actuators, profile
        if mode != self.agent.mode and not self.dry_run:
            self.agent.follow(mode)

    def tell(self, event: Event) -> None:
        """Pass a decision on to the webhook, the command and Alertmanager that are set."""
        if event.what not in TOLD or self.dry_run:
            return
        settings = self.settings
        if settings.webhook:
            self._later(lambda: self._notify("webhook", lambda: self._post_event(event)))
        if settings.alertmanager:
            self._later(lambda: self._notify("alertmanager", lambda: self._alert(event)))
        if settings.command and event.mode == "enforce":
            self._later(lambda: self._notify("command", lambda: self._run(event)))

    def answers(self) -> Iterator[Event]:
        """Answers and notices that have come since the last call."""
        while not self._answers.empty():
            yield self._answers.get()

    def close(self, timeout_s: float = 5.0) -> None:
        """Finish what is under way."""
        if self._thread is not None:
            self._work.put(None)
            self._thread.join(timeout_s)

    def plan(self, command: Command) -> list[str]:
        """What would be done for ``command``, in words, with preconditions as they are now."""
        if (path := self.agent.path(command.device)) is not None:
            return [f"agent {path}: {command.action} {json.dumps(command.args)}"]
        engine = ENGINES.get(self.settings.engine)
        if engine is None or not self.settings.url:
            return [f"{command.action}: nobody takes commands for '{command.device}'"]
        said = []
        for step, advice in self._steps(engine, command):
            if step is None:
                said.append(f"advice: {advice}")
            else:
                refused = self._refused(step)
                holds = f"refused: {refused}" if refused else "precondition holds"
                said.append(f"POST {self.settings.url}{step.path} ({holds})")
        return said

    def _later(self, work: Callable[[], None]) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._worker, daemon=True)
            self._thread.start()
        self._work.put(work)

    def _worker(self) -> None:
        while (work := self._work.get()) is not None:
            work()

    def _steps(self, engine: Engine, command: Command) -> Iterator[tuple[Step | None, str]]:
        """The requests of a command; None with advice for what the engine cannot do."""
        if command.action == "respond":
            for name in command.args.get("order", ()):
                unknown = f"{self.settings.engine} has no '{name}'"
                yield engine.steps.get(name), engine.advice.get(name, unknown)
        elif command.action == "admit":
            share = float(command.args.get("share", 1.0))
            step = engine.hold if share == 0 else engine.resume
            if share > 0 and self._asleep:
                yield Step("admit", "/wake_up"), ""
            yield step, f"{self.settings.engine} takes all traffic or none; shares need mmctl guard"
        elif command.action == "rebuild":
            yield (
                None,
                (
                    f"restart {self.settings.engine}: over HTTP it cannot be rebuilt "
                    "([actuators] command can do it)"
                ),
            )

    def _carry_out(self, command: Command) -> None:
        """In the thread: every step in turn, then one answer."""
        started = time.monotonic_ns()
        evidence: dict[str, Any] = {"id": command.id}
        if command.action == "verify":
            evidence |= self._verify()
        else:
            engine = ENGINES[self.settings.engine]
            steps = [self._step(*item) for item in self._steps(engine, command)]
            evidence["steps"] = steps
            if steps and all("refused" in step or "advice" in step for step in steps):
                first = steps[0]
                evidence["refused"] = first.get("refused") or first.get("advice")
        if command.action == "admit":
            evidence.pop("refused", None)  # a share that cannot be set is advice, not a failure
        self._answers.put(
            Event(
                ts_ns=time.time_ns(), what=command.action, device=command.device,
                evidence=evidence, took_ns=time.monotonic_ns() - started,
            )
        )  # fmt: skip

    def _step(self, step: Step | None, advice: str) -> dict[str, Any]:
        if step is None:
            return {"advice": advice}
        started = time.monotonic_ns()
        done: dict[str, Any] = {"response": step.response, "path": step.path}
        refused = self._not_offered(step) or self._drain(step) or self._refused(step)
        if refused is None:
            try:
                self._post(self.settings.url.rstrip("/") + step.path, b"")
            except MmctlError as error:
                refused = str(error)
        if refused is not None:
            return {**done, "refused": refused}
        self._asleep = step.path.startswith("/sleep") or (self._asleep and step.path != "/wake_up")
        return {**done, "took_ns": time.monotonic_ns() - started}

    def _not_offered(self, step: Step) -> str | None:
        """Engines offer some of these only in a developer mode: their own page of paths says."""
        url = self.settings.url.rstrip("/") + "/openapi.json"
        try:
            with urllib.request.urlopen(url, timeout=self.settings.timeout_s) as reply:
                offered = json.load(reply).get("paths", {})
        except (OSError, HTTPException, ValueError, AttributeError):
            return None  # no such page: the request itself will tell
        path = step.path.partition("?")[0]
        if path in offered:
            return None
        mode = "; start it with VLLM_SERVER_DEV_MODE=1" if self.settings.engine == "vllm" else ""
        return f"the server does not offer {path}{mode}"

    def _drain(self, step: Step) -> str | None:
        """Wait, no longer than the time-out, until nothing runs."""
        if "drained" not in step.precondition:
            return None
        deadline = time.monotonic() + self.settings.timeout_s
        while sum(self._running.values()) and time.monotonic() < deadline:
            time.sleep(0.05)
        return None

    def _refused(self, step: Step) -> str | None:
        """Why a step's precondition does not hold now."""
        if "drained" in step.precondition:
            if not self._running:
                return "whether requests run is unknown: name the engine's metrics page as a source"
            if running := sum(self._running.values()):
                return f"{running} requests run: drain before sleep"
        if "host memory" in step.precondition:
            import psutil

            needed = sum(self._used.values()) + self.profile.responses.host_reserve_bytes
            available = psutil.virtual_memory().available
            if not self._used:
                return "how much a sleep moves is unknown: name nvml: as a source"
            if available < needed:
                return f"{available} bytes of host memory are available, {needed} are needed"
        return None

    def _verify(self) -> dict[str, Any]:
        if not self.settings.golden:
            return {
                "refused": "no goldens: mmctl breaker verify --golden FILE --endpoint URL records "
                "them while the server is healthy; [actuators] golden names the file"
            }
        from pathlib import Path

        from mmctl.engine.recovery import asks, goldens
        from mmctl.engine.recovery.verify import compare

        try:
            known = goldens.load(Path(self.settings.golden))
            answers = goldens.observe(asks.endpoint(self.settings.url))
            found: dict[str, Any] = msgspec.to_builtins(
                compare(known, answers, self.profile.recovery)
            )
        except MmctlError as error:
            return {"refused": str(error)}
        return found

    def _notify(self, who: str, send: Callable[[], None]) -> None:
        try:
            send()
        except MmctlError as error:
            self._answers.put(
                Event(
                    ts_ns=time.time_ns(), what="notify", state="failed",
                    message=f"{who}: {error}", evidence={"to": who},
                )
            )  # fmt: skip

    def _post(self, url: str, body: bytes) -> None:
        request = urllib.request.Request(
            url, data=body, method="POST", headers={"Content-Type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=self.settings.timeout_s) as reply:
                reply.read(1 << 16)
        except urllib.error.HTTPError as error:
            raise MmctlError(f"{url} answers {error.code} {error.reason}") from None
        except (OSError, HTTPException, ValueError) as error:
            raise MmctlError(f"{url} cannot be reached: {error}") from None

    def _post_event(self, event: Event) -> None:
        self._post(self.settings.webhook, encode(event))

    def _alert(self, event: Event) -> None:
        """Alertmanager's v2 API: an alert starts with a trip and ends with close or clear."""
        from datetime import datetime, timezone

        moment = datetime.fromtimestamp(event.ts_ns / 1e9, timezone.utc).isoformat()
        over = event.what in ("close", "clear")
        alert = {
            "labels": {
                "alertname": "mmctl_breaker", "rule": event.rule or "", "mode": event.mode or "",
                "node": event.node, "device": event.device or "",
            },
            "annotations": {
                "state": event.state or "", "what": event.what,
                "reason": str(event.evidence.get("reason", "")),
            },
            "endsAt" if over else "startsAt": moment,
        }  # fmt: skip
        url = self.settings.alertmanager.rstrip("/") + "/api/v2/alerts"
        self._post(url, msgspec.json.encode([alert]))

    def _run(self, event: Event) -> None:
        command = list(self.settings.command)
        try:
            done = subprocess.run(
                command, input=encode(event) + b"\n", capture_output=True,
                timeout=self.settings.timeout_s,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            raise MmctlError(
                f"{command[0]} took longer than {self.settings.timeout_s:g} s"
            ) from None
        except OSError as error:
            raise MmctlError(f"cannot start {command[0]}: {error.strerror}") from None
        if done.returncode:
            last = done.stderr.decode("utf-8", "replace").strip().splitlines()[-1:]
            raise MmctlError(f"{command[0]} ended with {done.returncode}: {''.join(last)}")
