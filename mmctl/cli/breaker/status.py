"""``mmctl breaker status|log|trip|hold|reset|forget``: what the breaker did, and orders by hand."""

from __future__ import annotations

import time
from typing import Annotated, Any

import typer

from mmctl.cli import completion
from mmctl.cli.app import note, output, seconds
from mmctl.cli.breaker.lines import line, row
from mmctl.cli.main import Exit
from mmctl.cli.render import emit
from mmctl.engine.errors import MmctlError, UsageError, nearest, suggestion
from mmctl.engine.records import SCHEMA, Event

Target = Annotated[
    str,
    typer.Argument(
        metavar="DEVICE|INSTANCE",
        autocompletion=completion.targets,
        help="A target, as 'breaker status' names it.",
    ),
]
Reason = Annotated[str, typer.Option(metavar="TEXT", help="Why, for the audit log.")]
For = Annotated[str, typer.Option("--for", metavar="TIME", help="Expires after, such as 10min.")]


def status() -> int:
    """The state of every target as the running breaker last wrote it; reading changes nothing.

    Where no breaker runs these are the states of its end, and those of a demo have ended with
    it. Exit 3 when a target is open, verifying, half open or isolated.

    \b
    Examples:
      mmctl breaker status
      mmctl breaker status -o json
    """
    from mmctl.engine.breaker.store import read_state, running

    state = read_state()
    alive = running(state)
    now = time.time_ns()
    rows: list[dict[str, Any]] = []
    known = sorted(state.targets.items()) if state else []
    # The workers of a demo do not outlive its breaker.
    left = [(name, target) for name, target in known if alive or target.lasting]
    for name, target in left:
        memory = target.memory
        deadline = memory.deadline_ns
        rows.append(
            {
                "target": name,
                "node": target.node,
                "state": memory.state if alive else "unknown",
                "last_state": memory.state,
                "rule": memory.rule,
                "failures": memory.failures,
                "for_s": max(0.0, (now - memory.since_ns) / 1e9) if memory.since_ns else None,
                "deadline_in_s": None if deadline is None else (deadline - now) / 1e9,
                "reason": memory.reason,
            }
        )
    document = {
        "schema": SCHEMA, "running": alive, "mode": state.mode if state else None,
        "saved_ns": state.saved_ns if state else None, "targets": rows,
    }  # fmt: skip
    last = (
        "the last breaker watched a demo, which has ended" if known else "no breaker has run here"
    )
    table = None if rows else f"{last}: mmctl breaker watch"
    emit(document, rows, output(), table=table)
    if rows and not alive:
        note("no breaker is running: the states are those of its end")
    calm = all(row["last_state"] in ("closed", "unknown") for row in rows)
    return Exit.DONE if calm else Exit.FINDING


def log(
    since: Annotated[
        str, typer.Option(metavar="TIME", help="Only the last so long, such as 1h.")
    ] = "",
    what: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            autocompletion=completion.audited,
            help="Only events of this name: trip, refuse, respond …",
        ),
    ] = "",
    last: Annotated[
        int, typer.Option("-n", "--last", metavar="N", min=1, help="The last so many lines.")
    ] = 100,
) -> None:
    """The audit log: every trip, refusal, response and order with what caused it.

    \b
    Examples:
      mmctl breaker log -n 20
      mmctl breaker log --since 1h --what trip -o ndjson
    """
    from mmctl.engine.breaker.store import AUDITED, read_audit

    after = time.time_ns() - round(seconds("--since", since) * 1e9) if since else 0
    events = [
        record
        for record in read_audit()
        if isinstance(record, Event) and record.ts_ns >= after and what in ("", record.what)
    ][-last:]
    if what and not events:
        seen = {record.what for record in read_audit() if isinstance(record, Event)}
        known = sorted(seen | AUDITED)
        if what not in known:
            raise UsageError(f"--what: no event '{what}'{nearest(what, known)}")
    rows = [row(event) for event in events]
    table = "\n".join(map(line, events)) or "(nothing)"
    emit({"schema": SCHEMA, "events": rows}, rows, output(), table=table)


def trip(target: Target = "", reason: Reason = "", for_: For = "") -> None:
    """Open a breaker by hand; with --for it stays open that long, then it is verified.

    \b
    Examples:
      mmctl breaker trip gpu0 --reason 'maintenance of the rack'
      mmctl breaker trip gpu0 --reason drill --for 10min
    """
    _order("trip", target, reason, for_)


def hold(target: Target = "", reason: Reason = "", for_: For = "") -> None:
    """Isolate a target: no traffic and no action until a reset or the expiry.

    \b
    Examples:
      mmctl breaker hold gpu3 --reason 'swapping the riser' --for 2h
    """
    _order("hold", target, reason, for_)


def reset(target: Target = "", reason: Reason = "") -> None:
    """End a hold, a trip or an isolation: verified first, then half open, then closed.

    What happened before a reset is not acted on again.

    \b
    Examples:
      mmctl breaker reset gpu0 --reason 'riser replaced'
    """
    _order("reset", target, reason, "")


def forget(target: Target = "", reason: Reason = "") -> None:
    """Take a target that is gone off the list: a card pulled, a server that is no more.

    Only where no breaker runs. A target that a source shows again begins anew, without the hold
    or the failures that it had.

    \b
    Examples:
      mmctl breaker forget gpu1 --reason 'card removed'
    """
    from mmctl.engine.breaker import store

    state = store.read_state()
    _check("forget", target, reason, list(state.targets) if state else [])
    if store.running(state):
        raise MmctlError("a breaker runs: what it watches it does not forget; end it first")
    if state is None:
        raise UsageError(f"no target '{target}' here: no breaker has run")
    store.forget(target, reason)
    note(f"{target} is forgotten")


def _check(action: str, target: str, reason: str, known: list[str]) -> None:
    """UsageError where an order lacks its target or its reason, or names no target."""
    if not target:
        which = ", ".join(known) or "none is known yet: mmctl breaker watch"
        raise UsageError(f"{action} what? Name a target: {which}")
    if not reason:
        raise UsageError(f"{action} {target} needs --reason TEXT: it goes into the audit log")
    if known and target not in known:
        raise UsageError(
            f"no target '{target}' here{suggestion(target, known) or '; mmctl breaker status'}"
        )


def _order(action: str, target: str, reason: str, for_: str) -> None:
    from mmctl.engine.breaker.store import give_order, read_state, running

    state = read_state()
    _check(action, target, reason, list(state.targets) if state else [])
    expires = time.time_ns() + round(seconds("--for", for_) * 1e9) if for_ else None
    give_order(action, target, reason, expires)
    acting = running(state) and state is not None and state.mode == "enforce"
    if acting:
        then = ": it is verified, then half open, then closed" if action == "reset" else ""
        note(f"{action} of {target} is ordered{then}")
    else:
        note(
            f"{action} of {target} is noted: no enforcing breaker is running, the next one reads it"
        )
    if (wanted := output()) != "table":
        order = {
            "action": action, "target": target, "reason": reason, "expires_ns": expires,
            "acting": acting,
        }  # fmt: skip
        emit({"schema": SCHEMA, **order}, [order], wanted)
