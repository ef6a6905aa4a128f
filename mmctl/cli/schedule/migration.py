"""What ``mmctl schedule migrate`` does without --check, and how it is shown."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from mmctl.cli.app import common, note
from mmctl.cli.main import Exit
from mmctl.cli.render import emit, to_table
from mmctl.cli.schedule.migrate import reason_rows
from mmctl.engine import profiles
from mmctl.engine.records import SCHEMA
from mmctl.engine.schedule import migratable
from mmctl.engine.schedule.migration import engines, faults
from mmctl.engine.schedule.migration.decode import Begin
from mmctl.engine.units import show_bytes, show_seconds

if TYPE_CHECKING:
    from mmctl.engine.schedule.migration.live import Limits, Made, Move, Outcome, Plan

TOKENS_A_MOVE = 64  # what a move there or back may take while it copies


class Wanted(msgspec.Struct, frozen=True, kw_only=True):
    """What the command line asks for; ``asked`` is added to what the decode itself needs."""

    begin: Begin
    path: Path | None
    tokens: int
    repeat: int
    threads: int
    fault: str
    deadline_s: float | None
    asked: migratable.Needs


def move(source: str, target: str, wanted: Wanted, form: str) -> int:
    """Check, move, and show; see the command's help for the exit codes."""
    from mmctl.benchmarks.environment import environment
    from mmctl.engine.schedule.migration import live

    for name in (source, target):
        engines.require(name)
    if wanted.fault:
        faults.parse(wanted.fault)
    where = environment()
    tokens = wanted.tokens + TOKENS_A_MOVE * (wanted.repeat - 1)
    verdict, reasons = _verdict(source, target, wanted, tokens)
    document: dict[str, Any] = {
        "schema": SCHEMA, "from": source, "to": target, "verdict": verdict,
        "reasons": reason_rows(reasons), "basis": "measured", "environment": where,
    }  # fmt: skip
    if verdict == "not_migratable":
        rows = document["reasons"]
        shown = f"{source} → {target}: {verdict}, nothing was done\n\n{to_table(rows)}"
        emit(document, rows, form, table=shown)
        return Exit.FINDING
    outcome = live.run(_plan(source, target, wanted, tokens), _limits(wanted), note)
    document |= _told(outcome, wanted)
    rows = [msgspec.to_builtins(one) for one in outcome.moves]
    emit(document, rows, form, table=_table(document, outcome))
    if any(one.status == "rolled_back" for one in outcome.moves):
        return Exit.FAILED
    sound = document["tokens_equal"] is not False and not outcome.lost and not outcome.repeated
    return Exit.DONE if sound else Exit.FINDING


def freeze(source: str, wanted: Wanted, out: Path, form: str) -> int:
    """Run a decode for the tokens asked for and freeze it into ``out``."""
    from mmctl.engine.schedule.migration import live

    engines.require(source)
    plan = _plan(source, source, wanted, wanted.tokens)
    made, begun = live.freeze(plan, _limits(wanted), out)
    row = _kept(made, begun) | {"file": str(out), "bytes": begun["bytes"]}
    shown = (
        f"{out}: {show_bytes(row['bytes'])}, frozen at {source} after {len(made)} tokens with "
        f"{row['cache_tokens']} in its cache"
    )
    emit({"schema": SCHEMA, "from": source, "basis": "measured", **row}, [row], form, table=shown)
    return Exit.DONE


def thaw(target: str, wanted: Wanted, form: str) -> int:
    """Go on with a frozen decode, after its last step was found to come out alike."""
    from mmctl.engine.schedule.migration import live

    engines.require(target)
    plan = _plan(target, target, wanted, wanted.tokens)
    made, begun = live.thaw(plan, _limits(wanted))
    row = _kept(made, begun) | {
        "file": str(wanted.path), "l2_error": begun["l2_error"],
        "relative_l2_error": begun["relative_l2_error"],
    }  # fmt: skip
    shown = (
        f"{wanted.path}: goes on at {target}, {len(made)} tokens from number {row['first_index']}\n"
        f"L2 error of its last step: {row['l2_error']:.3g} (relative "
        f"{row['relative_l2_error']:.3g})\ntokens: {' '.join(map(str, row['tokens']))}"
    )
    emit({"schema": SCHEMA, "to": target, "basis": "measured", **row}, [row], form, table=shown)
    return Exit.DONE


def _kept(made: list[Made], begun: dict[str, Any]) -> dict[str, Any]:
    return {
        "cache_tokens": begun["past"] + sum(one.index > 0 for one in made),
        "vision_tokens": begun["vision_tokens"], "weights_bytes": begun["weights_bytes"],
        "first_index": made[0].index if made else None, "tokens": [one.token for one in made],
    }  # fmt: skip


