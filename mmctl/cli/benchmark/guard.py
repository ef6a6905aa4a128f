"""``mmctl benchmark guard``: what the guard costs, and what it spares text beside images."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Annotated, Any

import msgspec
import typer

from mmctl.cli.app import note, output, seconds, web_address
from mmctl.cli.breaker.watch import ModeOption, mode_of
from mmctl.cli.main import Exit
from mmctl.cli.render import emit, to_table
from mmctl.engine.errors import MissingExtraError, UsageError
from mmctl.engine.records import SCHEMA
from mmctl.engine.units import show_bytes, show_seconds


def guard(
    mode: ModeOption = "",
    rate: Annotated[
        float, typer.Option(metavar="N", min=1, help="Requests a second, for latencies.")
    ] = 200.0,
    requests: Annotated[
        int, typer.Option(metavar="N", min=100, help="Requests in a row, for throughput.")
    ] = 10_000,
    rounds: Annotated[int, typer.Option(metavar="N", min=1, help="Rounds of each load.")] = 5,
    mixture: Annotated[
        bool, typer.Option("--mixture", help="Text beside images over two backends, too.")
    ] = False,
    mixture_rate: Annotated[
        float, typer.Option(metavar="N", min=0.5, help="Requests a second of the mixture.")
    ] = 6.0,
    round_: Annotated[
        str, typer.Option("--round", metavar="TIME", help="One round of the mixture.")
    ] = "20s",
    backends: Annotated[
        list[str] | None,
        typer.Option(
            "--backend",
            metavar="URL",
            help="A server for the mixture (repeatable); by default two of ours.",
        ),
    ] = None,
    model: Annotated[str, typer.Option(metavar="NAME", help="The model they serve.")] = "serial",
) -> int:
    """Latency that the guard adds, requests that a core passes, memory over many requests.

    The guard runs as from the command line, between a backend that answers at once and a load
    generator, each a process. Direct and guarded load take turns. Throughput is given by the
    guard's own CPU time, which a busy machine does not change, and by the clock. With --mixture,
    first tokens of text with 20 % image requests over two backends: text alone, dealt out in
    turn, and through the guard; of backends of ours the times of work are modelled. Exit 3 where
    a budget is not met.

    \b
    Examples:
      mmctl benchmark guard
      mmctl benchmark guard --requests 100000 --mode enforce
      mmctl benchmark guard --mixture --backend http://127.0.0.1:8001 \\
        --backend http://127.0.0.1:8002 --model tiny
    """
    wanted = output()
    if find_spec("aiohttp") is None:
        raise MissingExtraError("benchmark guard", "guard")
    from mmctl.benchmarks import mixture as mixed
    from mmctl.benchmarks import relay as benchmark
    from mmctl.benchmarks.environment import environment

    named = [web_address("--backend", url) for url in backends or ()]
    if named and not mixture:
        raise UsageError("--backend belongs to --mixture")
    mixed.check(named)
    where = environment()
    chosen = mode_of(mode) or "observe"
    found = benchmark.measure(rate_per_s=rate, rounds=rounds, requests=requests, mode=chosen)
    document: dict[str, Any] = {
        "schema": SCHEMA, "environment": msgspec.to_builtins(where), "relay": found,
        "budget": benchmark.BUDGET,
    }  # fmt: skip
    met = benchmark.within(found)
    text = _relay(found, benchmark.BUDGET)
    if mixture:
        beside = mixed.measure(
            rate_per_s=mixture_rate, seconds=seconds("--round", round_), rounds=rounds,
            backends=named, model=model,
        )  # fmt: skip
        document["mixture"] = beside
        met = met and beside["guard_factor"] <= mixed.BUDGET_FACTOR
        text += f"\n\n{_mixture(beside)}"
    for remark in where.remarks:
        note(f"mmctl: {remark}")
    emit(document, [found], wanted, text)
    return Exit.DONE if met else Exit.FINDING


def _relay(found: dict[str, Any], budget: dict[str, float]) -> str:
    rows = [
        {
            "at": f"{found['rate_per_s']:g}/s, {name}",
            "direct": show_seconds(found[f"direct_{name}_s"]),
            "guarded": show_seconds(found[f"guarded_{name}_s"]),
            "added": show_seconds(found[f"added_{name}_s"]),
            "budget": show_seconds(budget[f"added_{name}_s"]),
        }
        for name in ("p50", "p99")
    ]
    return (
        f"{to_table(rows)}\n"
        f"{found['requests_per_core_second']:,.0f} requests a second of the guard's CPU "
        f"({found['cpu_s_per_request'] * 1e6:.0f} µs each; budget "
        f"{budget['requests_per_core_second']:,.0f}), {found['requests_per_second']:,.0f} by the "
        f"clock\n{show_bytes(found['resident_bytes'])} resident, "
        f"{show_bytes(found['resident_growth_bytes'])} more after {found['requests']:,} requests "
        f"(mode {found['mode']}, {found['basis']})"
    )


def _mixture(found: dict[str, Any]) -> str:
    rows = [
        {
            "text": name.replace("_", " "),
            "first token p50": show_seconds(found[f"{name}_ttft_p50_s"]),
            "p99": show_seconds(found[f"{name}_ttft_p99_s"]),
            "× alone": factor,
        }
        for name, factor in (
            ("text_alone", 1.0), ("round_robin", found["round_robin_factor"]),
            ("guard", found["guard_factor"]),
        )
    ]  # fmt: skip
    return (
        f"{found['text_requests']} text requests beside {found['image_share_ratio']:.0%} images, "
        f"{found['rate_per_s']:g}/s over two backends ({found['basis']})\n{to_table(rows)}\n"
        f"budget: the guard at most {found['budget_factor']:g} × text alone"
    )
