"""``mmctl breaker rules``: the rules in force, what they see now, and why."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
import typer

from mmctl.cli.app import common, note, output, seconds
from mmctl.cli.breaker.watch import Sources
from mmctl.cli.listen import listen
from mmctl.cli.main import Exit
from mmctl.cli.render import emit
from mmctl.engine import profiles
from mmctl.engine.errors import NoSourceError
from mmctl.engine.records import SCHEMA, AnyRecord, Event, Recording


def rules(
    sources: Sources = None,
    signals: Annotated[bool, typer.Option("--signals", help="Every signal, its source.")] = False,
    duration: Annotated[
        str, typer.Option(metavar="TIME", help="How long to look, once records come.")
    ] = "2s",
) -> int:
    """Every rule of the profile: what it needs, its inputs now, and why it is true or not.

    ``needs`` tells which rules live on a driver library and a metrics page alone, and which
    need an agent or a hook in the serving process. Exit 3 when a rule is true.

    A rule is an expression over signals. Over a window, as in mean(kv_ratio, 30s): mean, std,
    median, mad, min, max, p50, p95, p99, rate, slope, count, sum, first, delta. Of the present:
    abs, log, sqrt, at_least, at_most, known, and time_to(level, signal, 30s) at its slope.

    \b
    Examples:
      mmctl breaker rules
      mmctl breaker rules demo:calm --duration 5s
      mmctl breaker rules --signals
    """
    if signals:
        return _signals()
    from mmctl.engine.rules.live import Live
    from mmctl.engine.rules.rule import Verdict, compile_rules

    loaded = profiles.load(common().profile)
    compiled = compile_rules(loaded.profile.breaker.rules)
    live = Live(compiled)
    try:
        _look(live, sources or [], loaded.profile, duration)
    except NoSourceError as error:
        if sources:
            raise
        note(f"no source could be read: {error}")
    verdicts: dict[str, list[Verdict]] = {}
    for verdict in live.verdicts(live.now):
        verdicts.setdefault(verdict.rule, []).append(verdict)
    rows: list[dict[str, Any]] = []
    details: list[dict[str, Any]] = []
    for rule in compiled:
        needs = _needs(rule.signals)
        common_ = {
            "rule": rule.name,
            "mode": "observe" if rule.settings.mode == "observe" else loaded.profile.breaker.mode,
            "needs": needs,
        }
        found = verdicts.get(rule.name)
        if not found:
            kinds = ", ".join(sorted({signal.kind for signal in rule.signals}))
            rows.append({**common_, "subject": None, "truth": "unknown",
                         "why": f"no record has come yet of: {kinds}"})  # fmt: skip
        for verdict in found or ():
            truth = {True: "true", False: "false", None: "unknown"}[verdict.truth]
            rows.append(
                {**common_, "subject": verdict.subject, "truth": truth, "why": verdict.reason}
            )
            details.append(msgspec.to_builtins(verdict))
    document = {
        "schema": SCHEMA, "profile": loaded.name, "rules": rows, "verdicts": details,
        "settings": [msgspec.to_builtins(rule.settings) for rule in compiled],
    }  # fmt: skip
    emit(document, rows, output())
    return Exit.FINDING if any(row["truth"] == "true" for row in rows) else Exit.DONE


def _look(live: Any, sources: list[str], profile: profiles.Profile, duration: str) -> None:
    from mmctl.engine.sources import patience_s

    length_s = seconds("--duration", duration)
    start_s = max(map(patience_s, sources or profile.sources.default), default=0.0)
    for record in listen(sources, length_s, _is_reading, start_s):
        live.step(record)


def _is_reading(record: AnyRecord) -> bool:
    """Whether a source has begun: a worker tells of its model before it serves."""
    return not isinstance(record, (Recording, Event))


def _needs(used: Any) -> str:
    from mmctl.engine.rules.signals import KINDS

    kinds = {signal.kind for signal in used}
    if any(KINDS[kind].local for kind in kinds):
        return "agent or hook"
    if kinds <= {"request"}:
        return "guard, agent or recording"
    if kinds <= {"event"}:
        return "logs or events"
    if kinds <= {"host", "cpu"}:
        return "host alone"
    return "driver and metrics page"


def _signals() -> int:
    from mmctl.engine.rules.signals import KINDS, SIGNALS

    rows = [
        {
            "signal": signal.name,
            "record": signal.kind,
            "of": KINDS[signal.kind].scope,
            "source": "agent or hook" if KINDS[signal.kind].local else "driver, page or host",
            "about": signal.about,
        }
        for signal in sorted(SIGNALS.values())
    ]
    emit({"schema": SCHEMA, "signals": rows}, rows, output())
    return Exit.DONE
