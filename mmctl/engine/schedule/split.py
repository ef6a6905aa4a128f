"""Where a model's graph could be cut over devices: nodes with flops and bytes, candidates, cost.

A candidate is a node where max(flops / peak, bytes / bandwidth), in shares of the step's budget,
passes the threshold; the largest flops go first. The vision | language boundary is always among
them. Each says what would cross the link. Times are a roofline's: modelled.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import msgspec

from mmctl.engine.errors import MissingExtraError, MmctlError, UsageError
from mmctl.engine.modality import Matcher
from mmctl.engine.profiles import ModalityPatterns
from mmctl.engine.records import Modality
from mmctl.engine.schedule.costs import Peaks

THRESHOLD = 0.15
LEAST_THRESHOLD = 0.005
NODES_MOST = 1_000_000


class Node(msgspec.Struct, kw_only=True):
    """One operation; ``bytes`` are what it reads and writes, ``output_bytes`` what it makes."""

    name: str
    flops: float = 0.0
    bytes: float = 0.0
    output_bytes: float = 0.0
    inputs: list[str] = []
    modality: Literal["vision", "text", "other"] = "other"
    op: str = ""


class Cut(msgspec.Struct, frozen=True, kw_only=True):
    """A place to cut: before ``node``, or at the boundary of the modalities.

    ``before_s`` and ``after_s`` are the two sides on one device each, ``transfer_s`` what the
    link takes for the tensors that cross it.
    """

    node: str
    why: Literal["threshold", "vision|language"]
    cost_ratio: float
    flops: float
    bytes: float
    crossing_bytes: float
    transfer_s: float
    before_s: float
    after_s: float
    bottleneck_s: float


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """The nodes in order with their seconds, and the cuts, the largest flops first."""

    nodes: tuple[Node, ...]
    seconds: tuple[float, ...]
    budget_s: float
    threshold_ratio: float
    cuts: tuple[Cut, ...]


class _Graph(msgspec.Struct):
    nodes: list[Node]


def from_json(written: bytes, name: str) -> list[Node]:
    """A graph as ``{"nodes": [{"name", "flops", "bytes", "output_bytes", "inputs", …}]}``;
    MmctlError, with its ``name``, for what is none."""
    try:
        nodes = msgspec.json.decode(written, type=_Graph).nodes
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise MmctlError(f"{name} is no graph: {error}") from None
    return _ordered(nodes, name)


def _ordered(nodes: list[Node], name: str) -> list[Node]:
    """In an order in which every input comes first; MmctlError for a cycle or a strange name."""
    if not nodes:
        raise MmctlError(f"{name} holds no node")
    if len(nodes) > NODES_MOST:
        raise MmctlError(f"{name} holds more than {NODES_MOST} nodes")
    by_name = {node.name: node for node in nodes}
    if len(by_name) < len(nodes):
        raise MmctlError(f"{name} names a node twice")
    waits: dict[str, int] = {}
    users: dict[str, list[str]] = {}
    for node in nodes:
        if min(node.flops, node.bytes, node.output_bytes) < 0:
            raise MmctlError(f"{name}: '{node.name}' has negative flops or bytes")
        waits[node.name] = len(set(node.inputs))
        for given in set(node.inputs):
            if given not in by_name:
                raise MmctlError(f"{name}: '{node.name}' takes '{given}', which is no node")
            users.setdefault(given, []).append(node.name)
    ready = [node.name for node in nodes if not waits[node.name]]
    found: list[Node] = []
    at = 0
    while at < len(ready):
        found.append(by_name[ready[at]])
        for user in users.get(ready[at], ()):
            waits[user] -= 1
            if not waits[user]:
                ready.append(user)
        at += 1
    if len(found) < len(nodes):
        raise MmctlError(f"{name} has a cycle: it is no graph of one forward pass")
    return found


def from_torch(build: Callable[[], Any], patterns: ModalityPatterns) -> list[Node]:
    """The nodes of a torch module by ``torch.export``, shapes without running it.

    ``build`` gives ``(module, inputs)``. Flops are those of torch's own counter; bytes are the
    tensors each operation reads and writes. A node's modality is that of the module it is in.
    """
    try:
        import torch
        from torch.utils.flop_counter import flop_registry
    except ImportError:
        raise MissingExtraError("reading a torch model", "torch") from None
    try:
        module, inputs = build()
        program = torch.export.export(module, tuple(inputs))
    except MmctlError:
        raise
    except Exception as error:
        first = str(error).strip().split("\n")[0]
        raise MmctlError(f"the model cannot be exported: {type(error).__name__}: {first}") from None
    matcher = Matcher(patterns)
    nodes: list[Node] = []
    held: dict[str, tuple[list[str], float]] = {}
    for node in program.graph.nodes:
        made = _bytes(node.meta.get("val"))
        if node.op != "call_function":
            held[node.name] = ([], made)  # weights and inputs lie ready on either side
            continue
        given = [a.name for a in node.all_input_nodes]
        # Through views and weights to the operations that made the data.
        inputs_of = list(dict.fromkeys(n for g in given for n in held[g][0]))
        name = str(getattr(node.target, "__name__", node.target))
        if node.target in _views(torch) or name == "getitem":
            held[node.name] = (inputs_of, made)
            continue
        nodes.append(
            Node(
                name=node.name, op=name, flops=_flops(node, flop_registry),
                bytes=sum(held[g][1] for g in given) + made, output_bytes=made,
                inputs=inputs_of, modality=_modality(node, matcher),
            )
        )  # fmt: skip
        held[node.name] = ([node.name], made)
    return _ordered(nodes, "the exported model")


def _views(torch: Any) -> set[Any]:
    aten = torch.ops.aten
    return {
        aten.view.default, aten.reshape.default, aten.transpose.int, aten.permute.default,
        aten.unsqueeze.default, aten.squeeze.dim, aten.expand.default, aten.slice.Tensor,
        aten.select.int, aten.t.default, aten.alias.default, aten.detach.default,
        aten.split.Tensor, aten.chunk.default, aten.unbind.int, aten.flatten.using_ints,
    }  # fmt: skip


def _bytes(value: Any) -> float:
    if isinstance(value, (list, tuple)):
        return sum(_bytes(part) for part in value)
    if hasattr(value, "numel") and hasattr(value, "element_size"):
        return float(int(value.numel()) * value.element_size())
    return 0.0


def _flops(node: Any, registry: Any) -> float:
    """torch's formula of the operation; a linear layer is a product; others one a value."""
    values = [a.meta.get("val") if hasattr(a, "meta") else a for a in node.args]
    made = node.meta.get("val")
    if str(node.target).startswith("aten.linear"):
        x, weight = values[0], values[1]
        return 2.0 * int(x.numel()) * int(weight.shape[0])
    if str(node.target).startswith("aten.matmul"):
        a, b = values[0], values[1]
        inner = int(a.shape[-1])
        return 2.0 * int(made.numel()) * inner if hasattr(b, "shape") else 0.0
    formula = registry.get(getattr(node.target, "overloadpacket", None))
    if formula is not None:
        try:
            return float(formula(*values, **node.kwargs, out_val=made))
        except (TypeError, ValueError, AttributeError, AssertionError, IndexError):
            pass
    return float(int(made.numel())) if hasattr(made, "numel") else 0.0


