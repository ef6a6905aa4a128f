"""The demo's worker: a server under a tracker, paced by a clock, that answers the breaker.

One thread does all the work. Between two steps it waits for commands, so that the breaker has
a moment between a plan and its execution however slow the machine is. An out-of-memory error
ends the worker, as it ends a serving engine.
"""

from __future__ import annotations

import gc
import queue
import time
from collections.abc import Generator, Iterable
from typing import Any

import msgspec
import torch

from mmctl.agent.channel import Channel, Command
from mmctl.agent.device_pool import AgentPool
from mmctl.agent.publisher import Load, Publisher, Timing
from mmctl.agent.tracker import Tracker, labelled
from mmctl.demo import attention, canary, choose, fault, respond
from mmctl.demo.plan import Tape
from mmctl.demo.scenarios import Setup
from mmctl.demo.server import BATCH_IMAGES, Plan, Server, Session
from mmctl.engine import model as models
from mmctl.engine import profiles
from mmctl.engine.errors import MmctlError
from mmctl.engine.memory import dryrun
from mmctl.engine.memory.allocator import OutOfMemory
from mmctl.engine.records import Event, Fits
from mmctl.engine.recovery.canaries import draw
from mmctl.engine.recovery.goldens import Goldens
from mmctl.engine.recovery.rebuild import Report, Step, memory_is_back, rebuild
from mmctl.engine.responses import entropy
from mmctl.engine.responses.choice import Choice
from mmctl.engine.responses.offload import HostBlocks

WINDOW_S = 0.1
"""How long the worker listens for commands before each step."""

COLLECT_STEPS = 500
"""Cycles that torch leaves behind are collected so often, at the same steps in every run."""

VERDICT_S = 2.0
"""How long a step that will not fit waits for the word of a breaker that enforces."""

Job = Generator[dict[str, Any] | None, None, None]
"""A command at work: yields None to go on in the next step, or its answer."""


