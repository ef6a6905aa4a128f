"""``mmctl breaker guard``: breaker and scheduler in front of unmodified serving engines."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from mmctl.cli import completion
from mmctl.cli.app import common, host_port, note, quantity, seconds
from mmctl.cli.breaker.watch import ModeOption, mode_of
from mmctl.cli.main import Exit
from mmctl.cli.profile import checks
from mmctl.cli.recorded import KEEP, Keep, Record, Rotate, rotate_bytes
from mmctl.engine.errors import MissingExtraError, UsageError

Backends = Annotated[
    list[str] | None,
    typer.Option(
        "--backend",
        metavar="URL[=DEVICE,…]",
        help="A serving engine, and its devices (repeatable).",
    ),
]
Listen = Annotated[
    str, typer.Option(metavar="HOST:PORT", help="Where to listen; loopback by default.")
]
Model = Annotated[
    Path | None,
    typer.Option("--model", metavar="FOLDER", help="The model's config.json and tokenizer.json."),
]
Golden = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Goldens; recorded there where it is missing.")
]
Capacity = Annotated[
    int | None, typer.Option(metavar="N", min=1, help="Tokens that one backend's KV cache holds.")
]
Memory = Annotated[
    str, typer.Option(metavar="SIZE", help="Memory of a backend's devices; tells its capacity.")
]
ImageTokens = Annotated[
    int | None, typer.Option(metavar="N", min=1, help="Tokens of an image, while they are shrunk.")
]
OutputTokens = Annotated[
    int | None, typer.Option(metavar="N", min=1, help="Tokens of an answer, while it is capped.")
]
Requests = Annotated[
    int | None, typer.Option(metavar="N", min=1, help="Requests at once in one backend.")
]
Images = Annotated[
    int | None, typer.Option(metavar="N", min=1, help="Requests with images among them.")
]
Deadline = Annotated[str, typer.Option(metavar="TIME", help="An answer or an error within this.")]
Sources = Annotated[
    list[str] | None,
    typer.Option(
        "--source",
        metavar="SOURCE",
        help="Devices or metrics pages, by their URI (repeatable).",
        autocompletion=completion.sources,
    ),
]
Respond = Annotated[
    str,
    typer.Option(
        metavar="NAME,…",
        autocompletion=completion.treatments,
        help="Responses in force whatever the rules say.",
    ),
]


def guard(
    backends: Backends = None,
    listen: Listen = "",
    mode: ModeOption = "",
    model: Model = None,
    golden: Golden = None,
    capacity_tokens: Capacity = None,
    memory: Memory = "",
    image_tokens: ImageTokens = None,
    output_tokens: OutputTokens = None,
    requests: Requests = None,
    images: Images = None,
    deadline: Deadline = "",
    respond: Respond = "",
    sources: Sources = None,
    record: Record = None,
    rotate: Rotate = "",
    keep: Keep = KEEP,
) -> int:
    """Stand in front of OpenAI-compatible servers and pass on what they can bear.

    Chat, completions, responses and embeddings are seen by modality, routed, and under pressure
    shrunk, queued or refused; everything else passes. Observing changes nothing of what passes
    and has a line in the audit log for each request that would have been treated. Enforcing, a
    backend that died or was restarted, in use or idle, is asked canaries before it gets a share
    of the traffic again, then all of it; the first start asks one about 80 of them, to record
    what a healthy one answers. GET /health, /ready, /mmctl/status and /mmctl/metrics tell of
    the guard itself. Tokens of prompts are modelled by the model's rules and corrected by the
    usage that backends state. With --source nvml: a backend whose devices are named is weighed
    by how busy they are, and with its metrics page as a source by its own KV use. The guard
    never fetches a remote image and writes no prompt anywhere.

    \b
    Examples:
      mmctl breaker guard --backend http://127.0.0.1:8000
      mmctl breaker guard --backend http://127.0.0.1:8000 --backend http://127.0.0.1:8001 \\
        --mode enforce --capacity-tokens 65536
      mmctl breaker guard --backend http://127.0.0.1:8000 --mode enforce \\
        --image-tokens 1200 --respond shrink_images,cap_output
      mmctl breaker guard --backend http://127.0.0.1:8000=gpu0,gpu1 --source nvml: \\
        --golden good.json --listen 127.0.0.1:9000 --deadline 30s \\
        --record guard.ndjson --rotate 64MiB --keep 8
    """
    try:
        from mmctl.engine.memory import config as configuration
        from mmctl.guard import app
        from mmctl.guard.backends import parse
        from mmctl.guard.pressure import check
        from mmctl.guard.watch import socket_path
    except ImportError:
        raise MissingExtraError("breaker guard", "guard") from None
    loaded = checks.loaded(common().profile)
    given = {
        "capacity_tokens": capacity_tokens, "image_tokens": image_tokens,
        "output_tokens": output_tokens, "requests": requests, "images": images,
        "deadline_s": seconds("--deadline", deadline) if deadline else None,
    }  # fmt: skip
    settings = msgspec.structs.replace(
        loaded.profile.guard, **{name: value for name, value in given.items() if value is not None}
    )
    if settings.images > settings.requests:
        settings = msgspec.structs.replace(settings, images=settings.requests)
    memory_bytes = int(quantity("--memory", memory, "bytes")) if memory else 0
    host, port = host_port(listen or settings.listen)
    if not listen and host not in ("localhost", "::1") and not host.startswith("127."):
        raise UsageError(f"[guard] listen is no loopback: say so with --listen {settings.listen}")
    chosen = mode_of(mode) or loaded.profile.breaker.mode
    golden = golden or (Path(settings.golden) if settings.golden else None)
    socket = socket_path()
    options = app.Options(
        folder=model, drill=check([n for n in respond.split(",") if n], "--respond"),
        golden=golden, record=record, rotate_bytes=rotate_bytes(rotate, record), keep=keep,
        socket=socket, sources=tuple(sources or ()),
        memory_bytes=memory_bytes,
        profile_name=loaded.name,
    )  # fmt: skip
    if model is not None:
        configuration.read(model)  # said now, not by the first backend that answers
    profile = msgspec.structs.replace(loaded.profile, guard=settings)
    served = app.Guard(profile, chosen, parse(backends or []), options, note)

    def ready(had: int) -> None:
        note(f"guarding on http://{host}:{had} ({chosen}); mmctl top agent:{socket}")

    ended_by = app.run(served, host, port, ready)
    return Exit.TERMINATED if ended_by == signal.SIGTERM else Exit.INTERRUPTED