def _modality(node: Any, matcher: Matcher) -> Modality:
    """By the paths of the modules that the node stands in."""
    stack = node.meta.get("nn_module_stack") or {}
    return matcher.modality(" ".join(str(path) for path, _ in stack.values())) or "other"


def plan(
    nodes: Sequence[Node], peaks: Peaks, *, budget_s: float | None = None,
    threshold: float | None = None, most: int = 8,
) -> Plan:  # fmt: skip
    """Candidates for a cut on devices with these peaks.

    The budget is the sum of all nodes' seconds unless told. Without a ``threshold`` it adapts:
    from 0.15 down by halves until some node passes, up until no more than ``most`` do.
    """
    if threshold is not None and not threshold > 0:
        raise UsageError(f"a threshold of {threshold} is none: a share of the budget above 0")
    seconds = [
        max(node.flops / peaks.flops_per_s, node.bytes / peaks.bandwidth_bytes_per_s)
        for node in nodes
    ]
    budget = budget_s or sum(seconds)
    if budget <= 0:
        raise MmctlError("the graph does no work: its nodes have neither flops nor bytes")
    shares = [s / budget for s in seconds]
    chosen = THRESHOLD if threshold is None else threshold
    if threshold is None:
        while chosen > LEAST_THRESHOLD and not any(share > chosen for share in shares):
            chosen /= 2
        while sum(share > chosen for share in shares) > most:
            chosen *= 1.25
    crossing = _crossing(nodes)
    total = sum(seconds)
    before, done = [], 0.0
    for s in seconds:
        before.append(done)
        done += s

    def cut(i: int, why: Any, crossing_bytes: float, before_s: float) -> Cut:
        transfer = peaks.link_latency_s + crossing_bytes / peaks.link_bytes_per_s
        after = total - before_s
        return Cut(
            node=nodes[i].name, why=why, cost_ratio=shares[i], flops=nodes[i].flops,
            bytes=nodes[i].bytes, crossing_bytes=crossing_bytes, transfer_s=transfer,
            before_s=before_s, after_s=after, bottleneck_s=max(before_s, after, transfer),
        )  # fmt: skip

    picked = [
        cut(i, "threshold", crossing[i], before[i])
        for i, share in enumerate(shares) if share > chosen and i > 0
    ]  # fmt: skip
    picked.sort(key=lambda c: -c.flops)
    if (boundary := _boundary(nodes)) is not None:
        at, size = boundary
        vision_s = sum(
            s for s, node in zip(seconds, nodes, strict=True) if node.modality == "vision"
        )
        picked.insert(0, cut(at, "vision|language", size, vision_s))
    return Plan(
        nodes=tuple(nodes), seconds=tuple(seconds), budget_s=budget, threshold_ratio=chosen,
        cuts=tuple(picked),
    )  # fmt: skip


