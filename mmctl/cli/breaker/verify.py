"""``mmctl breaker verify``: does the server still answer as it did when it was healthy?"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from mmctl.cli.app import common, note, output, web_address
from mmctl.cli.main import Exit
from mmctl.cli.render import emit, to_table
from mmctl.engine import profiles
from mmctl.engine.errors import UsageError
from mmctl.engine.records import SCHEMA

GoldenOption = Annotated[
    Path,
    typer.Option("--golden", metavar="FILE", help="Goldens; recorded there where it is missing."),
]
RecordOption = Annotated[
    bool, typer.Option("--record", help="Record goldens anew, though there are some.")
]
EndpointOption = Annotated[
    str, typer.Option("--endpoint", metavar="URL", help="An OpenAI-compatible server.")
]
ModelOption = Annotated[str, typer.Option("--model", metavar="NAME", help="The model to ask for.")]
WorkerOption = Annotated[
    str, typer.Option("--worker", metavar="SOCKET", help="A worker that holds mmctl's agent.")
]
CallableOption = Annotated[
    str, typer.Option("--callable", metavar="MODULE:FUNCTION", help="A function to ask.")
]


def verify(
    golden: GoldenOption,
    endpoint: EndpointOption = "",
    model: ModelOption = "",
    worker: WorkerOption = "",
    callable_: CallableOption = "",
    record: RecordOption = False,
) -> int:
    """Ask twelve drawn images and compare with goldens recorded while the server was healthy.

    Without a file of goldens they are recorded first, in at least five runs: their spread is
    the tolerance of later checks. The verdict rests on closed answers, which must be the same,
    and on log-probabilities and embeddings where the server gives them; captions may be worded
    otherwise but must not contradict the golden ones. Switch lossy responses off before. A
    callable takes (image as array [224, 224, 3], question) and returns the text, or a mapping
    with text, tokens, logits, embedding. Exit 3 when the server is not consistent.

    \b
    Examples:
      mmctl breaker verify --golden good.json --endpoint http://127.0.0.1:8000
      mmctl breaker verify --golden good.json --worker /run/user/0/mmctl/demo.sock -o json
      mmctl breaker verify --golden good.json --callable myserver:answer --record
    """
    from mmctl.engine.recovery import asks, goldens
    from mmctl.engine.recovery.verify import compare

    endpoint = web_address("--endpoint", endpoint) if endpoint else ""
    settings = profiles.load(common().profile).profile.recovery
    named = [name for name in (endpoint, worker, callable_) if name]
    if len(named) != 1:
        raise UsageError("name one to ask: --endpoint URL, --worker SOCKET or --callable NAME")
    recording = record or not golden.exists()
    known = None if recording else goldens.load(golden)
    at_once = (1, 2, 4) if endpoint else (1,)
    if endpoint:
        ask = asks.endpoint(endpoint, model or None)
    else:
        ask = asks.worker(worker) if worker else asks.callable_(callable_)
    started = time.monotonic()
    if known is None:
        known = goldens.record(ask, named[0], settings, at_once=at_once, progress=_progress)
        goldens.save(known, golden)
        return _recorded(known, golden)
    verdict = compare(known, goldens.observe(ask), settings)
    rows = [msgspec.to_builtins(check) for check in verdict.checks]
    document = {
        "schema": SCHEMA, "server": named[0], "verdict": verdict.verdict, "checks": rows,
        "absent": verdict.absent, "golden": _about(known, golden),
        "took_s": time.monotonic() - started,
    }  # fmt: skip
    failed = [row for row in rows if not row["passed"]]
    columns = ["name", "passed", "value", "golden", "tolerance", "detail"]
    text = f"{to_table(rows, columns)}\n\n{verdict.verdict}: {len(failed)} of {len(rows)} failed"
    text += "".join(f"\nnot checked: {name}: {why}" for name, why in verdict.absent.items())
    emit(document, rows, output(), table=text)
    return Exit.DONE if verdict.verdict == "consistent" else Exit.FINDING


def _about(known: Any, path: Path) -> dict[str, Any]:
    return {
        "file": str(path), "node": known.node, "server": known.server, "runs": known.runs,
        "created_ns": known.created_ns, "mmctl": known.mmctl,
    }  # fmt: skip


def _recorded(known: Any, path: Path) -> int:
    rows = [
        {
            "name": answer.name, "answer": answer.answer.text, "right": answer.right,
            "margin": answer.margin, "logits_spread": answer.logits_spread,
            "rejected": answer.rejected,
        }
        for answer in known.answers
    ]  # fmt: skip
    document = {
        "schema": SCHEMA, "server": known.server, "verdict": "recorded", "checks": [],
        "absent": {}, "golden": _about(known, path), "answers": rows,
    }  # fmt: skip
    emit(document, rows, output())
    note(f"recorded {known.runs} runs to {path}: the same command verifies against them now")
    return Exit.DONE


def _progress(done: int, of: int) -> None:
    if sys.stderr.isatty() and not common().quiet:
        print(f"\rgood run {done} of {of}", end="\n" if done == of else "", file=sys.stderr)
