"""``mmctl schedule migrate``: could a decode run there, and move it there while it runs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mmctl.cli.app import output, quantity, seconds, to_write
from mmctl.cli.main import Exit
from mmctl.cli.render import emit, to_table
from mmctl.engine.errors import UsageError
from mmctl.engine.records import SCHEMA

if TYPE_CHECKING:
    from mmctl.engine.schedule import migratable
    from mmctl.engine.schedule.code_objects import CodeObject


def migrate(
    source: Annotated[
        str | None, typer.Argument(metavar="FROM", help="An engine: torch:cpu, openvino:cpu.")
    ] = None,
    target: Annotated[
        str | None, typer.Argument(metavar="TO", help="The engine to move to, named as FROM.")
    ] = None,
    check: Annotated[bool, typer.Option("--check", help="Only say whether it could.")] = False,
    cache: Annotated[
        int, typer.Option(metavar="N", min=2, max=8192, help="Tokens in the KV cache.")
    ] = 1024,
    image: Annotated[
        int, typer.Option(metavar="PIXELS", min=0, max=1024, help="Side of its image; 0: none.")
    ] = 224,
    tokens: Annotated[
        int, typer.Option(metavar="N", min=2, max=100_000, help="Tokens to make in all.")
    ] = 128,
    temperature: Annotated[
        float, typer.Option(metavar="T", min=0, help="Temperature of the sampler; 0: greedy.")
    ] = 0.0,
    seed: Annotated[
        int, typer.Option(metavar="N", min=0, max=2**31, help="Seed of weights, prompt, sampler.")
    ] = 0,
    repeat: Annotated[
        int, typer.Option(metavar="N", min=1, max=1000, help="Moves, there and back.")
    ] = 1,
    threads: Annotated[
        int, typer.Option(metavar="N", min=1, max=1024, help="Threads of each engine on a CPU.")
    ] = 1,
    deadline: Annotated[
        str, typer.Option(metavar="TIME", help="Longest pause, as in 200ms; else rolled back.")
    ] = "",
    fault: Annotated[
        str,
        typer.Option(metavar="FAULT", help="Drill: weights, memory, kill[:PHASE] or hang[:PHASE]."),
    ] = "",
    out: Annotated[Path | None, to_write("Freeze into a file; no TO.", metavar="STATE")] = None,
    from_: Annotated[
        Path | None, typer.Option("--from", metavar="STATE", help="Go on from such a file.")
    ] = None,
    code: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="FILE", help="With --check: a binary or wheel that it runs (repeatable)."
        ),
    ] = None,
    needs: Annotated[
        str, typer.Option(metavar="NAME,…", help="With --check: CPU features: avx512f.")
    ] = "",
    dtypes: Annotated[
        str, typer.Option(metavar="NAME,…", help="With --check: types it uses: bfloat16,int8.")
    ] = "",
    memory: Annotated[str, typer.Option(metavar="SIZE", help="Memory it holds: 12GiB.")] = "",
) -> int:
    """Move a running decode to another engine, device or process; or say whether it could.

    A decode of the demo's model runs in a process of its own, is frozen between two steps and
    goes on in a second process: the same tokens, none lost, none repeated. Its graph
    (torch.export, as plain data), weights, KV cache, vision tokens and sampler move; no code and
    no address does. Engines are torch:cpu, torch:cuda:0, openvino:cpu (or gpu, npu) and
    onnxruntime:cpu (or cuda); two processes of one engine and device are of the same kind.

    First the check is made and its verdict shown: when something blocks it, nothing is done, exit
    code 3. Then the target rebuilds the graph. Most of the cache is copied while the decode runs,
    old steps are run again at the target, and the last one on both sides at once: the L2 error of
    the logits (absolute; the relative one beside it) must stay below 1e-6 for the same kind, or
    2.3e-5 across kinds, before the source gives up ([schedule] in the profile). The pause is the
    time from the last token before the freeze to the begin of the next step. A target that is
    wrong, late, out of memory or gone is given up, and the decode goes on at the source behind
    its last token: exit code 1. --fault shows it, in the phases build, open, copy, check, pause,
    take, token. The tokens are compared with those of a run that was not moved: where they
    differ, exit code 3.

    --out freezes a decode into a file (safetensors: nothing in it can execute), --from goes on
    with one: on the one engine named, or moved from the first to the second.

    With --check, FROM and TO may also be here, a device of the shipped table, or a JSON
    description. Compared are code objects (cubins and PTX of a fat binary, ELF machines), CPU
    features, page, image and segment alignment, address ranges, data types and memory. What a
    description does not say is unknown and told so.

    \b
    Examples:
      mmctl schedule migrate torch:cpu torch:cpu
      mmctl schedule migrate torch:cpu openvino:cpu --temperature 0.8 --seed 7 -o json
      mmctl schedule migrate torch:cpu onnxruntime:cpu --repeat 20
      mmctl schedule migrate torch:cpu torch:cpu --fault kill:take
      mmctl schedule migrate torch:cpu --tokens 32 --out decode.safetensors
      mmctl schedule migrate onnxruntime:cpu --from decode.safetensors
      mmctl schedule migrate --check a100_sxm h100_sxm --code libkernels.so
      mmctl schedule migrate --check here arm.json -o json
    """
    from mmctl.engine.schedule.migratable import Needs

    form = output()
    memory_bytes = int(quantity("--memory", memory, "bytes")) if memory else None
    deadline_s = seconds("--deadline", deadline) if deadline else None
    asked = Needs(cpu_features=_words(needs), dtypes=_words(dtypes), memory_bytes=memory_bytes)
    if check:
        if source is None or target is None:
            raise UsageError("--check takes two places: mmctl schedule migrate --check FROM TO")
        return _check(source, target, asked, code or [], form)
    if code or needs:
        raise UsageError("--code and --needs belong to --check: a live move carries no code")
    from mmctl.cli.schedule import migration
    from mmctl.engine.schedule.migration.decode import Begin

    if image and image < 28:
        raise UsageError("--image: at least 28 pixels (four vision tokens), or 0 for no image")
    begin = Begin(cache_tokens=cache, image_pixels=image, seed=seed, temperature=temperature)
    wanted = migration.Wanted(
        begin=begin, path=from_, tokens=tokens, repeat=repeat, threads=threads, fault=fault,
        deadline_s=deadline_s, asked=asked,
    )  # fmt: skip
    if out is not None:
        if source is None or target is not None:
            raise UsageError("--out takes one engine: mmctl schedule migrate torch:cpu --out STATE")
        return migration.freeze(source, wanted, out, form)
    if from_ is not None and source is not None and target is None:
        return migration.thaw(source, wanted, form)
    if source is None or target is None:
        raise UsageError("name two engines: mmctl schedule migrate torch:cpu openvino:cpu")
    return migration.move(source, target, wanted, form)


def _check(source: str, target: str, asked: migratable.Needs, code: list[Path], form: str) -> int:
    import msgspec

    from mmctl.engine.schedule import code_objects, migratable
    from mmctl.engine.schedule.migration import engines

    held: dict[CodeObject, int] | None = None
    for path in code:
        held = held or {}
        for found, count in code_objects.read(path).items():
            held[found] = held.get(found, 0) + count
    if engines.is_engine(source) and engines.is_engine(target) and held is None:
        from mmctl.engine.schedule.migration import places

        verdict, reasons, found_places = places.check(source, target, asked)
        a, b = found_places or (None, None)
    else:
        a, b = _place(source), _place(target)
        verdict, reasons = migratable.check(a, b, msgspec.structs.replace(asked, code=held))
    rows = reason_rows(reasons)
    document = {
        "schema": SCHEMA, "from": a, "to": b, "verdict": verdict, "reasons": rows,
        "code": [
            {"kind": c.kind, "target": c.target, "count": n} for c, n in (held or {}).items()
        ],
    }  # fmt: skip
    names = f"{a.name if a else source} → {b.name if b else target}"
    emit(document, rows, form, table=f"{names}: {verdict}\n\n" + to_table(rows))
    return Exit.FINDING if verdict == "not_migratable" else Exit.DONE


def _place(name: str) -> migratable.Place:
    from mmctl.engine.schedule import migratable
    from mmctl.engine.schedule.migration import engines

    if engines.is_engine(name):
        from mmctl.engine.schedule.migration import places

        return places.place(name)
    return migratable.place(name)


def reason_rows(reasons: list[migratable.Reason]) -> list[dict[str, Any]]:
    """Reasons as rows of a document."""
    return [{"check": r.check, "verdict": r.verdict, "why": r.why} for r in reasons]


def _words(text: str) -> tuple[str, ...] | None:
    return tuple(part.strip() for part in text.split(",") if part.strip()) or None
