"""``mmctl fingerprint contention``: attention heads in each other's way."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from mmctl.cli.app import output, quantity
from mmctl.cli.fingerprint import load
from mmctl.cli.main import Exit
from mmctl.cli.render import emit, to_table
from mmctl.engine import units
from mmctl.engine.errors import UsageError
from mmctl.engine.records import SCHEMA

if TYPE_CHECKING:
    from mmctl.engine.access.contention import Contention, Head


def contention(
    source: Annotated[
        str | None, typer.Argument(metavar="[FILE|SOURCE]", help="Access records with heads.")
    ] = None,
    module: Annotated[
        str | None,
        typer.Option(metavar="FILE.py:FUNCTION", help="Run a torch attention module instead."),
    ] = None,
    window: Annotated[
        int, typer.Option(metavar="CYCLES", min=1, help="Arbitration window in cycles.")
    ] = 32,
    cycle: Annotated[
        str | None,
        typer.Option(metavar="TIME", help="Length of a cycle; by default ts_ns counts cycles."),
    ] = None,
    cycles: Annotated[
        int | None,
        typer.Option(
            metavar="N", min=1, help="Cycles observed, where idle ones frame the records."
        ),
    ] = None,
) -> int:
    """Bandwidth contention between attention heads (BWI), and who meets whom.

    bwi_cycles_ratio: of the cycles in which any head accesses memory, those in which more than
    one does. bwi_windows_ratio: the same for arbitration windows. bwi_all_…: over all cycles and
    windows. independent_ratio is what independent heads of the same rates would show (cycles),
    excess_ratio what is above that. Addresses count by 64-byte lines. Pairs that meet more often
    than chance are named: same_layer (modalities on one range of keys and values) or cross_layer
    (a cascade, with the bank). Records are measured; --module sees the tensors and models when
    each line is asked for.

    \b
    Examples:
      mmctl fingerprint contention accesses.ndjson
      mmctl fingerprint contention accesses.ndjson --cycle 0.08ns -o json
      mmctl fingerprint contention --module model.py:prefill --window 64
    """
    from mmctl.engine.access import attention, tracing
    from mmctl.engine.access import contention as engine

    wanted = output()
    if (source is None) == (module is None):
        raise UsageError("name a FILE or a SOURCE, or --module FILE.py:FUNCTION")
    if module is not None:
        accesses = attention.trace(tracing.load_workload(module), module)
    else:
        accesses = load.one(source or "", load.profile())
    if cycle is not None:
        accesses = _in_cycles(accesses, cycle)
    found = engine.analyse(accesses, window, cycles)
    document = {
        "schema": SCHEMA,
        "basis": "modelled" if module else "measured",
        **{name: getattr(found, name) for name in found.__struct_fields__},
    }
    emit(document, _rows(found), wanted, _text(found))
    return Exit.DONE


def _in_cycles(accesses: Any, length: str) -> Any:
    from dataclasses import replace

    ns = quantity("--cycle", length, "seconds") * 1e9
    if ns <= 0:
        raise UsageError("--cycle must be longer than nothing")
    first = int(accesses.cycle.min())
    return replace(accesses, cycle=((accesses.cycle - first) / ns).astype("int64"))


def _name(head: Head) -> str:
    where = "?" if head.layer is None else head.layer
    which = "?" if head.head is None else head.head
    return f"layer {where} head {which}" + (f" ({head.stream})" if head.stream else "")


def _rows(found: Contention) -> list[dict[str, Any]]:
    return [
        {
            "a": _name(pair.heads[0]),
            "b": _name(pair.heads[1]),
            "mode": pair.mode,
            "windows": pair.windows,
            "expected_windows": pair.expected_windows,
            "shared_lines": pair.shared_lines,
            "range": ", ".join(f"{r.address:#x}+{units.show_bytes(r.size_bytes)}"
                               for r in pair.ranges[:1]) or None,
            "banks": pair.banks or None,
        }
        for pair in found.pairs
    ]  # fmt: skip


def _text(found: Contention) -> str:
    figures = [
        {"per": "cycle", "bwi": found.bwi_cycles_ratio, "independent": found.independent_ratio,
         "excess": found.excess_ratio, "of all": found.bwi_all_cycles_ratio},
        {"per": f"{found.window_cycles} cycles", "bwi": found.bwi_windows_ratio,
         "independent": found.independent_windows_ratio, "excess": found.excess_windows_ratio,
         "of all": found.bwi_all_windows_ratio},
    ]  # fmt: skip
    lines = [f"{found.heads} heads, {found.accesses} accesses in {found.cycles} cycles",
             to_table(figures)]  # fmt: skip
    if found.pairs:
        lines += ["Heads that meet more often than chance", to_table(_rows(found)[:12])]
    return "\n".join(lines)
