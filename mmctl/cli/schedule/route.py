"""``mmctl schedule route``: requests on standard input become decisions on standard output."""

from __future__ import annotations

import sys
import threading
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mmctl.cli.app import common, note, output, to_read
from mmctl.cli.main import Exit
from mmctl.cli.render import emit
from mmctl.engine import profiles
from mmctl.engine.errors import MmctlError, NoSourceError, UsageError, nearest
from mmctl.engine.records import SCHEMA

if TYPE_CHECKING:
    from mmctl.engine.schedule.route import Router

START_S = 60.0  # the longest wait for the first device: a worker may load a model first


def route(
    sources: Annotated[list[str] | None, to_read("Where device records come from.")] = None,
    devices: Annotated[
        str, typer.Option(metavar="DEVICE,…", help="Devices by name, without a source: gpu0,gpu1.")
    ] = "",
    encoders: Annotated[
        str, typer.Option(metavar="DEVICE,…", help="Which of them encode images; by default all.")
    ] = "",
) -> int:
    """Place requests by live device records: one JSON object in, one decision out, per line.

    A request names id, images, vision_tokens, text_tokens and, where its KV cache lies
    somewhere, a pair or session. The same id with state completed or failed gives back what it
    held. A line that is no request gives an object with error, in its place. -o json and csv
    are written when the input ends.

    \b
    Examples:
      gateway | mmctl schedule route nvml: > decisions.ndjson
      mmctl schedule route --devices gpu0,gpu1 --encoders gpu1 < requests.ndjson
    """
    from mmctl.engine.schedule.route import Router

    form = output()
    router = Router(_names(devices), _names(encoders))
    stop = threading.Event()
    if sources:
        _listen(router, sources, stop)
    elif not devices:
        raise UsageError("no device: name a source such as nvml:, or --devices gpu0,gpu1")
    for name in () if sources else _names(encoders):
        if name not in _names(devices):
            raise UsageError(f"--encoders: no device '{name}'{nearest(name, _names(devices))}")
    try:
        return _answer(router, form)
    finally:
        stop.set()


def _answer(router: Router, form: str) -> int:
    """Answer each line as it comes; ``json`` and ``csv`` are one document at the end."""
    import msgspec

    from mmctl.engine.schedule.route import Ask

    decoder, encoder = msgspec.json.Decoder(Ask), msgspec.json.Encoder()
    write, flush = sys.stdout.buffer.write, sys.stdout.buffer.flush
    kept: list[dict[str, Any]] | None = [] if form in ("json", "csv") else None
    decided = wrong = 0
    for line in sys.stdin.buffer:
        try:
            ask = decoder.decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            if line.strip():
                wrong += 1
                if kept is not None:
                    kept.append({"error": f"no request: {error}"})
                    continue
                write(encoder.encode({"error": f"no request: {error}"}) + b"\n")
                flush()
            continue
        if ask.state in ("completed", "failed"):
            router.release(ask.id)
            continue
        decided += 1
        decision = router.decide(ask)
        if kept is not None:
            kept.append(msgspec.to_builtins(decision))
            continue
        write(encoder.encode(decision) + b"\n")
        flush()
    if kept is not None:
        document = {"schema": SCHEMA, "decisions": kept, "decided": decided, "refused": wrong}
        emit(document, kept, form)
    if wrong:
        note(f"{wrong} lines were no requests")
    return Exit.FAILED if wrong and not decided else Exit.DONE


def _names(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())


def _listen(router: Router, sources: list[str], stop: threading.Event) -> None:
    """Feed the router from a thread; NoSourceError when no device shows up in time."""
    from mmctl.engine.sources import open_sources

    profile = profiles.load(common().profile).profile
    seen, ended = threading.Event(), threading.Event()
    failed: list[MmctlError] = []

    def feed() -> None:
        try:
            for record in open_sources(sources, profile, stop):
                router.update(record)
                if router.devices:
                    seen.set()
                if stop.is_set():
                    return
        except MmctlError as error:
            failed.append(error)
        finally:
            ended.set()
            seen.set()

    threading.Thread(target=feed, name="devices", daemon=True).start()
    seen.wait(START_S)
    ended.wait(0.2)  # a file is read to its end before the first decision
    if not router.devices:
        stop.set()
        if failed:
            raise failed[0]
        raise NoSourceError(f"{', '.join(sources)} gave no device record: name another source")