def _verdict(
    source: str, target: str, wanted: Wanted, tokens: int
) -> tuple[str, list[migratable.Reason]]:
    from mmctl.engine.schedule.migration import places

    if wanted.path is None:
        needs = places.needs(wanted.begin, tokens)
    else:
        needs = places.needs_of(wanted.path, tokens)
    more = wanted.asked
    needs = msgspec.structs.replace(
        needs, memory_bytes=max(needs.memory_bytes or 0, more.memory_bytes or 0),
        dtypes=(*(needs.dtypes or ()), *(more.dtypes or ())),
    )  # fmt: skip
    verdict, reasons, _ = places.check(source, target, needs)
    note(f"{source} → {target}: {verdict}")
    return verdict, reasons


def _plan(source: str, target: str, wanted: Wanted, tokens: int) -> Plan:
    from mmctl.engine.schedule.migration.live import Plan

    return Plan(
        source=source, target=target, tokens=tokens, begin=wanted.begin, moves=wanted.repeat,
        path=str(wanted.path) if wanted.path else None, fault=wanted.fault,
        threads=wanted.threads,
    )  # fmt: skip


def _limits(wanted: Wanted) -> Limits:
    from mmctl.engine.schedule.migration.live import Limits

    set_ = profiles.load(common().profile).profile.schedule
    return Limits(
        deadline_s=wanted.deadline_s or set_.migration_deadline_s,
        patience_s=set_.migration_patience_s, l2_same_kind=set_.migration_l2_same_kind,
        l2_across_kinds=set_.migration_l2_across_kinds,
    )  # fmt: skip


def _told(outcome: Outcome, wanted: Wanted) -> dict[str, Any]:
    moves = outcome.moves
    moved = [one for one in moves if one.status == "migrated"]
    errors = [one.l2_error for one in moves if one.l2_error is not None]
    sampler = {"temperature": wanted.begin.temperature, "seed": wanted.begin.seed}
    absent = {}
    if not moved:
        absent["pause_s"] = absent["gap_s"] = "nothing was moved"
    if outcome.reference is None:
        absent["tokens_equal"] = "a decode from a file has no run that was not moved"
    if not errors:
        absent["l2_error"] = "no step was run on both sides"
    if outcome.prepare_s is None:
        absent["prepare_s"] = "the target never became ready"
    equal = None if outcome.reference is None else outcome.tokens == outcome.reference
    return {
        "decode": {
            "prompt_tokens" if wanted.path is None else "cache_tokens": outcome.sizes["past"],
            "vision_tokens": outcome.sizes["vision_tokens"],
            "weights_bytes": outcome.sizes["weights_bytes"], "nodes": outcome.sizes["nodes"],
            "sampler": sampler if wanted.path is None else None,
        },
        "moves": moves, "prepare_s": outcome.prepare_s,
        "pause_s": _spread([one.pause_s for one in moved]),
        "gap_s": _spread([one.gap_s for one in moved]),
        "l2_error": max(errors) if errors else None,
        "tokens_equal": equal, "lost": outcome.lost, "repeated": outcome.repeated,
        "tokens": outcome.tokens, "absent": absent,
    }  # fmt: skip


def _spread(values: list[float | None]) -> dict[str, Any] | None:
    known = [value for value in values if value is not None]
    if not known:
        return None
    return {"median": statistics.median(known), "max": max(known), "n": len(known)}


def _table(document: dict[str, Any], outcome: Outcome) -> str:
    lines = [
        f"{document['from']} → {document['to']}: {document['verdict']}",
        "",
        to_table(document["reasons"]),
        "",
        to_table([_row(one) for one in outcome.moves]),
        "",
    ]
    lines += [f"rolled back: {one.why}" for one in outcome.moves if one.why]
    if (pause := document["pause_s"]) is not None:
        lines.append(
            f"pause: {show_seconds(pause['median'])} median, {show_seconds(pause['max'])} at "
            f"most, of {pause['n']} (measured)"
        )
    equal = {True: "the same as", False: "NOT those of", None: "not compared with"}
    lines.append(
        f"tokens: {len(outcome.made)}, {equal[document['tokens_equal']]} a run that was not "
        f"moved; lost {outcome.lost}, repeated {outcome.repeated}"
    )
    lines += [f"! {remark}" for remark in document["environment"].remarks]
    return "\n".join(lines)


def _row(one: Move) -> dict[str, Any]:
    sent = show_bytes(one.paused_bytes) if one.paused_bytes is not None else None
    return {
        "from": one.source, "to": one.target, "status": one.status, "phase": one.phase,
        "cache tokens": one.cache_tokens,
        "pause": None if one.pause_s is None else show_seconds(one.pause_s),
        "gap": None if one.gap_s is None else show_seconds(one.gap_s),
        "L2 error": one.l2_error, "steps checked": one.checked_steps,
        "copied before": show_bytes(one.copied_bytes), "in the pause": sent,
    }  # fmt: skip
