"""The command tree as data, so that help needs no import and a group loads when called.

To add a command: write ``cli/GROUP/NAME.py`` with a function of typer parameters and name it
here as ``module:function``.
"""

from __future__ import annotations

from typing import NamedTuple


class Leaf(NamedTuple):
    """A command: where its function is and its line in the group's help."""

    target: str
    help: str


class Branch(NamedTuple):
    """A group: its commands, and the one that runs when none is named."""

    help: str
    default: str | None
    commands: dict[str, Leaf]
    examples: str = ""


TREE: dict[str, Leaf | Branch] = {
    "top": Leaf("top:top", "The dashboard: devices, conflict heatmap, events, recovery."),
    "probe": Branch(
        help="Read devices, engines, pools and links, live or from files.",
        default="node",
        commands={
            "node": Leaf("probe.node:node", "Every device and engine of this node."),
            "snapshot": Leaf("probe.snapshot:snapshot", "A PyTorch memory snapshot, explained."),
            "model": Leaf("probe.model:model", "What a model needs, from its config.json."),
            "kernels": Leaf("probe.kernels:kernels", "Where device time went, and who was late."),
            "align": Leaf("probe.align:align", "Launches and scheduling delays on one clock."),
            "links": Leaf("probe.links:links", "How the devices are joined."),
            "serve": Leaf("probe.serve:serve", "An OpenMetrics exporter, dashboards, alerts."),
        },
        examples="  mmctl probe\n  mmctl probe -o json",
    ),
    "fingerprint": Branch(
        help="Who disturbs whom: access patterns, contention, streams, traced kernels.",
        default="trace",
        commands={
            "trace": Leaf("fingerprint.trace:trace", "A fingerprint of each task's accesses."),
            "compare": Leaf("fingerprint.compare:compare", "Two tasks: alike, and colliding?"),
            "matrix": Leaf("fingerprint.compare:matrix", "All pairs of tasks at once."),
            "contention": Leaf("fingerprint.contention:contention", "Attention heads that meet."),
            "streams": Leaf("fingerprint.streams:streams", "One mixed stream, or two kept apart."),
            "instrument": Leaf("fingerprint.instrument:instrument", "PTX that records accesses."),
            "paths": Leaf("fingerprint.instrument:paths", "Each token's path through memory."),
        },
        examples="  mmctl fingerprint trace kernel.traceg\n"
        "  mmctl fingerprint compare vision.traceg text.traceg",
    ),
    "benchmark": Branch(
        help="Measure, fit and compare on this node.",
        default="device",
        commands={
            "device": Leaf("benchmark.device:device", "What each device reaches, by precision."),
            "stages": Leaf("benchmark.stages:stages", "What stages cost, and vision batching."),
            "links": Leaf("benchmark.links:links", "What transfers cost, by size and class."),
            "responses": Leaf("benchmark.responses:responses", "What giving memory back costs."),
            "pool": Leaf("benchmark.pool:pool", "The default pool against a lifetime-aware one."),
            "towers": Leaf("benchmark.towers:towers", "Two towers on two devices, bound or not."),
            "overlap": Leaf("benchmark.overlap:overlap", "A gather hidden behind the encoder."),
            "detector": Leaf("benchmark.detector:detector", "A learned detector, deployed."),
            "fingerprints": Leaf("benchmark.fingerprints:fingerprints", "How far to trust them."),
            "guard": Leaf("benchmark.guard:guard", "What the guard costs, and spares text."),
            "compare": Leaf("benchmark.compare:compare", "Two results: what changed."),
        },
        examples="  mmctl benchmark --quick\n"
        "  mmctl benchmark links nccl_perf.parquet\n"
        "  mmctl benchmark compare before.json after.json",
    ),
    "breaker": Branch(
        help="Trip before memory runs out, try it on a recording first, recover.",
        default="watch",
        commands={
            "watch": Leaf("breaker.watch:watch", "Watch sources and trip by the rules."),
            "rules": Leaf("breaker.rules:rules", "The rules, what they see now, and why."),
            "replay": Leaf("breaker.replay:replay", "Decide again over a recording."),
            "run": Leaf("breaker.run:run", "A program under the allocation hook."),
            "status": Leaf("breaker.status:status", "The state of every target."),
            "log": Leaf("breaker.status:log", "The audit log."),
            "trip": Leaf("breaker.status:trip", "Open a breaker by hand."),
            "hold": Leaf("breaker.status:hold", "Isolate a target by hand."),
            "reset": Leaf(
                "breaker.status:reset", "End a hold or a trip: verified, half open, closed."
            ),
            "forget": Leaf("breaker.status:forget", "Take a target that is gone off the list."),
            "evaluate": Leaf("breaker.evaluate:evaluate", "Trips against labels and truth."),
            "verify": Leaf("breaker.verify:verify", "Does it answer as when it was healthy?"),
            "guard": Leaf(
                "breaker.guard:guard", "In front of serving engines: route, shrink, hold."
            ),
            "diagnose": Leaf("breaker.diagnose:diagnose", "Failure chains in kernel logs."),
        },
        examples="  mmctl breaker watch demo:burst\n  mmctl breaker replay run.ndjson",
    ),
    "doctor": Leaf("doctor:doctor", "What can be read here, what cannot, and why."),
    "schedule": Branch(
        help="Place, route and simulate multimodal work on mixed devices.",
        default="plan",
        commands={
            "plan": Leaf("schedule.plan:plan", "Stages on devices, replicas and limits."),
            "route": Leaf("schedule.route:route", "Requests in, decisions out, by live records."),
            "split": Leaf("schedule.split:split", "Where a model could be cut over devices."),
            "sweep": Leaf("schedule.sweep:sweep", "A grid of plans, and its Pareto front."),
            "migrate": Leaf(
                "schedule.migrate:migrate", "Move a running decode; could it run there?"
            ),
            "rebalance": Leaf("schedule.rebalance:rebalance", "Communication against compute."),
            "queues": Leaf("schedule.queues:queues", "Depth, wait and misses of the two queues."),
            "simulate": Leaf("schedule.simulate:simulate", "A workload on a fleet, by policy."),
        },
        examples="  mmctl schedule plan azure --rate 8 --devices h100_sxm:2,l4:4\n"
        "  mmctl schedule simulate azure --devices h100_sxm:4,l4:4 --rate 8",
    ),
    "profile": Branch(
        help="List, show, choose, make and check profiles.",
        default="list",
        commands={
            "list": Leaf("profile.manage:list_", "Every profile and the one in force."),
            "show": Leaf("profile.manage:show", "All values of a profile and where each is set."),
            "use": Leaf("profile.manage:use", "Put a profile in force, or none."),
            "new": Leaf("profile.manage:new", "Start a profile that extends another."),
            "validate": Leaf("profile.manage:validate", "All problems of a profile at once."),
            "diff": Leaf("profile.manage:diff", "What two profiles set differently."),
        },
        examples="  mmctl profile show paper\n  mmctl profile diff default paper",
    ),
}

EXAMPLES = """\
  mmctl top demo --mode enforce     a small model under load: trip, response, recovery
  mmctl probe -o json               this node, once
  mmctl probe snapshot oom.pickle   why memory ran out, and what would have avoided it
  mmctl breaker watch nvml: http://127.0.0.1:8000/metrics
                                    what would trip on a live engine (observes)
  mmctl breaker replay run.ndjson   last night's recording, decided again
  mmctl doctor                      what can be read here, what cannot, and why
"""