class Worker:
    """Everything of one run; ``run`` returns when the scenario has ended or memory is out."""

    def __init__(
        self, setup: Setup, seed: int, pool: AgentPool, publisher: Publisher, channel: Channel
    ) -> None:
        self.setup, self.seed = setup, seed
        self.pool, self.publisher, self.channel = pool, publisher, channel
        self.tracker = Tracker(pool, pool.torch_device)
        self.host = HostBlocks()
        self.job: tuple[Command, Job, int] | None = None
        self.recovery = profiles.load().profile.recovery
        self.goldens: Goldens | None = None
        self.attached = False
        self.drift = entropy.Drift(profiles.load().profile.responses)
        self.refused: tuple[Session, ...] = ()  # the batch that the responses made room for
        self._build()

    def _build(self) -> None:
        self.model = models.build(seed=self.seed, device=self.pool.torch_device)
        self.server = Server(self.model, self.setup, self.seed, self.fits)

    def run(self) -> None:
        """Step after step until nobody listens or the pool refuses."""
        gc.disable()
        with torch.inference_mode():
            self._record_goldens()
        with torch.inference_mode(), self.tracker:
            self._adopt()
            gc.collect()
            gc.freeze()
            while self.step():
                if self.server.step_number % COLLECT_STEPS == 0:
                    gc.collect()

    def _record_goldens(self) -> None:
        started = time.monotonic_ns()
        self.goldens = canary.record_goldens(self.model, self.recovery)
        usable = [golden.name for golden in self.goldens.answers if golden.rejected is None]
        self.channel.publish(
            Event(
                ts_ns=time.time_ns(), node=self.publisher.node, device=self.publisher.device,
                what="golden", took_ns=time.monotonic_ns() - started,
                message=f"{len(usable)} canaries answered alike in {self.goldens.runs} runs",
                evidence={"canaries": usable, "runs": self.goldens.runs},
            )
        )  # fmt: skip

    def _adopt(self) -> None:
        with labelled("other", "weights"):
            for parameter in self.model.parameters():
                self.tracker.see(parameter)

    def step(self) -> bool:
        """One step, then the window for commands; False after an out-of-memory error."""
        if self.job is not None:
            self._advance()
        if self.setup.fault and self.server.step_number == self.setup.fault_at:
            fault.begin(self, self.setup.fault, self.seed)
        try:
            finished = self.server.execute()
        except torch.OutOfMemoryError as error:
            # The exception holds the frames and with them the memory of the step that failed.
            refusal, text = error.__cause__, str(error)
            error.__traceback__ = None
            self._report_oom(refusal, text)
            return False
        for session in finished:
            self._completed(session)
        new = attention.look(self.server)
        if new is not None:
            asked, name = self.drift.step(new), self.publisher.device
            self.channel.publish(
                entropy.event(new, asked, time.time_ns(), name, self.publisher.node)
            )
        for session in self.server.arrive():
            self.publisher.request(session.id, "queued", *session.size)
        self.server.plan()
        self._bring_back()
        fits = self._publish()
        # A breaker that enforces gets its say, however late its process is scheduled.
        self._listen(WINDOW_S, wait_s=0.0 if fits or not self.attached else VERDICT_S)
        return True

    def steps_of(self, tapes: Iterable[tuple[Session, Tape]]) -> list[dryrun.Step]:
        """The tapes as one allocation list for the pool as it is now."""
        steps: list[dryrun.Step] = []
        frees: list[int] = []
        frees_addresses: list[int] = []
        for session, tape in tapes:
            numbers: dict[int, int] = {}
            for slot, size_bytes in tape:
                if size_bytes:
                    numbers[slot] = len(steps)
                    steps.append(
                        dryrun.Step(
                            size_bytes, tuple(frees), frees_addresses=tuple(frees_addresses)
                        )
                    )
                    frees, frees_addresses = [], []
                elif slot in numbers:
                    frees.append(numbers[slot])
                elif (address := self._address(session, slot)) is not None:
                    frees_addresses.append(address)
        return steps

    def _address(self, session: Session, slot: int) -> int | None:
        held = self.server.existing(session, slot)
        return None if held is None else self.pool.addresses.get(held.untyped_storage()._cdata)

    def try_steps(self, steps: list[dryrun.Step], batch: str | None = None) -> Fits:
        """Dry run on a copy of the pool as it is now."""
        return dryrun.dry_run(self.pool.allocator, steps, batch)

    def fits(self, plan: Plan) -> bool:
        """Whether a plan would fit now."""
        return self.try_steps(self.steps_of(self.server.tapes_of(plan))).fits

    def _bring_back(self) -> None:
        """With all traffic admitted again, undo what the responses did where there is room.

        The cap on batches goes when a full batch of the images that did not fit would fit, and
        an offloaded session comes back where one of their requests still fits beside it.
        """
        server = self.server
        if server.holding or server.share < 1 or not self.refused:
            return
        side = self.refused[0].arrival.images[0]
        if server.capped and self._fits_beside(server.encode_tape(side, (1,) * BATCH_IMAGES), []):
            server.capped = False
        session = next((session for session in server.sessions if session.paused), None)
        if session is not None:
            least = server.encode_tape(side, (len(self.refused[0].arrival.images),))
            if self._fits_beside(least, respond.offloaded_bytes(session)):
                respond.reload_session(session)

    def _fits_beside(self, batch: Tape, more_bytes: list[int]) -> bool:
        """Whether ``more_bytes`` would leave room for what is planned, and for ``batch``."""
        more = [dryrun.Step(size) for size in more_bytes]
        planned = self.steps_of(self.server.tapes_of(self.server.planned))
        encode = self.steps_of([(self.refused[0], batch)])
        return all(self.try_steps([*more, *steps]).fits for steps in (planned, encode))

    def _publish(self) -> bool:
        server = self.server
        plan = server.planned
        steps = self.steps_of(server.tapes_of(plan))
        outlook = self.steps_of(server.tapes_of(server.outlook()))
        names = [f"prefill {plan.prefill.id}"] if plan.prefill else []
        if plan.batch:
            images = sum(len(session.arrival.images) for session in plan.batch)
            names.append(f"encode {images} × {plan.batch[0].arrival.images[0]} px")
        now = time.monotonic()
        queued = [s for s in (*server.waiting, *server.active) if s.begun_s is None]
        stored = [s for s in server.sessions if s.cache is not None]
        load = Load(
            running=len(server.active) + len(server.waiting) - len(queued),
            waiting=len(queued),
            vision_tokens=sum(s.vision_tokens for s in server.sessions if s.vision is not None)
            + sum(s.vision_tokens for s in plan.batch),
            text_tokens=sum(s.cache.length for s in stored if s.cache),
            generated_tokens=server.generated_tokens,
            oldest_wait_s=max((now - s.arrived_s for s in queued), default=0.0),
        )
        fits = self.try_steps(steps, ", ".join(names) or None)
        self.publisher.step(load, fits, outlook)
        return fits.fits

    def _completed(self, session: Session) -> None:
        assert session.begun_s is not None and session.first_s is not None
        now = time.monotonic()
        rest = session.arrival.output_tokens - 1
        timing = Timing(
            modality="vision" if session.arrival.images else "text",
            ttft_s=session.first_s - session.arrived_s,
            itl_s=(now - session.first_s) / rest if rest else None,
            e2e_s=now - session.arrived_s,
        )
        self.publisher.timings.append(timing)
        stages = {
            "queue_wait_s": session.begun_s - session.arrived_s,
            "ttft_s": timing.ttft_s, "e2e_s": timing.e2e_s,
        }  # fmt: skip
        self.publisher.request(session.id, "completed", *session.size, stages)

    def _listen(self, window_s: float, wait_s: float) -> None:
        """Take commands for ``window_s``, or up to ``wait_s`` until there is a first one."""
        started = time.monotonic()
        until = started + max(window_s, wait_s)
        while True:
            try:
                command = self.channel.commands.get(timeout=max(until - time.monotonic(), 0))
            except queue.Empty:
                return
            self._begin(command)
            until = started + window_s

    def _begin(self, command: Command) -> None:
        job = self._jobs().get(command.action)
        if job is None:
            self._answer(command, 0, {"refused": f"no action '{command.action}' here"})
            return
        self.job = (command, job(command.args), time.monotonic_ns())
        self._advance()

    def _jobs(self) -> dict[str, Any]:
        return {
            "attach": self._attach, "respond": self._respond, "rebuild": self._rebuild,
            "verify": self._verify, "admit": self._admit, "ask": self._ask, "fault": self._fault,
            "light_vision": self._light_vision,
        }  # fmt: skip

    def _advance(self) -> None:
        assert self.job is not None
        command, job, started = self.job
        try:
            answer = next(job)
        except MmctlError as error:
            answer = {"refused": str(error)}
        if answer is not None:
            self.job = None
            self._answer(command, time.monotonic_ns() - started, answer)

    def _answer(self, command: Command, took_ns: int, evidence: dict[str, Any]) -> None:
        self.channel.publish(
            Event(
                ts_ns=time.time_ns(), node=self.publisher.node, device=self.publisher.device,
                what=command.action, took_ns=took_ns,
                evidence={"id": command.id, **evidence},
            )
        )  # fmt: skip

    def _respond(self, args: dict[str, Any]) -> Job:
        order = args.get("order") or list(respond.KNOWN)
        settings = profiles.load().profile.responses
        server = self.server
        wanted = server.outlook()
        self.refused = wanted.batch

        def fits() -> bool:
            return self.fits(server.least(wanted) if server.capped else wanted)

        def cheapest() -> Choice:
            return choose.choice(self, wanted, settings)

        steps = list(respond.respond(server, self.pool, self.host, order, fits, cheapest))
        server.plan()
        device_free = self.pool.allocator.device_free_bytes
        yield {"steps": steps, "fits": fits(), "device_free_bytes": device_free}

    def _admit(self, args: dict[str, Any]) -> Job:
        self.server.admit(float(args.get("share", 1.0)))
        yield {"share": self.server.share}

    def _light_vision(self, args: dict[str, Any]) -> Job:
        """Images from now on through the light vision branch, or (``on`` false) the full one."""
        self.server.light = bool(args.get("on", True))
        self.server.plan()
        yield {"on": self.server.light}

    def _rebuild(self, args: dict[str, Any]) -> Job:
        """Everything on the device goes; what was not finished begins again."""
        old = self.server
        unfinished = [*old.active, *old.waiting]

        def drain() -> dict[str, Any]:
            for session in old.sessions:
                for moved in session.offloaded.values():
                    for handle in moved:
                        handle.discard()
                session.offloaded.clear()
                session.cache = session.vision = None
                session.light = False
                session.prefilled = session.produced = session.waiting_steps = 0
            return {"unfinished": len(unfinished)}

        def destroy() -> dict[str, Any]:
            held_bytes = self.pool.allocated_bytes
            del self.model, self.server
            old.forgotten.clear()
            del old.model
            gc.collect()
            self.pool.release_cached()
            return {"held_bytes": held_bytes}

        def baseline() -> dict[str, Any]:
            return memory_is_back(self.pool.allocated_bytes, 0, self.recovery)

        def build() -> dict[str, Any]:
            self.setup = self.setup._replace(stalls_at=None)
            self._build()
            self._adopt()
            return {"allocated_bytes": self.pool.allocated_bytes}

        def warm_up() -> dict[str, Any]:
            answer = canary.ask(self.model, draw(canary.CLOSED[0]), canary.CLOSED[0].question)
            return {"answer": answer.text}

        steps = [
            Step("drain", drain), Step("destroy", destroy), Step("baseline", baseline),
            Step("rebuild", build), Step("warm_up", warm_up),
        ]  # fmt: skip
        reports = rebuild(steps, self.recovery, self._report)
        failed = next((report for report in reports if not report.passed), None)
        if not hasattr(self, "server"):
            self._build()  # the worker goes on, whatever the verdict
            self._adopt()
        self.server.take_over(old, unfinished)
        names = {report.step for report in reports if report.passed}
        yield {
            "steps": [msgspec.to_builtins(report) for report in reports],
            "at_baseline": "baseline" in names,
            "absent": {"driver": "an emulated pool has no driver"},
        } | ({"error": f"{failed.step}: {failed.error}"} if failed else {})

    def _report(self, report: Report) -> None:
        self.channel.publish(
            Event(
                ts_ns=time.time_ns(), node=self.publisher.node, device=self.publisher.device,
                what="rebuild_step", state="done" if report.passed else "failed",
                message=f"{report.step}: {report.error or 'done'}", took_ns=report.took_ns,
                evidence=msgspec.to_builtins(report),
            )
        )  # fmt: skip

    def _verify(self, args: dict[str, Any]) -> Job:
        yield from canary.verify(self.model, self.goldens, self.recovery)

    def _ask(self, args: dict[str, Any]) -> Job:
        """A question about an image from outside: all that a verifier gets to see."""
        yield canary.asked(self.model, args)

    def _fault(self, args: dict[str, Any]) -> Job:
        yield {"done": fault.begin(self, str(args.get("kind")), int(args.get("seed", 0)))}

    def _attach(self, args: dict[str, Any]) -> Job:
        """A breaker that enforces is there: a step that will not fit waits for its word."""
        self.attached = args.get("mode") == "enforce"
        yield {"mode": args.get("mode")}

    def _report_oom(self, refusal: BaseException | None, text: str) -> None:
        evidence: dict[str, Any] = {"message": text}
        if isinstance(refusal, OutOfMemory):
            evidence |= msgspec.to_builtins(refusal.figures)
        plan = self.server.planned
        evidence["batch"] = [session.id for session in plan.batch]
        evidence["step"] = self.server.step_number
        self.channel.publish(
            Event(
                ts_ns=time.time_ns(), node=self.publisher.node, device=self.publisher.device,
                what="oom", message=text, evidence=evidence,
            )
        )  # fmt: skip