def _crossing(nodes: Sequence[Node]) -> list[float]:
    """Bytes alive just before each node: made earlier, still wanted at or after it."""
    place = {node.name: i for i, node in enumerate(nodes)}
    last = list(range(len(nodes)))
    for i, node in enumerate(nodes):
        for given in node.inputs:
            last[place[given]] = max(last[place[given]], i)
    change = [0.0] * (len(nodes) + 1)
    for i, node in enumerate(nodes):
        if last[i] > i:
            change[i + 1] += node.output_bytes
            change[last[i] + 1] -= node.output_bytes
    found, alive = [], 0.0
    for i in range(len(nodes)):
        alive += change[i]
        found.append(alive)
    return found


def _boundary(nodes: Sequence[Node]) -> tuple[int, float] | None:
    """The first node beyond vision that takes of it, and the bytes that go over."""
    made = {node.name: node for node in nodes}
    over: dict[str, float] = {}
    first = None
    for i, node in enumerate(nodes):
        if node.modality == "vision":
            continue
        for given in node.inputs:
            if made[given].modality == "vision":
                over[given] = made[given].output_bytes
                first = i if first is None else first
    return None if first is None else (first, sum(over.values()))


_COLOURS = {"vision": "#7fb3d5", "text": "#f0b27a", "other": "#d5d8dc"}


def to_dot(found: Plan) -> str:
    """The graph for graphviz, cuts in red."""
    cut = {c.node for c in found.cuts}
    lines = ["digraph split {", "  rankdir=LR; node [shape=box, style=filled];"]
    for node, seconds in zip(found.nodes, found.seconds, strict=True):
        label = f"{node.name}\\n{seconds * 1e6:.1f} us".replace('"', "'")
        edge = ', color="red", penwidth=3' if node.name in cut else ""
        lines.append(f'  "{_quoted(node.name)}" [label="{label}", '
                     f'fillcolor="{_COLOURS[node.modality]}"{edge}];')  # fmt: skip
    for node in found.nodes:
        lines += [f'  "{_quoted(given)}" -> "{_quoted(node.name)}";' for given in node.inputs]
    return "\n".join([*lines, "}"]) + "\n"


def _quoted(name: str) -> str:
    return name.replace("\\", "\\\\").replace('"', '\\"')


def to_svg(found: Plan, rows_most: int = 400) -> str:
    """Nodes from top to bottom, a bar of seconds each, a red line at each cut."""
    from html import escape

    cuts = {c.node: c for c in found.cuts}
    shown = list(zip(found.nodes, found.seconds, strict=True))
    if len(shown) > rows_most:
        worth = sorted(range(len(shown)), key=lambda i: -shown[i][1])[:rows_most]
        keep = {*worth, *(i for i, (node, _) in enumerate(shown) if node.name in cuts)}
        shown = [pair for i, pair in enumerate(shown) if i in keep]
    longest = max((seconds for _, seconds in shown), default=0.0) or 1.0
    height = 24 + 16 * len(shown) + 14 * len(cuts)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="900" height="{height}" '
        'font-family="monospace" font-size="11">',
        f'<rect width="900" height="{height}" fill="white"/>',
    ]
    y = 16
    for node, seconds in shown:
        if (c := cuts.get(node.name)) is not None:
            parts.append(f'<line x1="0" x2="900" y1="{y - 4}" y2="{y - 4}" stroke="red"/>')
            parts.append(
                f'<text x="560" y="{y + 7}" fill="red">{c.why}: '
                f"{c.crossing_bytes / 1024:.1f} KiB, {c.transfer_s * 1e6:.1f} µs</text>"
            )
            y += 14
        wide = max(1.0, 300.0 * seconds / longest)
        parts.append(f'<rect x="240" y="{y - 4}" width="{wide:.1f}" height="12" '
                     f'fill="{_COLOURS[node.modality]}"/>')  # fmt: skip
        parts.append(f'<text x="4" y="{y + 6}">{escape(node.name[:36])}</text>')
        parts.append(f'<text x="{246 + wide:.1f}" y="{y + 6}">{seconds * 1e6:.2f} µs</text>')
        y += 16
    return "\n".join([*parts, "</svg>"]) + "\n"
